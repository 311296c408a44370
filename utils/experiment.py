"""All that does not depend on the number of processes: the images and their split, the preprocessing, the model."""

import os
from argparse import Namespace
from dataclasses import dataclass

import torch
from torch import nn

import models
from data.demo import ensure_demo_data
from data.download import resolve_data_path
from data.loaders import ImageDataset
from data.split import Split, make_split
from data.transforms import EvalTransform, Preprocessing, TrainTransform
from utils.checkpoint import load_weights
from utils.distributed_utils import first_on_each_machine, get_local_world_size, usable_cpus
from utils.precision import Precision
from utils.resume import Resumed


@dataclass(frozen=True)
class Experiment:
    """What is trained on what.

    Attributes:
        model_name, model: a plain module on the device, not yet wrapped; its weights are equal on every process.
        split: classes and the lists of images.
        preprocessing: how an image becomes the model's input; it travels in the checkpoint.
        train_set, val_set: data sets of uint8 images.
        workers: processes that load images for this process.
        notes: what the user should know about the data and the weights.
    """

    model_name: str
    model: nn.Module
    split: Split
    preprocessing: Preprocessing
    train_set: ImageDataset
    val_set: ImageDataset
    workers: int
    notes: tuple[str, ...]

    @property
    def num_classes(self) -> int:
        return len(self.split.classes)


def prepare_experiment(args: Namespace, device: torch.device, resumed: Resumed | None = None) -> Experiment:
    """Reads the data folder and builds the model; a run that goes on brings its split, and its weights later.

    Raises DataError, ModelError or UserError for a user's mistake.
    """
    Precision(device, args.amp)  # refuses what the device cannot do, before anything is made
    if args.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS repeats itself only with this
        torch.use_deterministic_algorithms(True)
    split = resumed.split if resumed else _read_data(args)
    model, notes = _build_model(args, len(split.classes), resumed is None)
    notes += resumed.notes if resumed else ()
    preprocessing = _preprocessing(models.model_config(model), args.image_size)
    train_transform = TrainTransform(preprocessing, crop_scale=args.crop_scale, hflip=args.hflip)
    return Experiment(
        model_name=args.model,
        model=model.to(device, torch.float64 if args.float64 else torch.float32),
        split=split,
        preprocessing=preprocessing,
        train_set=ImageDataset(split.train, train_transform),
        val_set=ImageDataset(split.val, EvalTransform(preprocessing)),
        workers=_workers(args.workers),
        notes=(*split.notes, *notes),
    )


def _read_data(args: Namespace) -> Split:
    with first_on_each_machine():  # one process downloads or writes, the others find the folder
        data_path = resolve_data_path(args.data_path) if args.data_path else ensure_demo_data()
    return make_split(data_path, val_rate=args.val_rate, seed=args.seed, num_classes=args.num_classes)


def _build_model(args: Namespace, num_classes: int, load: bool) -> tuple[nn.Module, tuple[str, ...]]:
    torch.manual_seed(args.seed)
    with first_on_each_machine():  # one process downloads, the others find the file
        model = models.create_model(
            args.model, num_classes, pretrained=args.pretrained and load, image_size=args.image_size
        )
    notes = load_weights(model, args.weights) if args.weights and load else ()
    if args.freeze_layers:
        models.freeze_trunk(model)
    return model, notes


def _preprocessing(config: dict, image_size: int | None) -> Preprocessing:
    return Preprocessing.from_dict(config | ({"image_size": image_size} if image_size else {}))


def _workers(asked: int | None) -> int:
    return min(8, usable_cpus() // get_local_world_size()) if asked is None else asked

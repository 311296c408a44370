"""The first and the last lines of a training run."""

import shlex
import time
from argparse import Namespace

import torch
from torch import nn

from data.images import printable
from utils.checkpoint import unwrap
from utils.distributed_utils import get_world_size, say
from utils.experiment import Experiment
from utils.run import NullRun
from utils.schedule import Schedule

CLASSES_SHOWN = 8


def say_start(args: Namespace, experiment: Experiment, schedule: Schedule, device: torch.device, run: NullRun) -> None:
    """What is about to be trained, on what, with which arithmetic, and where it goes."""
    if run.folder is None:
        return  # not the main process
    say(f"device   {_device_name(device)}, {_count(get_world_size(), 'process', 'es')}, {_workers(experiment.workers)}")
    say(f"data     {printable(experiment.split.root)}")
    say(f"         {_counts(experiment)}")
    say(f"model    {_model(experiment)}")
    for note in experiment.notes:
        say(f"         {note}")
    for heading, note in zip(("batch", *[""] * len(schedule.notes)), schedule.notes, strict=False):
        say(f"{heading:8} {note}")
    for reason in _idle_options(args, device):
        say(f"note     {reason}")
    say(f"run      {run.folder}" + (f", goes on after step {run.step}" if run.step else ""))
    say(f"watch    tensorboard --logdir {shlex.quote(str(run.folder.parent))}")
    say()


def say_end(run: NullRun) -> None:
    """How good the best model is, where everything lies, and what to type next."""
    if run.folder is None:
        return
    best, folder = max(run.rows, key=lambda row: row["val_top1"]), shlex.quote(str(run.folder))
    say(f"\nbest     top-1 {best['val_top1']:.4f} in epoch {best['epoch'] + 1} of {len(run.rows)}")
    say(f"files    {run.folder}/: best.pth, last.pth, metrics.csv, split.csv and pictures (*.png)")
    seconds = time.perf_counter() - run.begun
    say(
        f"saving   {run.saves} times, {run.seconds_saving:.1f} s, for which the other processes waited: "
        f"{run.seconds_saving / seconds:.1%} of {seconds:.0f} s"
    )
    say(f"predict  python predict.py photo.jpg --weights {folder}/best.pth")
    say(f"watch    tensorboard --logdir {shlex.quote(str(run.folder.parent))}")


def _idle_options(args: Namespace, device: torch.device) -> list[str]:
    """A sentence for each option that was given and changes nothing in this run."""
    alone = "has no effect with one process"
    idle = {
        f"--syncBN {alone}": args.syncBN and get_world_size() == 1,
        f"--find-unused-parameters {alone}": getattr(args, "find_unused_parameters", False) and get_world_size() == 1,
        "--data-parallel has no effect without GPUs": getattr(args, "data_parallel", False) and device.type != "cuda",
        "--eval-amp has no effect without --amp": args.eval_amp and not args.amp,
        "--lr-scaling has no effect with --global-batch-size": args.lr_scaling != "linear" and args.global_batch_size,
    }
    return [sentence for sentence, holds in idle.items() if holds]


def _device_name(device: torch.device) -> str:
    return f"{device} ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else str(device)


def _workers(workers: int) -> str:
    return f"{_count(workers, 'worker')} each to load images" if workers else "which load their images themselves"


def _count(number: int, noun: str, plural: str = "s") -> str:
    return f"{number} {noun}{'' if number == 1 else plural}"


def _model(experiment: Experiment) -> str:
    model, size = unwrap(experiment.model), experiment.preprocessing.image_size
    parameters = sum(p.numel() for p in model.parameters())
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    share = "" if trained == parameters else f" ({trained:,} of them trained)"
    return (
        f"{experiment.model_name}, {parameters / 1e6:.2f} M parameters{share}, "
        f"{multiply_adds(model, size) / 1e6:,.0f} M multiply-adds for an image of {size} x {size}"
    )


@torch.no_grad()
def multiply_adds(model: nn.Module, image_size: int) -> int:
    """Of one image's way through the model's convolutions and linear layers: outputs times what each is summed over."""
    counted, parameter, was_training = [], next(model.parameters()), model.training

    def count(layer: nn.Module, inputs: tuple, output: torch.Tensor) -> None:
        counted.append(output.numel() * layer.weight[0].numel())

    layers = [module for module in model.modules() if isinstance(module, (nn.Conv2d, nn.Linear))]
    hooks = [layer.register_forward_hook(count) for layer in layers]
    model.eval()(torch.zeros(1, 3, image_size, image_size, dtype=parameter.dtype, device=parameter.device))
    for hook in hooks:
        hook.remove()
    model.train(was_training)
    return sum(counted)


def _counts(experiment: Experiment) -> str:
    split = experiment.split
    rows = split.counts()
    shown = ", ".join(f"{printable(name)} {train}+{val}" for name, train, val in rows[:CLASSES_SHOWN])
    more = f" and {len(rows) - CLASSES_SHOWN} more" if len(rows) > CLASSES_SHOWN else ""
    return f"{len(rows)} classes, {len(split.train)} training + {len(split.val)} validation images: {shown}{more}"

"""World size does not matter (law L1): both real scripts, from their first line to their last, on a small net.

Replaced are only the model (a small net), the run folder (a recorder) and the meeting of the processes (run_ranks).
"""

import hashlib
import sys
from dataclasses import fields
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import BatchSampler
from torch.utils.data.distributed import DistributedSampler

from data.loaders import ImageDataset, Loader
from data.samplers import SeededSampler
from data.transforms import Preprocessing, TrainTransform
from tests.makers import COLOURS, make_photo, make_photos, relative_difference, small_net
from tests.ranks import run_ranks
from utils.checkpoint import save_checkpoint
from utils.run import NullRun
from utils.trainer import Position

CPU = torch.device("cpu")
BATCH, STEPS, EPOCHS, VALIDATION = 12, 3, 2, 7
OPTIONS = f"--global-batch-size {BATCH} --lr 0.05 --epochs {EPOCHS} --image-size 16 --workers 0 --hflip 0.5".split()


class RecordingSet(ImageDataset):
    seen: list = []  # noqa: RUF012  (index, seed, digest of the tensor) of each training sample, in order

    def __getitem__(self, item):
        pixels, label = super().__getitem__(item)
        if isinstance(item, tuple):
            self.seen.append((*item, hashlib.sha256(pixels.numpy().tobytes()).hexdigest()))
        return pixels, label


class Recorder(NullRun):
    def __init__(self, folder: str | None):
        self.steps, self.rows, self.state, self.disk = [], [], {}, folder

    def log_step(self, step, loss, lr):
        self.steps.append((step, loss, lr))

    def log_epoch(self, row, step):
        self.rows.append(row)

    def save(self, name, state):
        self.state = {key: tensor.clone() for key, tensor in state["model"].items()}
        if self.disk:
            save_checkpoint(state, Path(self.disk, name))


def run_script_on_rank(rank, world_size, script, options, folder):
    """The script's main on this rank; what it saw and what it made."""
    import models
    import utils.experiment as experiment

    run = Recorder(folder if rank == 0 else None)
    models.create_model = lambda name, classes, **kwargs: small_net(classes)
    experiment.ImageDataset = RecordingSet
    sys.argv = [f"{script}.py", "--device", "cpu", *options]
    if script == "train_multi_gpu":
        import train_multi_gpu as module

        module.processes.is_launched = lambda: True
        module.processes.init_distributed_mode = lambda *arguments: CPU
    else:
        dist.destroy_process_group()
        import train_single_gpu as module
    module.start_run = lambda *arguments: run
    module.main()
    return {"seen": RecordingSet.seen, "steps": run.steps, "rows": run.rows, "state": run.state}


@pytest.fixture(scope="module")
def train(tmp_path_factory):
    """Runs a script once per set of arguments: train(world_size, *options, script=...) -> one dict per rank."""
    root, disk = tmp_path_factory.mktemp("photos"), tmp_path_factory.mktemp("run")
    make_photos(root / "train", {"red": 13, "green": 13, "blue": 13})
    for number in range(VALIDATION):  # one colour lies in a wrong folder, so that accuracy is neither 0 nor 1
        label = number % 3
        make_photo(root / "val" / ("red", "green", "blue")[label] / f"{number}.png", COLOURS[number // 3], number)

    @cache
    def run(world_size, *options, script="train_multi_gpu"):
        words = ["--data-path", str(root), *OPTIONS, *options]
        return run_ranks(run_script_on_rank, world_size, script, words, str(disk))

    run.disk = disk
    return run


def steps_of(ranks: list[dict]) -> list[list[tuple]]:
    """The samples of each step, over all ranks, sorted by index."""
    size = BATCH // len(ranks)
    steps = [[rank["seen"][first : first + size] for rank in ranks] for first in range(0, len(ranks[0]["seen"]), size)]
    return [sorted(sample for own in step for sample in own) for step in steps]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_several_processes_make_the_weights_of_one(train, world_size):
    alone = train(1, "--float64", script="train_single_gpu")[0]
    ranks = train(world_size, "--float64")
    for rank in ranks:
        assert {tensor.dtype for tensor in rank["state"].values()} == {torch.float64, torch.int64}
        assert relative_difference(rank["state"], alone["state"]) < 1e-12
    assert relative_difference(alone["state"], small_net(3).double().state_dict()) > 1e-2  # it did train


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_several_processes_report_the_figures_of_one(train, world_size):
    alone = train(1, "--float64", script="train_single_gpu")[0]
    for rank in train(world_size, "--float64"):
        assert [(step, lr) for step, _, lr in rank["steps"]] == [(step, lr) for step, _, lr in alone["steps"]]
        assert [loss for _, loss, _ in rank["steps"]] == pytest.approx([loss for _, loss, _ in alone["steps"]], 1e-12)
        for ours, theirs in zip(rank["rows"], alone["rows"], strict=True):
            assert (ours["epoch"], ours["lr"]) == (theirs["epoch"], theirs["lr"])
            assert (ours["val_top1"], ours["val_top5"]) == (theirs["val_top1"], theirs["val_top5"])
            for name in ("train_loss", "val_loss"):
                assert ours[name] == pytest.approx(theirs[name], 1e-12)
    assert all((row["val_top1"] * VALIDATION) % 1 < 1e-9 for row in alone["rows"])


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_samples_augmentations_and_learning_rates_are_equal_exactly_in_float32(train, world_size):
    alone, ranks = train(1, script="train_single_gpu"), train(world_size)
    assert steps_of(ranks) == steps_of(alone)
    assert [len(step) for step in steps_of(ranks)] == [BATCH] * STEPS * EPOCHS
    for rank in ranks:
        assert [lr for _, _, lr in rank["steps"]] == [lr for _, _, lr in alone[0]["steps"]]
        assert {tensor.dtype for tensor in rank["state"].values()} == {torch.float32, torch.int64}


@pytest.mark.parametrize("script", ["train_multi_gpu", "train_single_gpu"])
def test_each_epoch_has_another_order_and_other_augmentations(train, script):
    seen = train(1, script=script)[0]["seen"]
    first, second = ([*zip(*seen[k : k + STEPS * BATCH], strict=True)] for k in (0, STEPS * BATCH))
    assert first[0] != second[0]  # the order of the indices
    assert not set(first[1]) & set(second[1])  # seeds
    assert not set(first[2]) & set(second[2])  # tensors


def test_without_synchronized_statistics_the_result_is_another_one(train):
    alone, apart = train(1, "--float64", script="train_single_gpu")[0], train(2, "--float64", "--no-syncBN")
    assert relative_difference(apart[0]["state"], alone["state"]) > 1e-4
    assert apart[0]["rows"][-1]["val_loss"] == apart[1]["rows"][-1]["val_loss"]


def test_another_seed_is_another_run(train):
    assert steps_of(train(1, "--seed", "1")) != steps_of(train(1))


LAST = {"optimizer", "scaler", "schedule", "args", *(each.name for each in fields(Position))}


def test_what_a_run_saves_is_data_and_has_the_keys_of_an_ordinary_model(train):
    train(2, "--float64")
    for name, more in (("best.pth", set()), ("last.pth", LAST)):
        content = torch.load(train.disk / name, weights_only=True)
        assert {"model", "model_name", "classes", "preprocessing", "metrics", "versions"} | more == content.keys()
        assert content["classes"] == ["blue", "green", "red"]
        small_net(3).load_state_dict(content["model"])


@pytest.mark.parametrize("workers", [1, 2])
def test_the_tensors_do_not_depend_on_the_number_of_workers(tmp_path, workers):
    root = make_photos(tmp_path, 1, 9)
    samples = [(str(path), number) for number, path in enumerate(sorted(root.glob("*/*")))]
    transform = TrainTransform(Preprocessing(16, 1.0, "bilinear", (0.5,) * 3, (0.5,) * 3), 0.3, 0.5)

    def batches(count: int) -> list:
        sampler = DistributedSampler(samples, num_replicas=2, rank=1, seed=3, drop_last=True)
        batch_sampler = BatchSampler(SeededSampler(sampler, 3), 2, drop_last=True)
        loader, found = Loader(ImageDataset(samples, transform), batch_sampler, count, CPU), []
        for epoch in range(2):
            loader.set_epoch(epoch)
            found += list(loader)
        return found

    alone, helped = batches(0), batches(workers)
    assert len(alone) == len(helped) == 4
    for (images, labels), (same_images, same_labels) in zip(alone, helped, strict=True):
        assert torch.equal(images, same_images)
        assert torch.equal(labels, same_labels)

"""The run folder: everything that a run leaves behind, written by the main process alone.

Other processes hold a NullRun, which has the same methods and does nothing, so that the training code asks nobody.
"""

import csv
import fcntl
import json
import time
from argparse import Namespace
from itertools import islice
from pathlib import Path

import torch

from data.files import whole_file
from data.loaders import Loader, collate, unbroken
from data.split import Split, write_split
from utils.board import Board
from utils.checkpoint import save_checkpoint
from utils.distributed_utils import is_main_process
from utils.errors import UserError
from utils.experiment import Experiment
from utils.metrics import Metrics
from utils.resume import Resumed, agents_of_all_processes, split_hash

METRICS = ("epoch", "train_loss", "val_loss", "val_top1", "val_top5", "lr", "images_per_second", "seconds")
PICTURES = 16


def start_run(args: Namespace, experiment: Experiment, resumed: Resumed | None) -> "Run | NullRun":
    """The run folder, new or gone on with, on the main process; elsewhere an object that does nothing."""
    agents = agents_of_all_processes()
    return Run(args, experiment, resumed, agents) if is_main_process() else NullRun()


class NullRun:
    """What the other processes hold instead of a Run."""

    folder = None

    def log_start(self, train_loader: Loader) -> None: ...
    def log_step(self, step: int, loss: float, lr: float) -> None: ...
    def log_epoch(self, row: dict, step: int) -> None: ...
    def log_best(self, metrics: Metrics, step: int) -> None: ...
    def save(self, name: str, state: dict) -> None: ...
    def close(self) -> None: ...


class Run(NullRun):
    """A folder `<run-dir>/<date>-<time>_<model>/` of its own.

    Raises:
        UserError: the folder cannot be made or written to, found out before the first step.
    """

    def __init__(self, args: Namespace, experiment: Experiment, resumed: Resumed | None, agents: list[str]):
        self.args, self.experiment, self.step = args, experiment, resumed.state["step"] if resumed else 0
        self.begun, self.saves, self.seconds_saving = time.perf_counter(), 0, 0.0
        try:
            self.folder = resumed.folder if resumed else _new_folder(Path(args.run_dir), experiment.model_name)
            self._lock()
            self.rows = self._go_on(resumed.state["epochs_done"]) if resumed else self._begin(experiment.split)
            self._write_json("agents.json", agents)
            self.board = Board(self.folder, experiment.split.classes, purge_step=self.step if resumed else None)
        except OSError as error:
            raise UserError(
                f"the run cannot be written to {args.run_dir} ({error}): choose another --run-dir"
            ) from None
        self.split_hash = split_hash(self.folder / "split.csv")
        self.board.show_options(args)

    def _lock(self) -> None:
        """Held until this process ends, however it ends."""
        self.lock = open(self.folder / "lock", "a")  # noqa: SIM115
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"{self.folder} is being trained by another process: wait for it, or stop it") from None

    def _begin(self, split: Split) -> list[dict]:
        self._write_json("args.json", vars(self.args))
        self._write_json("class_indices.json", dict(enumerate(split.classes)))
        write_split(split, self.folder / "split.csv")
        self._append_metrics(METRICS)
        return []

    def _go_on(self, epochs_done: int) -> list[dict]:
        """Removes what a killed process left half done, and the rows of epochs that are about to be done again."""
        for leftover in self.folder.glob(".*.tmp"):
            leftover.unlink()
        with open(self.folder / "metrics.csv", newline="", encoding="utf-8") as file:
            rows = [row for row in csv.DictReader(file) if _is_whole(row) and int(row["epoch"]) < epochs_done]
        with whole_file(self.folder / "metrics.csv", newline="") as file:
            writer = csv.DictWriter(file, METRICS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
        return [{name: float(value) for name, value in row.items()} | {"epoch": int(row["epoch"])} for row in rows]

    def _write_json(self, name: str, content: dict) -> None:
        with whole_file(self.folder / name) as file:
            file.write(json.dumps(content, indent=2, ensure_ascii=False) + "\n")

    def _append_metrics(self, values) -> None:
        with open(self.folder / "metrics.csv", "a", newline="", encoding="utf-8") as file:
            csv.writer(file, lineterminator="\n").writerow(values)

    def log_start(self, train_loader: Loader) -> None:
        """Shows this process's first training images, made again from their indices and seeds."""
        items = list(islice(train_loader.batches.sampler, PICTURES))
        images, labels = unbroken(collate([self.experiment.train_set[item] for item in items]))
        self.board.show_training_images(images, labels.tolist())

    def log_step(self, step: int, loss: float, lr: float) -> None:
        """`step` counts from 0 over the whole run; `loss` is the mean over all processes."""
        self.board.log_step(step, loss, lr)

    def log_epoch(self, row: dict, step: int) -> None:
        """A row of metrics.csv, and the same values for TensorBoard; `step` is the number of steps done."""
        self.rows.append(row)
        self.step = step
        self._append_metrics(row[name] for name in METRICS)
        self.board.log_epoch(row, step)

    def log_best(self, metrics: Metrics, step: int) -> None:
        """The figures of a new best epoch, with the images that it is most wrong about."""
        samples = [self.experiment.val_set[answer.index] for answer in metrics.worst]
        images, labels = unbroken(collate(samples)) if samples else (torch.empty(0), torch.empty(0))
        given, probabilities = [a.guess for a in metrics.worst], [a.probability for a in metrics.worst]
        self.board.log_best(metrics, (images, labels.tolist(), given, probabilities), step)

    def save(self, name: str, state: dict) -> None:
        """Writes a checkpoint into the folder, whole or not at all.

        Raises:
            UserError: there is no room, or the folder cannot be written to; the file that was there is whole.
        """
        start = time.perf_counter()
        try:
            self.board.events.flush()  # what was logged up to here is not done again
            save_checkpoint(state | {"split_hash": self.split_hash}, self.folder / name)
        except OSError as error:
            raise UserError(
                f"{self.folder / name} cannot be written ({error.strerror}); the one saved before is whole: "
                "make room and go on with --resume"
            ) from None
        self.saves += 1
        self.seconds_saving += time.perf_counter() - start

    def close(self) -> None:
        self.board.finish(self.rows, self.args, self.step)


def _new_folder(run_dir: Path, model_name: str) -> Path:
    """Made by mkdir, which only one of two runs that start in the same second can do."""
    run_dir.mkdir(parents=True, exist_ok=True)
    stem = f"{time.strftime('%Y%m%d-%H%M%S')}_{model_name.replace('/', '-').replace(':', '-')}"
    for number in range(1, 1000):
        folder = run_dir / (stem if number == 1 else f"{stem}-{number}")
        try:
            folder.mkdir()
            return folder
        except FileExistsError:
            continue
    raise AssertionError("a thousand runs in one second")


def _is_whole(row: dict) -> bool:
    """A row that a killed process has not finished lacks its last values."""
    return None not in row.values() and all(row.values())


def newest_checkpoint(run_dir: str | Path = "runs") -> Path:
    """best.pth of the newest run that has one. Raises UserError where there is none."""
    found = sorted(Path(run_dir).glob("*/best.pth"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise UserError(f"no trained model in {run_dir}/: train one with python train_single_gpu.py, or give --weights")
    return found[-1]


def versions() -> dict[str, str]:
    """Of what made a checkpoint, as plain strings."""
    import sys

    found = {"python": sys.version.split()[0], "torch": str(torch.__version__)}
    return found | ({"timm": str(sys.modules["timm"].__version__)} if "timm" in sys.modules else {})

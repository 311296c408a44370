"""The state of a training: what it consists of, how it is saved, and how it is put back."""

import shlex
import signal
import sys
import time
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

import torch
from torch import nn

from utils.checkpoint import unwrap
from utils.distributed_utils import broadcast_buffers, get_local_world_size, get_world_size, is_main_process, say
from utils.errors import UserError
from utils.experiment import Experiment
from utils.heartbeat import Heartbeat
from utils.interruption import EXIT_CODES, interruption
from utils.precision import Precision
from utils.run import NullRun, versions
from utils.schedule import Schedule
from utils.step_watch import StepWatch, not_finite


@dataclass
class Position:
    """Where a run stands: all that it needs beside weights, optimizer and scaler to go on as if nothing had happened.

    Random numbers are not among it: every step and every sample is seeded from its place.

    Attributes:
        step: optimizer steps done.
        epochs_done: epochs that are trained and validated.
        best: the highest top-1 of them.
        loss_sum: the losses of the steps done in the epoch under way, each the mean over the processes.
        seconds, waited: spent in the epoch under way, in all and waiting for data.
    """

    step: int = 0
    epochs_done: int = 0
    best: float = -1.0
    loss_sum: float = 0.0
    seconds: float = 0.0
    waited: float = 0.0


@dataclass
class Trainer:
    """What the training steps need, put together once.

    Attributes:
        model: the wrapped model (DDP, DataParallel) or a plain one.
        save_seconds: time between two saves; the main process's clock counts.
    """

    model: nn.Module
    experiment: Experiment
    optimizer: torch.optim.Optimizer
    criterion: nn.Module
    schedule: Schedule
    precision: Precision
    watch: StepWatch
    position: Position
    args: Namespace
    run: NullRun
    save_seconds: float
    heartbeat: Heartbeat
    saved_at: float = field(default_factory=time.monotonic)


def make_optimizer(model: nn.Module, args: Namespace) -> torch.optim.Optimizer:
    """SGD with Nesterov momentum; weight decay acts on matrices and kernels, not on norms and biases."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.SGD(
        [
            {"params": [p for p in trainable if p.ndim > 1], "weight_decay": args.weight_decay},
            {"params": [p for p in trainable if p.ndim <= 1], "weight_decay": 0.0},
        ],
        lr=args.lr,  # train_step sets each step's own
        momentum=args.momentum,
        nesterov=args.momentum > 0,
    )


def prediction_state(model: nn.Module, experiment: Experiment, row: dict) -> dict:
    """What prediction needs, in tensors and plain Python values."""
    return {
        "model": unwrap(model).state_dict(),
        "model_name": experiment.model_name,
        "classes": list(experiment.split.classes),
        "preprocessing": experiment.preprocessing.to_dict(),
        "metrics": {name: float(value) for name, value in row.items()},
        "versions": versions(),
    }


def training_state(trainer: Trainer, row: dict) -> dict:
    """What going on with the training needs, on top of that."""
    return prediction_state(trainer.model, trainer.experiment, row) | {
        "optimizer": trainer.optimizer.state_dict(),
        "scaler": trainer.precision.scaler.state_dict(),
        "schedule": trainer.schedule.kept,
        "args": vars(trainer.args),
        **asdict(trainer.position),
    }


def restore(trainer: Trainer, state: dict) -> None:
    """Puts a run back to where `training_state` has seen it; the same on every process."""
    unwrap(trainer.model).load_state_dict(state["model"])
    trainer.optimizer.load_state_dict(state["optimizer"])
    trainer.precision.scaler.load_state_dict(state["scaler"])
    trainer.position = Position(**{each.name: state[each.name] for each in fields(Position)})


def settle(trainer: Trainer) -> None:
    """Makes sure, before anything is saved, that the model is sound and the same everywhere.

    Raises:
        UserError: a loss was not finite, or the last step made weights that are not; every process raises it.
    """
    trainer.watch.drain()
    broadcast_buffers(unwrap(trainer.model))
    floats = [tensor for tensor in unwrap(trainer.model).state_dict().values() if tensor.is_floating_point()]
    if not bool(torch.stack([tensor.isfinite().all() for tensor in floats]).all()):
        last = trainer.position.step - 1
        raise UserError(not_finite("a weight", last, trainer.schedule.learning_rate(last)))


def save(trainer: Trainer, row: dict | None = None) -> None:
    """Writes last.pth; `row` holds the figures of an epoch that has just ended."""
    trainer.run.save("last.pth", training_state(trainer, row or {}))
    trainer.saved_at = time.monotonic()


def save_and_perhaps_stop(trainer: Trainer) -> None:
    """What all processes do at the same step, because one of them asked for it."""
    settle(trainer)
    if trainer.watch.agreed - {"save"}:
        save_and_stop(trainer)
    save(trainer)
    trainer.watch.agreed.clear()


def save_and_stop(trainer: Trainer) -> None:
    """Ends this process after a signal, on every process at the same place. Raises SystemExit."""
    save(trainer)
    signals = trainer.watch.agreed - {"save"} or {interruption.signal.name}
    name = sorted(signals)[0]
    say(f"stopped by {name} after step {trainer.position.step} of {trainer.schedule.total_steps}; go on with:")
    say(f"  {resume_command(trainer.run)}")
    sys.exit(EXIT_CODES[signal.Signals[name]])


@contextmanager
def explained(schedule: Schedule) -> Iterator[None]:
    """Turns what torch says of a machine that is too small into a sentence for its user."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        text = str(error)
        if isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "can't allocate memory" in text:
            half, twice = max(1, schedule.batch_size // 2), 2 * schedule.accumulate
            raise UserError(
                f"out of memory with {schedule.batch_size} images at a time: try --batch-size {half} --accumulate "
                f"{twice}, a smaller --image-size, or --amp"
            ) from None
        if text.startswith("DataLoader worker"):
            raise UserError(
                "a process that loads images was killed; often shared memory is too small (docker run --shm-size=8g) "
                "or memory has run out: try --workers 0, and go on with --resume"
            ) from None
        raise


def requests(trainer: Trainer) -> set[str]:
    requests = {interruption.signal.name} if interruption.signal else set()
    if is_main_process() and time.monotonic() - trainer.saved_at > trainer.save_seconds:
        trainer.saved_at = time.monotonic()  # asked for once
        requests.add("save")
    return requests


def is_save_step(trainer: Trainer) -> bool:
    return bool(trainer.args.save_steps) and trainer.position.step % trainer.args.save_steps == 0


def resume_command(run: NullRun) -> str:
    """What to type to go on with the run."""
    script, folder = Path(sys.argv[0]).name, shlex.quote(str(run.folder))
    if get_world_size() == 1:
        return f"python {script} --resume {folder}"
    return f"torchrun --standalone --nproc-per-node={get_local_world_size()} {script} --resume {folder}"

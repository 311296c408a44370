"""The training loop, on one process or many: `fit` calls `train_one_epoch` and `evaluate` for each epoch."""

import time
from argparse import Namespace
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import islice

import torch
from torch import nn

import models
from data.loaders import Loader
from utils.checkpoint import unwrap
from utils.distributed_utils import broadcast_buffers, get_rank, reduce_value, say
from utils.errors import UserError
from utils.experiment import Experiment
from utils.metrics import Metrics, Totals
from utils.precision import Precision
from utils.progress import Progress
from utils.run import NullRun, versions
from utils.schedule import Schedule
from utils.step_watch import StepWatch, not_finite
from utils.worst import WorstAnswers


@dataclass
class Trainer:
    """What a training step needs, put together once.

    Attributes:
        model: the wrapped model (DDP, DataParallel) or a plain one.
        normalize: from uint8 images to the model's input.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    criterion: nn.Module
    schedule: Schedule
    precision: Precision
    normalize: callable
    watch: StepWatch
    seed: int


def fit(
    model: nn.Module,
    experiment: Experiment,
    schedule: Schedule,
    train_loader: Loader,
    val_loader: Loader,
    args: Namespace,
    run: NullRun,
) -> None:
    """Trains for all epochs, validates after each, and leaves last.pth and best.pth in the run folder.

    Raises:
        UserError: the loss is not finite; every process raises it at the same step.
        DataError: an image cannot be read.
    """
    device = train_loader.device
    precision = Precision(device, args.amp, args.eval_amp, args.float64)
    progress = Progress(schedule)
    watch = StepWatch(device, lambda *step: (run.log_step(*step), progress.show(*step)))
    trainer = Trainer(
        model=model,
        optimizer=make_optimizer(model, args),
        criterion=nn.CrossEntropyLoss(label_smoothing=args.label_smoothing),
        schedule=schedule,
        precision=precision,
        normalize=experiment.preprocessing.normalize,
        watch=watch,
        seed=args.seed,
    )
    run.log_start(train_loader)
    best = -1.0
    for epoch in range(schedule.epochs):
        train_loader.set_epoch(epoch)  # without it every epoch has the same order and the same augmentations
        start = time.perf_counter()
        with progress.epoch(epoch):
            train_loss, lr, waited = train_one_epoch(trainer, train_loader, epoch)
        settle(trainer, schedule.steps_per_epoch * (epoch + 1))
        trained = time.perf_counter() - start
        metrics = evaluate(model, val_loader, experiment, precision)
        row = {
            "epoch": epoch,
            "train_loss": train_loss,
            "val_loss": metrics.loss,
            "val_top1": metrics.top1,
            "val_top5": metrics.top5,
            "val_macro_f1": metrics.macro_f1,
            "lr": lr,
            "images_per_second": schedule.steps_per_epoch * schedule.global_batch_size / trained,
            "waiting": waited / trained,
            "seconds": time.perf_counter() - start,
        }
        step = schedule.steps_per_epoch * (epoch + 1)
        run.log_epoch(row, step)
        if improved := metrics.top1 > best:
            best = metrics.top1
            run.save("best.pth", prediction_state(model, experiment, row))
            run.log_best(metrics, step)
        run.save("last.pth", training_state(trainer, experiment, row, best, args))
        _say_epoch(row, schedule.epochs, improved, metrics.not_finite)


def train_one_epoch(trainer: Trainer, loader: Loader, epoch: int) -> tuple[float, float, float]:
    """One pass over the training images.

    Returns:
        The mean training loss over the images of all processes, the epoch's highest learning rate, and the seconds
        that this process waited for data.
    """
    models.train_mode(trainer.model)
    steps, batches, waited = trainer.schedule.steps_per_epoch, iter(loader), 0.0
    losses, rates = torch.zeros((), device=loader.device, dtype=trainer.precision.dtype), []
    for step in range(epoch * steps, (epoch + 1) * steps):
        asked = time.perf_counter()
        batch = list(islice(batches, trainer.schedule.accumulate))
        waited += time.perf_counter() - asked
        losses += train_step(trainer, batch, step)
        rates.append(trainer.optimizer.param_groups[0]["lr"])
    # Every step of every process has the same number of images, so their mean is the mean over the images.
    return float(reduce_value(losses, average=True)) / steps, max(rates), waited


def settle(trainer: Trainer, steps: int) -> None:
    """Makes sure, before anything is saved, that the model after so many steps is sound and the same everywhere.

    Raises:
        UserError: a loss was not finite, or the last step made weights that are not; every process raises it.
    """
    trainer.watch.drain()
    broadcast_buffers(unwrap(trainer.model))
    floats = [tensor for tensor in unwrap(trainer.model).state_dict().values() if tensor.is_floating_point()]
    if not bool(torch.stack([tensor.isfinite().all() for tensor in floats]).all()):
        raise UserError(not_finite("a weight", steps - 1, trainer.schedule.learning_rate(steps - 1)))


def train_step(trainer: Trainer, batches: list[tuple[torch.Tensor, torch.Tensor]], step: int) -> torch.Tensor:
    """One optimizer step over `batches`, whose gradients are averaged. Returns this process's mean loss, a scalar."""
    lr = trainer.schedule.learning_rate(step)
    for group in trainer.optimizer.param_groups:
        group["lr"] = lr
    # Dropout and its like draw from a generator that depends on nothing but the place in the run.
    torch.manual_seed(hash((trainer.seed, step, get_rank())) & 0x7FFF_FFFF_FFFF_FFFF)
    total = 0.0
    for number, (images, labels) in enumerate(batches, start=1):
        with _synchronizing(trainer.model, number == len(batches)):
            with trainer.precision.training():
                logits = trainer.model(trainer.normalize(images, trainer.precision.dtype))
                loss = trainer.criterion(logits, labels) / len(batches)
            trainer.precision.scaler.scale(loss).backward()
        total = total + loss.detach()
    trainer.precision.scaler.step(trainer.optimizer)
    trainer.precision.scaler.update()
    trainer.optimizer.zero_grad()
    trainer.watch.push(step, total, lr)
    return total


def _synchronizing(model: nn.Module, last: bool):
    """DDP averages gradients over the processes in a backward pass; of accumulated batches only the last needs it."""
    return nullcontext() if last or not hasattr(model, "no_sync") else model.no_sync()


@torch.inference_mode()
def evaluate(model: nn.Module, loader: Loader, experiment: Experiment, precision: Precision) -> Metrics:
    """Exact figures over the images of all processes' loaders, the same on each process.

    What is evaluated is what is saved: the module inside the wrapper, with rank 0's buffers.
    """
    model = unwrap(model)
    broadcast_buffers(model)
    model.eval()
    totals, worst = Totals(experiment.num_classes, loader.device), WorstAnswers()
    for images, labels in loader:
        with precision.evaluation():
            logits = model(experiment.preprocessing.normalize(images, precision.dtype))
        totals.update(logits, labels)
        worst.update(logits, labels)
    return replace(totals.reduce(), worst=worst.reduce(loader.batches.sampler.indices))


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


def training_state(trainer: Trainer, experiment: Experiment, row: dict, best: float, args: Namespace) -> dict:
    """What going on with the training needs, on top of that."""
    return prediction_state(trainer.model, experiment, row) | {
        "optimizer": trainer.optimizer.state_dict(),
        "scaler": trainer.precision.scaler.state_dict(),
        "epoch": row["epoch"],
        "best": float(best),
        "args": vars(args),
    }


def _say_epoch(row: dict, epochs: int, improved: bool, not_finite: int) -> None:
    say(
        f"epoch {row['epoch'] + 1}/{epochs}  train loss {row['train_loss']:.4f}  val loss {row['val_loss']:.4f}  "
        f"top-1 {row['val_top1']:.4f}  top-5 {row['val_top5']:.4f}  lr {row['lr']:.3g}  "
        f"{row['images_per_second']:.0f} images/s  {row['seconds']:.1f} s" + ("  (best)" if improved else "")
    )
    if not_finite:
        say(f"warning: the model gave no finite answer for {not_finite} validation images; they count as wrong")

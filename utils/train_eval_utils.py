"""The training loop, on one process or many: `fit` calls `train_one_epoch` and `evaluate` for each epoch."""

import math
import time
from argparse import Namespace
from contextlib import nullcontext
from dataclasses import replace
from itertools import islice

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import models
from data.loaders import Loader
from utils.checkpoint import unwrap
from utils.distributed_utils import broadcast_buffers, get_rank, get_world_size, reduce_value, say
from utils.experiment import Experiment
from utils.heartbeat import Heartbeat
from utils.interruption import interruption
from utils.metrics import Metrics, Totals
from utils.precision import Precision
from utils.progress import Progress
from utils.resume import Resumed
from utils.run import NullRun
from utils.schedule import Schedule
from utils.step_watch import StepWatch
from utils.trainer import (
    Position,
    Trainer,
    explained,
    is_save_step,
    make_optimizer,
    prediction_state,
    requests,
    restore,
    save,
    save_and_perhaps_stop,
    save_and_stop,
    settle,
)
from utils.worst import WorstAnswers


def fit(
    model: nn.Module,
    experiment: Experiment,
    schedule: Schedule,
    train_loader: Loader,
    val_loader: Loader,
    args: Namespace,
    run: NullRun,
    resumed: Resumed | None = None,
) -> None:
    """Trains for all epochs, validates after each, and leaves last.pth and best.pth in the run folder.

    Raises:
        UserError: the loss is not finite, on every process at the same step; or a checkpoint cannot be written.
        DataError: an image cannot be read.
        SystemExit: a signal came; the run was saved.
    """
    interruption.watch()
    device, progress = train_loader.device, Progress(schedule)
    trainer = Trainer(
        model=model,
        experiment=experiment,
        optimizer=make_optimizer(model, args),
        criterion=nn.CrossEntropyLoss(label_smoothing=args.label_smoothing),
        schedule=schedule,
        precision=Precision(device, args.amp, args.eval_amp, args.float64),
        watch=StepWatch(device, lambda *step: (run.log_step(*step), progress.show(*step))),
        position=Position(),
        args=args,
        run=run,
        save_seconds=60 * args.save_minutes,
        heartbeat=Heartbeat(args.timeout if get_world_size() > 1 else math.inf),
    )
    interruption.on_tick = trainer.heartbeat.tick
    if resumed:
        restore(trainer, resumed.state)
    else:
        run.log_start(train_loader)
        save(trainer)  # what cannot be written is found out here, and a killed run has something to go on with
    with explained(schedule):
        rehearse(trainer, device)
        while trainer.position.epochs_done < schedule.epochs:
            with progress.epoch(trainer.position.epochs_done, done=trainer.position.step % schedule.steps_per_epoch):
                train_rest_of_epoch(trainer, train_loader)
            end_epoch(trainer, val_loader)


def train_rest_of_epoch(trainer: Trainer, loader: Loader) -> None:
    """Trains from where the run stands to the end of the epoch under way; saves when it is time, and for a signal."""
    models.train_mode(trainer.model)
    position, schedule = trainer.position, trainer.schedule
    end = (position.epochs_done + 1) * schedule.steps_per_epoch
    begun = end - schedule.steps_per_epoch
    # Without set_epoch every epoch has the same order and the same augmentations.
    loader.set_epoch(position.epochs_done, (position.step - begun) * schedule.accumulate * schedule.batch_size)
    batches = iter(loader)
    dtype = torch.float32 if loader.device.type == "mps" else torch.float64  # mps knows no float64
    losses = torch.full((), position.loss_sum, device=loader.device, dtype=dtype)
    start = time.perf_counter() - position.seconds
    while position.step < end:
        trainer.heartbeat.at(position.step, "loading images")
        asked = time.perf_counter()
        batch = list(islice(batches, schedule.accumulate))
        position.waited += time.perf_counter() - asked
        trainer.heartbeat.at(position.step, "training")
        losses += train_step(trainer, batch, position.step)
        position.step += 1
        position.seconds = time.perf_counter() - start
        if trainer.watch.agreed or is_save_step(trainer):
            position.loss_sum = float(reduce_value(losses, average=True))
            save_and_perhaps_stop(trainer)
    # Every step of every process has the same number of images, so the mean of the losses is the mean over the images.
    position.loss_sum = float(reduce_value(losses, average=True))
    settle(trainer)
    position.seconds = time.perf_counter() - start
    if trainer.watch.agreed:  # in the last steps, read only now
        save_and_perhaps_stop(trainer)


def train_step(trainer: Trainer, batches: list[tuple[torch.Tensor, torch.Tensor]], step: int) -> torch.Tensor:
    """One optimizer step over `batches`, whose gradients are averaged. Returns this process's mean loss, a scalar."""
    lr = trainer.schedule.learning_rate(step)
    for group in trainer.optimizer.param_groups:
        group["lr"] = lr
    # Dropout and its like draw from a generator that depends on nothing but the place in the run.
    torch.manual_seed(hash((trainer.args.seed, step, get_rank())) & 0x7FFF_FFFF_FFFF_FFFF)
    total = 0.0
    for number, (images, labels) in enumerate(batches, start=1):
        with _synchronizing(trainer.model, number == len(batches)):
            loss = _loss(trainer, images, labels) / len(batches)
            trainer.precision.scaler.scale(loss).backward()
        total = total + loss.detach()
    trainer.precision.scaler.step(trainer.optimizer)
    trainer.precision.scaler.update()
    trainer.optimizer.zero_grad()
    trainer.watch.push(step, total, lr, requests(trainer))
    return total


def _loss(trainer: Trainer, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    with trainer.precision.training():
        logits = trainer.model(trainer.experiment.preprocessing.normalize(images, trainer.precision.dtype))
        return trainer.criterion(logits, labels)


def rehearse(trainer: Trainer, device: torch.device) -> None:
    """One forward and backward pass that leaves no trace but in DDP.

    After its first step DDP groups the gradients anew, in the order in which they came, and another grouping adds in
    another order. Rehearsed here, the grouping is the same in every step of a new run and of one that goes on.
    """
    if not isinstance(trainer.model, DistributedDataParallel):
        return
    models.train_mode(trainer.model)
    buffers = [(buffer, buffer.clone()) for buffer in trainer.model.buffers()]
    size, count = trainer.experiment.preprocessing.image_size, trainer.schedule.batch_size
    images = torch.zeros(count, 3, size, size, dtype=torch.uint8, device=device)
    _loss(trainer, images, torch.zeros(count, dtype=torch.int64, device=device)).backward()
    for buffer, before in buffers:
        buffer.copy_(before)
    trainer.optimizer.zero_grad()


def end_epoch(trainer: Trainer, loader: Loader) -> None:
    """Validates, writes the epoch down, and saves."""
    position, schedule, run = trainer.position, trainer.schedule, trainer.run
    trainer.heartbeat.at(position.step, "validating")
    start, epoch = time.perf_counter(), position.epochs_done
    try:
        metrics = evaluate(trainer.model, loader, trainer.experiment, trainer.precision, interruptible=True)
    except ValidationInterrupted:
        save_and_stop(trainer)
    steps = range(epoch * schedule.steps_per_epoch, position.step)
    row = {
        "epoch": epoch,
        "train_loss": position.loss_sum / schedule.steps_per_epoch,
        "val_loss": metrics.loss,
        "val_top1": metrics.top1,
        "val_top5": metrics.top5,
        "val_macro_f1": metrics.macro_f1,
        "lr": max(map(schedule.learning_rate, steps)),
        "images_per_second": schedule.steps_per_epoch * schedule.global_batch_size / position.seconds,
        "waiting": position.waited / position.seconds,
        "seconds": position.seconds + time.perf_counter() - start,
    }
    run.log_epoch(row, position.step)
    improved = metrics.top1 > position.best
    trainer.position = Position(step=position.step, epochs_done=epoch + 1, best=max(position.best, metrics.top1))
    if improved:
        run.save("best.pth", prediction_state(trainer.model, trainer.experiment, row))
        run.log_best(metrics, position.step)
    save(trainer, row)
    _say_epoch(row, schedule.epochs, improved, metrics.not_finite)


def _synchronizing(model: nn.Module, last: bool):
    """DDP averages gradients over the processes in a backward pass; of accumulated batches only the last needs it."""
    return nullcontext() if last or not hasattr(model, "no_sync") else model.no_sync()


class ValidationInterrupted(Exception):
    """A signal came during validation, which is done again when the run goes on."""


@torch.inference_mode()
def evaluate(
    model: nn.Module, loader: Loader, experiment: Experiment, precision: Precision, interruptible: bool = False
) -> Metrics:
    """Exact figures over the images of all processes' loaders, the same on each process.

    What is evaluated is what is saved: the module inside the wrapper, with rank 0's buffers.

    Raises:
        ValidationInterrupted: `interruptible` is set, and a signal came.
    """
    model = unwrap(model)
    broadcast_buffers(model)
    model.eval()
    totals, worst = Totals(experiment.num_classes, loader.device), WorstAnswers()
    for images, labels in loader:
        if interruptible and interruption.signal:
            raise ValidationInterrupted
        with precision.evaluation():
            logits = model(experiment.preprocessing.normalize(images, precision.dtype))
        totals.update(logits, labels)
        worst.update(logits, labels)
    return replace(totals.reduce(), worst=worst.reduce(loader.batches.sampler.indices))


def _say_epoch(row: dict, epochs: int, improved: bool, not_finite: int) -> None:
    say(
        f"epoch {row['epoch'] + 1}/{epochs}  train loss {row['train_loss']:.4f}  val loss {row['val_loss']:.4f}  "
        f"top-1 {row['val_top1']:.4f}  top-5 {row['val_top5']:.4f}  lr {row['lr']:.3g}  "
        f"{row['images_per_second']:.0f} images/s  {row['seconds']:.1f} s" + ("  (best)" if improved else "")
    )
    if not_finite:
        say(f"warning: the model gave no finite answer for {not_finite} validation images; they count as wrong")

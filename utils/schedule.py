"""Images in a step, steps in a run, and the learning rate of each: arithmetic, told in one line."""

import math
from argparse import Namespace
from dataclasses import dataclass

from utils.errors import UserError


@dataclass(frozen=True)
class Schedule:
    """The plan of a run. It is the same on every process, and a function of the step alone.

    Attributes:
        batch_size: images that one process takes at a time.
        accumulate: how many such batches make one optimizer step.
        world_size: number of processes.
        images: number of training images.
        epochs: passes over them.
        lr: the highest learning rate, after scaling.
        lrf: the last learning rate as a share of `lr`.
        warmup_steps: steps in which the learning rate rises to the cosine.
        notes: how the figures came about, for the run to print.
    """

    batch_size: int
    accumulate: int
    world_size: int
    images: int
    epochs: int
    lr: float
    lrf: float
    warmup_steps: int
    notes: tuple[str, ...]

    @property
    def global_batch_size(self) -> int:
        """Images of one optimizer step, over all processes."""
        return self.batch_size * self.accumulate * self.world_size

    @property
    def steps_per_epoch(self) -> int:
        return self.images // self.global_batch_size

    @property
    def total_steps(self) -> int:
        return self.steps_per_epoch * self.epochs

    @property
    def kept(self) -> dict:
        """What a run keeps of its schedule when it goes on, as options."""
        return {"global_batch_size": self.global_batch_size, "lr": self.lr, "warmup_steps": self.warmup_steps}

    def learning_rate(self, step: int) -> float:
        """Cosine from `lr` to `lr * lrf` over all steps (Loshchilov and Hutter 2017, arXiv:1608.03983), and in the
        first `warmup_steps` a rising share of it (Goyal et al. 2017, arXiv:1706.02677). `step` counts from 0."""
        cosine = (1 + math.cos(math.pi * step / self.total_steps)) / 2
        warmup = min(1.0, (step + 1) / (self.warmup_steps + 1))
        return self.lr * warmup * (self.lrf + (1 - self.lrf) * cosine)


def make_schedule(args: Namespace, images: int, world_size: int, kept: dict | None = None) -> Schedule:
    """The schedule for `images` training images on `world_size` processes.

    `kept` is `Schedule.kept` of a run that goes on: whatever the number of processes now, its steps stay the same.

    Raises:
        UserError: a global batch that cannot be shared evenly, or fewer images than processes.
    """
    args = Namespace(**vars(args) | (kept or {}))
    shares = world_size * args.accumulate
    if images < world_size:
        raise UserError(f"{images} training images for {world_size} processes: start at most {images}, or add photos")
    if args.global_batch_size:
        wanted, accumulate = _shared_evenly(args.global_batch_size, world_size, args.accumulate), args.accumulate
        lr, arithmetic = args.lr, f"learning rate {args.lr:g} for the global batch, not scaled"
    else:
        wanted, accumulate = args.batch_size * shares, args.accumulate
        factor = {"linear": shares, "sqrt": math.sqrt(shares), "none": 1}[args.lr_scaling]
        lr = args.lr * factor
        arithmetic = f"learning rate {args.lr:g} x {factor:g} ({args.lr_scaling} in {shares}) = {lr:g}"
    global_batch, accumulate, lowered = _lowered(wanted, images, world_size, accumulate, bool(args.global_batch_size))
    batch_size = global_batch // (world_size * accumulate)
    steps = images // global_batch
    total = steps * args.epochs
    warmup = args.warmup_steps if args.warmup_steps is not None else min(100, total // 10)
    processes = f"{world_size} process{'es' if world_size > 1 else ''}"
    notes = [f"{batch_size} images x {processes} x {accumulate} accumulated = {global_batch}; {arithmetic}"]
    notes.append(
        f"{steps} steps an epoch, {total} in all, {warmup} of warm-up; "
        f"{images - steps * global_batch} images are left out of each epoch, others each time"
    )
    return Schedule(
        batch_size, accumulate, world_size, images, args.epochs, lr, args.lrf, warmup, tuple(lowered + notes)
    )


def _shared_evenly(global_batch: int, world_size: int, accumulate: int) -> int:
    shares = world_size * accumulate
    if global_batch % shares:
        below = global_batch // shares * shares
        nearest = [str(size) for size in (below, below + shares) if size > 0]
        among = f"{world_size} processes" + (f" x {accumulate} accumulated batches" if accumulate > 1 else "")
        raise UserError(
            f"--global-batch-size {global_batch} cannot be shared evenly by {among}: take {' or '.join(nearest)}"
        )
    return global_batch


def _lowered(
    wanted: int, images: int, world_size: int, accumulate: int, by_global_batch: bool
) -> tuple[int, int, list[str]]:
    """The global batch and the accumulation that a small data set allows, and a note where they were lowered."""
    if wanted <= images:
        return wanted, accumulate, []
    # With --global-batch-size the step must be the same on 1, 2, 3 and 4 processes, so that all of them can share it.
    step = 12 if by_global_batch and images >= 12 and 12 % world_size == 0 else world_size
    lowered = images // step * step
    note = f"the global batch of {wanted} is lowered to {lowered}: there are {images} training images"
    return lowered, 1, [note + (", and batches are not accumulated" if accumulate > 1 else "")]

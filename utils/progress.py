"""The progress bar of the main process."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from utils.distributed_utils import is_main_process
from utils.schedule import Schedule

SECONDS_BETWEEN_UPDATES = 0.5


class Progress:
    """A bar an epoch on a terminal: loss, images/s and time left. Silent in a log file and on other processes.

    It is fed from reports that are read anyway, a few steps late, so that it costs the device nothing.
    """

    def __init__(self, schedule: Schedule):
        self.schedule, self.bar = schedule, None

    @contextmanager
    def epoch(self, epoch: int, done: int = 0) -> Iterator[None]:
        """The bar of one epoch, of which `done` steps were taken before an interruption."""
        from tqdm import tqdm

        images = self.schedule.steps_per_epoch * self.schedule.global_batch_size
        with tqdm(
            total=images,
            initial=done * self.schedule.global_batch_size,
            desc=f"epoch {epoch + 1}/{self.schedule.epochs}",
            unit=" images",
            leave=False,
            mininterval=SECONDS_BETWEEN_UPDATES,
            disable=None if is_main_process() else True,  # None: only where there is a terminal
        ) as self.bar:
            self.shown_at = time.monotonic()
            yield
        self.bar = None

    def show(self, step: int, loss: float, lr: float) -> None:
        if self.bar is None or self.bar.disable:
            return
        if time.monotonic() - self.shown_at > SECONDS_BETWEEN_UPDATES:
            self.bar.set_postfix(loss=f"{loss:.3f}", refresh=False)
            self.shown_at = time.monotonic()
        self.bar.update(self.schedule.global_batch_size)

"""What every step reports, read a few steps later, so that the device never waits for a number to be looked at."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from utils.distributed_utils import get_world_size
from utils.errors import UserError

LAG = 4  # steps between a report and its reading: enough for a small all-reduce to have arrived


@dataclass
class _Report:
    step: int
    lr: float
    values: torch.Tensor  # the loss summed over the processes, and how many of them found it not finite
    event: torch.cuda.Event | None
    work: dist.Work | None


def not_finite(what: str, step: int, lr: float) -> str:
    """The sentence for a training that has broken down at `step`, which counts from 0."""
    return (
        f"{what} is not finite at step {step} (learning rate {lr:g}): training stopped, and the checkpoints written "
        "before are sound; try a lower --lr or a longer --warmup-steps"
    )


class StepWatch:
    """Stops all processes together at the first loss that is not finite.

    Each step starts a small asynchronous all-reduce; its result is read `LAG` steps later. Every process reads the same
    sums at the same step, so all of them stop there and none is left waiting. `drain` reads what is still
    under way: called before a checkpoint is written, so that none holds weights that were not yet known to be sound.

    Args:
        device: where the losses are.
        on_step: called with (step, mean loss over all processes, learning rate) when a report is read.
    """

    def __init__(self, device: torch.device, on_step: Callable[[int, float, float], None]):
        self.device, self.on_step = device, on_step
        self.reports: deque[_Report] = deque()

    def push(self, step: int, loss: torch.Tensor, lr: float) -> None:
        """Reports a step's mean loss (a scalar on the device)."""
        loss = loss.detach()
        values = torch.stack([loss, (~loss.isfinite()).to(loss.dtype)])
        work = dist.all_reduce(values, async_op=True) if get_world_size() > 1 else None
        self.reports.append(self._on_its_way(_Report(step, lr, values, None, work)))
        while len(self.reports) > LAG:
            self._read()

    def drain(self) -> None:
        """Reads all reports. Raises UserError if one of them tells of a loss that is not finite."""
        while self.reports:
            self._read()

    def _on_its_way(self, report: _Report) -> _Report:
        """On CUDA: orders the copy to the host behind the all-reduce, on the device's own clock."""
        if self.device.type == "cuda":
            if report.work is not None:
                report.work.wait()  # the stream waits, this thread does not
            report.values = report.values.to("cpu", non_blocking=True)
            report.event = torch.cuda.Event()
            report.event.record()
        return report

    def _read(self) -> None:
        report = self.reports.popleft()
        if report.event is not None:
            report.event.synchronize()
        elif report.work is not None:
            report.work.wait()
        loss, found_not_finite = report.values.tolist()
        if found_not_finite:
            raise UserError(not_finite("the loss", report.step, report.lr))
        self.on_step(report.step, loss / get_world_size(), report.lr)

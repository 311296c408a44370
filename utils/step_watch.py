"""What every step reports, read a little later, so that the device never waits for a number to be looked at."""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from utils.distributed_utils import get_world_size
from utils.errors import UserError

# Steps between a report and its reading. On CUDA steps are queued ahead of the device; elsewhere a step is over when
# its code has run, and the small all-reduce of one step arrives during the next.
LAG_ON_CUDA, LAG = 4, 1
# What a process can ask all of them to do together.
REQUESTS = ("save", "SIGTERM", "SIGINT", "SIGUSR1")


def not_finite(what: str, step: int, lr: float) -> str:
    """The sentence for a training that has broken down at `step`, which counts from 0."""
    return (
        f"{what} is not finite at step {step} (learning rate {lr:g}): training stopped, and the checkpoints written "
        "before are sound; try a lower --lr or a longer --warmup-steps"
    )


@dataclass
class _Report:
    step: int
    lr: float
    values: torch.Tensor  # the sums over the processes: loss, losses that are not finite, and each of the requests
    event: torch.cuda.Event | None
    work: dist.Work | None


class StepWatch:
    """Lets all processes act together: at the first loss that is not finite, and on each other's requests.

    Each step starts a small asynchronous all-reduce; its result is read a few steps later. Every process reads the
    same sums at the same step, so all of them act there and none is left waiting. `drain` reads what is still under
    way: called before a checkpoint is written, so that none holds weights that were not yet known to be sound.

    Args:
        device: where the losses are.
        on_step: called with (step, mean loss over all processes, learning rate) when a report is read.

    Attributes:
        agreed: the requests that any process has made, known to every process at the same step.
    """

    def __init__(self, device: torch.device, on_step: Callable[[int, float, float], None]):
        self.device, self.on_step = device, on_step
        self.lag = LAG_ON_CUDA if device.type == "cuda" else LAG
        self.reports: deque[_Report] = deque()
        self.agreed: set[str] = set()

    def push(self, step: int, loss: torch.Tensor, lr: float, requests: Iterable[str] = ()) -> None:
        """Reports a step's mean loss (a scalar on the device) and what this process asks for."""
        loss, requests = loss.detach(), set(requests)
        asked = torch.tensor([float(name in requests) for name in REQUESTS], dtype=loss.dtype)
        values = torch.cat([loss[None], (~loss.isfinite()).to(loss.dtype)[None], asked.to(loss.device)])
        work = dist.all_reduce(values, async_op=True) if get_world_size() > 1 else None
        self.reports.append(self._on_its_way(_Report(step, lr, values, None, work)))
        while len(self.reports) > self.lag:
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
        loss, found_not_finite, *asked = report.values.tolist()
        if found_not_finite:
            raise UserError(not_finite("the loss", report.step, report.lr))
        self.agreed |= {name for name, count in zip(REQUESTS, asked, strict=True) if count}
        self.on_step(report.step, loss / get_world_size(), report.lr)

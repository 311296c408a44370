"""The validation images that the model is most wrong about, over all processes."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F

from utils.distributed_utils import get_world_size


@dataclass(frozen=True)
class WrongAnswer:
    """An image that was given another class than its own.

    Attributes:
        index: in the list of validation images.
        guess: the class that was given.
        probability: that the model gave to it, from 0 to 1.
        loss: cross-entropy of the true class, in nats.
    """

    index: int
    guess: int
    probability: float
    loss: float


class WorstAnswers:
    """Collects each image's loss on the device; `reduce` finds the largest among all processes.

    Args:
        count: how many to keep.
    """

    def __init__(self, count: int = 16):
        self.count = count
        self.batches: list[torch.Tensor] = []

    def update(self, logits: torch.Tensor, labels: torch.Tensor) -> None:
        """Adds a batch: logits N x C, labels N int64. Waits for no device."""
        probability, guess = logits.float().softmax(dim=1).max(dim=1)
        loss = F.cross_entropy(logits.float(), labels, reduction="none")
        loss = torch.where((guess != labels) & loss.isfinite(), loss, -torch.inf)
        self.batches.append(torch.stack([loss, guess.float(), probability]))

    def reduce(self, indices: Sequence[int]) -> tuple[WrongAnswer, ...]:
        """The worst, the largest loss first, the same on each process; `indices` are of this process's images."""
        rows = torch.full((self.count, 4), -torch.inf, dtype=torch.float64)
        if self.batches:
            seen = torch.cat(self.batches, dim=1).cpu().double()
            order = seen[0].argsort(descending=True, stable=True)[: self.count]
            places = torch.tensor(list(indices), dtype=torch.float64)[order]
            rows[: len(order)] = torch.cat([seen[:, order].T, places[:, None]], dim=1)
        answers = [
            WrongAnswer(index=int(index), guess=int(guess), probability=probability, loss=loss)
            for loss, guess, probability, index in self._from_all_processes(rows)
            if loss > -torch.inf
        ]
        return tuple(sorted(answers, key=lambda answer: (-answer.loss, answer.index))[: self.count])

    def _from_all_processes(self, rows: torch.Tensor) -> list[list[float]]:
        if get_world_size() == 1:
            return rows.tolist()
        rows = rows.to(self.batches[0].device) if self.batches else rows
        gathered = [torch.empty_like(rows) for _ in range(get_world_size())]
        dist.all_gather(gathered, rows)
        return torch.cat(gathered).tolist()

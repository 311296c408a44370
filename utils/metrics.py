"""Exact validation figures: totals kept on the device, summed over the processes once, divided once."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from utils.distributed_utils import reduce_value
from utils.worst import WrongAnswer


@dataclass(frozen=True)
class Metrics:
    """What a model achieved on a list of labelled images.

    Attributes:
        loss: mean cross-entropy in nats, over all images.
        correct, correct5, count: images whose class is the best guess, is among the five best, and all of them.
        confusion: int64, C x C; row = true class, column = best guess. An image whose logits are not finite stands
            in no column, so it counts as wrong.
        not_finite: the number of those.
        class_counts: int64, C; the images of each class, those whose logits are not finite among them.
        worst: the wrong answers with the largest losses, where they were collected.
    """

    loss: float
    correct: int
    correct5: int
    count: int
    confusion: torch.Tensor
    not_finite: int
    class_counts: torch.Tensor
    worst: tuple[WrongAnswer, ...] = ()

    @property
    def top1(self) -> float:
        return self.correct / self.count

    @property
    def top5(self) -> float:
        """With fewer than five classes: the share among all of them, which is 1."""
        return self.correct5 / self.count

    def per_class(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Precision, recall and F1: three float64 tensors of length C, from 0 to 1, and 0 where undefined."""
        return per_class(self.confusion, self.class_counts)

    @property
    def macro_f1(self) -> float:
        """The mean F1 of the classes that have images. Where all have: scikit-learn's `f1_score(average="macro")`."""
        f1 = self.per_class()[2][self.class_counts > 0]
        return float(f1.mean()) if len(f1) else 0.0


def per_class(
    confusion: torch.Tensor, class_counts: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Precision, recall and F1 of each class, one division each, 0 where there is nothing to divide by.

    Args:
        confusion: int64, C x C; row = true class, column = best guess.
        class_counts: int64, C; the images of each class, if some of them stand in no column.

    Returns:
        Three float64 tensors of length C.
    """
    right, given = confusion.diagonal().double(), confusion.sum(dim=0)
    true = confusion.sum(dim=1) if class_counts is None else class_counts
    # A denominator of 0 has a numerator of 0, so any other denominator gives the 0 we want.
    return right / given.clamp(min=1), right / true.clamp(min=1), 2 * right / (given + true).clamp(min=1)


class Totals:
    """Sums over images; `reduce` turns them into Metrics of all processes."""

    def __init__(self, num_classes: int, device: torch.device):
        self.num_classes = num_classes
        # mps knows no float64; there is one process there, and its sums stay below float32's exact integers.
        self.dtype = torch.float32 if device.type == "mps" else torch.float64
        self.loss = torch.zeros((), dtype=self.dtype, device=device)
        self.correct5 = torch.zeros((), dtype=self.dtype, device=device)
        self.cells = torch.zeros(num_classes * (num_classes + 1), dtype=self.dtype, device=device)

    def update(self, logits: torch.Tensor, labels: torch.Tensor) -> None:
        """Adds a batch: logits N x C of any float dtype, labels N int64 from 0 to C - 1. Waits for no device."""
        logits = logits if logits.dtype == torch.float64 else logits.float()
        self.loss += F.cross_entropy(logits, labels, reduction="sum").to(self.dtype)
        finite = logits.isfinite().all(dim=1)
        best = logits.topk(min(5, self.num_classes), dim=1).indices
        self.correct5 += ((best == labels[:, None]).any(dim=1) & finite).sum()
        guess = torch.where(finite, best[:, 0], self.num_classes)  # a column of its own for "no answer"
        cells = labels * (self.num_classes + 1) + guess
        self.cells.index_add_(0, cells, torch.ones_like(cells, dtype=self.dtype))

    def reduce(self) -> Metrics:
        """The figures over the images of all processes, the same on each; one all-reduce."""
        sums = torch.cat([self.loss[None], self.correct5[None], self.cells])
        loss, correct5, *_ = sums = reduce_value(sums, average=False).cpu()
        confusion = sums[2:].to(torch.int64).view(self.num_classes, self.num_classes + 1)
        count = int(confusion.sum())
        return Metrics(
            loss=float(loss) / count,
            correct=int(confusion.diagonal().sum()),
            correct5=int(correct5),
            count=count,
            confusion=confusion[:, :-1].contiguous(),
            not_finite=int(confusion[:, -1].sum()),
            class_counts=confusion.sum(dim=1),
        )

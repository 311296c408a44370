"""Figures of numbers: per-class bars and the curves of a run. matplotlib is imported where a figure is drawn."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from utils.figure_text import class_labels, name_style, new_figure, number_note
from utils.metrics import per_class

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ALL_CLASSES = 40  # up to so many classes, each has its bars
WORST_CLASSES = 30  # of more, so many
# Okabe and Ito's colours, which people tell apart whatever their colour vision.
_BLUE, _ORANGE, _GREEN = "#0072B2", "#E69F00", "#009E73"


def per_class_figure(
    confusion: torch.Tensor, classes: Sequence[str], class_counts: torch.Tensor | None = None
) -> "Figure":
    """Recall and precision as bars, F1 as a number; the class with the lowest F1 on top.

    Of more than 40 classes the 30 lowest, and how many others there are. Classes without images are left out.

    Args:
        confusion: int64, C x C; row = true class, column = given class.
        classes: C names.
        class_counts: int64, C; the images of each class, if some stand in no column (no finite answer).
    """
    counts = (confusion.sum(dim=1) if class_counts is None else class_counts).tolist()
    precision, recall, f1 = (scores.tolist() for scores in per_class(confusion, class_counts))
    order = sorted((i for i, count in enumerate(counts) if count), key=lambda i: (f1[i], recall[i], i))
    shown = order if len(order) <= ALL_CLASSES else order[:WORST_CLASSES]
    names = class_labels(classes, 28)
    figure = new_figure(7.5, 0.3 * max(len(shown), 2) + 1.3)
    axes = figure.subplots()
    for offset, scores, name, color in ((-0.19, recall, "recall", _BLUE), (0.19, precision, "precision", _ORANGE)):
        places = [place + offset for place in range(len(shown))]
        axes.barh(places, [scores[i] for i in shown], height=0.36, color=color, label=name)
    for place, i in enumerate(shown):
        axes.text(1.02, place, f"{f1[i]:.3f}", va="center", fontsize=8)
    labels = [f"{names[i]} ({counts[i]:,})" for i in shown]
    axes.set_yticks(range(len(shown)), labels, fontsize=8, **name_style())
    axes.set_xlim(0, 1)
    axes.set_ylim(max(len(shown), 1) - 0.4, -0.6)
    axes.text(1.02, 1, "F1", va="bottom", fontsize=8, transform=axes.transAxes)
    notes = [number_note([classes[i] for i in shown], [names[i] for i in shown]), *_left_out(order, shown, f1, counts)]
    axes.set_xlabel("\n".join(filter(None, notes)), loc="left", fontsize=8)
    _clean(axes, "x")
    figure.suptitle("Recall and precision of each class (its images), lowest F1 on top", x=0.01, ha="left", fontsize=11)
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), borderaxespad=0, ncols=2, frameon=False, fontsize=8)
    return figure


def _left_out(order: list[int], shown: list[int], f1: list[float], counts: list[int]) -> list[str]:
    notes = []
    if others := order[len(shown) :]:
        notes.append(f"{len(others):,} other classes: F1 from {f1[others[0]]:.3f} to {f1[others[-1]]:.3f}")
    if empty := counts.count(0):
        notes.append(f"{empty:,} of {len(counts):,} classes without images, left out")
    return notes


def curves_figure(rows: Sequence[dict]) -> "Figure":
    """Losses, accuracies and learning rate over the epochs, counted from 1; the best epoch is marked.

    Args:
        rows: at least one; as in metrics.csv, numbers or their text. The best epoch is the first with the highest
            val_top1. val_macro_f1 is drawn where the rows have it.
    """
    assert rows, "a run's curves need an epoch"
    epochs = [int(row["epoch"]) + 1 for row in rows]
    figure = new_figure(7.5, 7.5)
    panels = figure.subplots(3, 1, sharex=True, height_ratios=[3, 3, 1.6])
    _curves(panels[0], epochs, rows, {"train_loss": "training", "val_loss": "validation"})
    _curves(panels[1], epochs, rows, {"val_top1": "top-1", "val_top5": "top-5", "val_macro_f1": "macro F1"})
    _curves(panels[2], epochs, rows, {"lr": ""})
    for axes, title in zip(panels, ("Loss", "Validation accuracy", "Learning rate"), strict=True):
        axes.set_title(title, loc="left", fontsize=10)
    _mark_best(figure, panels, epochs, rows)
    panels[-1].set_xlabel("epoch")
    panels[-1].set_xlim(min(epochs) - 0.5, max(epochs) + 0.5)
    panels[-1].xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
    return figure


def _curves(axes, epochs: list[int], rows: Sequence[dict], names: dict[str, str]) -> None:
    marker = "o" if len(epochs) <= 40 else None  # a single epoch would be invisible as a line
    for (key, name), color in zip(names.items(), (_BLUE, _ORANGE, _GREEN), strict=False):
        if key in rows[0]:
            values = [_finite(row.get(key)) for row in rows]
            axes.plot(epochs, values, color=color, marker=marker, markersize=3, linewidth=1.5, label=name)
    if len(names) > 1:
        axes.legend(frameon=False, fontsize=8)
    _clean(axes, "y")


def _mark_best(figure, panels, epochs: list[int], rows: Sequence[dict]) -> None:
    top1 = [_finite(row["val_top1"]) for row in rows]
    best = max(range(len(rows)), key=lambda i: -1 if math.isnan(top1[i]) else top1[i])  # max takes the first of equals
    for axes in panels:
        axes.axvline(epochs[best], color="0.5", linewidth=1, linestyle="--", zorder=0)
    title = f"{len(rows)} epoch{'s' if len(rows) > 1 else ''}; best: epoch {epochs[best]}, top-1 {top1[best]:.4f}"
    figure.suptitle(title + " (dashed)", x=0.01, ha="left", fontsize=11)


def _finite(value) -> float:
    """A gap in the curve for what is missing or not finite."""
    number = math.nan if value in (None, "") else float(value)
    return number if math.isfinite(number) else math.nan


def _clean(axes, grid: str) -> None:
    axes.grid(axis=grid, color="0.9", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8)

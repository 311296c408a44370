"""The confusion matrix as a figure that can be read for 3 classes and for 1,000."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from utils.figure_text import class_labels, name_style, new_figure, number_note, text_width

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WRITTEN = 20  # up to so many classes, counts stand in the cells
NAMED = 120  # up to so many, each class has a row; beyond, neighbours share one
_DARK, _LIGHT, _EMPTY = "#0b2a4a", "white", "0.92"


def confusion_figure(
    confusion: torch.Tensor, classes: Sequence[str], class_counts: torch.Tensor | None = None
) -> "Figure":
    """Row-normalised colours; counts in the cells for few classes, a list of the most confused pairs for many.

    With more than 20 classes the colours are logarithmic, so that one image among thousands is seen; with more than
    120, a cell stands for a block of neighbouring classes.

    Args:
        confusion: int64, C x C; row = true class, column = given class.
        classes: C names.
        class_counts: int64, C; the images of each class, if some stand in no column (no finite answer).
    """
    confusion = confusion.cpu()
    counts = confusion.sum(dim=1) if class_counts is None else class_counts.cpu()
    draw = _few if len(classes) <= WRITTEN else _many
    figure = draw(confusion, classes, counts)
    figure.suptitle(_title(confusion, counts), x=0.01, ha="left", fontsize=11)
    return figure


def confused_pairs(confusion: torch.Tensor, most: int) -> list[tuple[int, int, int]]:
    """(images, true class, given class) of the commonest mistakes, the commonest first, then by class number."""
    wrong = confusion.clone().fill_diagonal_(0)
    places = wrong.nonzero()
    images = wrong[places[:, 0], places[:, 1]]
    order = images.argsort(descending=True, stable=True)[:most]
    return [(int(images[i]), *places[i].tolist()) for i in order]


def _title(confusion: torch.Tensor, counts: torch.Tensor) -> str:
    right, total = int(confusion.diagonal().sum()), int(counts.sum())
    title = f"Confusion matrix: {right:,} of {total:,} right" + (f" ({right / total:.1%})" if total else "")
    if unanswered := total - int(confusion.sum()):
        title += f"\n{unanswered:,} without an answer"
    if empty := int((counts == 0).sum()):
        title += f"\n{empty:,} of {len(counts):,} classes without images (gray)"
    return title


def _few(confusion: torch.Tensor, classes: Sequence[str], counts: torch.Tensor) -> "Figure":
    """Every class has its name, every cell its count."""
    labels, size = class_labels(classes, 24), len(classes)
    cell = max(0.45, min(0.8, 3.6 / size))  # inches
    names, side = 0.09 * max(map(text_width, labels)), cell * size
    rotation = 0 if names < cell else 45
    rows = [f"{name} ({count:,})" for name, count in zip(labels, counts.tolist(), strict=True)]
    figure = new_figure(
        max(side + 0.09 * max(map(text_width, rows)) + 1.9, 4.6), side + (names * 0.7 if rotation else 0.1) + 1.3
    )
    axes = figure.subplots()
    shares = confusion / counts.clamp(min=1)[:, None]
    image = axes.imshow(shares.numpy(), cmap="Blues", vmin=0, vmax=1, interpolation="nearest")
    _frame(axes, counts)
    _write_counts(axes, confusion, shares, cell)
    _name_axes(axes, labels, rows, 9)
    if rotation:
        axes.set_xticks(
            range(size), labels, fontsize=9, rotation=45, ha="right", rotation_mode="anchor", **name_style()
        )
    axes.set_ylabel("true class (images)")
    axes.set_xlabel("\n".join(filter(None, ["given class", number_note(classes, labels)])))
    _color_bar(figure, image, axes, "share of the true class")
    return figure


def _write_counts(axes, confusion: torch.Tensor, shares: torch.Tensor, cell: float) -> None:
    """Every count but the zeros beside the diagonal, in a size at which the longest fits into its cell."""
    longest = len(f"{int(confusion.max()):,}")
    size = min(10.0, cell * 72 * 0.9 / (0.62 * longest))
    for row, column in (confusion + torch.eye(len(confusion), dtype=confusion.dtype)).nonzero().tolist():
        color = _LIGHT if shares[row, column] > 0.5 else _DARK
        text = f"{int(confusion[row, column]):,}"
        axes.text(column, row, text, ha="center", va="center", fontsize=size, color=color).set_in_layout(False)


def _many(confusion: torch.Tensor, classes: Sequence[str], counts: torch.Tensor) -> "Figure":
    """Logarithmic colours, and the most confused pairs by name at the side."""
    block = -(-len(classes) // NAMED)
    side = 8.0 if block > 1 else max(5.0, 0.088 * len(classes))  # inches
    figure = new_figure(side + 7.2, side + 2.0)
    axes, side_list = figure.subplots(1, 2, width_ratios=[side + 2.5, 4.7])
    blocks, block_counts = _in_blocks(confusion, block), _in_blocks(counts.diag(), block).diagonal()
    image = _log_image(axes, blocks / block_counts.clamp(min=1)[:, None], int(block_counts.max()))
    _frame(axes, block_counts)
    if block == 1:
        _name_all(axes, classes, side)
    else:
        _name_some(axes, classes, block)
    _color_bar(figure, image, axes, "share of the true class" + ("es" if block > 1 else "") + ", logarithmic")
    _list_pairs(side_list, confusion, classes, counts, rows=min(30, int(side / 0.2)))
    return figure


def _in_blocks(matrix: torch.Tensor, block: int) -> torch.Tensor:
    """Sums over squares of block x block cells."""
    size = -(-len(matrix) // block)
    padded = matrix.new_zeros(size * block, size * block)
    padded[: len(matrix), : len(matrix)] = matrix
    return padded.view(size, block, size, block).sum(dim=(1, 3))


def _log_image(axes, shares: torch.Tensor, most_images: int):
    """Zero is white; the smallest share that there can be is already clearly blue."""
    import matplotlib
    import numpy
    from matplotlib.colors import ListedColormap, LogNorm

    colors = ListedColormap(matplotlib.colormaps["Blues"](numpy.linspace(0.3, 1, 256)))
    visible = numpy.ma.masked_equal(shares.double().numpy(), 0)
    norm = LogNorm(vmin=min(0.1, max(1e-4, 1 / max(most_images, 1))), vmax=1, clip=True)
    return axes.imshow(visible, cmap=colors, norm=norm, interpolation="nearest")


def _name_all(axes, classes: Sequence[str], side: float) -> None:
    labels = class_labels(classes, 24)
    _name_axes(axes, labels, labels, min(8.0, side * 72 / len(classes) * 0.85))
    axes.tick_params(axis="x", rotation=90)
    axes.set_ylabel("true class")
    axes.set_xlabel("\n".join(filter(None, ["given class", number_note(classes, labels)])))


def _name_some(axes, classes: Sequence[str], block: int) -> None:
    """Every so many blocks, the number and name of the first class in it."""
    step = -(-len(classes) // block // 20)
    places = range(0, -(-len(classes) // block), step)
    names = class_labels(classes, 18)
    labels = [f"{names[place * block]} ({place * block})" for place in places]
    axes.set_yticks(places, labels, fontsize=8, **name_style())
    axes.set_xticks(places, labels, fontsize=8, rotation=90, **name_style())
    axes.set_ylabel(f"true class (its number), {block} neighbours a row")
    axes.set_xlabel(f"given class (its number), {block} neighbours a column")


def _name_axes(axes, columns: list[str], rows: list[str], size: float) -> None:
    axes.set_xticks(range(len(columns)), columns, fontsize=size, **name_style())
    axes.set_yticks(range(len(rows)), rows, fontsize=size, **name_style())
    axes.tick_params(length=0)


def _frame(axes, counts: torch.Tensor) -> None:
    """Gray rows for classes without images."""
    axes.spines[:].set_color("0.7")
    for row in (counts == 0).nonzero().flatten().tolist():
        axes.axhspan(row - 0.5, row + 0.5, color=_EMPTY, linewidth=0)


def _color_bar(figure, image, axes, text: str) -> None:
    from matplotlib.ticker import PercentFormatter

    bar = figure.colorbar(image, ax=axes, shrink=0.6, aspect=30, pad=0.02, format=PercentFormatter(1, symbol=" %"))
    bar.outline.set_visible(False)
    bar.ax.tick_params(labelsize=8, length=2)
    bar.set_label(text, fontsize=8)


def _list_pairs(axes, confusion: torch.Tensor, classes: Sequence[str], counts: torch.Tensor, rows: int) -> None:
    axes.set_axis_off()
    pairs = confused_pairs(confusion, rows)
    axes.set_title("Most confused: images, true → given" if pairs else "No mistakes", loc="left", fontsize=9)
    names = class_labels(classes, 20)
    for row, (images, true, given) in enumerate(pairs):
        height = 1 - (row + 0.7) / rows
        text = f"{images:,} of {int(counts[true]):,}"
        axes.text(0.16, height, text, fontsize=8, ha="right", transform=axes.transAxes)
        text = f"{names[true]} → {names[given]}"
        axes.text(0.18, height, text, fontsize=8, transform=axes.transAxes, **name_style()).set_in_layout(False)

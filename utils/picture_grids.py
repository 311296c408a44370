"""Images in rows with their class names: the first training batch, the worst-classified validation images."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from utils.figure_text import label, name_style, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_IMAGES = 32
_SIDE, _GAP, _LINE, _CAPTION = 1.2, 0.08, 0.15, 0.4  # inches
_NAME_WIDTH = 18  # columns of text over an image


def image_grid_figure(images: torch.Tensor, titles: Sequence[str], caption: str, columns: int = 8) -> "Figure":
    """Images under their names.

    Args:
        images: uint8, N x 3 x H x W with N from 1; the first 32 are shown, small ones enlarged without blur.
        titles: N names.
        caption: one line that says what is seen.
    """
    return _grid(images, [[label(title, _NAME_WIDTH)] for title in titles], caption, columns)


def worst_figure(
    images: torch.Tensor,
    true_names: Sequence[str],
    given_names: Sequence[str],
    probabilities: Sequence[float],
    columns: int = 8,
) -> "Figure":
    """Wrongly classified images, in the order given, under their true class, then the given one and its probability.

    Args:
        images: uint8, N x 3 x H x W with N from 1; the first 32 are shown.
        probabilities: of the given class, from 0 to 1.
    """
    lines = [
        [label(true, _NAME_WIDTH), f"{label(given, _NAME_WIDTH - 6)} {float(probability):.1%}"]
        for true, given, probability in zip(true_names, given_names, probabilities, strict=True)
    ]
    caption = "Worst-classified validation images: true class (black), given class and its probability (red)"
    return _grid(images, lines, caption, columns)


def _grid(images: torch.Tensor, lines: list[list[str]], caption: str, columns: int) -> "Figure":
    assert len(images) == len(lines) > 0, "one title for each image, and at least one image"
    images, lines = images[:MOST_IMAGES], lines[:MOST_IMAGES]
    columns = min(columns, len(images))
    rows = -(-len(images) // columns)
    row_height = _SIDE + _LINE * len(lines[0]) + _GAP
    # A caption may be wider than a few images are; it needs about 0.075 inches a character.
    width = max(columns * (_SIDE + _GAP) + _GAP, 0.075 * len(caption) + 0.2)
    height = rows * row_height + _CAPTION
    figure = new_figure(width, height, layout=None)
    figure.text(_GAP / width, 1 - 0.12 / height, label(caption, 150), fontsize=10, va="top", **name_style())
    for number, image in enumerate(images):
        row, column = divmod(number, columns)
        left, bottom = _GAP + column * (_SIDE + _GAP), height - _CAPTION - (row + 1) * row_height + _GAP
        axes = figure.add_axes((left / width, bottom / height, _SIDE / width, _SIDE / height))
        _show(axes, image)
        _write(axes, lines[number])
    return figure


def _show(axes, image: torch.Tensor) -> None:
    enlarged = max(image.shape[1:]) < _SIDE * axes.figure.dpi
    axes.imshow(image.permute(1, 2, 0).cpu().numpy(), interpolation="nearest" if enlarged else "hanning")
    axes.set_axis_off()


def _write(axes, lines: list[str]) -> None:
    """The lines over an image, the last one next to it; a second line is what the model said."""
    for place, (line, color) in enumerate(zip(lines, ("black", "#b3261e"), strict=False)):
        above = 1 + (0.03 + _LINE * (len(lines) - 1 - place)) / _SIDE
        axes.text(0, above, line, transform=axes.transAxes, fontsize=7, color=color, va="bottom", **name_style())

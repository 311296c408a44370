"""Class names in figures: any script, any length, any bytes, and never a box in place of a character.

matplotlib's own font, DejaVu Sans, knows no Chinese, Japanese or Korean. Where a font that does is installed, it stands
in for the missing characters; otherwise a name goes by its class number, "#12". Names are never read as formulas ($).
"""

import contextlib
import functools
import logging
import re
import unicodedata
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from data.images import printable

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_OWN_FAMILY = "DejaVu Sans"  # comes with matplotlib
_FURTHER_FAMILIES = (
    "Noto Sans CJK SC",
    "Noto Sans CJK JP",  # older matplotlib sees only the first face of the collection
    "Noto Sans SC",
    "Source Han Sans SC",
    "WenQuanYi Zen Hei",
    "WenQuanYi Micro Hei",
    "PingFang SC",
    "Hiragino Sans GB",
    "Hiragino Sans",
    "Heiti TC",
    "Microsoft YaHei",
    "SimHei",
    "Malgun Gothic",
    "Arial Unicode MS",
    "Droid Sans Fallback",
    "Noto Emoji",
    "Symbola",
)
NUMBER_NOTE = "#n: class number n in class_indices.json"


def new_figure(width: float, height: float, layout: str | None = "constrained") -> "Figure":
    """An empty white figure of so many inches at 110 dots an inch, drawn by Agg: no pyplot, no display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=110, layout=layout, facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def name_style() -> dict:
    """The text properties under which a class name is drawn as it stands."""
    return {"fontfamily": list(_fonts()[0]), "parse_math": False}


def class_labels(classes: Sequence[str], width: int) -> list[str]:
    """A label for each class, at most `width` (at least 12) columns wide, no two alike unless the names are.

    Where characters cannot be shown, or two labels would be alike, "#" and the class number come first.
    """
    labels = [shorten(_shown(name, number), width) for number, name in enumerate(classes)]
    count = Counter(labels)
    return [label if count[label] == 1 else shorten(f"#{number} {label}", width) for number, label in enumerate(labels)]


def number_note(classes: Sequence[str], labels: Sequence[str]) -> str:
    """What "#12" means, if one of these labels has it; else empty."""
    numbered = any(
        label.startswith("#") and not name.startswith("#") for name, label in zip(classes, labels, strict=True)
    )
    return NUMBER_NOTE if numbered else ""


def label(name: str, width: int) -> str:
    """One name alone, at most `width` columns wide; a character that cannot be shown becomes U+4E2D or the like."""
    return shorten(_shown(name), width)


def shorten(text: str, width: int) -> str:
    """`text`, with an ellipsis for what is too much in its middle: names often differ at their ends only."""
    if text_width(text) <= width:
        return text
    tail = _fitting(text[::-1], (width - 1) // 3)[::-1]
    return _fitting(text, width - 1 - text_width(tail)) + "…" + tail


def text_width(text: str) -> int:
    """In columns: a Chinese character takes two, a combining one none."""
    return sum(map(_columns, text))


def _columns(character: str) -> int:
    if unicodedata.combining(character):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def _fitting(text: str, width: int) -> str:
    """The longest start of `text` that is at most so wide."""
    used = 0
    for position, character in enumerate(text):
        used += _columns(character)
        if used > width:
            return text[:position]
    return text


def _shown(name: str, number: int | None = None) -> str:
    # Half of a surrogate pair is no character; printable spells the other half range, undecodable bytes, as \xNN.
    text = printable(re.sub("[\ud800-\udc7f\udd00-\udfff]", "\ufffd", name))
    characters = _fonts()[1]
    if all(ord(character) in characters for character in text):
        return text
    if number is None:
        return "".join(c if ord(c) in characters else f"U+{ord(c):04X}" for c in text)
    return f"#{number} {''.join(c for c in text if ord(c) in characters).strip()}".rstrip()


@functools.cache
def _fonts() -> tuple[tuple[str, ...], frozenset[int]]:
    """The font families to draw names with, in this order, and the code points that they have."""
    from matplotlib import font_manager

    # That a fallback font has no weight "normal", only 500, is nothing to tell the user each time it is drawn.
    logging.getLogger("matplotlib.font_manager").addFilter(lambda record: "font weight" not in str(record.msg))
    installed = {entry.name for entry in font_manager.fontManager.ttflist}
    if not installed.intersection(_FURTHER_FAMILIES):
        installed |= _new_families()
    families, characters = [], set()
    for family in (_OWN_FAMILY, *(name for name in _FURTHER_FAMILIES if name in installed)):
        try:
            path = font_manager.findfont(family, fallback_to_default=False)
            characters |= font_manager.get_font(path).get_charmap().keys()
        except (OSError, RuntimeError, ValueError):  # listed in matplotlib's cache, but gone or damaged
            continue
        families.append(family)
    return tuple(families), frozenset(characters)


def _new_families() -> set[str]:
    """Makes fonts known that were installed after matplotlib wrote its list of fonts, which it never renews."""
    from matplotlib import font_manager

    manager = font_manager.fontManager
    for path in {*font_manager.findSystemFonts()} - {str(entry.fname) for entry in manager.ttflist}:
        with contextlib.suppress(Exception):  # a damaged font may fail in any way; it is only left out
            manager.addfont(path)
    return {entry.name for entry in manager.ttflist}

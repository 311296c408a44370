"""What figures say: the numbers, the names, the order; and that they are drawn without a word of complaint."""

import io
import itertools
import logging
import os
import subprocess
import sys
import warnings

import pytest
import torch
from matplotlib.text import Text
from PIL import Image
from sklearn.metrics import f1_score, precision_recall_fscore_support

from utils import figure_text
from utils.confusion_plot import confused_pairs, confusion_figure
from utils.figure_text import class_labels, label, number_note, shorten, text_width
from utils.metrics import Totals, per_class
from utils.picture_grids import image_grid_figure, worst_figure
from utils.plots import curves_figure, per_class_figure

ODD_NAMES = [
    "cost $5 and $6",
    "$x^{2",
    "snake_case_name",
    "100% wool",
    "bad\udcffbyte",
    "half \ud83d pair",
    "玫瑰",
    "玫瑰 rose",
    "😀 smile",
    "a" * 200,
    "a" * 200 + "b",
    "line\nbreak\t",
    "",
    "#7",
    "\U000e0fff",
]


@pytest.fixture
def only_dejavu(monkeypatch):
    """matplotlib as on a machine without any other font."""
    monkeypatch.setattr(figure_text, "_FURTHER_FAMILIES", ())
    monkeypatch.setattr(figure_text, "_new_families", set)
    figure_text._fonts.cache_clear()
    yield
    figure_text._fonts.cache_clear()


def random_confusion(size: int, images: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    true = torch.randint(0, size, (images,), generator=generator)
    given = torch.where(torch.rand(images, generator=generator) < 0.7, true, true.flip(0))
    return torch.bincount(true * size + given, minlength=size * size).view(size, size)


def drawn(figure, caplog) -> list[str]:
    """Saves the figure as PNG, which must warn of nothing; all texts in it."""
    caplog.clear()
    file = io.BytesIO()
    with warnings.catch_warnings(), caplog.at_level(logging.WARNING):
        warnings.simplefilter("error")
        figure.savefig(file, format="png")
    assert not caplog.records
    size = Image.open(file).size
    assert size == tuple(figure.canvas.get_width_height())
    assert max(size) < 2000
    return [text.get_text() for text in figure.findobj(Text) if text.get_text()]


def metrics_of(true: torch.Tensor, given: torch.Tensor, size: int):
    """`given` is -1 for an image without a finite answer."""
    logits = torch.nn.functional.one_hot(given.clamp(min=0), size).float()
    logits[given < 0] = float("nan")
    totals = Totals(size, torch.device("cpu"))
    totals.update(logits, true)
    return totals.reduce()


@pytest.mark.parametrize("seed", range(5))
def test_scores_are_scikit_learns(seed):
    generator = torch.Generator().manual_seed(seed)
    true = torch.cat([torch.arange(7), torch.randint(0, 7, (93,), generator=generator)])
    given = torch.where(
        torch.rand(100, generator=generator) < 0.5, true, torch.randint(0, 7, (100,), generator=generator)
    )
    metrics = metrics_of(true, given, 7)
    ours, theirs = metrics.per_class(), precision_recall_fscore_support(true, given, labels=range(7), zero_division=0)
    for mine, other in zip(ours, theirs, strict=False):
        assert mine.dtype == torch.float64
        torch.testing.assert_close(mine, torch.tensor(other), rtol=1e-15, atol=1e-16)
    expected = f1_score(true, given, average="macro", zero_division=0)
    assert metrics.macro_f1 == pytest.approx(expected, rel=1e-15)


def test_scores_are_zero_where_undefined_and_macro_f1_leaves_classes_without_images_out():
    confusion = torch.tensor([[3, 1, 0, 0], [0, 0, 0, 0], [2, 0, 0, 0], [0, 0, 0, 0]])
    precision, recall, f1 = per_class(confusion)
    assert precision.tolist() == [0.6, 0, 0, 0]
    assert recall.tolist() == [0.75, 0, 0, 0]
    assert f1.tolist() == [6 / 9, 0, 0, 0]
    true, given = torch.tensor([0, 0, 0, 0, 2, 2]), torch.tensor([0, 0, 0, 1, 0, 0])
    assert metrics_of(true, given, 4).macro_f1 == (6 / 9) / 2


def test_an_image_without_a_finite_answer_lowers_its_classs_recall():
    metrics = metrics_of(torch.tensor([0, 0, 1]), torch.tensor([0, -1, 1]), 2)
    assert metrics.not_finite == 1
    assert metrics.class_counts.tolist() == [2, 1]
    precision, recall, f1 = metrics.per_class()
    assert (precision.tolist(), recall.tolist(), f1.tolist()) == ([1, 1], [0.5, 1], [2 / 3, 1])
    assert metrics.macro_f1 == (2 / 3 + 1) / 2


def test_the_counts_stand_in_their_cells(caplog):
    confusion = torch.tensor([[1234, 5, 0], [0, 0, 7], [0, 0, 0]])
    figure = confusion_figure(confusion, ["ant", "bee", "cow"])
    cells = {(*text.get_position(),): text.get_text() for text in figure.axes[0].texts}
    assert cells == {(0, 0): "1,234", (1, 0): "5", (1, 1): "0", (2, 1): "7", (2, 2): "0"}  # (column, row)
    texts = drawn(figure, caplog)
    assert {"ant", "bee", "cow", "ant (1,239)", "bee (7)", "cow (0)", "given class"} <= set(texts)
    title = "Confusion matrix: 1,234 of 1,246 right (99.0%)\n1 of 3 classes without images (gray)"
    assert figure._suptitle.get_text() == title
    assert figure.axes[0].images[0].get_array()[0].tolist() == pytest.approx([1234 / 1239, 5 / 1239, 0])


def test_images_without_an_answer_are_counted(caplog):
    figure = confusion_figure(torch.tensor([[1, 0], [0, 2]]), ["a", "b"], torch.tensor([4, 2]))
    assert figure._suptitle.get_text() == "Confusion matrix: 3 of 6 right (50.0%)\n3 without an answer"
    assert "a (4)" in drawn(figure, caplog)


@pytest.mark.parametrize("size", [1, 2, 5, 20, 21, 102, 120, 121, 1000])
def test_every_number_of_classes_is_drawn(size, caplog):
    names = [f"class {number}" for number in range(size)]
    confusion = random_confusion(size, 8 * size)
    texts = drawn(confusion_figure(confusion, names), caplog)
    if size <= 120:
        assert set(names) <= set(texts)
    if size > 20:
        (images, true, given), *_ = confused_pairs(confusion, 1)
        assert f"{names[true]} → {names[given]}" in texts
        assert f"{images} of {int(confusion[true].sum())}" in texts


@pytest.mark.parametrize("size", [3, 50, 500])
def test_no_images_at_all_and_no_mistakes_are_drawn(size, caplog):
    names = [f"class {number}" for number in range(size)]
    empty = torch.zeros(size, size, dtype=torch.int64)
    drawn(per_class_figure(empty, names), caplog)
    assert any("Confusion matrix: 0 of 0 right" in text for text in drawn(confusion_figure(empty, names), caplog))
    texts = drawn(confusion_figure(empty + torch.eye(size, dtype=torch.int64), names), caplog)
    assert ("No mistakes" in texts) == (size > 20)


def test_one_mistake_among_a_thousand_classes_is_seen():
    confusion = 50 * torch.eye(1000, dtype=torch.int64)
    confusion[17, 900] = 1
    figure = confusion_figure(confusion, [str(number) for number in range(1000)])
    image = figure.axes[0].images[0]
    shares = image.get_array()
    assert shares.shape == (112, 112)  # 9 neighbours a block
    assert shares[17 // 9, 900 // 9] == pytest.approx(1 / 451)
    assert (~shares.mask).sum() == 112 + 1
    lightest = image.to_rgba(shares)[17 // 9, 900 // 9]
    assert lightest[0] < 0.8  # clearly not white


def test_confused_pairs_come_by_count_then_class_number():
    confusion = torch.tensor([[9, 2, 1], [3, 9, 0], [2, 1, 9]])
    assert confused_pairs(confusion, 9) == [(3, 1, 0), (2, 0, 1), (2, 2, 0), (1, 0, 2), (1, 2, 1)]
    assert confused_pairs(confusion, 2) == [(3, 1, 0), (2, 0, 1)]
    assert confusion.diagonal().tolist() == [9, 9, 9]


def test_per_class_bars_have_trouble_on_top(caplog):
    confusion = torch.tensor([[9, 1, 0], [5, 5, 0], [0, 0, 0]])
    figure = per_class_figure(confusion, ["good", "bad", "none"])
    axes = figure.axes[0]
    assert [text.get_text() for text in axes.get_yticklabels()] == ["bad (10)", "good (10)"]
    assert axes.yaxis_inverted()
    recall, precision = ([bar.get_width() for bar in bars] for bars in axes.containers)
    assert recall == [0.5, 0.9]
    assert precision == [5 / 6, 9 / 14]
    texts = drawn(figure, caplog)
    assert {"0.625", "0.750", "recall", "precision"} <= set(texts)
    assert "1 of 3 classes without images, left out" in texts


@pytest.mark.parametrize(("size", "shown"), [(40, 40), (41, 30), (1000, 30)])
def test_of_many_classes_the_worst_are_shown_and_the_others_counted(size, shown, caplog):
    confusion = random_confusion(size, 40 * size)
    figure = per_class_figure(confusion, [f"class {number}" for number in range(size)])
    f1 = per_class(confusion)[2].sort().values
    expected = [f"{value:.3f}" for value in f1[:shown].tolist()]
    texts = drawn(figure, caplog)
    assert [text for text in texts if len(text) == 5 and text.startswith("0.")] == expected
    note = f"{size - shown:,} other classes: F1 from {f1[-1] if shown == size else f1[shown]:.3f} to {f1[-1]:.3f}"
    assert (note in texts) == (size > shown)


def row(epoch: int, top1: float, **others) -> dict:
    return {"epoch": epoch, "train_loss": 1.0, "val_loss": 2.0, "val_top1": top1, "val_top5": 1.0, "lr": 0.1} | others


@pytest.mark.parametrize("epochs", [1, 2, 300])
def test_curves_hold_the_rows_and_mark_the_first_best_epoch(epochs, caplog):
    rows = [row(i, [0.5, 0.75, 0.75][min(i, 2)], lr=0.1 / (i + 1)) for i in range(epochs)]
    figure = curves_figure(rows)
    lines = {line.get_label(): line for axes in figure.axes for line in axes.lines if len(line.get_xdata()) == epochs}
    assert {"training", "validation", "top-1", "top-5"} <= set(lines)
    assert list(lines["top-1"].get_xdata()) == list(range(1, epochs + 1))
    assert list(lines["top-1"].get_ydata()) == [item["val_top1"] for item in rows]
    assert list(figure.axes[2].lines[0].get_ydata()) == [item["lr"] for item in rows]
    best = "epoch 1, top-1 0.5000" if epochs == 1 else "epoch 2, top-1 0.7500"
    assert any(f"best: {best}" in text for text in drawn(figure, caplog))
    assert all(tick == int(tick) for tick in figure.axes[2].get_xticks())


def test_curves_take_text_gaps_and_macro_f1(caplog):
    rows = [row(0, 0.5, val_loss="nan", val_macro_f1="0.25"), row(1, 0.4, val_loss="inf", train_loss="")]
    rows = [{key: str(value) for key, value in item.items()} for item in rows]
    figure = curves_figure(rows)
    assert "macro F1" in drawn(figure, caplog)
    assert torch.tensor(figure.axes[0].lines[1].get_ydata()).isnan().all()
    assert "best: epoch 1, top-1 0.5000" in figure._suptitle.get_text()


@pytest.mark.parametrize(("number", "size"), [(1, 8), (3, 32), (32, 224), (40, 8)])
def test_image_grids_show_the_pixels_under_their_names(number, size, caplog):
    images = torch.randint(0, 256, (number, 3, size, size), dtype=torch.uint8)
    figure = image_grid_figure(images, [f"name {i}" for i in range(number)], "What is seen")
    shown = min(number, 32)
    assert len(figure.axes) == shown
    for i, axes in enumerate(figure.axes):
        picture = axes.images[0]
        assert torch.equal(torch.from_numpy(picture.get_array().copy()).permute(2, 0, 1), images[i])
        assert (picture.get_interpolation() == "nearest") == (size < 132)
        assert axes.texts[0].get_text() == f"name {i}"
    assert "What is seen" in drawn(figure, caplog)


def test_tiny_images_are_enlarged_without_blur():
    images = torch.zeros(1, 3, 8, 8, dtype=torch.uint8)
    images[0, :, ::2] = 255
    figure = image_grid_figure(images, [""], "")
    figure.canvas.draw()
    box = figure.axes[0].get_window_extent()
    picture = figure.canvas.buffer_rgba()
    left, top = int(box.x0) + 2, int(figure.bbox.height - box.y1) + 2
    column = [picture[y, left, 0] for y in range(top, top + int(box.height) - 4)]
    assert set(column) == {0, 255}
    assert sum(a != b for a, b in itertools.pairwise(column)) == 7


def test_worst_images_name_both_classes_and_the_probability(caplog):
    images = torch.zeros(2, 3, 16, 16, dtype=torch.uint8)
    figure = worst_figure(images, ["rose", "$5_"], ["tulip", "玫\udcff"], [0.987, float("nan")])
    texts = drawn(figure, caplog)
    assert {"rose", "tulip 98.7%", "$5_"} <= set(texts)


@pytest.mark.parametrize(("size", "images"), [(1, 9), (2, 10**6), (12, 10**5), (60, 10**5), (300, 10**5)])
def test_no_text_of_a_confusion_figure_is_cut_off(size, images):
    names = [f"{number} Wide MWMW names that go on and on" for number in range(size)]
    figure = confusion_figure(random_confusion(size, images), names)
    figure.canvas.draw()
    axes, *others = figure.axes
    texts = [*axes.get_yticklabels(), *axes.get_xticklabels(), axes.yaxis.label, figure._suptitle]
    for text in texts + [text for other in others for text in other.texts]:
        box = text.get_window_extent()
        assert box.x0 >= 0, text
        assert box.y0 >= 0, text
        assert box.x1 <= figure.bbox.width, text


@pytest.mark.parametrize("copies", [1, 3, 12])
def test_odd_names_are_drawn_as_they_stand(copies, caplog):
    names = [name + "'" * copy for copy in range(copies) for name in ODD_NAMES]
    confusion = random_confusion(len(names), 20 * len(names))
    for figure in (confusion_figure(confusion, names), per_class_figure(confusion, names)):
        for text in drawn(figure, caplog):
            assert all(ord(character) in figure_text._fonts()[1] or character == "\n" for character in text)
        assert all(not text.get_parse_math() for text in figure.findobj(Text) if "$" in text.get_text())
    images = torch.zeros(len(ODD_NAMES), 3, 8, 8, dtype=torch.uint8)
    drawn(image_grid_figure(images, ODD_NAMES, "玫瑰 $x^{2"), caplog)


def test_without_a_font_a_name_goes_by_its_number(only_dejavu, caplog):
    names = ["玫瑰", "玫瑰 rose", "rose", "郁金香"]
    labels = class_labels(names, 24)
    assert labels == ["#0", "#1 rose", "rose", "#3"]
    assert number_note(names, labels) == "#n: class number n in class_indices.json"
    texts = drawn(confusion_figure(random_confusion(4, 40), names), caplog)
    assert "given class\n#n: class number n in class_indices.json" in texts
    assert label("玫 rose", 24) == "U+73AB rose"
    drawn(image_grid_figure(torch.zeros(4, 3, 8, 8, dtype=torch.uint8), names, "玫瑰"), caplog)


def test_labels_are_short_and_distinct():
    names = ["a" * 50 + str(number) + "b" * 50 for number in range(30)] + ["short"]
    labels = class_labels(names, 20)
    assert len(set(labels)) == len(names)
    assert all(text_width(text) <= 20 for text in labels)
    assert labels[12].startswith("#12 a")
    assert labels[-1] == "short"
    assert number_note(["short"], labels[-1:]) == ""
    assert class_labels(["bad\udcff", "line\nbreak"], 20) == ["bad\\xff", "line\\x0abreak"]


def test_shortening_keeps_both_ends():
    assert shorten("abcdefghij", 10) == "abcdefghij"
    assert shorten("abcdefghijk", 10) == "abcdef…ijk"
    assert shorten("玫瑰玫瑰玫瑰", 12) == "玫瑰玫瑰玫瑰"
    assert shorten("玫瑰玫瑰玫瑰", 10) == "玫瑰玫…瑰"
    assert text_width("e\u0301") == 1


def test_figures_need_neither_display_nor_pyplot(tmp_path):
    code = (
        "import sys, torch, utils.plots, utils.picture_grids, utils.confusion_plot\n"
        "assert 'matplotlib' not in sys.modules\n"
        "utils.confusion_plot.confusion_figure(torch.eye(3).long(), 'abc').savefig(sys.argv[1])\n"
        "assert 'matplotlib.pyplot' not in sys.modules\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "DISPLAY"} | {"MPLBACKEND": "tkagg"}
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "x.png")], check=True, env=environment)
    assert Image.open(tmp_path / "x.png").format == "PNG"


def test_tensorboard_takes_the_figures(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    figure = confusion_figure(random_confusion(5, 99), ODD_NAMES[:5])
    with SummaryWriter(str(tmp_path)) as writer:
        writer.add_figure("confusion", figure)
    events = EventAccumulator(str(tmp_path)).Reload()
    (image,) = events.Images("confusion")
    assert (image.width, image.height) == tuple(figure.canvas.get_width_height())

"""What TensorBoard shows of a run, and the same pictures as PNG files in the run folder.

Every value stands at the number of optimizer steps done, so that a run that goes on later goes on at its place.
"""

import io
import json
import time
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

import torch

from data.files import whole_file
from data.images import printable
from utils.confusion_plot import confusion_figure
from utils.metrics import Metrics
from utils.picture_grids import image_grid_figure, worst_figure
from utils.plots import curves_figure, per_class_figure

# Figures take a second or two; drawn at each new best, they would be a good part of a run of a minute.
SECONDS_BETWEEN_FIGURES = 60
# Options that say how a run runs, not what it learns: no use in comparing runs by them.
HOW_IT_RUNS = {
    *("device", "dist_url", "local_rank", "run_dir", "resume", "save_minutes", "save_steps", "timeout", "workers"),
    *("world_size", "find_unused_parameters"),
}
SCALARS = {
    "train_loss": "loss/training",
    "val_loss": "loss/validation",
    "val_top1": "validation/top1",
    "val_top5": "validation/top5",
    "val_macro_f1": "validation/macro_f1",
    "lr": "learning_rate/epoch",
    "images_per_second": "speed/images_per_second",
    "waiting": "speed/share_of_time_waiting_for_data",
}


class Board:
    """One event file, and the PNG files beside it.

    Args:
        folder: the run folder.
        classes: names, in the order of the model's outputs.
        purge_step: where a run goes on; what an earlier process has written from there on is taken out of sight.
    """

    def __init__(self, folder: Path, classes: Sequence[str], purge_step: int | None = None):
        from torch.utils.tensorboard import SummaryWriter

        self.folder, self.classes = folder, [printable(name) for name in classes]
        self.events = SummaryWriter(str(folder), purge_step=purge_step)
        self.drawn_at = -SECONDS_BETWEEN_FIGURES
        self.waiting: tuple | None = None  # what the next drawing shows

    def show_options(self, args: Namespace) -> None:
        rows = "".join(f"| {name} | {_cell(value)} |\n" for name, value in sorted(vars(args).items()))
        self.events.add_text("options", f"| option | value |\n|---|---|\n{rows}")

    def show_training_images(self, images: torch.Tensor, labels: Sequence[int]) -> None:
        """Augmented training images as the model sees them, uint8 N x 3 x S x S."""
        names = [self.classes[label] for label in labels]
        figure = image_grid_figure(images, names, "Augmented training images, as the model sees them")
        self._show("images/training", figure, "training_images.png", 0)

    def log_step(self, step: int, loss: float, lr: float) -> None:
        self.events.add_scalar("step/loss", loss, step)
        self.events.add_scalar("step/learning_rate", lr, step)

    def log_epoch(self, row: dict, step: int) -> None:
        for name, tag in SCALARS.items():
            self.events.add_scalar(tag, row[name], step)
        self.events.flush()

    def log_best(self, metrics: Metrics, worst: tuple, step: int) -> None:
        """The figures of a new best epoch; drawn now, or by `draw` if the last ones were drawn a moment ago.

        `worst` holds images (uint8, N x 3 x S x S), their true classes, the given ones and the probabilities of those.
        """
        self.waiting = (metrics, worst, step)
        if time.monotonic() - self.drawn_at > SECONDS_BETWEEN_FIGURES:
            self.draw()

    def draw(self) -> None:
        if self.waiting is None:
            return
        metrics, (images, true, given, probabilities), step = self.waiting
        confusion, counts = metrics.confusion, metrics.class_counts
        self._show("figures/confusion", confusion_figure(confusion, self.classes, counts), "confusion_matrix.png", step)
        self._show("figures/per_class", per_class_figure(confusion, self.classes, counts), "per_class.png", step)
        if len(images):
            names = ([self.classes[label] for label in labels] for labels in (true, given))
            self._show("images/worst", worst_figure(images, *names, probabilities), "worst_images.png", step)
        self.waiting, self.drawn_at = None, time.monotonic()

    def finish(self, rows: Sequence[dict], args: Namespace, step: int) -> None:
        """Draws what is still to be drawn, and leaves the options beside the best figures, to compare runs by."""
        self.draw()
        if rows:
            self._show("figures/curves", curves_figure(rows), "curves.png", step)
            best = max(rows, key=lambda row: row["val_top1"])
            figures = {f"best/{name}": best.get(name) for name in ("val_top1", "val_macro_f1", "val_loss")}
            self._compare(args, {name: value for name, value in figures.items() if value is not None})
        self.events.close()

    def _compare(self, args: Namespace, figures: dict[str, float]) -> None:
        # SummaryWriter.add_hparams would open a second event file, which TensorBoard shows as another run.
        from torch.utils.tensorboard.summary import hparams

        plain = {
            name: value if isinstance(value, (bool, int, float)) else printable(str(value))
            for name, value in vars(args).items()
            if value is not None and name not in HOW_IT_RUNS
        }
        for summary in hparams(plain, figures):
            self.events.file_writer.add_summary(summary)
        for name, value in figures.items():
            self.events.add_scalar(name, value)

    def _show(self, tag: str, figure, name: str, step: int) -> None:
        """Draws once, for the file and for TensorBoard; SummaryWriter.add_figure would draw again, through pyplot."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        picture = io.BytesIO()
        figure.savefig(picture, format="png")
        with whole_file(self.folder / name, "wb") as file:
            file.write(picture.getvalue())
        width, height = figure.canvas.get_width_height()
        image = Summary.Image(encoded_image_string=picture.getvalue(), height=height, width=width, colorspace=3)
        self.events.file_writer.add_summary(Summary(value=[Summary.Value(tag=tag, image=image)]), step)


def _cell(value) -> str:
    """A value as a cell of a Markdown table."""
    return printable(value if isinstance(value, str) else json.dumps(value)).replace("|", "\\|")

"""From a checkpoint to answers: the one way, for prediction, evaluation and export alike."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

import models
from data.errors import DataError
from data.images import load_image
from data.transforms import EvalTransform, Preprocessing
from utils.checkpoint import read_checkpoint
from utils.errors import UserError


@dataclass(frozen=True)
class Predictor:
    """A trained model with all that belongs to it.

    Calling it with a list of paths gives a list of rows in the same order: `{"path", "class", "probability",
    "accepted", "top": [{"class", "probability"}]}`, or `{"path", "error"}` for a file that cannot be read.

    Attributes:
        model: in evaluation mode, float32, on `device`.
        classes: names; their places are the model's outputs.
    """

    model: nn.Module
    model_name: str
    classes: tuple[str, ...]
    preprocessing: Preprocessing
    device: torch.device

    def __call__(self, paths: Sequence[str], top_k: int = 1, batch_size: int = 32) -> list[dict]:
        return list(self.rows(paths, top_k, batch_size))

    def rows(self, paths: Sequence[str], top_k: int = 1, batch_size: int = 32) -> Iterator[dict]:
        """The rows as they become known, a batch at a time."""
        for first in range(0, len(paths), batch_size):
            yield from self._batch(paths[first : first + batch_size], min(top_k, len(self.classes)))

    def _batch(self, paths: Sequence[str], top_k: int) -> list[dict]:
        read = [self._read(path) for path in paths]
        images = [item for item in read if isinstance(item, torch.Tensor)]
        answers = iter(self._answers(torch.stack(images), top_k) if images else ())
        return [
            {"path": path, "error": str(item)} if isinstance(item, DataError) else {"path": path, **next(answers)}
            for path, item in zip(paths, read, strict=True)
        ]

    def _read(self, path: str) -> torch.Tensor | DataError:
        try:
            return EvalTransform(self.preprocessing)(load_image(path))
        except DataError as error:
            return error

    @torch.inference_mode()
    def logits(self, images: torch.Tensor) -> torch.Tensor:
        """uint8 images N x 3 x S x S to float32 logits N x C, on the device."""
        return self.model(self.preprocessing.normalize(images.to(self.device)))

    def _answers(self, images: torch.Tensor, top_k: int) -> Iterator[dict]:
        probabilities, labels = self.logits(images).softmax(dim=1).topk(top_k, dim=1)
        for values, places in zip(probabilities.tolist(), labels.tolist(), strict=True):
            top = [{"class": self.classes[k], "probability": p} for k, p in zip(places, values, strict=True)]
            yield {**top[0], "accepted": True, "top": top}


def load_predictor(path: str | Path, device: torch.device | str = "cpu") -> Predictor:
    """The model of a checkpoint (best.pth or last.pth) with its class names and preprocessing.

    Raises:
        UserError: the file cannot be read, or is not a checkpoint of this program.
        ModelError: its model cannot be built here.
    """
    content, device = read_checkpoint(path), torch.device(device)
    lacking = [key for key in ("model", "model_name", "classes", "preprocessing") if key not in content]
    if lacking:
        raise UserError(
            f"{path} has no {', '.join(lacking)}: it is not a checkpoint of this program; use best.pth of a run, "
            "or train with --weights FILE to start from it"
        )
    preprocessing = Preprocessing.from_dict(content["preprocessing"])
    classes = tuple(content["classes"])
    model = models.create_model(content["model_name"], len(classes), image_size=preprocessing.image_size)
    model.load_state_dict(content["model"])  # copies into float32, whatever it was trained in
    return Predictor(model.to(device).eval(), content["model_name"], classes, preprocessing, device)

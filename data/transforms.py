"""From an image to what the model sees: one value, `Preprocessing`, for training, validation, prediction, export.

The worker's part ends in uint8, a quarter of the bytes of float32; casting and normalising are done for a whole batch
at once on the device by `Preprocessing.normalize`.
"""

import math
import random
from dataclasses import asdict, dataclass

import numpy
import torch
from PIL import Image

_RESAMPLING = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}


@dataclass(frozen=True)
class Preprocessing:
    """How an image becomes the model's input.

    Attributes:
        image_size: height and width of the input, in pixels.
        crop_fraction: side of the central square that is kept, as a share of the image's shorter side, in (0, 1].
        interpolation: "bilinear" or "bicubic", antialiased.
        mean, std: of the R, G and B channels on the scale from 0 to 1.
    """

    image_size: int
    crop_fraction: float
    interpolation: str
    mean: tuple[float, float, float]
    std: tuple[float, float, float]

    def to_dict(self) -> dict:
        """Plain Python values, fit for a checkpoint that `torch.load(weights_only=True)` reads."""
        return {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(self).items()}

    @classmethod
    def from_dict(cls, values: dict) -> "Preprocessing":
        return cls(**{key: tuple(value) if isinstance(value, list) else value for key, value in values.items()})

    @property
    def resampling(self) -> Image.Resampling:
        return _RESAMPLING[self.interpolation]

    def normalize(self, images: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """(x / 255 - mean) / std of uint8 images N x 3 x H x W, as `dtype`, on the device where the images are."""
        mean, std = (self._per_channel(values, images.device, dtype) for values in (self.mean, self.std))
        return images.to(dtype).sub_(mean * 255).div_(std * 255)

    @staticmethod
    def _per_channel(values: tuple, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=device).view(1, 3, 1, 1)


class EvalTransform:
    """The central square of an RGB image, resized: uint8 tensor 3 x S x S.

    Crop and resize are one step, so that no picture, however long and thin, is ever made larger than S x S.
    """

    def __init__(self, preprocessing: Preprocessing):
        self.preprocessing = preprocessing

    def __call__(self, image: Image.Image) -> torch.Tensor:
        side = self.preprocessing.crop_fraction * min(image.size)
        left, top = ((length - side) / 2 for length in image.size)
        return _resized(image, (left, top, left + side, top + side), self.preprocessing)


class TrainTransform:
    """A random part of an RGB image, resized and perhaps mirrored: uint8 tensor 3 x S x S.

    Args:
        preprocessing: size and interpolation.
        crop_scale: the smallest share of the image's area that a crop may have, in (0, 1]; with 1 it is the largest one
            of an allowed shape.
        hflip: probability of mirroring left and right, in [0, 1].
    """

    ASPECT_RATIOS = (3 / 4, 4 / 3)
    ATTEMPTS = 10

    def __init__(self, preprocessing: Preprocessing, crop_scale: float, hflip: float):
        self.preprocessing, self.crop_scale, self.hflip = preprocessing, crop_scale, hflip

    def __call__(self, image: Image.Image, seed: int) -> torch.Tensor:
        """The same image and seed give the same tensor, on whatever process and worker."""
        dice = random.Random(seed)
        box = self._random_box(*image.size, dice)
        mirrored = dice.random() < self.hflip
        pixels = _resized(image, box, self.preprocessing)
        return pixels.flip(-1) if mirrored else pixels

    def _random_box(self, width: int, height: int, dice: random.Random) -> tuple[float, float, float, float]:
        """A box of random area and aspect ratio (Szegedy et al. 2015, arXiv:1409.4842, section 6)."""
        log_low, log_high = (math.log(ratio) for ratio in self.ASPECT_RATIOS)
        for _ in range(self.ATTEMPTS):
            area = width * height * dice.uniform(self.crop_scale, 1.0)
            ratio = math.exp(dice.uniform(log_low, log_high))
            box_width, box_height = math.sqrt(area * ratio), math.sqrt(area / ratio)
            if box_width <= width and box_height <= height:
                left, top = dice.uniform(0, width - box_width), dice.uniform(0, height - box_height)
                return left, top, left + box_width, top + box_height
        # A picture far from square has no such box: the largest central one of an allowed shape.
        box_width = min(width, height * self.ASPECT_RATIOS[1])
        box_height = min(height, width / self.ASPECT_RATIOS[0])
        left, top = (width - box_width) / 2, (height - box_height) / 2
        return left, top, left + box_width, top + box_height


def _resized(image: Image.Image, box: tuple[float, float, float, float], preprocessing: Preprocessing) -> torch.Tensor:
    """`box` of an RGB image as a uint8 tensor 3 x S x S."""
    size = (preprocessing.image_size, preprocessing.image_size)
    left, top, right, bottom = box
    inside = (max(left, 0.0), max(top, 0.0), min(right, image.width), min(bottom, image.height))
    pixels = numpy.array(image.resize(size, preprocessing.resampling, box=inside))
    return torch.from_numpy(pixels).permute(2, 0, 1).contiguous()

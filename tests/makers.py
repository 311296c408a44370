"""Inputs that several test files make: small photos in class folders, a small net, pictures of odd shapes."""

import random
from pathlib import Path

import torch
from PIL import Image
from torch import nn

COLOURS = [(200, 60, 50), (60, 190, 70), (50, 80, 210), (190, 190, 60), (150, 60, 180)]


def make_photo(path: Path, colour: tuple[int, int, int], seed: int, size: tuple[int, int] = (24, 20)) -> str:
    """A noisy picture of one colour; the extension says the format. Returns the path as a string."""
    noise = Image.frombytes("RGB", size, random.Random(seed).randbytes(3 * size[0] * size[1]))
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.blend(Image.new("RGB", size, colour), noise, 0.5).save(path)
    return str(path)


def make_photos(folder: Path, classes: int | dict[str, int], count: int = 4) -> Path:
    """`folder`/<class>/<number>.jpg or .png, of several sizes; `classes` is their number, or name -> images."""
    names = {f"class_{label}": count for label in range(classes)} if isinstance(classes, int) else classes
    for label, (name, images) in enumerate(names.items()):
        for number in range(images):
            path = Path(folder) / name / f"{number:03d}.{('jpg', 'png')[number % 2]}"
            make_photo(path, COLOURS[label % len(COLOURS)], 1000 * label + number, (20 + number % 7, 18 + number % 5))
    return Path(folder)


def small_net(classes: int, seed: int = 0) -> nn.Sequential:
    """Convolutions and BatchNorm, N x 3 x H x W -> N x classes; the same weights for the same seed."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, classes),
    )


def relative_difference(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """The largest |a - b| / |b| (Euclidean norms) of two state dicts' tensors."""
    assert ours.keys() == theirs.keys()
    pairs = [(ours[key].double(), theirs[key].double()) for key in ours]
    return max(float((a - b).norm() / b.norm().clamp_min(1e-300)) for a, b in pairs)

"""Models by name: our own ResNets, and every other one from timm. Importing this costs no more than torch."""

from typing import Any

from torch import nn

from .errors import ModelError
from .head import freeze_trunk, head_modules, reset_head, train_mode
from .hub import fetch_resnet
from .resnet import ARCHITECTURES, ResNet, resnet
from .timm_models import create_timm_model, timm_config

__all__ = [
    "ModelError",
    "count_parameters",
    "create_model",
    "freeze_trunk",
    "head_modules",
    "model_config",
    "reset_head",
    "train_mode",
]

IMAGENET_MEAN = [0.485, 0.456, 0.406]
IMAGENET_STD = [0.229, 0.224, 0.225]


def create_model(name: str, num_classes: int, *, pretrained: bool = False, image_size: int | None = None) -> nn.Module:
    """A model that turns images (N, 3, H, W), float, normalised as model_config says, into logits (N, num_classes).

    resnet18, 34, 50, 101 and 152 are ours; every other name is timm's, tags (`resnet50.a1_in1k`) and the prefixes
    `hf-hub:` and `local-dir:` included. `pretrained` loads ImageNet weights; a head that does not fit them is new
    and zero (see reset_head). `image_size`, in pixels, matters to architectures that are built for one size.
    Weights are on the CPU, random ones drawn from torch's default generator: with one seed all processes get the same.

    Raises ModelError: unknown name (with near matches), impossible size, weights that do not exist or are unreachable.
    """
    if name not in ARCHITECTURES:
        return create_timm_model(name, num_classes, pretrained, image_size)
    model = resnet(name, num_classes)
    if pretrained:
        load_resnet(model, fetch_resnet(name))
    return model


def load_resnet(model: ResNet, state: dict[str, Any]) -> None:
    """Loads an official state dict strictly; a head for another number of classes is left out and set to zero."""
    new_head = state["fc.weight"].shape != model.fc.weight.shape
    if new_head:
        reset_head(model)
        state = state | {f"fc.{key}": value for key, value in model.fc.state_dict().items()}
    model.load_state_dict(state)


def model_config(model: nn.Module) -> dict[str, Any]:
    """What a model wants its images to be, as plain values that a checkpoint can hold.

    mean and std: three floats each, for RGB from 0 to 1; interpolation: "bilinear" or "bicubic"; crop_fraction: side
    of the centre crop / shorter side of the resized image; image_size: pixels of that crop's side.
    """
    if hasattr(model, "pretrained_cfg"):
        return timm_config(model)
    return {
        "mean": list(IMAGENET_MEAN),
        "std": list(IMAGENET_STD),
        "interpolation": "bilinear",
        "crop_fraction": 0.875,  # 224 of 256
        "image_size": 224,
    }


def count_parameters(model: nn.Module) -> int:
    """How many numbers training changes."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)

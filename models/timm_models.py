"""Every model that is not ours: timm builds it, and what goes wrong becomes one sentence.

timm is imported inside the functions: it takes about 3 s, and our own ResNets do without.
"""

import contextlib
import difflib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from .errors import ModelError
from .head import head_modules, reset_head
from .hub import REMEDY, hub_errors, reason, short_wait
from .resnet import ARCHITECTURES

SOURCES = ("hf-hub:", "hf_hub:", "local-dir:")
OUR_INTERPOLATIONS = ("bilinear", "bicubic")


def create_timm_model(name: str, num_classes: int, pretrained: bool, image_size: int | None) -> nn.Module:
    """timm's model of that name (`resnet50.a1_in1k`, `hf-hub:owner/name`, `local-dir:folder`), head for num_classes.

    Raises ModelError for an unknown name, a size that the architecture cannot take, weights that do not exist or
    cannot be fetched.
    """
    import timm

    if not name.startswith(SOURCES):
        check_name(name)
        if pretrained and not timm.models.get_pretrained_cfg(name).has_weights:
            raise ModelError(f"{name}: timm has no pretrained weights for it: {REMEDY}")
    with source_errors(name, pretrained):
        sized = size_arguments(name, image_size)
        model = timm.create_model(name, pretrained=pretrained, num_classes=num_classes, **sized)
    head_modules(model)  # refuses what cannot classify, such as the bare encoders of language models
    if pretrained and model.pretrained_cfg.get("num_classes") != num_classes:
        reset_head(model)
    if sized:  # timm goes on naming the size of the weights' own training; ours is the size that this model takes
        model.pretrained_cfg = dict(model.pretrained_cfg, input_size=(3, image_size, image_size))
    return model


def check_name(name: str) -> None:
    """Raises ModelError, with near matches, unless timm's registry has this architecture and tag."""
    import timm

    architecture, _, tag = name.partition(".")
    if "/" in name or "\\" in name or ":" in name:
        raise ModelError(f"{name!r} is no model name: write hf-hub:OWNER/NAME or local-dir:FOLDER")
    if not timm.is_model(architecture):
        near = difflib.get_close_matches(name, dict.fromkeys([*ARCHITECTURES, *timm.list_models()]), n=3)
        hint = f"did you mean {' or '.join(near)}" if near else "timm.list_models() names them all"
        raise ModelError(f"unknown model {name!r}: {hint}")
    tags = [full.partition(".")[2] for full in timm.list_pretrained(architecture + ".*")]
    if tag and tag not in tags:
        raise ModelError(f"{architecture} has no weights tagged {tag!r}: it has {', '.join(tags) or 'none'}")


def size_arguments(name: str, image_size: int | None) -> dict[str, int]:
    """img_size for architectures that are built for one input size, such as vision transformers; else nothing.

    The size is tried on torch's meta device, shapes without numbers: no memory, no time, no random draws.
    """
    import timm

    if image_size is None:
        return {}
    with torch.device("meta"):
        config = timm.create_model(name).pretrained_cfg
    own_size = config["input_size"][-1]
    if image_size == own_size or not config.get("fixed_input_size"):
        return {}
    try:
        with torch.device("meta"), torch.no_grad():
            timm.create_model(name, img_size=image_size).eval()(torch.empty(1, 3, image_size, image_size))
    except (AssertionError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        message = f"{name} cannot take images of {image_size} pixels ({reason(error)}): its own size is {own_size}"
        raise ModelError(message) from error
    return {"img_size": image_size}


@contextlib.contextmanager
def source_errors(name: str, pretrained: bool) -> Iterator[None]:
    """One sentence for a hub that does not answer, or a local folder that is no model."""
    from_hub = name.startswith(("hf-hub:", "hf_hub:"))
    if name.startswith("local-dir:"):
        try:
            yield
        except ModelError:
            raise
        except (OSError, KeyError, ValueError, RuntimeError) as error:
            raise ModelError(f"{name} is no folder that timm can load ({reason(error)})") from error
    elif pretrained or from_hub:  # what has its description on the hub needs the hub even for random weights
        remedy = "give the name of one of timm's own models, or local-dir:FOLDER" if from_hub else REMEDY
        with hub_errors(name, remedy), short_wait():
            yield
    else:
        yield


def timm_config(model: nn.Module) -> dict[str, Any]:
    """See models.model_config."""
    import timm

    resolved = timm.data.resolve_model_data_config(model)
    interpolation = resolved["interpolation"]
    return {
        "mean": [float(value) for value in resolved["mean"]],
        "std": [float(value) for value in resolved["std"]],
        "interpolation": interpolation if interpolation in OUR_INTERPOLATIONS else "bicubic",
        "crop_fraction": float(resolved["crop_pct"]),
        "image_size": int(resolved["input_size"][-1]),
    }

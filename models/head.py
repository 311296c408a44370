"""The head of a model (its classifier layers) and its trunk (all the rest): for fine-tuning and freezing."""

import torch
from torch import nn

from .errors import ModelError


def head_modules(model: nn.Module) -> dict[str, nn.Module]:
    """The classifier modules by dotted name: `fc` for our ResNets, two for timm's distilled models.

    Raises ModelError for a model without one.
    """
    names = (getattr(model, "pretrained_cfg", None) or {"classifier": "fc"}).get("classifier") or ()
    heads = {}
    for name in [names] if isinstance(names, str) else names:
        try:
            module = model.get_submodule(name)
        except AttributeError:
            continue  # a configuration may name a second head that this variant was built without
        if any(True for _ in module.parameters()):
            heads[name] = module
    if not heads:
        raise ModelError(f"{type(model).__name__} has no classifier layer: choose another --model")
    return heads


def reset_head(model: nn.Module) -> None:
    """Sets weights and biases of the head to zero: for a new head on a loaded trunk.

    All logits are then 0 and the first loss is exactly log(num_classes). The gradient that reaches the trunk is
    head.weight^T times that of the logits, so a random head would shake good features before it knows anything.
    """
    with torch.no_grad():
        for head in head_modules(model).values():
            for module in head.modules():
                if isinstance(module, (nn.Linear, nn.Conv2d)):
                    for parameter in module.parameters(recurse=False):
                        parameter.zero_()


def freeze_trunk(model: nn.Module) -> None:
    """From now on only the head has gradients. Use `train_mode` instead of `model.train()` with it."""
    model.requires_grad_(False)
    for head in head_modules(model).values():
        head.requires_grad_(True)


def train_mode(model: nn.Module) -> None:
    """`model.train()`, except that what is frozen stays in eval mode.

    requires_grad = False stops gradients only: a BatchNorm in train mode would go on moving its running statistics,
    and a frozen trunk with dropout would feed its head noise. A module counts as frozen when it has parameters, its
    children's included, and all of them are frozen; all inside it is then in eval mode. A module without parameters
    (a Dropout beside a trainable head) follows its parent.
    """
    model.train()
    for module in model.modules():
        parameters = list(module.parameters())
        if parameters and not any(parameter.requires_grad for parameter in parameters):
            module.eval()

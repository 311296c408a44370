"""Checkpoints: written whole or not at all, read as data and never as code, and fitted to a model."""

import warnings
import zipfile
from pathlib import Path
from typing import IO

import torch
from torch import nn

import models
from data.files import whole_file
from utils.errors import UserError

WRAPPER_PREFIXES = ("module.", "_orig_mod.")  # of DDP, DataParallel and torch.compile
STATE_KEYS = ("model", "state_dict", "model_state_dict", "model_state")
LEAST_FITTING_SHARE = 0.9


def unwrap(model: nn.Module) -> nn.Module:
    """The module inside DistributedDataParallel, DataParallel and torch.compile."""
    while True:
        inner = next((model._modules[name] for name in ("module", "_orig_mod") if name in model._modules), None)
        if inner is None:
            return model
        model = inner


def save_checkpoint(state: dict, path: str | Path) -> None:
    """Writes `state` so that `path` always holds the whole old or the whole new file.

    `state` holds tensors and plain Python values only: `torch.load(weights_only=True)` reads nothing else.
    """
    with whole_file(path, "wb") as file:
        noting = _NotingFile(file)
        try:
            torch.save(state, noting)
        except Exception as error:
            raise noting.failure or error from None


class _NotingFile:
    """A file for torch.save, which tells of a full disk in words of its own: the system's error is kept here."""

    def __init__(self, file: IO[bytes]):
        self.file, self.failure = file, None

    def write(self, data: bytes) -> int:
        try:
            return self.file.write(data)
        except OSError as error:
            self.failure = error
            raise

    def flush(self) -> None:
        self.file.flush()


def read_checkpoint(path: str | Path, mmap: bool = False) -> dict:
    """The content of a .pth, .pt or .safetensors file, its tensors on the CPU, with `mmap` read when they are used.

    Raises:
        UserError: the file is missing, empty, cut, something else, or holds more than tensors and plain values.
    """
    path = Path(path)
    if not path.is_file():
        raise UserError(f"no such weights file: {path}" if not path.exists() else f"{path} is not a file of weights")
    with open(path, "rb") as file:
        head = file.read(512)
    _refuse_what_is_no_checkpoint(path, head)
    if path.suffix == ".safetensors":
        return _read_safetensors(path)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about other programs' pickles; what matters becomes a sentence
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    except Exception as error:
        raise UserError(_why_unreadable(path, head, error)) from None
    if not isinstance(content, dict):
        raise UserError(f"{path} holds a {type(content).__name__}, but weights are a dict of tensors")
    return content


def _refuse_what_is_no_checkpoint(path: Path, head: bytes) -> None:
    text = head.lstrip().lower()
    if not head:
        raise UserError(f"{path} is empty (0 bytes): download or save it again")
    if text.startswith(b"version https://git-lfs"):
        raise UserError(f"{path} is a Git LFS pointer, not the file itself: fetch it with git lfs pull")
    if text.startswith((b"<!doctype html", b"<html", b"<?xml")):
        raise UserError(f"{path} is a web page (HTML), not weights: the download went wrong")


def _read_safetensors(path: Path) -> dict:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path, device="cpu")
    except (SafetensorError, OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read as safetensors, it is cut or something else ({error})") from None


def _names_code(head: bytes, message: str) -> bool:
    """Whether torch refused a pickle for what it would call; other files make it stumble over their first bytes."""
    return "unsupported global" in message or (head.startswith(b"\x80") and "unsupported" in message)


def _why_unreadable(path: Path, head: bytes, error: Exception) -> str:
    import pickle

    reason = (str(error).splitlines() or [type(error).__name__])[0]
    if isinstance(error, pickle.UnpicklingError) and _names_code(head, str(error).lower()):
        return (
            f"{path} holds Python objects, which could run code when loaded, and is refused: "
            "save its state_dict() with plain values only"
        )
    if isinstance(error, (RuntimeError, EOFError, zipfile.BadZipFile)):
        return f"{path} is cut short or damaged and cannot be read: download or save it again ({reason})"
    return f"{path} is no checkpoint that torch can read ({reason})"


def load_weights(model: nn.Module, path: str | Path) -> tuple[str, ...]:
    """Loads a file's weights into `model`; a classifier for other classes is left out, and the model's own set to 0.

    Keys may carry the prefixes of DDP, DataParallel and torch.compile, and the weights may lie in a training
    checkpoint. A file that fits less than nine tenths of the model, or is used to less than nine tenths, belongs to
    another architecture.

    Returns:
        Sentences that name everything that was not used, and everything that keeps its first values.

    Raises:
        UserError: the file cannot be read, or belongs to another architecture.
    """
    state, own = _state_dict_in(read_checkpoint(path), path), model.state_dict()
    heads = tuple(f"{name}." for name in models.head_modules(model))
    fitting = {key: tensor for key, tensor in state.items() if key in own and own[key].shape == tensor.shape}
    unused = sorted(state.keys() - fitting.keys())
    # Older files, some of torchvision's among them, lack the counters of BatchNorm, which nothing needs.
    missing = sorted(key for key in own.keys() - fitting.keys() if not key.endswith("num_batches_tracked"))
    _refuse_other_architecture(path, fitting, [*unused], [*missing], heads)
    model.load_state_dict(fitting, strict=False)
    notes = [f"loaded {len(fitting)} of the model's {len(own)} tensors from {path}"]
    if any(key.startswith(heads) for key in missing):
        models.reset_head(model)
        notes.append(f"the classifier is new, for {_outputs(model)} classes")
    if unused:
        notes.append(f"not used from {path}: {', '.join(unused)}")
    if left := [key for key in missing if not key.startswith(heads)]:
        notes.append(f"not in {path}, so left at their first values: {', '.join(left)}")
    return tuple(notes)


def _state_dict_in(content: dict, path: str | Path) -> dict[str, torch.Tensor]:
    inner = next((content[key] for key in STATE_KEYS if isinstance(content.get(key), dict)), content)
    state = {_bare(key): tensor for key, tensor in inner.items() if isinstance(tensor, torch.Tensor)}
    if not state:
        raise UserError(f"{path} holds no weights: neither tensors nor a state_dict under {', '.join(STATE_KEYS)}")
    return state


def _bare(key: str) -> str:
    while key.startswith(WRAPPER_PREFIXES):
        key = key.partition(".")[2]
    return key


def _refuse_other_architecture(path, fitting: dict, unused: list[str], missing: list[str], heads: tuple) -> None:
    fits = sum(not key.startswith(heads) for key in fitting)
    unused, missing = ([key for key in keys if not key.startswith(heads)] for keys in (unused, missing))
    share = fits / max(1, fits + max(len(unused), len(missing)))
    if share < LEAST_FITTING_SHARE:
        example = (missing or unused)[0]
        raise UserError(
            f"{path} holds weights of another architecture: {fits} tensors fit, {len(missing)} of the model's are "
            f"missing and {len(unused)} of the file's have no place, for example {example}; check --model"
        )


def _outputs(model: nn.Module) -> int:
    head = next(iter(models.head_modules(model).values()))
    return getattr(head, "out_features", None) or head.out_channels

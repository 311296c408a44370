"""A checkpoint is data (law L6), is written whole or not at all, and is fitted to a model without silence."""

import os
import pickle
import stat
from argparse import Namespace
from collections import OrderedDict
from pathlib import Path

import numpy
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import models
from tests.makers import small_net
from utils.checkpoint import load_weights, read_checkpoint, save_checkpoint, unwrap
from utils.errors import UserError


class RunsCode:
    def __init__(self, path: Path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


def refused(path: Path) -> str:
    """The one sentence with which a file is refused; it names the file."""
    with pytest.raises(UserError) as caught:
        read_checkpoint(path)
    message = str(caught.value)
    assert str(path) in message
    assert "\n" not in message
    assert caught.value.__cause__ is None
    return message


def tiny_net(classes: int = 3) -> nn.Sequential:
    """18 tensors in the trunk, 2 in the classifier, which is called fc as in our ResNets."""
    torch.manual_seed(7)
    layers = {}
    for number in (1, 2, 3):
        layers[f"conv{number}"] = nn.Conv2d(3 if number == 1 else 4, 4, 3, bias=False)
        layers[f"bn{number}"] = nn.BatchNorm2d(4)
    return nn.Sequential(OrderedDict(layers, pool=nn.AdaptiveAvgPool2d(1), flat=nn.Flatten(), fc=nn.Linear(4, classes)))


def fresh_net(classes: int = 3) -> nn.Sequential:
    """A tiny_net with other numbers in it."""
    model = tiny_net(classes)
    for parameter in model.parameters():
        nn.init.constant_(parameter, 0.5)
    return model


@pytest.fixture
def state() -> dict[str, torch.Tensor]:
    return tiny_net().state_dict()


def saved(path: Path, content) -> Path:
    save_file(content, path) if path.suffix == ".safetensors" else torch.save(content, path)
    return path


# ------------------------------------------------------------------------------------------------- data, not code


@pytest.mark.parametrize("way", ["zip", "legacy", "plain pickle"])
def test_a_pickle_that_would_run_code_is_refused_and_does_not_run(tmp_path, way):
    proof, path = tmp_path / "it_ran", tmp_path / "weights.pth"
    content = {"model": {"weight": torch.zeros(2)}, "extra": RunsCode(proof)}
    if way == "plain pickle":
        path.write_bytes(pickle.dumps({"extra": RunsCode(proof)}, protocol=2))
    else:
        torch.save(content, path, _use_new_zipfile_serialization=way == "zip")
    message = refused(path)
    assert not proof.exists()
    assert "could run code" in message
    if way == "zip":  # the file is what it claims to be
        torch.load(path, weights_only=False)
        assert proof.is_dir()


@pytest.mark.parametrize(
    "value",
    [numpy.float64(0.5), numpy.int64(3), Path("a"), Namespace(lr=0.1), numpy.random.RandomState, small_net(2)],
    ids=lambda value: type(value).__name__,
)
def test_whatever_is_more_than_plain_values_is_refused(tmp_path, value):
    assert "refused" in refused(saved(tmp_path / "weights.pth", {"model": {}, "value": value}))


def test_plain_values_and_tensors_come_back_as_they_were(tmp_path):
    content = {"a": torch.arange(3), "b": [1, 2.5, "c", None, True], "d": {"e": (1, 2)}}
    save_checkpoint(content, tmp_path / "file.pth")
    again = read_checkpoint(tmp_path / "file.pth")
    assert torch.equal(again.pop("a"), content.pop("a"))
    assert again == content


# --------------------------------------------------------------------------------------- files that are no weights


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (b"", "empty"),
        (b"<!DOCTYPE html><html><body>404</body></html>", "HTML"),
        (b"\n  <html>\n<body>sign in</body></html>", "HTML"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 44\n", "git lfs pull"),
        (b"\x89PNG\r\n\x1a\n" + bytes(200), ""),
        (b"hello, this is text", ""),
        (bytes(1000), ""),
        (b"PK\x03\x04" + bytes(500), ""),
        (b"\x80\x02", ""),
    ],
)
@pytest.mark.parametrize("extension", [".pth", ".pt", ".safetensors"])
def test_what_is_no_weights_file_is_one_sentence(tmp_path, content, word, extension):
    path = tmp_path / f"weights{extension}"
    path.write_bytes(content)
    message = refused(path)
    assert word in message
    assert "run code" not in message  # it holds none


@pytest.mark.parametrize("extension", [".pth", ".safetensors"])
@pytest.mark.parametrize("share", [0.01, 0.2, 0.5, 0.9, 0.999])
def test_a_cut_file_is_one_sentence(tmp_path, extension, share):
    path = saved(tmp_path / f"weights{extension}", {f"weight{k}": torch.randn(50, 50) for k in range(4)})
    whole = path.read_bytes()
    path.write_bytes(whole[: max(9, int(len(whole) * share))])
    message = refused(path)
    assert "cut" in message or "damaged" in message
    assert "run code" not in message


def test_a_missing_file_and_a_folder_are_one_sentence(tmp_path):
    assert "no such" in refused(tmp_path / "nowhere.pth")
    assert "not a file" in refused(tmp_path)


def test_a_file_without_a_dict_or_without_tensors_is_one_sentence(tmp_path):
    assert "Tensor" in refused(saved(tmp_path / "tensor.pth", torch.zeros(3)))
    assert "list" in refused(saved(tmp_path / "list.pth", [torch.zeros(3)]))
    for content in ({"epoch": 3}, {"model": {"name": "x"}}, {}):
        with pytest.raises(UserError, match="holds no weights") as caught:
            load_weights(small_net(2), saved(tmp_path / "none.pth", content))
        assert "none.pth" in str(caught.value)


# ----------------------------------------------------------------------------------------------------- atomic save


@pytest.mark.parametrize("step", ["save", "fsync", "replace"])
def test_a_failing_write_leaves_the_old_file_whole_and_no_other(tmp_path, monkeypatch, step):
    path = tmp_path / "last.pth"
    save_checkpoint({"epoch": 1, "weight": torch.ones(100)}, path)
    before = path.read_bytes()

    def fail(*arguments, **options):
        if step == "save":
            arguments[1].write(b"half a file")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch if step == "save" else os, step, fail)
    with pytest.raises(OSError, match="No space"):
        save_checkpoint({"epoch": 2}, path)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["last.pth"]


def test_a_saved_file_replaces_the_old_one_and_is_readable_by_others(tmp_path):
    path = tmp_path / "last.pth"
    for epoch in (1, 2):
        save_checkpoint({"epoch": epoch}, path)
    assert read_checkpoint(path) == {"epoch": 2}
    assert os.listdir(tmp_path) == ["last.pth"]
    (tmp_path / "plain").write_text("")
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE((tmp_path / "plain").stat().st_mode)


def test_unwrap_finds_the_module_inside_every_wrapper():
    inner = small_net(2)
    assert unwrap(inner) is inner
    assert unwrap(nn.DataParallel(nn.DataParallel(inner))) is inner
    compiled = nn.Module()  # as torch.compile wraps; the real one costs seconds of imports
    compiled._orig_mod = nn.DataParallel(inner)
    assert unwrap(compiled) is inner


# ---------------------------------------------------------------------------------------------------- load_weights


@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module."])
@pytest.mark.parametrize("extension", [".pth", ".pt", ".safetensors"])
def test_weights_load_from_every_kind_of_file_and_wrapper(tmp_path, prefix, extension, state):
    path = saved(tmp_path / f"w{extension}", {prefix + key: value for key, value in state.items()})
    model = fresh_net()
    notes = load_weights(model, path)
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert notes == (f"loaded 20 of the model's 20 tensors from {path}",)


@pytest.mark.parametrize("key", ["model", "state_dict", "model_state_dict"])
def test_weights_load_out_of_a_training_checkpoint(tmp_path, key, state):
    path = saved(tmp_path / "last.pth", {"epoch": 3, key: state, "optimizer": {"state": {}}})
    model = fresh_net()
    load_weights(model, path)
    assert torch.equal(model.fc.weight, state["fc.weight"])


def test_another_head_is_listed_and_the_models_own_is_zero(tmp_path, state):
    path, model = saved(tmp_path / "w.pth", state), fresh_net(5)
    notes = load_weights(model, path)
    assert notes == (
        f"loaded 18 of the model's 20 tensors from {path}",
        "the classifier is new, for 5 classes",
        f"not used from {path}: fc.bias, fc.weight",
    )
    assert not model.fc.weight.any()
    assert not model.fc.bias.any()
    assert torch.equal(model.conv1.weight, state["conv1.weight"])


def test_a_file_without_a_head_gives_a_new_one(tmp_path, state):
    trunk = {key: value for key, value in state.items() if not key.startswith("fc.")}
    path, model = saved(tmp_path / "w.pth", trunk), fresh_net()
    assert load_weights(model, path)[1:] == ("the classifier is new, for 3 classes",)
    assert not model.fc.weight.any()


def test_a_key_too_many_and_a_key_too_few_are_listed_by_name(tmp_path, state):
    del state["bn3.bias"]
    path = saved(tmp_path / "w.pth", state | {"ema.decay": torch.zeros(1)})
    assert load_weights(fresh_net(), path) == (
        f"loaded 19 of the model's 20 tensors from {path}",
        f"not used from {path}: ema.decay",
        f"not in {path}, so left at their first values: bn3.bias",
    )


def test_a_tensor_of_another_shape_is_not_used(tmp_path, state):
    path = saved(tmp_path / "w.pth", state | {"conv1.weight": torch.zeros(4, 1, 3, 3)})
    notes = load_weights(fresh_net(), path)
    assert f"not used from {path}: conv1.weight" in notes
    assert any("conv1.weight" in note and "first values" in note for note in notes)


def test_a_file_from_before_batchnorm_counted_its_batches_loads(tmp_path, state):
    """torchvision's official ResNet files have no num_batches_tracked: 102 tensors for ResNet-18's 122."""
    old = {key: value for key, value in state.items() if not key.endswith("num_batches_tracked")}
    model = fresh_net()
    load_weights(model, saved(tmp_path / "w.pth", old))
    assert all(torch.equal(model.state_dict()[key], value) for key, value in old.items())


@pytest.mark.parametrize(("file", "model"), [("resnet34", "resnet18"), ("resnet18", "resnet34")])
def test_weights_of_another_architecture_are_refused_and_change_nothing(tmp_path, file, model):
    path, model = saved(tmp_path / "w.pth", models.create_model(file, 3).state_dict()), models.create_model(model, 3)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(UserError, match=r"another architecture.*--model") as caught:
        load_weights(model, path)
    assert str(path) in str(caught.value)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_weights_of_another_family_are_refused(tmp_path):
    names = ["conv_stem.weight", "bn1.weight", "blocks.0.0.conv_dw.weight", "classifier.weight", "classifier.bias"]
    path = saved(tmp_path / "w.safetensors", {name: torch.zeros(32) for name in names})
    with pytest.raises(UserError, match="another architecture: 0 tensors fit"):
        load_weights(models.create_model("resnet18", 3), path)


def test_half_precision_weights_load_into_float32(tmp_path, state):
    halves = {key: value.half() if value.is_floating_point() else value for key, value in state.items()}
    model = fresh_net()
    load_weights(model, saved(tmp_path / "w.safetensors", halves))
    assert torch.equal(model.fc.weight, halves["fc.weight"].float())
    assert model.fc.weight.dtype == torch.float32

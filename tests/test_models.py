"""Laws of models/: equal to torchvision's, a head that is found and zeroed, a frozen trunk that does not move."""

import functools
import hashlib
import http.server
import io
import json
import math
import pathlib
import subprocess
import sys
import threading
import time

import pytest
import torch
from torch import nn

import models
from models import ModelError, create_model, freeze_trunk, head_modules, model_config, reset_head, train_mode
from models import hub as model_hub

ROOT = pathlib.Path(__file__).resolve().parent.parent
RESNETS = ["resnet18", "resnet34", "resnet50", "resnet101", "resnet152"]
REFUSED = "http://127.0.0.1:9/"  # the discard port: nobody listens there


def randomise_norms(model):
    """Fresh norms are the identity in eval mode; random ones show a swapped key or a forgotten layer."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.uniform_(-0.1, 0.1)
            module.running_var.uniform_(0.5, 1.5)
            nn.init.uniform_(module.weight, 0.2, 0.6)  # below 1: keeps the sums of 50 blocks near 1
            nn.init.uniform_(module.bias, -0.1, 0.1)


def official(name, num_classes=1000):
    import torchvision

    torch.manual_seed(0)
    model = getattr(torchvision.models, name)(num_classes=num_classes)
    randomise_norms(model)
    return model


def same_state(left, right):
    assert left.keys() == right.keys()
    return all(torch.equal(left[key], right[key]) for key in left)


def snapshot(model):
    return {key: value.clone() for key, value in model.state_dict().items()}


@pytest.mark.parametrize("name", RESNETS)
def test_resnet_equals_torchvision(name):
    theirs = official(name).eval()
    with torch.device("meta"):  # every value is to come from the file, so none is drawn
        ours = create_model(name, 1000).eval()
    assert list(ours.state_dict()) == list(theirs.state_dict())
    ours.load_state_dict(theirs.state_dict(), strict=True, assign=True)
    images = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        expected = theirs(images)
        assert 0.1 < expected.abs().max() < 100  # else 1e-6 would say nothing
        assert (ours(images) - expected).abs().max() <= 1e-6


def test_resnet_trains_like_torchvision():
    theirs, ours = official("resnet18", 7).train(), create_model("resnet18", 7).train()
    ours.load_state_dict(theirs.state_dict())
    images = torch.randn(4, 3, 64, 64)
    losses = [nn.functional.cross_entropy(model(images), torch.arange(4)) for model in (ours, theirs)]
    for loss in losses:
        loss.backward()
    assert torch.equal(*losses)
    assert same_state(ours.state_dict(), theirs.state_dict())  # running statistics too
    for ours_parameter, theirs_parameter in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(ours_parameter.grad, theirs_parameter.grad)


def test_resnet_takes_any_image_size_and_class_count():
    model = create_model("resnet18", 3).eval()
    with torch.no_grad():
        assert model(torch.zeros(2, 3, 28, 45)).shape == (2, 3)


def test_resnet_starts_as_he_et_al():
    torch.manual_seed(0)
    weight = create_model("resnet18", 3).layer4[0].conv1.weight  # 256 -> 512 channels: fan_out is not fan_in
    assert weight.std().item() == pytest.approx(math.sqrt(2 / (512 * 9)), rel=0.01)


def test_weight_files_are_torchvisions():
    from torchvision.models import get_model_weights

    urls = {name: get_model_weights(name)["IMAGENET1K_V1"].url for name in RESNETS}
    assert urls == {name: model_hub.HUB_URL + model_hub.WEIGHT_FILES[name] for name in RESNETS}


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("resnet19", "resnet18"),
        ("renset50", "resnet50"),
        ("tf_eficientnet_lite0", "tf_efficientnet_lite0"),
        ("resnet50.a1_inlk", "a1_in1k"),
        ("timm/resnet50", "hf-hub:"),
    ],
)
def test_unknown_name_gets_near_matches(name, near):
    with pytest.raises(ModelError, match=near):
        create_model(name, 5)


@pytest.mark.parametrize(
    ("name", "heads"),
    [
        ("resnet18", ["fc"]),
        ("tf_efficientnet_lite0", ["classifier"]),
        ("vit_tiny_patch16_224", ["head"]),
        ("deit_tiny_distilled_patch16_224", ["head", "head_dist"]),
    ],
)
def test_head_is_found_zeroed_and_alone_unfrozen(name, heads):
    model = create_model(name, 5)
    assert list(head_modules(model)) == heads
    before = snapshot(model)
    reset_head(model)
    freeze_trunk(model)
    for key, parameter in model.named_parameters():
        in_head = key.rpartition(".")[0] in heads
        assert parameter.requires_grad == in_head
        assert not parameter.any() if in_head else torch.equal(parameter, before[key])
    assert model.eval()(torch.randn(1, 3, 224, 224)).tolist() == [[0.0] * 5]  # so the loss is log(5)


def test_model_without_head_is_refused():
    with pytest.raises(ModelError, match="no classifier"):
        head_modules(nn.Sequential(nn.Conv2d(3, 4, 1)))
    with torch.device("meta"), pytest.raises(ModelError, match="no classifier"):  # an encoder of 88 million
        create_model("qwen3_vit_88m_enc", 5)


@pytest.mark.parametrize("name", ["resnet18", "tf_efficientnet_lite0"])
def test_frozen_trunk_does_not_move(name):
    torch.manual_seed(0)
    model = create_model(name, 5)
    freeze_trunk(model)
    train_mode(model)
    before = snapshot(model)
    # weight decay would move even a parameter whose gradient is zero
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, weight_decay=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(torch.randn(4, 3, 64, 64)), torch.arange(4)).backward()
        optimizer.step()
    heads = tuple(f"{head}." for head in head_modules(model))
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key]) != key.startswith(heads), key


def test_train_mode_follows_what_is_frozen():
    frozen = nn.Sequential(nn.Linear(2, 2), nn.Dropout(), nn.BatchNorm1d(2)).requires_grad_(False)
    model = nn.Sequential(frozen, nn.Dropout(), nn.Sequential(nn.Linear(2, 2), nn.Dropout()))
    train_mode(model.eval())
    modes = {name: module.training for name, module in model.named_modules()}
    assert modes == {"": True, "0": False, "0.0": False, "0.1": False, "0.2": False, "1": True, "2": True, "2.0": True,
                     "2.1": True}  # fmt: skip
    train_mode(model.requires_grad_(True))
    assert all(module.training for module in model.modules())


def test_config_is_plain_and_the_models_own():
    assert model_config(create_model("resnet18", 5)) == {
        "mean": [0.485, 0.456, 0.406],
        "std": [0.229, 0.224, 0.225],
        "interpolation": "bilinear",
        "crop_fraction": 0.875,
        "image_size": 224,
    }
    config = model_config(create_model("tf_efficientnet_lite0", 5))
    assert config == {
        "mean": [0.5, 0.5, 0.5],
        "std": [0.5, 0.5, 0.5],
        "interpolation": "bicubic",
        "crop_fraction": 0.875,
        "image_size": 224,
    }
    assert {type(value) for value in config.values()} == {list, str, float, int}


def test_fixed_size_architectures_take_the_asked_size():
    model = create_model("vit_tiny_patch16_224", 5, image_size=96).eval()
    assert model_config(model)["image_size"] == 96
    assert model(torch.zeros(1, 3, 96, 96)).shape == (1, 5)
    assert model_config(create_model("vit_tiny_patch16_224", 5))["image_size"] == 224  # nothing leaks into timm


def test_fixed_size_of_a_local_folder(tmp_path):
    import timm

    config = {
        "architecture": "vit_tiny_patch16_224",
        "pretrained_cfg": timm.models.get_pretrained_cfg("vit_tiny_patch16_224").to_dict(),
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = create_model(f"local-dir:{tmp_path}", 5, image_size=96).eval()
    assert model(torch.zeros(1, 3, 96, 96)).shape == (1, 5)
    with pytest.raises(ModelError, match=r"^local-dir:\S+ cannot take images of 10 pixels"):
        create_model(f"local-dir:{tmp_path}", 5, image_size=10)


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "coatnet_pico_rw_224"])
def test_impossible_size_is_one_sentence(name):
    with pytest.raises(ModelError, match=rf"^{name} cannot take images of 10 pixels .*own size is 224$"):
        create_model(name, 5, image_size=10)


def test_trying_a_size_draws_no_random_numbers():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    from models.timm_models import size_arguments

    assert size_arguments("vit_tiny_patch16_224", 96) == {"img_size": 96}
    assert torch.equal(torch.get_rng_state(), before)


@pytest.fixture
def serve(tmp_path, monkeypatch):
    """serve(bytes) makes these the official resnet18 file of a hub on 127.0.0.1; the cache is empty."""
    served = tmp_path / "served"
    served.mkdir()
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "cache"))
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(served))
    monkeypatch.setattr(http.server.SimpleHTTPRequestHandler, "log_message", lambda *_: None)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    monkeypatch.setattr(model_hub, "HUB_URL", f"http://127.0.0.1:{server.server_port}/")

    def put(content, digest=None):
        name = f"resnet18-{(digest or hashlib.sha256(content).hexdigest())[:8]}.pth"
        (served / name).write_bytes(content)
        monkeypatch.setitem(model_hub.WEIGHT_FILES, "resnet18", name)
        return tmp_path / "cache" / "hub" / "checkpoints" / name

    yield put
    server.shutdown()
    server.server_close()


def saved(value):
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def test_pretrained_resnet_comes_from_the_hub(serve, monkeypatch, capsys):
    state = official("resnet18").state_dict()
    kept = serve(saved(state))
    model = create_model("resnet18", 5, pretrained=True)
    fetched = model.state_dict()
    assert fetched.keys() == state.keys()
    assert all(torch.equal(fetched[key], state[key]) for key in state if not key.startswith("fc."))
    assert not model.fc.weight.any()
    assert not model.fc.bias.any()
    assert capsys.readouterr().out == ""  # standard output belongs to results
    assert kept.exists()
    monkeypatch.setattr(model_hub, "HUB_URL", REFUSED)  # from now on the cache answers
    assert same_state(create_model("resnet18", 1000, pretrained=True).state_dict(), state)


class RunsCode:
    def __reduce__(self):
        return print, ("this pickle ran code",)


def test_damaged_or_dangerous_hub_files_are_refused(serve, capsys):
    serve(b"not what was promised", digest="0" * 64)
    with pytest.raises(ModelError, match=r"resnet18: the weight file http.* is damaged .*--no-pretrained"):
        create_model("resnet18", 5, pretrained=True)
    kept = serve(saved({"fc.weight": RunsCode()}))
    with pytest.raises(ModelError, match=f"{kept.name} is damaged .*delete it"):
        create_model("resnet18", 5, pretrained=True)
    assert "ran code" not in "".join(capsys.readouterr())


ADVICE = r"\): give --weights FILE, or --no-pretrained to start from random weights$"


def test_unreachable_hub_is_one_sentence(serve, monkeypatch):
    serve(b"x")
    monkeypatch.setitem(model_hub.WEIGHT_FILES, "resnet18", "resnet18-00000000.pth")
    with pytest.raises(ModelError, match=r"^resnet18: .*\(HTTP 404 .*" + ADVICE):
        create_model("resnet18", 5, pretrained=True)
    monkeypatch.setattr(model_hub, "HUB_URL", REFUSED)
    with pytest.raises(ModelError, match=r"^resnet18: .*\(Connection refused" + ADVICE):
        create_model("resnet18", 5, pretrained=True)


@pytest.fixture
def no_hugging_face(tmp_path, monkeypatch):
    """A huggingface_hub whose server refuses connections, with an empty cache, whose folder it returns."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", REFUSED.rstrip("/"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(model_hub, "getproxies", dict)
    yield tmp_path / "hub"
    assert constants.HF_HUB_OFFLINE is False


@pytest.mark.parametrize("name", ["tf_efficientnet_lite0", "hf-hub:timm/resnet18.a1_in1k"])
def test_unreachable_hugging_face_is_one_sentence_at_once(name, no_hugging_face):
    start = time.monotonic()
    with pytest.raises(ModelError, match=rf"^{name}: .*\(Connection refused\): give ") as caught:
        create_model(name, 5, pretrained=True)
    assert time.monotonic() - start < 10  # left alone: 47 s
    assert ("--no-pretrained" in str(caught.value)) == (not name.startswith("hf-hub:"))


def test_random_weights_need_no_hub(monkeypatch):
    monkeypatch.setattr(model_hub, "urlopen", None)
    assert create_model("tf_efficientnet_lite0", 5).num_classes == 5


def test_cached_hugging_face_weights_need_no_net(no_hugging_face):
    import timm
    from safetensors.torch import save_file

    torch.manual_seed(0)
    state = timm.create_model("test_efficientnet").state_dict()
    repository = no_hugging_face / "models--timm--test_efficientnet.r160_in1k"
    snapshot_folder = repository / "snapshots" / ("0" * 40)
    snapshot_folder.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
    save_file(state, snapshot_folder / "model.safetensors")
    assert same_state(create_model("test_efficientnet", 1000, pretrained=True).state_dict(), state)


def test_timm_pretrained_head_is_zero_where_it_is_new(tmp_path):
    import timm
    from safetensors.torch import save_file

    torch.manual_seed(0)
    source = timm.create_model("test_efficientnet", num_classes=4)
    state = {key: value.contiguous() for key, value in source.state_dict().items()}
    save_file(state, tmp_path / "model.safetensors")
    config = {"architecture": "test_efficientnet", "num_classes": 4, "pretrained_cfg": source.pretrained_cfg}
    (tmp_path / "config.json").write_text(json.dumps(config))
    name = f"local-dir:{tmp_path}"
    assert same_state(create_model(name, 4, pretrained=True).state_dict(), state)
    fitted = create_model(name, 5, pretrained=True)
    heads = tuple(f"{head}." for head in head_modules(fitted))
    for key, value in fitted.state_dict().items():
        assert not value.any() if key.startswith(heads) else torch.equal(value, state[key])
    with pytest.raises(ModelError, match="no folder that timm can load"):
        create_model(f"local-dir:{tmp_path / 'missing'}", 5)


def test_weights_that_do_not_exist():
    with pytest.raises(ModelError, match=r"^coatnet_0_224: timm has no pretrained weights for it: give --weights FILE"):
        create_model("coatnet_0_224", 5, pretrained=True)


def test_count_parameters_counts_what_trains():
    model = create_model("resnet18", 5)
    assert models.count_parameters(model) == 11_176_512 + 5 * 513
    freeze_trunk(model)
    assert models.count_parameters(model) == 5 * 513


def test_import_is_light():
    code = (
        "import sys, models; models.create_model('resnet18', 2);"
        "sys.exit(sum(m in sys.modules for m in ('timm', 'torchvision', 'huggingface_hub')))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0

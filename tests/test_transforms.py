"""One preprocessing (law L4): what validation sees is what prediction sees; augmentation hangs on its seed alone."""

import dataclasses
import random
from pathlib import Path

import numpy
import pytest
import torch
from PIL import Image

import models
from data.images import load_image
from data.loaders import ImageDataset
from data.transforms import EvalTransform, Preprocessing, TrainTransform
from utils.checkpoint import save_checkpoint
from utils.predictor import load_predictor

CPU = torch.device("cpu")
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
PICTURES = [
    ("RGB", (40, 30), "png"),
    ("RGB", (31, 57), "jpg"),
    ("L", (33, 20), "jpg"),
    ("RGBA", (20, 41), "png"),
    ("LA", (25, 25), "png"),
    ("P", (28, 19), "gif"),
    ("1", (16, 16), "png"),
    ("CMYK", (30, 22), "jpg"),
    ("I;16", (21, 34), "png"),
    ("RGB", (1, 1), "png"),
    ("RGB", (1, 500), "png"),
    ("RGB", (3000, 8), "png"),
]


def preprocessing(size: int = 24, crop_fraction: float = 0.875, interpolation: str = "bilinear") -> Preprocessing:
    return Preprocessing(size, crop_fraction, interpolation, MEAN, STD)


def picture(mode: str, size: tuple[int, int], seed: int = 0) -> Image.Image:
    values = random.Random(seed).randbytes(size[0] * size[1] * 4)
    if mode == "I;16":
        return Image.fromarray(numpy.frombuffer(values, "<u2")[: size[0] * size[1]].reshape(size[::-1]).copy())
    image = Image.frombytes("RGBA", size, values)
    return image.convert("RGB").convert(mode) if mode in ("P", "1", "L", "CMYK", "RGB") else image.convert(mode)


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> list[str]:
    folder, paths = tmp_path_factory.mktemp("pictures"), []
    for number, (mode, size, extension) in enumerate(PICTURES):
        paths.append(str(folder / f"{number:02d}.{extension}"))
        picture(mode, size, number).save(paths[-1])
    return paths


@pytest.mark.parametrize(("interpolation", "size", "crop_fraction"), [("bilinear", 24, 0.875), ("bicubic", 37, 1.0)])
def test_prediction_sees_bit_for_bit_what_validation_sees(files, tmp_path, interpolation, size, crop_fraction):
    wanted = preprocessing(size, crop_fraction, interpolation)
    content = {
        "model": models.create_model("resnet18", 3).state_dict(),
        "model_name": "resnet18",
        "classes": ["a", "b", "c"],
        "preprocessing": wanted.to_dict(),
    }
    save_checkpoint(content, tmp_path / "best.pth")
    predictor, seen = load_predictor(tmp_path / "best.pth"), []
    predictor.model.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].clone()))
    rows = predictor(files, batch_size=5)
    assert [row["path"] for row in rows if "error" not in row] == files
    validation = ImageDataset([(path, 0) for path in files], EvalTransform(wanted))
    expected = wanted.normalize(torch.stack([validation[index][0] for index in range(len(files))]))
    assert torch.equal(torch.cat(seen), expected)
    assert predictor.preprocessing == wanted


@pytest.mark.parametrize("number", range(len(PICTURES)))
def test_every_picture_becomes_uint8_of_the_wanted_size(files, number):
    image = load_image(files[number])
    for pixels in (EvalTransform(preprocessing())(image), TrainTransform(preprocessing(), 0.35, 0.5)(image, 1)):
        assert (pixels.shape, pixels.dtype) == ((3, 24, 24), torch.uint8)
        assert pixels.is_contiguous()


def test_validation_takes_the_central_square():
    image = Image.new("RGB", (60, 20), "red")
    image.paste("blue", (20, 0, 40, 20))
    pixels = EvalTransform(preprocessing(20, 1.0))(image)
    assert torch.equal(pixels, torch.tensor([0, 0, 255], dtype=torch.uint8).view(3, 1, 1).expand(3, 20, 20))
    whole = numpy.array(picture("RGB", (20, 20)))
    unscaled = EvalTransform(preprocessing(20, 1.0))(Image.fromarray(whole))
    assert torch.equal(unscaled, torch.from_numpy(whole).permute(2, 0, 1))


@pytest.mark.parametrize("size", [(1, 500), (500, 1), (3000, 8), (1, 1)])
def test_no_picture_is_made_larger_than_the_input_on_the_way(size, monkeypatch):
    made, original = [], Image.Image._new

    def recorded(self, core):
        made.append(core.size)
        return original(self, core)

    image = picture("RGB", size)
    monkeypatch.setattr(Image.Image, "_new", recorded)
    EvalTransform(preprocessing(224))(image)
    for seed in range(20):
        TrainTransform(preprocessing(224), 0.35, 0.5)(image, seed)
    assert made
    assert max(width * height for width, height in made) <= max(224 * 224, size[0] * size[1])


def test_the_same_seed_gives_the_same_tensor_and_another_one_another():
    image, transform = picture("RGB", (50, 40)), TrainTransform(preprocessing(), 0.35, 0.5)
    first = transform(image, 11)
    random.seed(5)
    torch.manual_seed(5)
    numpy.random.seed(5)
    assert torch.equal(TrainTransform(preprocessing(), 0.35, 0.5)(image, 11), first)
    assert len({transform(image, seed).numpy().tobytes() for seed in range(50)}) == 50


def test_augmentation_leaves_the_global_generators_alone():
    image, before, torchs = picture("RGB", (50, 40)), random.getstate(), torch.get_rng_state()
    TrainTransform(preprocessing(), 0.35, 0.5)(image, 3)
    assert random.getstate() == before
    assert torch.equal(torch.get_rng_state(), torchs)


@pytest.mark.parametrize("size", [(40, 40), (40, 31), (31, 40)])
def test_crop_scale_one_without_mirroring_is_the_whole_picture(size):
    image, transform = picture("RGB", size), TrainTransform(preprocessing(), 1.0, 0.0)
    whole = numpy.array(image.resize((24, 24), Image.Resampling.BILINEAR))
    for seed in range(10):
        assert torch.equal(transform(image, seed), torch.from_numpy(whole).permute(2, 0, 1))


def test_mirroring_is_exact_and_as_frequent_as_asked():
    image = picture("RGB", (50, 40))
    plain, mirrored, half = (TrainTransform(preprocessing(), 0.35, share) for share in (0.0, 1.0, 0.5))
    count = 0
    for seed in range(400):
        expected = plain(image, seed)
        assert torch.equal(mirrored(image, seed), expected.flip(-1))
        count += torch.equal(half(image, seed), expected.flip(-1))
    assert 150 < count < 250


@pytest.mark.parametrize("crop_scale", [0.2, 0.7])
def test_random_boxes_lie_inside_and_are_no_smaller_than_asked(crop_scale):
    transform = TrainTransform(preprocessing(), crop_scale, 0.0)
    for seed in range(300):
        left, top, right, bottom = transform._random_box(60, 50, random.Random(seed))
        assert -1e-9 <= left < right <= 60 + 1e-9
        assert -1e-9 <= top < bottom <= 50 + 1e-9
        assert (right - left) * (bottom - top) >= crop_scale * 3000 * (1 - 1e-9)
        assert 3 / 4 - 1e-9 <= (right - left) / (bottom - top) <= 4 / 3 + 1e-9


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-15)])
def test_normalize_is_the_formula(dtype, tolerance):
    images = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).expand(2, 3, 16, 16)
    mean, std = (torch.tensor(values, dtype=torch.float64).view(1, 3, 1, 1) for values in (MEAN, STD))
    normalized = preprocessing().normalize(images, dtype)
    expected = (images.double() / 255 - mean) / std
    assert normalized.dtype == dtype
    assert (normalized.double() - expected).abs().max() <= tolerance * expected.abs().max()
    assert torch.equal(images[0, 0].flatten(), torch.arange(256, dtype=torch.uint8))
    assert preprocessing().normalize(images).dtype == torch.float32


def test_normalizing_one_image_or_a_batch_gives_the_same_bits():
    images = torch.randint(0, 256, (5, 3, 24, 24), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    single = torch.cat([preprocessing().normalize(image[None]) for image in images])
    assert torch.equal(preprocessing().normalize(images), single)


def test_preprocessing_survives_a_checkpoint(tmp_path: Path):
    wanted = preprocessing(37, 0.9, "bicubic")
    torch.save(wanted.to_dict(), tmp_path / "file.pth")
    again = Preprocessing.from_dict(torch.load(tmp_path / "file.pth", weights_only=True))
    assert again == wanted
    assert hash(again) == hash(wanted)
    with pytest.raises(dataclasses.FrozenInstanceError):
        again.image_size = 1

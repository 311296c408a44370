"""Every kind of file gives exactly known pixels, or one line that names the file and the reason."""

import io
import os
import struct
import subprocess
import sys
import types
import warnings
import zlib

import numpy
import pytest
from PIL import Image, ImageStat

from data import images
from data.errors import DataError
from data.images import load_image, printable, readable_extensions

RED, GREEN, BLUE, YELLOW = (220, 40, 40), (40, 180, 60), (40, 70, 210), (230, 210, 50)


def quadrants() -> Image.Image:
    """64 x 48: red, green over blue, yellow."""
    image = Image.new("RGB", (64, 48))
    for index, colour in enumerate((RED, GREEN, BLUE, YELLOW)):
        image.paste(colour, (index % 2 * 32, index // 2 * 24, index % 2 * 32 + 32, index // 2 * 24 + 24))
    return image


def corners(image: Image.Image) -> list[tuple[int, ...]]:
    return [image.getpixel((x, y)) for y in (12, 36) for x in (16, 48)]


def saved(folder, image: Image.Image, name: str, **options) -> str:
    path = str(folder / name)
    image.save(path, **options)
    return path


def png(folder, depth: int, colour_type: int, rows: bytes, size: tuple[int, int], transparency: bytes = b"") -> str:
    """A PNG written by hand, for the kinds that Pillow cannot write."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    content = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">2I5B", *size, depth, colour_type, 0, 0, 0))
    content += chunk(b"tRNS", transparency) if transparency else b""
    content += chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    (folder / "made.png").write_bytes(content)
    return str(folder / "made.png")


def reason(path) -> str:
    with pytest.raises(DataError) as caught:
        load_image(str(path))
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert "\n" not in message
    return message.removeprefix(f"{path}: ")


def pixels(path: str) -> list:
    image = load_image(path)
    assert image.mode == "RGB"
    return numpy.asarray(image)[..., 0].tolist()


@pytest.mark.parametrize("name", ["a.png", "a.bmp", "a.tif", "a.ppm", "a.qoi", "a.tga", "A.PNG"])
def test_lossless_formats_are_exact(tmp_path, name):
    image = load_image(saved(tmp_path, quadrants(), name))
    assert (image.mode, image.size, image.tobytes()) == ("RGB", (64, 48), quadrants().tobytes())


def test_the_content_decides_not_the_extension(tmp_path):
    assert corners(load_image(saved(tmp_path, quadrants(), "a.jpg", format="PNG"))) == [RED, GREEN, BLUE, YELLOW]
    assert corners(load_image(saved(tmp_path, quadrants(), "a", format="PNG"))) == [RED, GREEN, BLUE, YELLOW]


def test_plain_jpeg_is_what_pillow_decodes_and_is_not_copied(tmp_path, monkeypatch):
    path = saved(tmp_path, quadrants(), "a.jpg")
    with Image.open(path) as expected:
        content = expected.convert("RGB").tobytes()
    monkeypatch.setattr(Image.Image, "copy", None)
    monkeypatch.setattr(Image.Image, "convert", None)
    assert load_image(path).tobytes() == content


@pytest.mark.parametrize("extension", ["jpg", "png", "tif", "webp"])
@pytest.mark.parametrize("orientation", range(10))
def test_orientation_is_applied(tmp_path, extension, orientation):
    inverse = {5: 5, 6: 8, 7: 7, 8: 6}.get(orientation, orientation)
    turn = images._TURNS.get(inverse)
    stored = quadrants() if turn is None else quadrants().transpose(turn)
    exif = Image.Exif()
    exif[0x0112] = orientation
    options = {"lossless": True} if extension == "webp" else {"quality": 95} if extension == "jpg" else {}
    image = load_image(saved(tmp_path, stored, f"a.{extension}", exif=exif, **options))
    assert image.size == (64, 48)
    for found, expected in zip(corners(image), (RED, GREEN, BLUE, YELLOW), strict=True):
        assert numpy.abs(numpy.subtract(found, expected)).max() <= 3


@pytest.mark.parametrize(
    "exif", [b"Exif\0\0", b"Exif\0\0garbage", b"Exif\0\0II*\0\xff\xff\xff\x7f", b"Exif\0\0MM\0*\0"]
)
def test_corrupt_exif_counts_as_upright(tmp_path, exif):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        image = load_image(saved(tmp_path, quadrants(), "a.jpg", exif=exif))
    assert image.size == (64, 48)
    assert not caught


@pytest.mark.parametrize("adobe_transform", [0, 2])
def test_ink_is_the_right_way_round(tmp_path, adobe_transform):
    ink = (0, 200, 200, 20)
    if adobe_transform:
        # YCCK stores the first three inks as YCbCr, and black inverted; Pillow writes every value inverted.
        ycc = Image.new("RGB", (1, 1), ink[:3]).convert("YCbCr").getpixel((0, 0))
        ink = (*(255 - value for value in ycc), ink[3])
    path = saved(tmp_path, Image.new("CMYK", (64, 48), ink), "a.jpg", quality=95)
    content = bytearray((tmp_path / "a.jpg").read_bytes())
    content[content.index(b"Adobe") + 11] = adobe_transform
    (tmp_path / "a.jpg").write_bytes(content)
    assert load_image(path).getpixel((5, 5)) == pytest.approx((235, 51, 51), abs=3)


def test_sixteen_bit_gray_is_divided_by_256(tmp_path):
    values = numpy.array([[0, 255, 256, 12850, 32768, 65535]], dtype=numpy.uint16)
    expected = [[0, 0, 1, 50, 128, 255]]
    for name in ("a.png", "a.tif"):
        assert pixels(saved(tmp_path, Image.fromarray(values), name)) == expected
    (tmp_path / "a.pgm").write_bytes(b"P5\n6 1\n65535\n" + values.astype(">u2").tobytes())
    assert pixels(str(tmp_path / "a.pgm")) == expected
    dark = struct.pack(">2H", 0, 200)
    (tmp_path / "dark.pgm").write_bytes(b"P5\n2 1\n65535\n" + dark)
    assert pixels(str(tmp_path / "dark.pgm")) == [[0, 0]]


def test_sixteen_bit_colour_keeps_the_upper_byte(tmp_path):
    row = b"\0" + struct.pack(">6H", 0xFFFF, 0x8000, 0, 0x1234, 0x00FF, 0x0100)
    image = load_image(png(tmp_path, 16, 2, row, (2, 1)))
    assert numpy.asarray(image).tolist() == [[[255, 128, 0], [18, 0, 1]]]


@pytest.mark.parametrize(
    ("dtype", "values", "expected"),
    [
        ("float32", [0, 0.25, 0.5, 1], [0, 64, 128, 255]),
        ("float32", [50, 50, 50, 205], [50, 50, 50, 205]),
        ("float32", [0, 256, 32768, 65535], [0, 1, 128, 255]),
        ("float32", [-1, 0, 0.5, 1], [0, 128, 191, 255]),
        ("float32", [0, 1e5, 2e5, 4e5], [0, 64, 128, 255]),
        ("float32", [float("nan"), 0, 1, float("inf")], [0, 0, 255, 255]),
        ("float32", [-7, -7, -7, -7], [128, 128, 128, 128]),
        ("float32", [float("nan")] * 4, [0, 0, 0, 0]),
        ("int32", [0, 1, 50, 205], [0, 1, 50, 205]),
        ("int32", [0, 2560, 32768, 65535], [0, 10, 128, 255]),
        ("int32", [-100, -50, 0, 100], [0, 64, 128, 255]),
        ("int32", [0, 10**6, 2 * 10**6, 10**6], [0, 128, 255, 128]),
    ],
)
def test_32_bit_images_follow_the_documented_rule(tmp_path, dtype, values, expected):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        image = Image.fromarray(numpy.array([values], dtype=dtype))
        found = pixels(saved(tmp_path, image, "a.tif"))
    assert numpy.abs(numpy.subtract(found, [expected])).max() <= 1
    assert found[0][0] == expected[0]
    assert found[0][3] == expected[3]


def test_transparency_is_laid_on_white(tmp_path):
    rgba = Image.new("RGBA", (3, 1))
    for x, colour in enumerate([(220, 40, 40, 255), (255, 0, 255, 0), (0, 0, 0, 128)]):
        rgba.putpixel((x, 0), colour)
    white, half = (255, 255, 255), (127, 127, 127)
    for name in ("a.png", "a.tif", "a.tga"):
        image = load_image(saved(tmp_path, rgba, name))
        assert [image.getpixel((x, 0)) for x in range(3)] == [RED, white, half]
    image = load_image(saved(tmp_path, Image.merge("LA", rgba.split()[2:]), "la.png"))
    assert [image.getpixel((x, 0)) for x in range(3)] == [(40, 40, 40), white, half]


def test_a_transparent_colour_or_palette_entry_is_white(tmp_path):
    two = Image.new("RGB", (2, 1), RED)
    two.putpixel((1, 0), GREEN)
    palette = two.quantize(2)
    index = palette.getpixel((1, 0))
    gray = Image.new("L", (2, 1), 9)
    gray.putpixel((1, 0), 77)
    for name, image, transparency in [
        ("rgb.png", two, GREEN),
        ("index.png", palette, index),
        ("bytes.png", palette, bytes(0 if entry == index else 255 for entry in range(2))),
        ("index.gif", palette, index),
        ("gray.png", gray, 77),
    ]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            loaded = load_image(saved(tmp_path, image, name, transparency=transparency))
        assert not caught
        assert loaded.getpixel((1, 0)) == (255, 255, 255), name
        assert loaded.getpixel((0, 0)) == ((9, 9, 9) if name == "gray.png" else RED), name
    row = b"\0" + struct.pack(">2H", 0x1234, 0x8000)
    assert pixels(png(tmp_path, 16, 0, row, (2, 1), struct.pack(">H", 0x8000))) == [[0x12, 255]]


def test_one_bit_gray_and_palette(tmp_path):
    one = Image.new("1", (2, 1))
    one.putpixel((0, 0), 1)
    assert pixels(saved(tmp_path, one, "one.png")) == [[255, 0]]
    assert pixels(saved(tmp_path, Image.new("L", (2, 1), 77), "l.png")) == [[77, 77]]
    assert corners(load_image(saved(tmp_path, quadrants().quantize(4), "p.png"))) == [RED, GREEN, BLUE, YELLOW]


def test_lab_and_other_colour_spaces_become_rgb(tmp_path):
    lab = load_image(saved(tmp_path, Image.new("LAB", (2, 2), (255, 128, 128)), "a.tif"))
    assert lab.mode == "RGB"
    assert min(lab.getpixel((0, 0))) >= 250


@pytest.mark.parametrize("extension", ["gif", "webp", "png", "tif", "mpo"])
def test_first_frame(tmp_path, extension):
    frames = [Image.new("RGB", (16, 12), colour) for colour in (RED, BLUE, GREEN)]
    image = load_image(saved(tmp_path, frames[0], f"a.{extension}", save_all=True, append_images=frames[1:]))
    assert image.mode == "RGB"
    assert ImageStat.Stat(image).mean == pytest.approx(RED, abs=4)


def test_missing_folder_pipe_empty_and_links(tmp_path):
    assert reason(tmp_path / "nosuch.jpg") == "not found"
    (tmp_path / "folder.jpg").mkdir()
    assert reason(tmp_path / "folder.jpg") == "is a folder, not a file"
    os.mkfifo(tmp_path / "pipe.jpg")
    assert reason(tmp_path / "pipe.jpg") == "is not a regular file"
    (tmp_path / "empty.jpg").touch()
    assert reason(tmp_path / "empty.jpg") == "an empty file (0 bytes)"
    (tmp_path / "broken.jpg").symlink_to("nothing")
    assert reason(tmp_path / "broken.jpg") == "a link to nothing"
    (tmp_path / "self.jpg").symlink_to("self.jpg")
    assert reason(tmp_path / "self.jpg") == "too many levels of symbolic links"


def test_no_permission(tmp_path, monkeypatch):
    path = saved(tmp_path, quadrants(), "a.png")
    monkeypatch.setattr("builtins.open", lambda *_: (_ for _ in ()).throw(PermissionError(13, "Permission denied")))
    assert reason(path) == "permission denied"


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.jpg", b"<!DOCTYPE html><html><title>404</title></html>", "a web page (HTML)"),
        ("a.jpg", b"\n  <HTML><body>", "a web page (HTML)"),
        ("a.jpg", b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 3\n", "git lfs pull"),
        ("a.jpg", b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + bytes(range(200)), "pip install pillow-heif"),
        ("a.HEIC", b"whatever this is", "pip install pillow-heif"),
        ("a.jpg", b"<?xml version='1.0'?>\n<svg width='9'>", "SVG"),
        ("a.jpg", b"%PDF-1.7", "PDF"),
        ("a.ps", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "PostScript"),
        ("a.jpg", b"\0\5\x16\7\0\2\0\0Mac OS X", "macOS companion file"),
        ("a.jpg", bytes(5000), "zero bytes"),
        ("a.jpg", b"hello", "not an image, or damaged at its very start"),
    ],
)
def test_what_is_no_image_is_recognised(tmp_path, name, content, expected):
    (tmp_path / name).write_bytes(content)
    assert expected in reason(tmp_path / name)


@pytest.mark.parametrize("extension", ["jpg", "png", "webp", "gif", "bmp", "tif", "avif", "jp2", "ppm", "tga"])
@pytest.mark.parametrize("share", [0.02, 0.3, 0.6, 0.9])
def test_a_file_cut_short_is_a_data_error(tmp_path, extension, share):
    if f".{extension}" not in readable_extensions():
        pytest.skip("not in this installation of Pillow")
    noise = Image.fromarray(numpy.random.default_rng(0).integers(0, 256, (96, 96, 3), dtype=numpy.uint8))
    path = tmp_path / f"a.{extension}"
    noise.save(path)
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])
    assert reason(path)


def test_decompression_bomb(tmp_path, monkeypatch):
    path = saved(tmp_path, quadrants(), "a.png")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 64 * 48 - 1)  # Pillow warns from here, and refuses twice that
        assert load_image(path).size == (64, 48)
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
        assert reason(path) == "too large: Image size (3072 pixels) exceeds limit of 2000 pixels"


@pytest.mark.parametrize(
    "error", [struct.error("unpack"), SyntaxError("broken\nPNG"), ValueError(), RecursionError("r")]
)
def test_whatever_a_parser_raises_is_a_data_error(tmp_path, monkeypatch, error):
    path = saved(tmp_path, quadrants(), "a.png")
    monkeypatch.setattr(Image, "open", lambda *_, **__: (_ for _ in ()).throw(error))
    assert reason(path).startswith("damaged image: ")


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, SystemExit])
def test_what_does_not_concern_the_file_passes(tmp_path, monkeypatch, error):
    path = saved(tmp_path, quadrants(), "a.png")
    monkeypatch.setattr(Image, "open", lambda *_, **__: (_ for _ in ()).throw(error()))
    with pytest.raises(error):
        load_image(path)


def test_a_relative_path_is_named_in_full_and_odd_names_in_one_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError) as caught:
        load_image("照片 \n\udcff.jpg")
    assert str(caught.value) == f"{tmp_path}/照片 \\x0a\\xff.jpg: not found"
    assert printable('ä, "b" 😀') == 'ä, "b" 😀'


def test_extensions():
    assert {".jpg", ".jpeg", ".jfif", ".png", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".mpo"} <= readable_extensions()
    assert not {".mpg", ".h5", ".grib", ".bufr", ".wmf", ".emf", ".eps", ".ps", ".pdf", ".txt"} & readable_extensions()


def test_the_heif_plugin_is_used_where_it_is_installed(monkeypatch):
    called = []
    plugin = types.SimpleNamespace(register_heif_opener=lambda: called.append(True))
    monkeypatch.setitem(sys.modules, "pillow_heif", plugin)
    images.readable_formats.__wrapped__()
    assert called == [True]


def test_the_file_is_closed_and_the_image_can_be_sent_to_another_process(tmp_path):
    import pickle

    path = saved(tmp_path, quadrants(), "a.png")
    with warnings.catch_warnings():
        warnings.simplefilter("error", ResourceWarning)
        image = load_image(path)
    os.remove(path)
    assert corners(pickle.loads(pickle.dumps(image))) == [RED, GREEN, BLUE, YELLOW]
    assert io.BytesIO(image.tobytes()).getvalue() == quadrants().tobytes()


def test_reading_images_imports_neither_torch_nor_torchvision():
    code = "import sys, data.images, data.split, data.demo; print(sorted({'torch', 'torchvision'} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"

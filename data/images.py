"""`load_image(path)`: the one way a file becomes an RGB image, in training, validation and prediction alike.

Rules, the same everywhere:
- The content decides, not the extension. Of animations and multi-page files, the first frame.
- EXIF orientation is applied; an unreadable EXIF block counts as upright. Colour profiles are not applied.
- Transparency, of any kind, is laid on white.
- 16-bit gray: value // 256. Colour with 16 bits a channel is reduced to its upper 8 bits by Pillow itself.
- 32-bit integers and floats, by the range of the picture: floats in [0, 1] times 255; values in [0, 255] as they are;
  in [0, 65535] divided by 256; anything else from the smallest to the largest value onto 0..255.
"""

import contextlib
import functools
import logging
import os
import re
import stat
import warnings

from PIL import Image, UnidentifiedImageError

from data.errors import DataError

# Pillow knows these by name but does not decode them itself: it waits for a handler that nobody has installed (BUFR,
# GRIB, HDF5, WMF), only tells that it is such a file (MPEG), or starts a foreign program, Ghostscript (EPS).
_NOT_DECODED = {"BUFR", "GRIB", "HDF5", "WMF", "MPEG", "EPS"}
_HEIF_EXTENSIONS = (".heic", ".heif", ".hif")
_HEIF_HINT = "HEIC image; `pip install pillow-heif` makes it readable"
_ORIENTATION = 0x0112
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
# What files that are no images usually are, by the start of their lower-cased content.
_LOOKS_LIKE = (
    (rb"version https://git-lfs", "a Git LFS pointer, not the image itself; `git lfs pull` fetches it"),
    (rb"\s*(<!--.*?-->\s*)*(<!doctype html|<html|<head|<body|<script)", "a web page (HTML), not an image"),
    (rb"\s*(<\?xml.*?\?>\s*)?(<!doctype svg|<svg)", "an SVG drawing, not an image of pixels"),
    (rb"....ftyp(hei[cxms]|hev[cxms]|mif1|msf1)", _HEIF_HINT),
    (rb"....ftypavi[fs]", "AVIF image; this installation of Pillow cannot read it"),
    (rb"....ftyp|\x1ae\xdf\xa3|\x00\x00\x01[\xb3\xba]", "a video, not an image"),
    (rb"%pdf", "a PDF document, not an image"),
    (rb"%!ps|\xc5\xd0\xd3\xc6", "a PostScript document, not an image"),
    (rb"\x00\x05\x16[\x00\x07]", "a macOS companion file, not an image"),
    (rb"\x00+$", "nothing but zero bytes, not an image"),
)
# Pillow reports oddities as warnings and, for a few, through logging; load_image answers with an image or an error.
_QUIET = ("ignore", None, Warning, re.compile(r"PIL\."), 0)
logging.getLogger("PIL").addHandler(logging.NullHandler())


def load_image(path: str) -> Image.Image:
    """Read one file as an image of mode RGB, fully decoded and upright; the file is closed again.

    Raises:
        DataError: "<full path>: <reason>", one line, whatever is wrong with the file: missing, unreadable, empty, not
            an image, damaged, or more pixels than Pillow's limit against decompression bombs (twice
            `PIL.Image.MAX_IMAGE_PIXELS`).
    """
    _silence_pillow()
    try:
        mode = os.stat(path).st_mode
        if not stat.S_ISREG(mode):  # opening a named pipe would wait for ever
            raise DataError("is a folder, not a file" if stat.S_ISDIR(mode) else "is not a regular file")
        with open(path, "rb") as file:
            image = Image.open(file, formats=readable_formats())
            image.load()
            return _to_rgb(_upright(image))
    except MemoryError:  # says something about the machine, not about the file
        raise
    except (
        Exception
    ) as error:  # Pillow's plugins let out what their parsers meet: struct.error, SyntaxError, KeyError...
        raise DataError(f"{printable(os.path.abspath(path))}: {_reason(path, error)}") from error


@functools.cache
def readable_formats() -> tuple[str, ...]:
    """The names of the formats that Pillow decodes on this installation, commonest first; HEIF with its plugin."""
    with contextlib.suppress(ImportError):
        import pillow_heif

        pillow_heif.register_heif_opener()
    Image.init()
    first = [name for name in ("JPEG", "PNG") if name in Image.OPEN]
    return tuple(first + [name for name in Image.OPEN if name not in _NOT_DECODED and name not in first])


@functools.cache
def readable_extensions() -> frozenset[str]:
    """The lower-case extensions, with their dot, of `readable_formats`."""
    formats = {*readable_formats(), "MPO"}  # MPO, a JPEG with further pictures behind it, is opened by way of JPEG
    return frozenset(extension for extension, name in Image.registered_extensions().items() if name in formats)


def extension_hint(extension: str) -> str:
    """What to install to read files of this (lower-case) extension; empty if we do not know."""
    return "the plugin pillow-heif reads it" if extension in _HEIF_EXTENSIONS else ""


def printable(path: str) -> str:
    r"""A path as one line of valid Unicode: unchanged where it is that already, any other byte as \xNN."""
    # Under an ASCII locale every byte of a Chinese name is a surrogate; together they are valid again.
    text = path.encode("utf-8", "surrogateescape").decode("utf-8", "surrogateescape")
    return re.sub("[\x00-\x1f\x7f\udc80-\udcff]", lambda match: f"\\x{ord(match[0]) & 0xFF:02x}", text)


def _silence_pillow() -> None:
    # Not warnings.catch_warnings: it swaps a global, so threads that decode side by side would undo each other's.
    if warnings.filters[:1] != [_QUIET]:
        warnings.filterwarnings("ignore", module=_QUIET[3].pattern)


def _upright(image: Image.Image) -> Image.Image:
    # ImageOps.exif_transpose would also rewrite the EXIF block, which fails on damaged ones, and copy upright images.
    try:
        orientation = image.getexif().get(_ORIENTATION)
    except MemoryError:
        raise
    except Exception:
        return image
    turn = _TURNS.get(orientation) if isinstance(orientation, int) else None
    return image if turn is None else image.transpose(turn)


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode in ("I", "F") or image.mode.startswith("I;16"):
        return _gray_to_rgb(image)
    if image.has_transparency_data:
        image = image.convert("RGBA")
        white = Image.new("RGB", image.size, "white")
        white.paste(image, mask=image.getchannel("A"))
        return white
    return image if image.mode == "RGB" else image.convert("RGB")


def _gray_to_rgb(image: Image.Image) -> Image.Image:
    import numpy

    values = numpy.asarray(image)
    transparent = image.info.get("transparency")
    sixteen_bit = image.mode.startswith("I;16") or image.format == "PPM"
    gray = (values // 256).astype(numpy.uint8) if sixteen_bit and image.mode != "F" else _range_to_bytes(values)
    if isinstance(transparent, int):
        gray = numpy.where(values == transparent, numpy.uint8(255), gray)
    return Image.fromarray(gray).convert("RGB")


def _range_to_bytes(values):
    """32-bit integers or floats, any shape, to uint8 by the rule at the top; not-a-number counts as the smallest."""
    import numpy

    finite = values[numpy.isfinite(values)].astype(numpy.float64)
    low, high = (finite.min(), finite.max()) if finite.size else (0.0, 0.0)
    offset, scale = 0.0, 1.0
    if low < 0 or high > 65535:
        offset, scale = (low, 255 / (high - low)) if high > low else (low - 128, 1.0)
    elif high > 255:
        scale = 1 / 256
    elif high <= 1 and values.dtype.kind == "f":
        scale = 255.0
    values = numpy.nan_to_num(values.astype(numpy.float64), nan=low, posinf=high, neginf=low)
    return numpy.rint((values - offset) * scale).clip(0, 255).astype(numpy.uint8)


def _reason(path: str, error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        return "a link to nothing" if os.path.islink(path) else "not found"
    if isinstance(error, DataError):
        return str(error)
    if isinstance(error, OSError) and error.errno:
        return (error.strerror or type(error).__name__).lower()
    if isinstance(error, Image.DecompressionBombError):
        return f"too large: {_one_line(error).split(', ')[0]}"
    if isinstance(error, UnidentifiedImageError):
        return _looks_like(path)
    return f"damaged image: {_one_line(error)}"


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__


def _looks_like(path: str) -> str:
    """What a file is that Pillow does not recognise, from its first bytes, else from its extension."""
    try:
        with open(path, "rb") as file:
            start = file.read(1024).lower()
    except OSError:
        start = b"?"
    if not start:
        return "an empty file (0 bytes)"
    for pattern, meaning in _LOOKS_LIKE:
        if re.match(pattern, start, re.DOTALL):
            return f"not readable: {meaning}" if meaning == _HEIF_HINT else meaning
    if path.lower().endswith(_HEIF_EXTENSIONS):
        return f"not an image that Pillow knows; by its name a {_HEIF_HINT}"
    return "not an image, or damaged at its very start"

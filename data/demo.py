"""The built-in data set: scikit-learn's handwritten digits as PNG files, so that a first run needs no other data."""

import os
import shutil
import uuid

from PIL import Image

from data.errors import DataError


def ensure_demo_data(folder: str = "demo_data") -> str:
    """Write the 1,797 digits as `folder`/<digit>/digit_<index in the data set>.png; return `folder`.

    A folder that exists is left as it is. The images are gray, 8 x 8; the data set's values v, 0 to 16, become
    (255 v + 8) // 16, that is 0 to 255, rounded.
    `folder` appears complete or not at all, also when several processes do this at once or one is killed.

    Source: E. Alpaydin, C. Kaynak, Optical Recognition of Handwritten Digits, UCI Machine Learning Repository, 1998.

    Raises:
        DataError: scikit-learn is missing, or the folder cannot be written.
    """
    if os.path.isdir(folder):
        return folder
    temporary = f"{os.path.abspath(folder)}.{uuid.uuid4().hex}.tmp"
    try:
        _write_digits(temporary)
        os.rename(temporary, folder)
    except OSError as error:
        if not os.path.isdir(folder):  # otherwise another process was faster, and its folder is as good
            raise DataError(f"{folder}: the demo data cannot be written there: {error.strerror or error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder


def _write_digits(folder: str) -> None:
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise DataError(
            "the demo data comes with scikit-learn: pip install scikit-learn, or give --data-path DIR"
        ) from error
    digits = load_digits()
    for label in digits.target_names:
        os.makedirs(os.path.join(folder, str(label)))
    for index, (values, label) in enumerate(zip(digits.images.astype(int), digits.target, strict=True)):
        gray = ((255 * values + 8) // 16).astype("uint8")
        Image.fromarray(gray).save(os.path.join(folder, str(label), f"digit_{index:04d}.png"))

"""A folder of labelled images -> which of them train and which validate.

Two layouts: `root/<class>/<image>`, split here, per class; or `root/train/<class>/<image>` with
`root/val/<class>/<image>`, split by the user. Images in folders inside a class folder belong to that class.
"""

import csv
import hashlib
import os
import re
from collections import Counter
from dataclasses import dataclass

from data.errors import DataError
from data.files import whole_file
from data.images import printable
from data.listing import LAYOUT, Classes, FolderReader
from data.wording import SHOWN, by_extension, count_of, names_of

Sample = tuple[str, int]  # path, label

# The names of the two parts in the second layout; the first that exists is taken.
_PART_NAMES = {"train": ("train",), "val": ("val",)}


@dataclass(frozen=True)
class Split:
    """Which images train and which validate.

    Attributes:
        root: the data folder, absolute.
        classes: sorted folder names; a label is an index into them.
        train, val: (absolute path, label) of each image, by class, then by path.
        notes: what was left out or looks odd, one sentence each with counts, for the run to print.
    """

    root: str
    classes: tuple[str, ...]
    train: list[Sample]
    val: list[Sample]
    notes: tuple[str, ...] = ()

    def counts(self) -> list[tuple[str, int, int]]:
        """(class, training images, validation images) of each class."""
        train, val = (Counter(label for _, label in part) for part in (self.train, self.val))
        return [(name, train[label], val[label]) for label, name in enumerate(self.classes)]


def make_split(root: str, *, val_rate: float, seed: int, num_classes: int | None = None) -> Split:
    """Read the folder `root` and split it.

    In the first layout int(n * val_rate) of a class's n images validate: those whose hash, keyed by `seed`, of the path
    relative to `root` is smallest. So the choice depends neither on the order of listing nor on where `root` lies, and
    few images change sides when others are added: of a class of 100 that grows by 10, about one.
    In the second layout `val_rate` and `seed` have no effect.

    Raises:
        DataError: the folder holds nothing to train on, or not what the arguments say; one sentence.
    """
    if not 0 < val_rate < 1:
        raise DataError(f"--val-rate {val_rate} must lie between 0 and 1, for example 0.2")
    root = os.path.abspath(root)
    reader = FolderReader(root)
    folders, loose = reader.list_top("")
    parts = _parts(reader, folders)
    train = reader.read_classes(*(reader.list_top(parts[0]) if parts else (folders, loose)))
    val = reader.read_classes(*reader.list_top(parts[1])) if parts else {}
    _check_classes(reader, train, parts, num_classes)
    if parts:
        _check_same_classes(root, train, val)
        reader.note_unused(folders, parts)
    else:
        train, val = _split_classes(train, val_rate, seed)
    _check_validation(root, train, val, parts, val_rate)
    classes = tuple(name for name, images in train.items() if images)
    notes = [*reader.notes(), *_notes_on_classes(train, val)]
    return Split(root, classes, _samples(root, classes, train), _samples(root, classes, val), tuple(notes))


def write_split(split: Split, path: str) -> None:
    r"""Write `split` as CSV: path (absolute), label (the class's name), split ("train" or "val").

    UTF-8, RFC 4180. Valid Unicode stands there unchanged; other bytes of a name as \xNN. The file appears whole or not.
    """
    with whole_file(path, newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["path", "label", "split"])
        for part, samples in (("train", split.train), ("val", split.val)):
            writer.writerows([_to_text(image), _to_text(split.classes[label]), part] for image, label in samples)


def read_split(path: str, root: str | None = None) -> Split:
    """The inverse of `write_split`, without the notes; `root` is where the data folder lies now, if it was moved.

    Raises:
        DataError: the file is missing, or is no such list.
    """
    try:
        with open(path, encoding="utf-8-sig", newline="", errors="surrogateescape") as file:
            rows = list(csv.DictReader(file, strict=True))
    except (OSError, csv.Error) as error:
        raise DataError(f"{printable(path)}: cannot be read as a list of images: {error}") from error
    if not rows or not all(row.get("path") and row.get("label") and row.get("split") in _PART_NAMES for row in rows):
        raise DataError(f"{printable(path)}: expected is the heading path,label,split, with train or val as split")
    folder = os.path.dirname(os.path.abspath(path))
    rows = [(*_from_text(folder, row["path"], row["label"]), row["split"]) for row in rows]
    classes = tuple(sorted({label for _, label, _ in rows}))
    labels = {name: label for label, name in enumerate(classes)}
    written_root = os.path.commonpath([image for image, _, _ in rows])
    if root is not None:
        root = os.path.abspath(root)
        rows = [(os.path.join(root, os.path.relpath(image, written_root)), label, part) for image, label, part in rows]
    train, val = ([(image, labels[label]) for image, label, part in rows if part == wanted] for wanted in _PART_NAMES)
    return Split(root or written_root, classes, train, val)


def _parts(reader: FolderReader, folders: list[str]) -> tuple[str, str] | None:
    """The names of the training and the validation folder, or None if the folders are classes.

    A folder `train` that itself holds images is a class (of vehicles, say); one that holds folders only is a part.
    """
    found = {part: next((name for name in names if name in folders), None) for part, names in _PART_NAMES.items()}
    present = [name for name in found.values() if name]
    if not present or (len(present) == 1 and not _holds_folders_only(reader.root, present[0])):
        return None
    missing = [part for part, name in found.items() if not name]
    if missing:
        raise DataError(
            f"{printable(reader.root)}: no {missing[0]} folder, found: {names_of(folders)}; "
            f"{LAYOUT}, under exactly these two names"
        )
    return found["train"], found["val"]


def _holds_folders_only(root: str, folder: str) -> bool:
    folders, images = FolderReader(root).list_folder(folder)
    return bool(folders) and not images


def _check_classes(
    reader: FolderReader, train: Classes, parts: tuple[str, str] | None, num_classes: int | None
) -> None:
    where = printable(os.path.join(reader.root, parts[0]) if parts else reader.root)
    classes = [name for name, images in train.items() if images]
    if not classes:
        left_out = f" (left out: {by_extension(reader.left_out)})" if reader.left_out else ""
        seen = f"{count_of(len(train), 'folder')} without a readable image" if train else "no folder and no image"
        raise DataError(f"{where}: found {seen}{left_out}; {LAYOUT}")
    if len(classes) == 1:
        inner, _ = reader.list_folder(os.path.join(parts[0] if parts else "", classes[0]))
        only = printable(classes[0])
        hint = (
            f"; if its {len(inner)} folders are the classes, type --data-path {where}/{only}" if len(inner) > 1 else ""
        )
        raise DataError(f"{where}: only one class, {only}, and a classifier needs two{hint}; {LAYOUT}")
    if num_classes is not None and num_classes != len(classes):
        raise DataError(
            f"--num_classes {num_classes}, but {where} holds {len(classes)} classes: {names_of(classes)}; "
            f"leave the option out or type --num_classes {len(classes)}"
        )


def _check_same_classes(root: str, train: Classes, val: Classes) -> None:
    """A class may lack validation images, but then its folder is there; a forgotten or misspelt one is a mistake."""
    trained = {name for name, images in train.items() if images}
    only_train = sorted(trained - set(val))
    only_val = sorted(name for name, images in val.items() if images and name not in trained)
    if only_train or only_val:
        sides = (("train", only_train), ("val", only_val))
        differences = "; ".join(f"only in {side}: {names_of(names)}" for side, names in sides if names)
        raise DataError(f"{printable(root)}: train and val must hold the same classes; {differences}")


def _check_validation(root: str, train: Classes, val: Classes, parts: tuple[str, str] | None, val_rate: float) -> None:
    if any(val.values()):
        return
    if parts:
        raise DataError(f"{printable(os.path.join(root, parts[1]))}: no images to validate with; {LAYOUT}")
    largest = max(len(images) for images in train.values())
    rate = f", or type --val-rate {-(-100 // largest) / 100}" if largest > 1 else ""
    raise DataError(
        f"{printable(root)}: the validation set is empty, as the largest class has only "
        f"{count_of(largest, 'image')} and --val-rate is {val_rate}; add images{rate}"
    )


def _split_classes(classes: Classes, val_rate: float, seed: int) -> tuple[Classes, Classes]:
    train, val = {}, {}
    key = hashlib.blake2b(str(seed).encode()).digest()
    for name, images in classes.items():
        # 1e-9: 0.29 * 100 is 28.999999999999996 in floating point; a class keeps at least one image to train on.
        count = min(int(len(images) * val_rate + 1e-9), max(len(images) - 1, 0))
        chosen = set(sorted(images, key=lambda image: _hash(image, key))[:count])
        val[name] = [image for image in images if image in chosen]
        train[name] = [image for image in images if image not in chosen]
    return train, val


def _hash(image: str, key: bytes) -> bytes:
    return hashlib.blake2b(os.fsencode(image), key=key, digest_size=16).digest()


def _samples(root: str, classes: tuple[str, ...], images: Classes) -> list[Sample]:
    return [(os.path.join(root, image), label) for label, name in enumerate(classes) for image in images[name]]


def _notes_on_classes(train: Classes, val: Classes) -> list[str]:
    without_images = sorted(name for name in train | val if not train.get(name))
    unvalidated = [name for name, images in train.items() if images and not val[name]]
    notes = [f"{printable(name)}: 0 validation images" for name in unvalidated[:SHOWN]]
    if len(unvalidated) > SHOWN:
        notes.append(f"{len(unvalidated) - SHOWN} more classes have 0 validation images")
    if without_images:
        folders = count_of(len(without_images), "folder")
        notes.append(
            f"{folders} without images, left out of the classes: {names_of(without_images, len(without_images))}"
        )
    return notes


def _to_text(name: str) -> str:
    text = os.fsencode(name).decode("utf-8", "surrogateescape")
    return re.sub("[\udc80-\udcff]", lambda match: f"\\x{ord(match[0]) & 0xFF:02x}", text)


def _from_text(folder: str, path: str, label: str) -> tuple[str, str]:
    # A name may hold the four characters \xff itself: then that file exists, and nothing is translated.
    path, label = (os.fsdecode(text.encode("utf-8", "surrogateescape")) for text in (path, label))
    path = os.path.join(folder, path)
    if r"\x" not in path or os.path.lexists(path):
        return path, label
    return _from_escapes(path), _from_escapes(label)


def _from_escapes(text: str) -> str:
    escaped = rb"\\x([89a-f][0-9a-f])"
    return os.fsdecode(re.sub(escaped, lambda match: bytes.fromhex(match[1].decode()), os.fsencode(text)))

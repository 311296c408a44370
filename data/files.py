"""Files that appear whole or not at all, and names that any file or terminal can hold."""

import codecs
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

ESCAPE_BYTES = "escape_bytes"


def _escape_bytes(error: UnicodeError) -> tuple[str, int]:
    """For what cannot be encoded: a byte that Python keeps as a surrogate becomes \\xNN, another letter \\uNNNN."""
    letter = error.object[error.start]
    if "\udc80" <= letter <= "\udcff":
        return f"\\x{ord(letter) & 0xFF:02x}", error.start + 1
    return letter.encode("ascii", "backslashreplace").decode(), error.start + 1


codecs.register_error(ESCAPE_BYTES, _escape_bytes)


@contextmanager
def whole_file(path: str | Path, mode: str = "w", **options) -> Iterator[IO]:
    """Opens a temporary file beside `path` that takes its place when the block ends well, and vanishes otherwise.

    Args:
        mode, options: as of `open`; text is UTF-8, and bytes of file names that are not are written as \\xNN.
    """
    path = Path(path)
    if "b" not in mode:
        options |= {"encoding": "utf-8", "errors": ESCAPE_BYTES}
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, mode, **options) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o666 & ~_umask())  # mkstemp makes files that nobody else may read
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
    _sync_folder(path.parent)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _sync_folder(folder: Path) -> None:
    """Makes the new name last through a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

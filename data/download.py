"""Known public data sets by name: downloaded into the working directory, verified, unpacked.

Beside the folder lie, only while this goes on: `<folder>.tgz.part`, what has come so far, from which a later start goes
on; `<folder>.unpacking`; `<folder>.lock`. All are removed once the folder is there.
"""

import contextlib
import hashlib
import os
import re
import shutil
import sys
import tarfile
import urllib.request
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from http.client import HTTPException
from urllib.error import HTTPError, URLError

from data.errors import DataError
from data.images import printable

_TIMEOUT = 30  # seconds without a byte
_ATTEMPTS = 3  # connections that break off, in one start of the program
_CHUNK = 1 << 20
_BY_HAND = "download it by hand, unpack it and give --data-path FOLDER"


@dataclass(frozen=True)
class KnownDataSet:
    """A gzipped tar archive on the web that holds one folder of class folders.

    Attributes:
        url: http, https or file.
        size: of the archive in bytes; None if it is not known.
        sha256: of the archive, 64 hexadecimal digits in lower case.
        folder: the archive's own top folder, and the folder's name after unpacking.
    """

    url: str
    size: int | None
    sha256: str
    folder: str


KNOWN_DATA_SETS = {
    "flowers": KnownDataSet(  # 3,670 photos of 5 classes, CC-BY 2.0
        url="https://storage.googleapis.com/download.tensorflow.org/example_images/flower_photos.tgz",
        size=228_813_984,
        sha256="4c54ace7911aaffe13a365c34f650e71dd5bf1be0a58b464e5a7183e3e595d9c",
        folder="flower_photos",
    )
}


def resolve_data_path(path: str) -> str:
    """The folder that --data-path means: `path` itself if it exists or is no known name, else the data set's folder.

    The environment variable FLOWERS_URL names another address of the same archive, still verified by its sha256;
    with FLOWERS_SHA256 it may be another archive, whose top folder must be flower_photos too. Likewise for other names.

    Raises:
        DataError: see `ensure_data_set`; or one of these variables is malformed.
    """
    if path not in KNOWN_DATA_SETS or os.path.exists(path):
        return path
    return ensure_data_set(_with_environment(path, KNOWN_DATA_SETS[path]))


def ensure_data_set(data_set: KnownDataSet, parent: str = ".") -> str:
    """Download and unpack `data_set` as `parent`/<its folder>; return that path.

    A folder that is there and not empty is used as it is. It appears complete or not at all, also when a process is
    killed or several do this at once: one works, the others wait and find the folder. Nothing is unpacked before size
    and sha256 have been verified. Progress goes to standard error; a bar only if that is a terminal.

    Raises:
        DataError: the archive cannot be had, is not the expected one, or there is no room for it. What has come of it
            is kept, unless its sha256 is wrong.
    """
    folder = os.path.normpath(os.path.join(parent, data_set.folder))
    part = f"{folder}.tgz.part"
    try:
        if _is_filled(folder):
            return folder
        with _locked(f"{folder}.lock"):
            if not _is_filled(folder):  # else another process made it while this one waited
                _download(data_set, part)
                _unpack(data_set, part, folder)
                os.remove(part)
    except OSError as error:  # all that concerns the network is a DataError by now
        reason = error.strerror or error
        raise DataError(
            f"{printable(os.path.abspath(folder))}: {data_set.url} cannot be stored there: {reason}; make room, "
            f"start in another folder, or {_BY_HAND}"
        ) from error
    return folder


def _with_environment(name: str, data_set: KnownDataSet) -> KnownDataSet:
    url = os.environ.get(f"{name.upper()}_URL") or data_set.url
    sha256 = os.environ.get(f"{name.upper()}_SHA256", "").strip().lower()
    if not re.match("(https?|file)://.", url, re.IGNORECASE):
        raise DataError(f"{name.upper()}_URL={url}: must start with https://, http:// or file://")
    if not re.fullmatch("([0-9a-f]{64})?", sha256):
        raise DataError(f"{name.upper()}_SHA256={sha256}: must be 64 hexadecimal digits, as sha256sum prints them")
    other = {"sha256": sha256, "size": None} if sha256 not in ("", data_set.sha256) else {}
    return replace(data_set, url=url, **other)


def _is_filled(folder: str) -> bool:
    return os.path.isdir(folder) and bool(os.listdir(folder))


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# ---------------------------------------------------------------------------------------------------- one at a time


@contextlib.contextmanager
def _locked(path: str) -> Iterator[None]:
    """One process at a time; the lock ends with the process, so a killed one blocks nobody."""
    import fcntl  # Linux and macOS

    while True:
        with open(path, "a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                _say(f"waiting for another process, which holds {printable(path)}")
                fcntl.flock(file, fcntl.LOCK_EX)
            if not _is_file_at(path, file.fileno()):  # its holder has removed it, somebody else may hold a new one
                continue
            try:
                yield
            finally:
                with contextlib.suppress(OSError):
                    os.remove(path)
            return


def _is_file_at(path: str, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


# ---------------------------------------------------------------------------------------------------- downloading


class _BrokenOff(Exception):
    """The network, not the disk: why no more came. Another try may bring the rest."""


def _download(data_set: KnownDataSet, part: str) -> None:
    """Make `part` the whole, verified archive. A wrong one is fetched anew once: it may be two versions in one file."""
    for _ in range(2):
        _fetch_missing(data_set, part)
        size, found = _size(part), _sha256(part)
        if found == data_set.sha256:
            return
        _say(f"{data_set.url}: wrong sha256, removed")
        os.remove(part)
    raise DataError(
        f"{data_set.url}: {size:,} bytes with sha256 {found} where {data_set.sha256} is expected, twice: the file "
        f"there is another or was damaged on its way; try later, or {_BY_HAND}"
    )


def _fetch_missing(data_set: KnownDataSet, part: str) -> None:
    for attempt in range(_ATTEMPTS):
        have = _size(part)
        if have == data_set.size:
            return
        try:
            return _fetch(data_set, part, have)
        except _BrokenOff as error:
            reason = error
            if _size(part) == have:  # then trying again at once is of no use
                break
            if attempt + 1 < _ATTEMPTS:
                _say(f"{data_set.url}: {reason}; trying again")
    raise DataError(
        f"{data_set.url}: the download failed: {reason}; type the same command again later to go on from there, or "
        f"{_BY_HAND}"
    ) from reason


def _size(path: str) -> int:
    return os.path.getsize(path) if os.path.exists(path) else 0


def _fetch(data_set: KnownDataSet, part: str, have: int) -> None:
    """Append to `part`, of which `have` bytes are right, what is missing; from the start if the server cannot skip.

    No If-Range: the sha256 says what the file is, wherever it comes from, so that another mirror can go on with it.
    """
    response = _open(data_set.url, have)
    if response is None:
        return
    with response:
        have, total = _offset_and_total(response, part, have)
        if data_set.size and total and total != data_set.size:
            raise DataError(
                f"{data_set.url}: {total:,} bytes where {data_set.size:,} are expected, so it is another "
                f"file; {_BY_HAND}"
            )
        total = data_set.size or total
        _say(f"downloading {data_set.url}" + _amounts(have, total))
        with open(part, "ab" if have else "wb") as file, _bar(have, total) as bar:
            for chunk in _chunks(response, total - have if total else sys.maxsize):
                file.write(chunk)
                bar.update(len(chunk))
        if total and (came := _size(part)) < total:
            raise _BrokenOff(f"the connection broke off after {came:,} of {total:,} bytes")


def _open(url: str, have: int):
    """The server's answer; None if it says that there is nothing after the first `have` bytes."""
    headers = {"User-Agent": "python-urllib", **({"Range": f"bytes={have}-"} if have else {})}
    try:
        return urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=_TIMEOUT)
    except HTTPError as error:
        error.close()
        if have and error.code == 416:
            return None
        raise _BrokenOff(_reason(error)) from error
    except (OSError, HTTPException, ValueError) as error:  # ValueError: not an address
        raise _BrokenOff(_reason(error)) from error


def _offset_and_total(response, part: str, have: int) -> tuple[int, int | None]:
    """Where in the file the answer's first byte belongs, `have` or 0, and the file's size if the server tells it."""
    if response.status != 206:  # None for file://
        length = response.headers.get("Content-Length") or ""
        return 0, int(length) if length.isdigit() else None
    match = re.fullmatch(r"bytes (\d+)-\d+/(\d+|\*)", response.headers.get("Content-Range") or "")
    if not match or int(match[1]) != have:
        with contextlib.suppress(FileNotFoundError):
            os.remove(part)  # so that the next try asks for all of it
        raise _BrokenOff(f"asked for the bytes from {have:,} on, the server sent others")
    return have, None if match[2] == "*" else int(match[2])


def _chunks(response, limit: int) -> Iterator[bytes]:
    """At most `limit` bytes, each piece as soon as it comes: what a stalled connection has brought is not lost."""
    while limit > 0:
        try:
            chunk = response.read1(min(limit, _CHUNK))
        except (OSError, HTTPException) as error:
            raise _BrokenOff(_reason(error)) from error
        if not chunk:
            return
        limit -= len(chunk)
        yield chunk


def _reason(error: Exception) -> str:
    if isinstance(error, HTTPError):
        return f"HTTP {error.code} {error.reason}"
    if isinstance(error, URLError) and isinstance(error.reason, Exception):
        error = error.reason
    if isinstance(error, TimeoutError):
        return f"no answer for {_TIMEOUT} seconds"
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def _amounts(have: int, total: int | None) -> str:
    size = f" ({total / 1e6:,.1f} MB)" if total else ""
    return f"{size}, going on after {have / 1e6:,.1f} MB" if have else size


def _bar(have: int, total: int | None):
    from tqdm import tqdm

    return tqdm(
        initial=have,
        total=total,
        unit="B",
        unit_scale=True,
        file=sys.stderr,
        disable=not sys.stderr.isatty(),
        leave=False,
    )


def _sha256(path: str) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


# ---------------------------------------------------------------------------------------------------- unpacking


def _unpack(data_set: KnownDataSet, archive: str, folder: str) -> None:
    temporary = f"{folder}.unpacking"
    shutil.rmtree(temporary, ignore_errors=True)  # left by a process that was killed
    try:
        with tarfile.open(archive, "r:gz") as tar:
            files, left_out = _unpack_members(tar, data_set, temporary)
        if not files:
            raise DataError(f"{data_set.url}: the archive has no file in a folder {data_set.folder}; {_BY_HAND}")
        os.rename(os.path.join(temporary, data_set.folder), folder)
    except (tarfile.TarError, EOFError, zlib.error) as error:
        raise DataError(f"{data_set.url}: not a gzipped tar archive, or damaged: {error}; {_BY_HAND}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    beside = f" ({left_out:,} beside {data_set.folder} in the archive left out)" if left_out else ""
    _say(f"{printable(folder)}: {files:,} files, verified and unpacked{beside}; the archive is removed")


def _unpack_members(tar: tarfile.TarFile, data_set: KnownDataSet, temporary: str) -> tuple[int, int]:
    """Write the data set's folder into `temporary`; return how many files it has, and how many lie beside it.

    Only names and contents are taken over, by hand: no links, owners or permissions. So it is safe in every version of
    Python, those without tarfile's extraction filters too.
    """
    files = left_out = 0
    for member in tar:
        parts = [part for part in member.name.split("/") if part != "."]
        if member.name.startswith("/") or ".." in parts or not (member.isfile() or member.isdir()):
            what = f"{printable(member.name)} leads out of its folder, or is a link or a device"
            raise DataError(f"{data_set.url}: the archive is not safe to unpack, {what}; {_BY_HAND}")
        if parts[:1] != [data_set.folder]:
            left_out += member.isfile()
        elif member.isdir():
            os.makedirs(os.path.join(temporary, *parts), exist_ok=True)
        else:
            _write_member(tar, member, os.path.join(temporary, *parts))
            files += 1
    return files, left_out


def _write_member(tar: tarfile.TarFile, member: tarfile.TarInfo, path: str) -> None:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "wb") as file, tar.extractfile(member) as source:
        shutil.copyfileobj(source, file)

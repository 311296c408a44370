"""Data sets by name: from a server of our own on 127.0.0.1, which can break off, lie, stall or refuse."""

import contextlib
import dataclasses
import hashlib
import io
import os
import random
import signal
import socket
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from data import download
from data.download import KNOWN_DATA_SETS, KnownDataSet, ensure_data_set, resolve_data_path
from data.errors import DataError

PROJECT = os.path.dirname(os.path.dirname(os.path.abspath(download.__file__)))
FILES = {
    f"flower_photos/{name}/{i}.jpg": random.Random(f"{name}{i}").randbytes(20_000) for name in "ab" for i in (1, 2)
}
FILES["flower_photos/LICENSE.txt"] = b"CC-BY"


def make_archive(files: dict[str, bytes], *others: tarfile.TarInfo) -> bytes:
    with io.BytesIO() as buffer:
        with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
            for name, content in files.items():
                member = tarfile.TarInfo(name)
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
            for member in others:
                tar.addfile(member)
        return buffer.getvalue()


ARCHIVE = make_archive(FILES)
SIZE = len(ARCHIVE)


class Handler(BaseHTTPRequestHandler):
    """Answers the k-th request as the k-th word of `server.script` says, the last word for all that follow.

    ranges, plain (knows no ranges), wrong_range, no_length; part N: N bytes of what is asked for, then hangs up;
    stall N: likewise, then the rest when `server.gate` opens; close: no answer; status N: that error.
    """

    def do_GET(self):
        server, asked = self.server, self.headers.get("Range")
        word, *numbers = server.script[min(len(server.log), len(server.script) - 1)].split()
        number = int(numbers[0]) if numbers else len(server.body)
        self.entry = [asked, 0]
        server.log.append(self.entry)
        if word == "status":
            self.send_error(number)
        elif word != "close":
            partial = asked and word != "plain"
            self.send_body(word, number, int(asked[len("bytes=") : -1]) if partial else 0, partial)

    def send_body(self, word, number, start, partial):
        body = self.server.body
        if start >= len(body):
            return self.send_error(416)
        self.send_response(206 if partial else 200)
        if partial:
            self.send_header("Content-Range", f"bytes {start - (word == 'wrong_range')}-{len(body) - 1}/{len(body)}")
        if word != "no_length":
            self.send_header("Content-Length", str(len(body) - start))
        self.end_headers()
        self.send(body[start : start + number])
        if word == "stall":
            self.server.gate.wait(20)
            self.send(body[start + number :])

    def send(self, piece):
        self.entry[1] += len(piece)  # before it is sent: the client may be done with it sooner than we
        with contextlib.suppress(ConnectionError):  # it has hung up
            self.wfile.write(piece)

    def log_message(self, *_):
        pass


@pytest.fixture
def server():
    """`body` is what it sends, `script` how; `log` has [Range header, bytes sent] of each request."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads, server.block_on_close = True, False
        server.body, server.script, server.log, server.gate = ARCHIVE, ["ranges"], [], threading.Event()
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield server
        server.gate.set()
        server.shutdown()
        thread.join()


@pytest.fixture
def flowers(server, tmp_path, monkeypatch):
    """The data set on that server; the working directory is empty."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(download, "_TIMEOUT", 0.6)
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY", "FLOWERS_URL", "FLOWERS_SHA256"):
        monkeypatch.delenv(name, raising=False)
    url = f"http://127.0.0.1:{server.server_address[1]}/flower_photos.tgz"
    return KnownDataSet(url, SIZE, hashlib.sha256(ARCHIVE).hexdigest(), "flower_photos")


def holding(server, body: bytes, flowers: KnownDataSet) -> KnownDataSet:
    """The server has `body`, and `body` is what is expected."""
    server.body = body
    return dataclasses.replace(flowers, size=len(body), sha256=hashlib.sha256(body).hexdigest())


def assert_complete():
    """All files with their contents, and nothing else beside them."""
    paths = [os.path.join(folder, name) for folder, _, names in os.walk("flower_photos") for name in names]
    assert {path: Path(path).read_bytes() for path in paths} == FILES
    assert os.listdir() == ["flower_photos"]


def listing(*expected: str) -> bool:
    return sorted(os.listdir()) == sorted(expected)


# ---------------------------------------------------------------------------------------------------- names


def test_other_paths_are_left_alone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for path in ("", "photos", "/nowhere/flowers", "flower", "flowers/"):
        assert resolve_data_path(path) == path
    os.mkdir("flowers")
    assert resolve_data_path("flowers") == "flowers"
    assert listing("flowers")


def test_by_name_with_another_address(server, flowers, monkeypatch, capfd):
    monkeypatch.setitem(KNOWN_DATA_SETS, "flowers", dataclasses.replace(flowers, url="http://127.0.0.1:9/never"))
    monkeypatch.setenv("FLOWERS_URL", flowers.url)
    assert resolve_data_path("flowers") == "flower_photos"
    assert_complete()
    out, error = capfd.readouterr()
    assert out == ""
    assert error.splitlines() == [
        f"downloading {flowers.url} (0.1 MB)",
        "flower_photos: 5 files, verified and unpacked; the archive is removed",
    ]
    assert resolve_data_path("flowers") == "flower_photos"  # as it is, nothing asked again
    assert server.log == [[None, SIZE]]


def test_another_address_is_still_verified(server, flowers, monkeypatch):
    monkeypatch.setenv("FLOWERS_URL", flowers.url)
    with pytest.raises(DataError, match=f"{SIZE:,} bytes where 228,813,984 are expected"):
        resolve_data_path("flowers")
    monkeypatch.setenv("FLOWERS_SHA256", flowers.sha256.upper())
    assert resolve_data_path("flowers") == "flower_photos"
    assert_complete()


@pytest.mark.parametrize(
    ("name", "value"), [("FLOWERS_URL", "ftp://host/x"), ("FLOWERS_URL", "here.tgz"), ("FLOWERS_SHA256", "12ab")]
)
def test_malformed_variables(flowers, monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    with pytest.raises(DataError, match=f"{name}={value}: must"):
        resolve_data_path("flowers")
    assert listing()


def test_the_real_archive():
    """As the data set's page and shared facts tell it."""
    real = KNOWN_DATA_SETS["flowers"]
    assert real.url == "https://storage.googleapis.com/download.tensorflow.org/example_images/flower_photos.tgz"
    assert (real.size, real.folder) == (228813984, "flower_photos")
    assert real.sha256 == "4c54ace7911aaffe13a365c34f650e71dd5bf1be0a58b464e5a7183e3e595d9c"


def test_a_file_address_and_another_parent(flowers, tmp_path):
    (tmp_path / "mirror.tgz").write_bytes(ARCHIVE)
    os.mkdir("below")
    url = (tmp_path / "mirror.tgz").as_uri()
    assert ensure_data_set(dataclasses.replace(flowers, url=url), "below") == os.path.join("below", "flower_photos")
    os.chdir("below")
    assert_complete()
    assert (tmp_path / "mirror.tgz").read_bytes() == ARCHIVE


def test_a_bar_on_a_terminal(flowers, monkeypatch):
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", terminal)
    ensure_data_set(flowers)
    assert "0%|" in terminal.getvalue()


# ---------------------------------------------------------------------------------------------------- going on


def leave_part(content: bytes) -> None:
    with open("flower_photos.tgz.part", "wb") as file:
        file.write(content)


def test_only_the_rest_is_asked_for(server, flowers, capfd):
    leave_part(ARCHIVE[:50_000])
    ensure_data_set(flowers)
    assert server.log == [["bytes=50000-", SIZE - 50_000]]
    assert "going on after 0.1 MB" in capfd.readouterr().err
    assert_complete()


@pytest.mark.parametrize(
    ("script", "log"),
    [
        (["part 30000", "ranges"], [[None, 30_000], ["bytes=30000-", SIZE - 30_000]]),  # breaks off, goes on at once
        (["part 30000", "plain"], [[None, 30_000], ["bytes=30000-", SIZE]]),  # cannot skip: from the start
        (["part 30000", "wrong_range", "ranges"], [[None, 30_000], ["bytes=30000-", SIZE - 30_000], [None, SIZE]]),
        (["stall 30000", "ranges"], [[None, 30_000], ["bytes=30000-", SIZE - 30_000]]),
        (["no_length"], [[None, SIZE]]),
    ],
)
def test_servers(server, flowers, script, log):
    server.script = script
    ensure_data_set(flowers)
    assert server.log == log
    assert_complete()


@pytest.mark.parametrize("size", [SIZE, None])
def test_a_complete_part_is_not_fetched_again(server, flowers, size):
    leave_part(ARCHIVE)
    ensure_data_set(dataclasses.replace(flowers, size=size))
    assert server.log == ([] if size else [[f"bytes={SIZE}-", 0]])
    assert_complete()


@pytest.mark.parametrize("part", [b"x" * 100, b"x" * SIZE, ARCHIVE + b"more"], ids=["begun", "whole", "longer"])
def test_a_wrong_part_is_fetched_anew_once(server, flowers, part):
    leave_part(part)
    ensure_data_set(flowers)
    assert server.log[-1] == [None, SIZE]
    assert_complete()


def test_a_wrong_archive(server, flowers):
    server.body = bytes(SIZE)
    with pytest.raises(DataError, match=f"sha256 {hashlib.sha256(bytes(SIZE)).hexdigest()} where {flowers.sha256}"):
        ensure_data_set(flowers)
    assert server.log == [[None, SIZE]] * 2
    assert listing()


@pytest.mark.parametrize(
    ("script", "requests", "reason"),
    [
        (["part 10000", "status 404"], 2, "HTTP 404 Not Found"),
        (["part 10000", "status 503"], 2, "HTTP 503 Service Unavailable"),
        (["part 10000", "close"], 2, "Remote end closed connection without response"),
        (["stall 10000", "stall 0"], 2, "no answer for 0.6 seconds"),
        (["part 10000"], 3, f"broke off after 30,000 of {SIZE:,} bytes"),
    ],
)
def test_a_failed_download_keeps_what_it_has(server, flowers, script, requests, reason):
    server.script = script
    with pytest.raises(DataError) as caught:
        ensure_data_set(flowers)
    message = str(caught.value)
    assert message.startswith(f"{flowers.url}: the download failed: ")
    assert reason in message
    assert "type the same command again" in message
    assert "--data-path FOLDER" in message
    assert "\n" not in message
    assert len(server.log) == requests
    assert listing("flower_photos.tgz.part")
    server.script, have = ["ranges"], os.path.getsize("flower_photos.tgz.part")
    ensure_data_set(flowers)
    assert server.log[-1] == [f"bytes={have}-", SIZE - have]
    assert have == 30_000 if requests == 3 else have == 10_000
    assert_complete()


def test_nobody_answers(flowers):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound but not listening: refused
        url = f"http://127.0.0.1:{unused.getsockname()[1]}/x.tgz"
        with pytest.raises(DataError, match="download failed: Connection refused"):
            ensure_data_set(dataclasses.replace(flowers, url=url))
    for url in ("http://[::1/x", "http://127.0.0.1:port/x", "file:///nowhere/x.tgz", "http://127.0.0.1/ü x"):
        with pytest.raises(DataError, match="download failed"):
            ensure_data_set(dataclasses.replace(flowers, url=url))
    assert listing()


def test_another_file_is_refused_before_it_is_fetched(server, flowers):
    server.body = b"<html>please log in</html>"
    with pytest.raises(DataError, match=f"26 bytes where {SIZE:,} are expected"):
        ensure_data_set(flowers)
    assert listing()


def test_folders_that_are_there(server, flowers):
    os.mkdir("flower_photos")  # empty, so nobody's data
    ensure_data_set(flowers)
    assert_complete()
    os.rename("flower_photos", "old")
    os.mkdir("flower_photos")
    open("flower_photos/mine", "w").close()
    ensure_data_set(flowers)
    assert os.listdir("flower_photos") == ["mine"]
    assert len(server.log) == 1
    os.remove("flower_photos/mine")
    os.rmdir("flower_photos")
    open("flower_photos", "w").close()
    with pytest.raises(DataError, match=r"flower_photos: .* cannot be stored there: Not a directory"):
        ensure_data_set(flowers)
    assert os.path.getsize("flower_photos") == 0


# ---------------------------------------------------------------------------------------------------- archives


def special(name: str, kind: bytes, target: str = "") -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type, member.linkname = kind, target
    return member


OUTSIDE = os.path.join(tempfile.gettempdir(), "flower_photos_evil")
EVIL = {
    "parent": special("../evil", tarfile.REGTYPE),
    "inner parent": special("flower_photos/../../evil", tarfile.REGTYPE),
    "parent folder": special("flower_photos/../../evil", tarfile.DIRTYPE),
    "absolute": special(OUTSIDE, tarfile.REGTYPE),
    "symbolic link": special("flower_photos/evil", tarfile.SYMTYPE, "../../../etc"),
    "absolute link": special("flower_photos/evil", tarfile.SYMTYPE, "/etc/passwd"),
    "hard link": special("flower_photos/evil", tarfile.LNKTYPE, "../victim"),
    "device": special("flower_photos/evil", tarfile.CHRTYPE),
    "pipe": special("flower_photos/evil", tarfile.FIFOTYPE),
}


@pytest.mark.parametrize("kind", EVIL)
def test_evil_archives(server, flowers, kind):
    os.mkdir("work")
    open("victim", "w").close()
    evil = holding(server, make_archive(FILES, EVIL[kind]), flowers)
    with pytest.raises(
        DataError, match=r"not safe to unpack, .*evil leads out of its folder, or is a link or a device"
    ):
        ensure_data_set(evil, "work")
    assert listing("victim", "work")
    assert os.stat("victim").st_nlink == 1
    assert os.listdir("work") == ["flower_photos.tgz.part"]
    assert not os.path.exists(OUTSIDE)


def test_what_lies_beside_the_folder_is_left_out_and_said(server, flowers, capfd):
    ensure_data_set(holding(server, make_archive({"./._flower_photos": b"1", **FILES}), flowers))
    assert "5 files, verified and unpacked (1 beside flower_photos in the archive left out)" in capfd.readouterr().err
    assert_complete()


def test_permissions_in_the_archive_do_not_matter(server, flowers):
    closed = special("flower_photos/c", tarfile.DIRTYPE)
    closed.mode = 0
    setuid = special("flower_photos/c/x.jpg", tarfile.REGTYPE)
    setuid.mode = 0o6777
    ensure_data_set(holding(server, make_archive(FILES, closed, setuid), flowers))
    assert os.stat("flower_photos/c").st_mode & 0o700 == 0o700
    assert os.stat("flower_photos/c/x.jpg").st_mode & 0o7111 == 0


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"no archive", "not a gzipped tar archive"),
        (make_archive(FILES)[:-20_000], "not a gzipped tar archive, or damaged"),
        (make_archive({"other/1.jpg": b"1"}), "no file in a folder flower_photos"),
    ],
    ids=["text", "cut", "other folder"],
)
def test_no_such_archive(server, flowers, body, reason):
    with pytest.raises(DataError, match=reason):
        ensure_data_set(holding(server, body, flowers))
    assert listing("flower_photos.tgz.part")


# ---------------------------------------------------------------------------------------------------- processes


def start(flowers: KnownDataSet, before: str = "") -> subprocess.Popen:
    code = f"from data import download; {before}\nprint(download.ensure_data_set(download.{flowers!r}))"
    environment = {**os.environ, "PYTHONPATH": PROJECT}
    return subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=-1, stderr=-1, text=True)


def kill(process: subprocess.Popen) -> None:
    process.send_signal(signal.SIGKILL)
    process.communicate()


def wait_until(condition) -> None:
    deadline = time.monotonic() + 20
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert condition()


def test_two_processes_download_once(server, flowers):
    server.script = ["stall 30000"]
    first = start(flowers)
    wait_until(lambda: server.log)
    second = start(flowers)
    assert second.stderr.readline() == "waiting for another process, which holds flower_photos.lock\n"
    server.gate.set()
    assert [process.communicate()[0] for process in (first, second)] == ["flower_photos\n"] * 2
    assert server.log == [[None, SIZE]]
    assert_complete()


def test_killed_while_downloading(server, flowers):
    """The one that waits takes over, and goes on where the other was."""
    server.script = ["stall 30000", "ranges"]
    first = start(flowers)
    wait_until(lambda: os.path.exists("flower_photos.tgz.part") and os.path.getsize("flower_photos.tgz.part"))
    second = start(flowers)
    second.stderr.readline()
    kill(first)
    have = os.path.getsize("flower_photos.tgz.part")
    assert second.communicate()[0] == "flower_photos\n"
    assert server.log[1] == [f"bytes={have}-", SIZE - have]
    assert_complete()


def test_killed_while_unpacking(server, flowers):
    slow = "import time; copy = download.shutil.copyfileobj\ndef slow(*a): copy(*a); time.sleep(0.5)\n"
    process = start(flowers, f"{slow}download.shutil.copyfileobj = slow")
    wait_until(lambda: os.path.exists("flower_photos.unpacking/flower_photos/a/2.jpg"))
    kill(process)
    assert listing("flower_photos.lock", "flower_photos.tgz.part", "flower_photos.unpacking")
    open("flower_photos.unpacking/flower_photos/half", "w").close()
    ensure_data_set(flowers)
    assert server.log == [[None, SIZE]]
    assert_complete()


@pytest.mark.parametrize(("limit", "kept"), [(40_000, 40_000), (10_000, SIZE)])
def test_no_room(server, flowers, limit, kept):
    """A limit on the size of a file stands for a full disk, while downloading or, with the archive there, unpacking."""
    leave_part(ARCHIVE[: kept if kept == SIZE else 100])
    process = start(flowers, f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))")
    message = process.communicate()[1].splitlines()[-1]
    assert message.startswith(
        f"data.errors.DataError: {os.path.realpath('flower_photos')}: {flowers.url} cannot be stored"
    )
    assert "File too large; make room, start in another folder, or download it by hand" in message
    assert listing("flower_photos.tgz.part")
    assert os.path.getsize("flower_photos.tgz.part") == kept
    ensure_data_set(flowers)
    assert_complete()


def test_the_lock_is_removed_and_still_excludes(tmp_path):
    inside, most = [], []

    def work():
        for _ in range(30):
            with download._locked(str(tmp_path / "lock")):
                inside.append(1)
                most.append(len(inside))
                time.sleep(0.0005)
                inside.pop()

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1] * 180
    assert os.listdir(tmp_path) == []


def test_import_arrows():
    """Only the standard library when imported; tqdm when it downloads."""
    code = "import sys; from data import download; print([m for m in ('tqdm', 'torch', 'utils') if m in sys.modules])"
    environment = {**os.environ, "PYTHONPATH": PROJECT}
    assert subprocess.check_output([sys.executable, "-c", code], env=environment, text=True) == "[]\n"

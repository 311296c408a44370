"""The digits: exact pixels and counts, complete or absent."""

import os
import signal
import subprocess
import sys
import time

import numpy
import pytest
from sklearn.datasets import load_digits

from data import demo
from data.demo import ensure_demo_data
from data.errors import DataError
from data.images import load_image
from data.split import make_split

COUNTS = [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]


def counts(folder) -> list[int]:
    return [len(os.listdir(folder / str(digit))) for digit in range(10)]


def test_digits_are_exact(tmp_path):
    folder = str(tmp_path / "new" / "demo_data")
    assert ensure_demo_data(folder) == folder
    assert os.listdir(tmp_path / "new") == ["demo_data"]
    assert counts(tmp_path / "new" / "demo_data") == COUNTS
    assert sum(COUNTS) == 1797
    digits = load_digits()
    scale = numpy.array([0, 16, 32, 48, 64, 80, 96, 112, 128, 143, 159, 175, 191, 207, 223, 239, 255])
    for index in (0, 1, 900, 1796):
        image = load_image(f"{folder}/{digits.target[index]}/digit_{index:04d}.png")
        assert image.size == (8, 8)
        assert (numpy.asarray(image)[..., 1] == scale[digits.images[index].astype(int)]).all()
    split = make_split(folder, val_rate=0.2, seed=0)
    assert split.counts() == [(str(digit), n - int(n * 0.2), int(n * 0.2)) for digit, n in enumerate(COUNTS)]
    assert split.notes == ()


def test_an_existing_folder_is_used_as_it_is(tmp_path):
    (tmp_path / "demo_data").mkdir()
    (tmp_path / "demo_data" / "mine.txt").touch()
    ensure_demo_data(str(tmp_path / "demo_data"))
    assert os.listdir(tmp_path / "demo_data") == ["mine.txt"]


def test_the_slower_of_two_discards_its_own(tmp_path, monkeypatch):
    folder = tmp_path / "demo_data"
    write = demo._write_digits

    def slow(temporary):
        write(temporary)
        monkeypatch.setattr(demo, "_write_digits", write)
        ensure_demo_data(str(folder))  # the other process, between our writing and our renaming
        (folder / "winner").touch()

    monkeypatch.setattr(demo, "_write_digits", slow)
    assert ensure_demo_data(str(folder)) == str(folder)
    assert (folder / "winner").exists()
    assert os.listdir(tmp_path) == ["demo_data"]


@pytest.fixture
def start(tmp_path_factory):
    """Starts a Python process with a stand-in for scikit-learn (2,000 digits), whose import takes seconds."""
    stub = tmp_path_factory.mktemp("stub")
    (stub / "sklearn").mkdir()
    (stub / "sklearn" / "__init__.py").touch()
    (stub / "sklearn" / "datasets.py").write_text(
        "import numpy, types\n"
        "def load_digits():\n"
        "    target = numpy.arange(2000) % 10\n"
        "    return types.SimpleNamespace(images=numpy.ones((2000, 8, 8)), target=target, target_names=range(10))\n"
    )
    project = os.path.dirname(os.path.dirname(os.path.abspath(demo.__file__)))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(stub), project])}
    return lambda code, folder: subprocess.Popen([sys.executable, "-c", code], cwd=folder, env=environment)


def test_two_processes_at_once(tmp_path, start):
    code = "from data.demo import ensure_demo_data; ensure_demo_data()"
    both = [start(code, tmp_path) for _ in range(2)]
    assert [process.wait() for process in both] == [0, 0]
    assert os.listdir(tmp_path) == ["demo_data"]
    assert counts(tmp_path / "demo_data") == [200] * 10


def test_killed_while_writing(tmp_path, start):
    code = (
        "import time; from PIL import Image; from data.demo import ensure_demo_data; save = Image.Image.save\n"
        "def slow(*a, **k): time.sleep(0.05); save(*a, **k)\n"
        "Image.Image.save = slow; ensure_demo_data()"
    )
    process = start(code, tmp_path)
    deadline = time.monotonic() + 20
    while not any(tmp_path.rglob("*.png")) and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert any(tmp_path.rglob("*.png"))
    assert not (tmp_path / "demo_data").exists()
    ensure_demo_data(str(tmp_path / "demo_data"))
    assert counts(tmp_path / "demo_data") == COUNTS


def test_mistakes(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match="file: the demo data cannot be written there"):
        ensure_demo_data(str(tmp_path / "file"))
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(DataError, match="pip install scikit-learn"):
        ensure_demo_data(str(tmp_path / "demo_data"))
    assert os.listdir(tmp_path) == ["file"]

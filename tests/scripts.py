"""Run the project's scripts as a user does: as processes of their own, in an empty working folder."""

import contextlib
import csv
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from PIL import Image

ROOT = Path(__file__).resolve().parent.parent
SINGLE, MULTI, PREDICT = "train_single_gpu.py", "train_multi_gpu.py", "predict.py"
# The surroundings of a test run must not tell a script that a launcher started it, nor which GPUs it has.
_FOREIGN = ("SLURM_", "TORCHELASTIC_", "PYTHON", "MASTER_", "LC_", "CUDA_")
_FOREIGN_NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "LANG", "COLUMNS")


@dataclass(frozen=True)
class Finished:
    """How a process ended: exit code (negative: a signal's number), its text, and the seconds it took."""

    returncode: int
    stdout: str
    stderr: str
    seconds: float

    @property
    def text(self) -> str:
        return self.stdout + self.stderr


def run_script(
    script: str,
    *options: object,
    cwd: Path,
    env: dict[str, str] | None = None,
    launcher: str | Sequence[str] | None = None,
    processes: int | None = None,
    timeout: float = 240,
) -> Finished:
    """Run `script` of this project in the folder `cwd` to its end.

    Args:
        options: its command line.
        env: variables beside the plain ones that every run gets.
        launcher: None, a name (see `launcher_words`), or the words that stand between `python` and the script.
        processes: what the named launcher shall start.

    What is still running after `timeout` seconds is killed, children included, and subprocess.TimeoutExpired is raised.
    """
    named = launcher is None or isinstance(launcher, str)
    start = launcher_words(launcher, processes) if named else [*launcher]
    command = [sys.executable, *start, str(ROOT / script), *map(str, options)]
    return run_command(command, cwd, environment(cwd, env), timeout)


def run_command(command: Sequence[str], cwd: Path, env: dict[str, str], timeout: float) -> Finished:
    start = time.monotonic()
    # A session of its own: one signal reaches the launcher and all that it started.
    process = subprocess.Popen(
        command, cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    )
    try:
        output, errors = process.communicate(timeout=timeout)
    except BaseException:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise
    texts = (text.decode("utf-8", "backslashreplace") for text in (output, errors))
    return Finished(process.returncode, *texts, time.monotonic() - start)


def environment(cwd: Path, extra: dict[str, str] | None = None) -> dict[str, str]:
    """One thread a process, UTF-8, no GPU, and a temporary folder that a test can look into."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(_FOREIGN) and name not in _FOREIGN_NAMES
    }
    temporary = temporary_folder(cwd)
    temporary.mkdir(exist_ok=True)
    plain = {"OMP_NUM_THREADS": "1", "TMPDIR": str(temporary), "CUDA_VISIBLE_DEVICES": "", "LC_ALL": "C.UTF-8"}
    return kept | plain | (extra or {})


def temporary_folder(cwd: Path) -> Path:
    return cwd.parent / f"{cwd.name}_temporary"


def left_in_temporary_folder(cwd: Path) -> list[str]:
    """What a script left there, but for the one cache folder of each user that torch makes when it is imported."""
    return [path.name for path in temporary_folder(cwd).iterdir() if not path.name.startswith("torchinductor_")]


def words(text: str) -> list[str]:
    """A command line's words, for options too many to be written as a list."""
    return text.split()


def launcher_words(name: str | None, processes: int | None) -> list[str]:
    """`launch` and `launch --use_env` are torch.distributed.launch's two ways, `torchrun` is torchrun --standalone."""
    if name is None:
        return []
    if name == "torchrun":
        return ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    module, *flags = name.split()
    port = f"--master_port={free_port()}"  # other tests run beside this one
    return ["-m", f"torch.distributed.{module}", f"--nproc_per_node={processes}", port, *flags]


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def side_by_side(calls: dict, at_once: int = 2) -> dict:
    """The results of functions without arguments, by the same names; two at a time keep two cores busy."""
    with ThreadPoolExecutor(at_once) as pool:
        futures = {name: pool.submit(call) for name, call in calls.items()}
        return {name: future.result() for name, future in futures.items()}


def newest_run(cwd: Path) -> Path:
    """The run folder in `cwd`/runs that was made last."""
    return max((cwd / "runs").iterdir(), key=lambda folder: (folder / "args.json").stat().st_mtime_ns)


def read_metrics(run: Path) -> list[dict[str, float]]:
    """The rows of metrics.csv as numbers."""
    with open(run / "metrics.csv", newline="", encoding="utf-8") as file:
        return [{name: float(value) for name, value in row.items()} for row in csv.DictReader(file)]


def read_rows(path: Path) -> list[dict[str, str]]:
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def read_checkpoint(path: Path) -> dict:
    """A checkpoint, read as data; a test that gets it knows that it holds nothing else (law L6)."""
    return torch.load(path, map_location="cpu", weights_only=True)


def difference(state: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """Norm of the difference of all floating-point tensors over the norm of `other`'s."""
    assert state.keys() == other.keys()
    floating = [key for key, tensor in other.items() if tensor.is_floating_point()]
    norm = sum(float(other[key].double().square().sum()) for key in floating) ** 0.5
    return sum(float((state[key].double() - other[key].double()).square().sum()) for key in floating) ** 0.5 / norm


def make_photos(folder: Path, classes: Iterable[str], each: int, pixels: int = 24) -> Path:
    """`each` PNG images a class, stripes whose direction and width are the class's, with an offset of the image's."""
    for number, name in enumerate(classes):
        (folder / name).mkdir(parents=True)
        for index in range(each):
            stripes(number, index, pixels).save(folder / name / f"{index:03d}.png")
    return folder


def stripes(number: int, index: int, pixels: int = 24) -> Image.Image:
    """Deterministic, with shades that overlap between the classes, so that a short training does not get all right."""
    image = Image.new("RGB", (pixels, pixels))
    for x in range(pixels):
        for y in range(pixels):
            along = x if number % 2 else y
            wave = 160 if (along + index) // (2 + number) % 2 else 40
            image.putpixel((x, y), (wave, (wave + 13 * index) % 256, (37 * index + 11 * number) % 256))
    return image

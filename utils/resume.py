"""Going on with a run: finding it, telling every process what it was, and which options it keeps.

The rule for options: a run keeps those that it was started with. Only what does not change the result may be given
anew (FREE_OPTIONS), and --epochs, which may grow. Any other option that is given and differs is named and ignored. The
images of a step stay the same too, so that another number of processes takes the same steps.
"""

import hashlib
import io
import json
import os
import socket
import subprocess
import sys
import tempfile
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from data.files import whole_file
from data.split import Split, make_split, read_split
from utils.checkpoint import read_checkpoint
from utils.distributed_utils import cleanup, get_rank, get_world_size, say
from utils.errors import UserError
from utils.options import given_options

FREE_OPTIONS = {
    *("resume", "epochs", "workers", "device", "world_size", "dist_url", "local_rank", "run_dir", "data_path"),
    *("save_minutes", "save_steps", "timeout", "data_parallel", "find_unused_parameters"),
}
# In this order: last.pth is what makes a folder a run that can go on, so it comes last.
RUN_FILES = ("args.json", "class_indices.json", "split.csv", "metrics.csv", "best.pth", "last.pth")


@dataclass(frozen=True)
class Resumed:
    """A run to go on with.

    Attributes:
        folder: where it goes on, on rank 0's machine.
        state: the content of last.pth.
        split: the run's own lists of images.
        notes: what has changed since, for the run to print.
    """

    folder: Path
    state: dict
    split: Split
    notes: tuple[str, ...]


def resume_or_start(args: Namespace, distributed: bool) -> tuple[Namespace, Resumed | None]:
    """The options to train with, and the run to go on with; None for a new run. The same on every process.

    A run is gone on with if --resume says so, or if the launcher of that run has started this process again.

    Raises:
        UserError: there is no such run, or it cannot be read.
        SystemExit: with code 0, the run is finished already.
    """
    folder = _named_run(args) if args.resume else _run_of_this_launcher(Path(args.run_dir))
    steps = _from_every_process(_step_of(folder))
    if max(steps) < 0:
        if args.resume:
            raise UserError(f"no run to go on with: there is none with a last.pth in {args.run_dir}/")
        return args, None
    owner = steps.index(max(steps))
    folder, files = _share(folder, owner)
    if owner != 0 and get_rank() == 0:
        _write_here(folder, files)
        print(f"the newest checkpoint lies with rank {owner}: the run goes on here, in {folder}", flush=True)
    state = torch.load(io.BytesIO(files["last.pth"]), map_location="cpu", weights_only=True)
    args, ignored = _options(state["args"], args, distributed)
    split, changes = _split(files["split.csv"], state, args)
    if state["epochs_done"] >= args.epochs:
        say(f"{folder} is already at epoch {state['epochs_done']} of {args.epochs}: nothing to do (--epochs may grow)")
        cleanup()
        sys.exit(0)
    return args, Resumed(folder, state, split, (*ignored, *changes))


def agent_identity() -> str | None:
    """Names the launcher's process that has started this one, for all time; None without an elastic launcher."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    parent = os.getppid()
    started = subprocess.run(["ps", "-o", "lstart=", "-p", str(parent)], capture_output=True, text=True).stdout.strip()
    return f"{os.environ['TORCHELASTIC_RUN_ID']} {socket.gethostname()} {parent} {started}"


def agents_of_all_processes() -> list[str]:
    """The launchers of all machines, each once; empty without an elastic launcher."""
    return sorted({agent for agent in _from_every_process(agent_identity()) if agent})


def split_hash(path: Path) -> str:
    """Of a run's split.csv, as its checkpoints hold it."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _named_run(args: Namespace) -> Path | None:
    if args.resume != "newest":
        path = Path(args.resume)
        if not path.exists() and get_world_size() == 1:
            raise UserError(f"--resume {args.resume}: no such run folder or file")
        return path if path.is_dir() else path.parent
    found = sorted(Path(args.run_dir).glob("*/last.pth"), key=lambda path: path.stat().st_mtime)
    return found[-1].parent if found else None


def _run_of_this_launcher(run_dir: Path) -> Path | None:
    agent = agent_identity()
    if agent is None:
        return None
    folders = (path.parent for path in run_dir.glob("*/agents.json") if agent in json.loads(path.read_text()))
    return max(folders, key=lambda folder: folder.stat().st_mtime, default=None)


def _step_of(folder: Path | None) -> int:
    if folder is None or not (folder / "last.pth").is_file():
        return -1
    state = read_checkpoint(folder / "last.pth", mmap=True)
    if "step" not in state or "args" not in state:
        raise UserError(f"{folder / 'last.pth'} holds weights but no run: --weights starts from it, --resume cannot")
    return state["step"]


def _from_every_process(value) -> list:
    if get_world_size() == 1:
        return [value]
    values = [None] * get_world_size()
    dist.all_gather_object(values, value)
    return values


def _share(folder: Path | None, owner: int) -> tuple[Path, dict[str, bytes]]:
    """The folder's name and files of the process that has the newest checkpoint, on every process."""
    content = [None]
    if get_rank() == owner:
        names = RUN_FILES if owner else ("split.csv", "last.pth")  # rank 0 needs the others to go on elsewhere
        content = [(str(folder), {name: (folder / name).read_bytes() for name in names if (folder / name).is_file()})]
    if get_world_size() > 1:
        dist.broadcast_object_list(content, src=owner)
    return Path(content[0][0]), content[0][1]


def _write_here(folder: Path, files: dict[str, bytes]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in RUN_FILES:
        if name in files:
            with whole_file(folder / name, "wb") as file:
                file.write(files[name])


def _options(saved: dict, args: Namespace, distributed: bool) -> tuple[Namespace, list[str]]:
    """The run's own options with the free ones of this start, and a sentence for each that is ignored."""
    given = given_options(distributed)
    ignored = [
        f"ignored: --{name.replace('_', '-')} {value}, the run keeps {saved[name]}"
        for name, value in given.items()
        if name not in FREE_OPTIONS and name in saved and value != saved[name]
    ]
    changed = {name: value for name, value in given.items() if name in FREE_OPTIONS}
    return Namespace(**{**vars(args), **saved, **changed}), ignored


def _split(content: bytes, state: dict, args: Namespace) -> tuple[Split, list[str]]:
    """The run's own split, and what has changed in the data folder since it was made."""
    if hashlib.sha256(content).hexdigest() != state["split_hash"]:
        raise UserError("the run's split.csv is not the one it was trained with: put it back, or start a new run")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "split.csv")
        path.write_bytes(content)
        moved = args.data_path if args.data_path != state["args"]["data_path"] else None
        split = read_split(str(path), moved)
    now = make_split(split.root, val_rate=args.val_rate, seed=args.seed)
    old, new = ({path for path, _ in (*part.train, *part.val)} for part in (split, now))
    if gone := sorted(old - new):
        raise UserError(f"{len(gone)} images of the run are gone, for example {gone[0]}: put them back to go on")
    return split, [f"{len(new - old)} images were added since the run began; it goes on without them"] * (new != old)

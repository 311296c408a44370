"""A harness that kills runs and lets them go on: `python -m tests.faults --runs 60` (see --help).

Each trial trains a small net on one, two or three processes, is killed with SIGKILL at random moments (a worker, all
processes, or the launcher alone), goes on with --resume until it is done, and must end with weights that are bit for
bit those of a run that nobody disturbed. No checkpoint may ever be unreadable, no process may be left behind.
"""

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from tests.makers import make_photos

ROOT = Path(__file__).resolve().parent.parent
OPTIONS = "--device cpu --model resnet18 --no-pretrained --image-size 16 --batch-size 4 --workers 1 --save-steps 2"
VICTIMS = ("worker", "all", "launcher")


def command(folder: Path, processes: int, *more: str, epochs: int = 2) -> list[str]:
    script = "train_single_gpu.py" if processes == 1 else "train_multi_gpu.py"
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"] if processes > 1 else []
    options = [*OPTIONS.split(), "--data-path", str(folder / "photos"), "--epochs", str(epochs), *more]
    return [sys.executable, *launcher, str(ROOT / script), *options]


def start(words: list[str], log: Path) -> subprocess.Popen:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with open(log, "ab") as file:
        return subprocess.Popen(words, stdout=file, stderr=file, env=environment, start_new_session=True)


def children(parent: int) -> list[int]:
    """The processes that `parent` has started, as they are now."""
    rows = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    pairs = (map(int, row.split()) for row in rows.splitlines())
    return [pid for pid, ppid in pairs if ppid == parent]


def descendants(parent: int) -> list[int]:
    """The processes that `parent` has started, and those that they have started."""
    return [pid for child in children(parent) for pid in (child, *descendants(child))]


def is_alive(pid: int) -> bool:
    try:
        state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True).stdout.strip()
    except OSError:
        return False
    return bool(state) and not state.startswith("Z")


def wait_until_gone(pids: list[int], seconds: float) -> list[int]:
    """The processes that are still there after so many seconds."""
    deadline = time.monotonic() + seconds
    while (left := [pid for pid in pids if is_alive(pid)]) and time.monotonic() < deadline:
        time.sleep(0.2)
    return left


def kill(process: subprocess.Popen, victim: str, dice: random.Random) -> list[int]:
    """Kills the victim; returns the processes that must be gone soon."""
    family = descendants(process.pid)
    workers = children(process.pid) or [process.pid]
    targets = {
        "worker": [dice.choice(workers)],
        "all": [process.pid, *family],
        "launcher": [process.pid],
    }[victim]
    for pid in targets:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    return family


def weights(run_dir: Path) -> dict[str, torch.Tensor]:
    (run,) = [folder for folder in run_dir.iterdir() if (folder / "last.pth").exists()]
    return torch.load(run / "last.pth", map_location="cpu", weights_only=True)["model"]


def read_all(run_dir: Path) -> None:
    """Every checkpoint under its own name is whole at any time."""
    for path in run_dir.glob("*/*.pth"):
        torch.load(path, map_location="cpu", weights_only=True)


def undisturbed(folder: Path, processes: int) -> tuple[dict[str, torch.Tensor], float]:
    """The weights of a run that nobody disturbs, and the seconds from its first step to its end."""
    run_dir, log = folder / f"whole{processes}", folder / f"whole{processes}.log"
    process = start(command(folder, processes, "--run-dir", str(run_dir)), log)
    wait_for_training(process, log, 0)
    begun = time.monotonic()
    assert process.wait(600) == 0, log.read_text()
    return weights(run_dir), time.monotonic() - begun


def wait_for_training(process: subprocess.Popen, log: Path, before: int) -> int:
    """Waits until one more start has come to its first step, or the process has ended; how many have by now."""
    while process.poll() is None and log.read_text(errors="replace").count("\nwatch ") == before:
        time.sleep(0.05)
    return log.read_text(errors="replace").count("\nwatch ")


def trial(folder: Path, processes: int, victim: str, seed: int, expected: dict, seconds: float, kills: int = 2) -> dict:
    """One run that is killed until it is done; raises AssertionError where a promise is broken."""
    dice, run_dir, log = random.Random(seed), folder / f"trial{seed}", folder / f"trial{seed}.log"
    starts, done, begun, resume = 0, 0, 0, []
    while True:
        process = start(command(folder, processes, "--run-dir", str(run_dir), *resume), log)
        starts += 1
        begun = wait_for_training(process, log, begun)
        try:
            code = process.wait(dice.uniform(0, 0.8) * seconds if done < kills else 600)
        except subprocess.TimeoutExpired:
            family = kill(process, victim, dice)
            done += 1
            process.wait(60)
            left = wait_until_gone(family, 30 if victim == "worker" else 15)
            assert not left, f"processes {left} are left behind\n{log.read_text()[-3000:]}"
            read_all(run_dir)
        else:
            if code == 0:
                break
            assert done, log.read_text()[-3000:]
        resume = ["--resume"] if list(run_dir.glob("*/last.pth")) else []
        assert starts < 12, log.read_text()[-3000:]
    final = weights(run_dir)
    different = [name for name in expected if not torch.equal(final[name], expected[name])]
    assert not different, f"{len(different)} tensors differ after {done} kills, {different[0]} among them"
    rows = next(run_dir.glob("*/metrics.csv")).read_text().splitlines()
    assert [row.split(",")[0] for row in rows] == ["epoch", "0", "1"], rows
    return {"starts": starts, "kills": done}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=60, help="how many (60)")
    parser.add_argument("--kills", type=int, default=2, help="of one run at the most (2)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", help="where to work (a temporary folder)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(args.folder or temporary)
        make_photos(folder / "photos", {"cat": 15, "dog": 15, "owl": 15})
        wholes = {processes: undisturbed(folder, processes) for processes in (1, 2, 3)}
        kills = 0
        for number in range(args.runs):
            processes, victim = 1 + number % 3, VICTIMS[number // 3 % 3]
            result = trial(folder, processes, victim, args.seed + number, *wholes[processes], args.kills)
            kills += result["kills"]
            print(f"{number + 1:3} of {args.runs}: {processes} process(es), {victim:8} killed {result}", flush=True)
            subprocess.run(["rm", "-rf", str(folder / f"trial{args.seed + number}")], check=True)
    print(f"{args.runs} runs, {kills} kills: weights bit-identical in all, every checkpoint whole, nothing left behind")


if __name__ == "__main__":
    main()

"""A run that was stopped, killed or moved goes on exactly (law L3), as the real scripts, under every launcher."""

import os
import re
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests import faults
from tests.makers import make_photos
from tests.scripts import (
    MULTI,
    ROOT,
    SINGLE,
    difference,
    environment,
    free_port,
    read_checkpoint,
    read_metrics,
    run_script,
)

TRAINING = faults.OPTIONS.split()
LAUNCH = [sys.executable, "-m", "torch.distributed.launch", "--nproc_per_node=2", str(ROOT / MULTI)]
SIGNALS = ["--signals-to-handle", "SIGTERM,SIGINT,SIGUSR1"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("resume")
    make_photos(folder / "photos", {"cat": 15, "dog": 15, "owl": 15})
    return folder


@pytest.fixture(scope="module")
def whole(base):
    """Weights, run folder and seconds of the runs that nobody disturbed, on one and on two processes."""
    runs = {}
    for processes in (1, 2):
        state, seconds = faults.undisturbed(base, processes)
        runs[processes] = state, next((base / f"whole{processes}").iterdir()), seconds
    return runs


def options(base: Path, run_dir: str, *more: str, epochs: int = 2) -> list[str]:
    return [
        *TRAINING,
        "--data-path",
        str(base / "photos"),
        "--epochs",
        str(epochs),
        "--run-dir",
        str(base / run_dir),
        *more,
    ]


def without_batch_size(words: list[str]) -> list[str]:
    place = words.index("--batch-size")
    return words[:place] + words[place + 2 :]


def begin(words: list[str], base: Path, name: str) -> subprocess.Popen:
    with open(base / f"{name}.log", "wb") as file:
        return subprocess.Popen(
            words, cwd=base, env=environment(base), stdout=file, stderr=file, start_new_session=True
        )


def wait_for(path: Path, pattern: str, seconds: float = 90) -> None:
    deadline = time.monotonic() + seconds
    while not re.search(pattern, path.read_text()):
        assert time.monotonic() < deadline, path.read_text()
        time.sleep(0.1)


def only_run(base: Path, run_dir: str) -> Path:
    (folder,) = (base / run_dir).iterdir()
    return folder


def same(state: dict, other: dict) -> bool:
    return state.keys() == other.keys() and all(torch.equal(state[name], other[name]) for name in state)


@pytest.mark.parametrize(
    ("processes", "victim"),
    [(2, "worker"), *(pytest.param(*each, marks=pytest.mark.slow) for each in ((1, "all"), (2, "launcher")))],
)
def test_killed_at_random_moments_it_ends_with_the_same_weights_bit_for_bit(base, whole, processes, victim):
    state, _, seconds = whole[processes]
    result = faults.trial(base, processes, victim, 100 + 10 * processes + len(victim), state, seconds, kills=1)
    assert result["kills"] >= 1


STOPS = {
    "plain TERM": ([sys.executable, str(ROOT / MULTI), "--world-size", "2"], signal.SIGTERM, 143),
    "plain USR1": ([sys.executable, str(ROOT / MULTI), "--world-size", "2"], signal.SIGUSR1, 138),
    "torchrun INT": ([*TORCHRUN, *SIGNALS, str(ROOT / MULTI)], signal.SIGINT, 1),
    "launch TERM": (LAUNCH, signal.SIGTERM, 1),
    "single INT": ([sys.executable, str(ROOT / SINGLE)], signal.SIGINT, 130),
}


SLOW_STOPS = ("plain TERM", "torchrun INT", "launch TERM")


@pytest.mark.parametrize(
    "name", ["plain USR1", "single INT", *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW_STOPS)]
)
def test_a_signal_stops_all_processes_and_loses_no_step(base, whole, name):
    words, number, code = STOPS[name]
    run_dir, log = name.replace(" ", "_"), base / f"{name}.log"
    process = begin([*words, *options(base, run_dir)], base, name)
    wait_for(log, "watch ")
    family = faults.descendants(process.pid)
    sent = time.monotonic()
    process.send_signal(number)
    assert process.wait(30) == code, log.read_text()
    assert not faults.wait_until_gone(family, 10 - (time.monotonic() - sent)), log.read_text()
    steps = 18 if "single" in name else 8
    assert re.search(
        rf"stopped by {number.name} after step \d+ of {steps}; go on with:\n  .*--resume ",
        log.read_text(),
    )
    done = read_checkpoint(only_run(base, run_dir) / "last.pth")["step"]
    assert 0 <= done < 18
    finish = begin([*words, *options(base, run_dir, "--resume")], base, f"{name} again")
    assert finish.wait(120) == 0, (base / f"{name} again.log").read_text()
    assert (f"goes on after step {done}" if done else "run ") in (base / f"{name} again.log").read_text()
    expected = whole[1 if "single" in name else 2][0]
    assert same(read_checkpoint(only_run(base, run_dir) / "last.pth")["model"], expected)


@pytest.mark.slow
def test_a_killed_worker_under_max_restarts_needs_nobodys_help(base, whole):
    words = [*TORCHRUN, "--max-restarts=3", str(ROOT / MULTI), *options(base, "elastic")]
    process = begin(words, base, "elastic")
    wait_for(base / "elastic.log", "watch ")
    os.kill(faults.children(process.pid)[1], signal.SIGKILL)
    assert process.wait(120) == 0, (base / "elastic.log").read_text()
    folder = only_run(base, "elastic")
    assert same(read_checkpoint(folder / "last.pth")["model"], whole[2][0])
    # The same command another day is another run.
    assert begin(words, base, "elastic later").wait(120) == 0
    assert len(list((base / "elastic").iterdir())) == 2


def test_metrics_and_events_go_on_without_a_doubled_or_missing_step(base, whole):
    for processes, run_dir in ((1, "single_INT"), (2, "plain_USR1")):
        folder = only_run(base, run_dir)
        rows, expected = read_metrics(folder), read_metrics(whole[processes][1])
        assert [row["epoch"] for row in rows] == [0, 1]
        for name in ("val_loss", "val_top1", "lr"):
            assert [row[name] for row in rows] == [row[name] for row in expected]
        assert [row["train_loss"] for row in rows] == pytest.approx([row["train_loss"] for row in expected], rel=1e-12)
        events = EventAccumulator(str(folder)).Reload()
        steps = {1: 18, 2: 8}[processes]
        assert [event.step for event in events.Scalars("step/loss")] == list(range(steps))
        assert [event.step for event in events.Scalars("validation/top1")] == [steps // 2, steps]
        assert len(list(folder.glob("events*"))) == 2


@pytest.mark.slow
def test_a_changed_option_is_named_and_ignored_more_epochs_are_not(base):
    first = run_script(SINGLE, *options(base, "more"), cwd=base)
    assert first.returncode == 0, first.text
    done = run_script(SINGLE, *options(base, "more", "--resume"), cwd=base)
    assert done.returncode == 0
    assert "already at epoch 2 of 2" in done.stdout
    again = run_script(SINGLE, *options(base, "more", "--resume", "--lr", "0.5", epochs=3), cwd=base)
    assert again.returncode == 0, again.text
    assert "ignored: --lr 0.5, the run keeps 0.01" in again.stdout
    rows = read_metrics(only_run(base, "more"))
    assert [row["epoch"] for row in rows] == [0, 1, 2]
    assert rows[2]["lr"] < 0.01
    args = read_checkpoint(only_run(base, "more") / "last.pth")["args"]
    assert (args["lr"], args["epochs"]) == (0.01, 3)


@pytest.mark.slow
def test_another_number_of_processes_goes_on_with_the_same_steps(base):
    shared = ["--float64", "--lr", "0.01"]
    plain = without_batch_size(options(base, "moved", *shared))
    words = [sys.executable, str(ROOT / SINGLE), *plain, "--global-batch-size", "12"]
    process = begin(words, base, "moved")
    wait_for(base / "moved.log", "watch ")
    process.send_signal(signal.SIGTERM)
    process.wait(30)
    moved = run_script(MULTI, *plain, "--resume", "--world-size", "2", cwd=base)
    assert moved.returncode == 0, moved.text
    undisturbed = run_script(SINGLE, *[w.replace("moved", "stayed") for w in words[2:]], cwd=base)
    assert undisturbed.returncode == 0, undisturbed.text
    state, expected = (read_checkpoint(only_run(base, name) / "last.pth")["model"] for name in ("moved", "stayed"))
    assert difference(state, expected) < 1e-6


def test_a_living_run_cannot_be_resumed_and_a_changed_split_is_noticed(base):
    process = begin([sys.executable, str(ROOT / SINGLE), *options(base, "alive", epochs=50)], base, "alive")
    wait_for(base / "alive.log", "epoch 1/")
    refused = run_script(SINGLE, *options(base, "alive", "--resume", epochs=50), cwd=base)
    assert refused.returncode == 2
    assert re.fullmatch(r"error: .*is being trained by another process.*\n", refused.stderr)
    process.send_signal(signal.SIGTERM)
    process.wait(30)
    split = only_run(base, "alive") / "split.csv"
    split.write_text(split.read_text().replace(",val", ",train", 1))
    changed = run_script(SINGLE, *options(base, "alive", "--resume", epochs=50), cwd=base)
    assert (changed.returncode, len(changed.stderr.splitlines())) == (2, 1)
    assert "split.csv" in changed.stderr


def test_a_disk_that_is_full_leaves_the_old_checkpoint_whole(base):
    run_dir = base / "full"
    words = [sys.executable, str(ROOT / SINGLE), *options(base, "full")]
    process = begin(words, base, "full")
    wait_for(base / "full.log", "watch ")
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (4_000_000, 4_000_000))
    assert process.wait(60) == 2, (base / "full.log").read_text()
    (sentence,) = [line for line in (base / "full.log").read_text().splitlines() if line.startswith("error")]
    assert "last.pth cannot be written" in sentence
    assert "--resume" in sentence
    faults.read_all(run_dir)
    assert not list(run_dir.glob("*/.*.tmp"))


STALL = """
import os, sys, time
if os.environ.get("RANK") == "1" and sys.argv[0].endswith("train_multi_gpu.py"):
    import torch
    step = torch.optim.SGD.step
    calls = []
    def slow(self, *a, **k):
        calls.append(1)
        if len(calls) == 3:
            {what}
        return step(self, *a, **k)
    torch.optim.SGD.step = slow
"""


@pytest.mark.parametrize(
    ("name", "what", "code", "expected"),
    [
        pytest.param(
            "stall",
            "time.sleep(600)",
            1,
            r"error: waited 12 seconds at step \d+: rank 1 did not arrive",
            marks=pytest.mark.slow,
        ),
        (
            "memory",
            "raise torch.OutOfMemoryError('CUDA out of memory')",
            2,
            r"out of memory with 4 images.*--batch-size 2",
        ),
        pytest.param(
            "killed", "os.kill(os.getpid(), 9)", 137, r"process 1 was ended by SIGKILL", marks=pytest.mark.slow
        ),
        pytest.param("bug", "raise KeyError('a bug')", 1, r"KeyError: 'a bug'", marks=pytest.mark.slow),
    ],
)
def test_one_rank_in_trouble_ends_all_and_says_why_once(base, name, what, code, expected):
    place = base / f"site {name}"
    place.mkdir()
    (place / "sitecustomize.py").write_text(STALL.format(what=what))
    limits = ["--timeout", "0.2"] if name == "stall" else []
    begun = time.monotonic()
    ended = run_script(
        MULTI,
        *options(base, f"trouble {name}", "--world-size", "2", *limits),
        cwd=base,
        env={"PYTHONPATH": str(place)},
    )
    assert ended.returncode == code or name == "stall", ended.text
    assert len(re.findall(expected, ended.text)) == 1, ended.text
    assert "Connection closed" not in ended.text
    assert time.monotonic() - begun < 90
    faults.read_all(base / f"trouble {name}")


def test_a_killed_loader_process_is_told_with_its_likely_cause(base):
    process = begin([sys.executable, str(ROOT / SINGLE), *options(base, "loader", epochs=50)], base, "loader")
    wait_for(base / "loader.log", "watch ")
    deadline = time.monotonic() + 30
    while not (children := faults.descendants(process.pid)) and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(1.0)
    for pid in children:
        os.kill(pid, signal.SIGKILL)
    assert process.wait(60) == 2, (base / "loader.log").read_text()
    assert "--shm-size" in (base / "loader.log").read_text()


@pytest.mark.slow
def test_two_agents_make_the_weights_of_one_and_only_rank_0_writes(base):
    double = ["--float64", "--global-batch-size", "12"]
    plain, port = without_batch_size(options(base, "agents")) + double, free_port()
    agents = [
        [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", f"--node-rank={node}", "--nproc-per-node=1"]
        + ["--master-addr=127.0.0.1", f"--master-port={port}", str(ROOT / MULTI)]
        + [word.replace("/agents", f"/agents{node}") for word in plain]
        for node in (0, 1)
    ]
    both = [begin(words, base, f"agent{node}") for node, words in enumerate(agents)]
    assert [process.wait(120) for process in both] == [0, 0], (base / "agent0.log").read_text()
    assert not (base / "agents1").exists()
    alone = run_script(MULTI, *[w.replace("/agents", "/alone") for w in plain], "--world-size", "2", cwd=base)
    assert alone.returncode == 0, alone.text
    state, expected = (read_checkpoint(only_run(base, name) / "last.pth")["model"] for name in ("agents0", "alone"))
    assert difference(state, expected) < 1e-9

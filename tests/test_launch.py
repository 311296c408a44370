"""Every way to start the training scripts: one result, one run folder, nothing left over (DESIGN.md, law L1)."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import scripts
from tests.scripts import MULTI, SINGLE, difference, free_port, newest_run, read_checkpoint, read_metrics, run_script

FILES = ["args.json", "best.pth", "class_indices.json", "last.pth", "metrics.csv", "split.csv"]
TRAINING = "--device cpu --model resnet18 --no-pretrained --image-size 16 --global-batch-size 8 --float64".split()
TRAINING += "--epochs 2 --lr 0.01 --workers 0 --val-rate 0.25".split()
TUTORIAL = "-m torch.distributed.launch --nnodes=1 --nproc_per_node=2".split()
# Launcher, processes and options of one start each.
STARTS = {
    "single": (SINGLE, None, None, []),
    "plain": (MULTI, None, None, []),
    "world-size": (MULTI, None, None, ["--world-size", "2"]),
    "use_env": (MULTI, "launch --use_env", 2, []),
    "torchrun": (MULTI, "torchrun", 2, []),
}
EVERY_START = [*STARTS, "tutorial", "slurm", "together"]
DIGITS = "--device cpu --global-batch-size 96 --syncBN --float64 --lr 0.01 --epochs 2 --workers 0".split()


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    return scripts.make_photos(tmp_path_factory.mktemp("data") / "photos", ["cat", "dog", "owl"], each=12)


@pytest.fixture(scope="module")
def runs(tmp_path_factory, photos):
    """Each start's working folder and how its process, or its processes, ended."""
    folders = {name: tmp_path_factory.mktemp(name.replace("-", "_")) for name in EVERY_START}
    options = [*TRAINING, "--data-path", photos]
    calls = {name: lambda name=name: [start(name, options, folders[name])] for name in STARTS}
    calls["tutorial"] = lambda: [start_as_tutorials_do(options, folders["tutorial"])]
    calls["slurm"] = lambda: start_under_slurm(options, folders["slurm"])
    ended = scripts.side_by_side(calls)
    twice = {number: lambda: start("world-size", options, folders["together"]) for number in range(2)}
    ended["together"] = [*scripts.side_by_side(twice).values()]
    return {name: (folders[name], ended[name]) for name in EVERY_START}


def start(name, options, cwd):
    script, launcher, processes, own_options = STARTS[name]
    return run_script(script, *options, *own_options, cwd=cwd, launcher=launcher, processes=processes)


def start_as_tutorials_do(options, cwd):
    words = [*TUTORIAL, f"--master_port={free_port()}"]
    return run_script(MULTI, *options, cwd=cwd, launcher=words, env={"CUDA_VISIBLE_DEVICES": "0,1"})


def start_under_slurm(options, cwd):
    """What `srun -n 2` does: it starts the script twice and tells each process its number."""
    job = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_NTASKS": "2", "SLURM_JOB_NODELIST": "127.0.0.1"}
    job |= {"SLURM_NNODES": "1", "SLURM_TASKS_PER_NODE": "2", "SLURM_STEP_ID": "0"}
    tasks = {
        rank: job | {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank), "SLURM_NODEID": "0"} for rank in range(2)
    }
    calls = {rank: lambda env=env: run_script(MULTI, *options, cwd=cwd, env=env) for rank, env in tasks.items()}
    return [*scripts.side_by_side(calls).values()]


@pytest.mark.parametrize("name", EVERY_START)
def test_every_start_ends_well_and_quietly(runs, name):
    for ended in runs[name][1]:
        assert ended.returncode == 0, ended.text
        for noise in ("Traceback", "destroy_process_group", "UserWarning", "Connection closed", "Error"):
            assert noise not in ended.text


@pytest.mark.parametrize("name", EVERY_START)
def test_every_start_leaves_one_run_folder_written_by_one_process(runs, name):
    cwd, ended = runs[name]
    jobs = 2 if name == "together" else 1
    assert sorted(path.name for path in cwd.iterdir()) == ["runs"]
    folders = sorted((cwd / "runs").iterdir())
    assert len(folders) == jobs
    for folder in folders:
        assert sorted(path.name for path in folder.iterdir() if "tfevents" not in path.name) == FILES
        assert len([*folder.glob("*tfevents*")]) == 1
        assert [row["epoch"] for row in read_metrics(folder)] == [0, 1]
        assert str(folder.relative_to(cwd)) in "".join(one.stdout for one in ended)
    assert sum(one.stdout.count("epoch 2/2") for one in ended) == jobs
    assert [*scripts.temporary_folder(cwd).iterdir()] == []


@pytest.mark.parametrize("name", [name for name in EVERY_START if name != "single"])
def test_every_start_trains_the_same(runs, name):
    expected = newest_run(runs["single"][0])
    for folder in (runs[name][0] / "runs").iterdir():
        assert_same_training(folder, expected, 1e-9)


def assert_same_training(run: Path, expected: Path, tolerance: float) -> None:
    """Weights of last.pth and losses to `tolerance`, relative; accuracies and learning rates exactly."""
    rows, expected_rows = read_metrics(run), read_metrics(expected)
    assert len(rows) == len(expected_rows)
    for row, expected_row in zip(rows, expected_rows, strict=True):
        for name in ("epoch", "val_top1", "val_top5", "lr"):
            assert row[name] == expected_row[name], name
        for name in ("train_loss", "val_loss"):
            assert row[name] == pytest.approx(expected_row[name], rel=tolerance), name
    state, expected_state = (read_checkpoint(folder / "last.pth")["model"] for folder in (run, expected))
    assert difference(state, expected_state) < tolerance


def test_training_moved_the_weights(runs):
    """Else the equalities above would be those of runs that did nothing."""
    run = newest_run(runs["single"][0])
    state = read_checkpoint(run / "last.pth")["model"]
    assert int(state["bn1.num_batches_tracked"]) == 2 * (27 // 8)
    assert difference(state, read_checkpoint(run / "best.pth")["model"]) > 1e-6 or read_metrics(run)[1]["val_top1"] > (
        read_metrics(run)[0]["val_top1"]
    )


def test_jobs_of_one_moment_do_not_meet(runs):
    cwd, ended = runs["together"]
    assert max(one.seconds for one in ended) < sum(one.seconds for one in ended)
    named = [[folder.name in one.stdout for one in ended] for folder in sorted((cwd / "runs").iterdir())]
    assert sorted(named) == [[False, True], [True, False]]


def test_the_processes_are_those_asked_for(runs):
    for name in EVERY_START:
        processes = 1 if name in ("single", "plain") else 2
        assert f"batch {8 // processes} x {processes} processes" in runs[name][1][0].stdout + runs[name][1][-1].stdout


@pytest.mark.parametrize("launcher", ["torchrun"])
def test_a_world_size_that_the_launcher_contradicts_is_one_sentence(tmp_path, photos, launcher):
    cwd = tmp_path / "work"
    cwd.mkdir()
    options = [*TRAINING, "--data-path", photos, "--world-size", "3"]
    ended = run_script(MULTI, *options, cwd=cwd, launcher=launcher, processes=2)
    assert ended.returncode not in (0, -9)
    sentences = [line for line in ended.stderr.splitlines() if line.startswith("error: ")]
    assert len(sentences) == 1
    assert "--world-size 3" in sentences[0]
    assert "2 processes" in sentences[0]
    assert "Traceback (most recent call last)" not in ended.stderr
    assert not (cwd / "runs").exists()


def train_digits(folder, processes, options):
    """One run in a folder of its own; None processes: the script for one device."""
    folder.mkdir()
    own_options = [] if processes is None else ["--world-size", processes]
    ended = run_script(SINGLE if processes is None else MULTI, *options, *own_options, cwd=folder, timeout=900)
    assert ended.returncode == 0, ended.text
    return newest_run(folder)


@pytest.fixture(scope="module")
def demo_data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("digits") / "demo_data"
    code = f"from data.demo import ensure_demo_data; ensure_demo_data({str(folder)!r})"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=scripts.ROOT)
    return folder


SMALL = "--model resnet18 --image-size 16 --val-rate 0.6 --no-pretrained --hflip 0 --crop-scale 0.7".split()


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(SMALL, id="small"),
        pytest.param(["--model", "resnet18", "--image-size", "32", "--no-pretrained"], id="full", marks=pytest.mark.slow),
    ],
)
def test_the_digits_train_the_same_on_any_number_of_processes(tmp_path, demo_data, options):
    options = [*DIGITS, *options, "--data-path", demo_data]
    calls = {
        name: lambda name=name: train_digits(tmp_path / str(name), name, options) for name in (None, 1, 2, 3)
    }
    folders = scripts.side_by_side(calls, at_once=1 + ("16" in options))
    for processes in (1, 2, 3):
        assert_same_training(folders[processes], folders[None], 1e-6)

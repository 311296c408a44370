"""Every way to start the training scripts: one result, one run folder, nothing left over (DESIGN.md, law L1)."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import scripts
from tests.scripts import (
    MULTI,
    SINGLE,
    difference,
    free_port,
    newest_run,
    read_checkpoint,
    read_metrics,
    run_script,
    words,
)

FILES = {"args.json", "best.pth", "class_indices.json", "last.pth", "metrics.csv", "split.csv"}
TRAINING = words("--device cpu --model resnet18 --no-pretrained --image-size 16 --global-batch-size 6 --float64")
TRAINING += words("--epochs 1 --lr 0.01 --workers 0 --val-rate 0.25")
TUTORIAL = words("-m torch.distributed.launch --nnodes=1 --nproc_per_node=2")
# Launcher, processes and options of one start each.
STARTS = {
    "single": (SINGLE, None, None, []),
    "plain": (MULTI, None, None, []),
    "world-size": (MULTI, None, None, ["--world-size", "3"]),
    "use_env": (MULTI, "launch --use_env", 2, []),
    "torchrun": (MULTI, "torchrun", 2, []),
}
TOGETHER = ["torchrun", "world-size"]  # started at one moment in one folder: they must not meet
EVERY_START = ["single", "plain", "use_env", "tutorial", "slurm", "together"]
DIGITS = words("--device cpu --model resnet18 --no-pretrained --image-size 32 --hflip 0 --crop-scale 0.7 --workers 0")
DIGITS += words("--global-batch-size 96 --syncBN --float64 --lr 0.01 --epochs 2")


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    return scripts.make_photos(tmp_path_factory.mktemp("data") / "photos", ["cat", "dog", "owl"], each=12)


@pytest.fixture(scope="module")
def runs(tmp_path_factory, photos):
    """Each start's working folder and how its process, or its processes, ended."""
    folders = {name: tmp_path_factory.mktemp(name) for name in EVERY_START}
    options = [*TRAINING, "--data-path", photos]
    calls = {name: lambda name=name: [start(name, options, folders[name])] for name in ("single", "plain", "use_env")}
    calls["tutorial"] = lambda: [start_as_tutorials_do(options, folders["tutorial"])]
    calls["slurm"] = lambda: start_under_slurm(options, folders["slurm"])
    ended = scripts.side_by_side(calls)
    both = {name: lambda name=name: start(name, options, folders["together"]) for name in TOGETHER}
    ended["together"] = [*scripts.side_by_side(both).values()]
    yield {name: (folders[name], ended[name]) for name in EVERY_START}
    for folder in folders.values():
        shutil.rmtree(folder / "runs")  # 300 MB each


def start(name, options, cwd):
    script, launcher, processes, own_options = STARTS[name]
    return run_script(script, *options, *own_options, cwd=cwd, launcher=launcher, processes=processes)


def start_as_tutorials_do(options, cwd):
    launcher = [*TUTORIAL, f"--master_port={free_port()}"]
    return run_script(MULTI, *options, cwd=cwd, launcher=launcher, env={"CUDA_VISIBLE_DEVICES": "0,1"})


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
        names = {path.name for path in folder.iterdir()}
        assert names >= FILES
        assert not [name for name in names if name.startswith(".") or name.endswith(".tmp")]
        assert len([*folder.glob("*tfevents*")]) == 1
        assert [row["epoch"] for row in read_metrics(folder)] == [0]
        assert str(folder.relative_to(cwd)) in "".join(one.stdout for one in ended)
    assert sum(one.stdout.count("epoch 1/1") for one in ended) == jobs
    left = scripts.left_in_temporary_folder(cwd)
    # torch's launchers leave an empty folder of their own behind; ours must not.
    assert [path.partition("_")[0] for path in left] == ["torchelastic"] * (name in ("use_env", "tutorial", "together"))


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
    assert int(state["bn1.num_batches_tracked"]) == 27 // 6
    assert state["layer4.1.bn2.weight"].sub(1).abs().max() > 1e-5  # norms begin at 1


def test_jobs_of_one_moment_do_not_meet(runs):
    cwd, ended = runs["together"]
    named = [[f"runs/{folder.name}\n" in one.stdout for one in ended] for folder in sorted((cwd / "runs").iterdir())]
    assert sorted(named) == [[False, True], [True, False]]


def test_the_processes_are_those_asked_for(runs):
    for name, counts in {"single": [1], "plain": [1], "use_env": [2], "tutorial": [2], "together": [2, 3]}.items():
        said = [re.search(r"^device\b.*?\b(\d+) process", one.stdout, re.MULTILINE) for one in runs[name][1]]
        assert [int(match[1]) for match in said] == counts


def test_a_world_size_that_the_launcher_contradicts_is_one_sentence(tmp_path, photos):
    cwd = tmp_path / "work"
    cwd.mkdir()
    options = [*TRAINING, "--data-path", photos, "--world-size", "3"]
    ended = run_script(MULTI, *options, cwd=cwd, launcher="torchrun", processes=2)
    assert ended.returncode == 1
    sentences = [line for line in ended.stderr.splitlines() if line.startswith("error: ")]
    assert len(sentences) == 1
    assert "--world-size 3" in sentences[0]
    assert "2 processes" in sentences[0]
    # No traceback of ours; the launcher, which may lie in our .venv, shows its own.
    assert not re.search(rf'File "{re.escape(str(scripts.ROOT))}/(?!\.venv)', ended.stderr)
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


@pytest.mark.slow
def test_the_digits_train_the_same_on_any_number_of_processes(tmp_path, demo_data):
    """Law L1 with the real scripts and data: four minutes on two cores. The runs above are its small form."""
    options = [*DIGITS, "--data-path", demo_data]
    folders = {name: train_digits(tmp_path / str(name), name, options) for name in (None, 1, 2, 3)}
    for processes in (1, 2, 3):
        assert_same_training(folders[processes], folders[None], 1e-6)

"""A user's mistake is one sentence, once; a failure of one process ends them all, and its cause is told once."""

import re
import subprocess
import time
from dataclasses import replace

import pytest

from tests import scripts
from tests.scripts import MULTI, SINGLE, run_script, words

TINY = words("--device cpu --model resnet18 --no-pretrained --image-size 16 --workers 0 --val-rate 0.25 --epochs 50")
# Imported by every Python that has its folder on PYTHONPATH, before the script: rank 1 fails in its first step.
FAILING = """
import os, time
if os.environ.get("RANK") == "1":
    import torch
    def fail(self, closure=None):
        open("failed_at", "w").write(str(time.time()))
        {}
    torch.optim.SGD.step = fail
"""


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("errors")
    scripts.make_photos(folder / "photos", ["cat", "dog"], each=12)
    scripts.make_photos(folder / "one", ["cat"], each=4)
    scripts.make_photos(folder / "damaged", ["cat", "dog"], each=12)
    for path in (folder / "damaged" / "dog").iterdir():
        if path.name in ("003.png", "005.png"):
            path.write_bytes(b"no picture")
    for part in ("train", "val"):  # a damaged validation image is met by a loader's process first
        scripts.make_photos(folder / "parts" / part, ["cat", "dog"], each=12)
    (folder / "parts" / "val" / "dog" / "003.png").write_bytes(b"no picture")
    (folder / "empty").mkdir()
    (folder / "file.txt").write_text("no folder")
    for name, what in (("raise", 'raise RuntimeError("the sky fell")'), ("kill", "os.kill(os.getpid(), 9)")):
        (folder / name).mkdir()
        (folder / name / "sitecustomize.py").write_text(FAILING.format(what))
    return folder


# What is typed after the plain options, and words that the sentence must have.
MISTAKES = {
    "no such folder": (["--data-path", "{base}/nowhere"], ["nowhere", "no such folder"]),
    "a file": (["--data-path", "{base}/file.txt"], ["file.txt", "file"]),
    "an empty folder": (["--data-path", "{base}/empty"], ["empty", "folder per class"]),
    "one class": (["--data-path", "{base}/one"], ["one", "class"]),
    "unknown model": (["--data-path", "{base}/photos", "--model", "resnet81"], ["resnet81", "resnet18"]),
    "unknown option": (["--epohcs", "3"], ["--epohcs", "--epochs"]),
    "no weights": (["--data-path", "{base}/photos", "--weights", "gone.pth"], ["gone.pth"]),
}


def begin(base, name, script, *options, **keywords):
    cwd = base / name.replace(" ", "_")
    cwd.mkdir()
    result = run_script(script, *TINY, *(str(word).format(base=base) for word in options), cwd=cwd, **keywords)
    failed = cwd / "failed_at"
    return replace(result, seconds=time.time() - float(failed.read_text())) if failed.exists() else result


@pytest.fixture(scope="module")
def ended(base):
    """How each mistake ended on one process, and some of them on two."""
    calls = {name: (SINGLE, options, {}) for name, (options, _) in MISTAKES.items()}
    nowhere, two = ["--data-path", "{base}/nowhere"], ["--world-size", "2"]
    calls["two"] = (MULTI, [*two, *nowhere], {})
    calls["launched"] = (MULTI, nowhere, {"launcher": "launch", "processes": 2})
    calls["two damaged"] = (MULTI, [*two, "--data-path", "{base}/damaged"], {})
    calls["one damaged"] = (SINGLE, ["--data-path", "{base}/parts", "--workers", "2"], {})
    photos = ["--data-path", "{base}/photos"]
    for name in ("raise", "kill"):
        calls[f"two {name}"] = (MULTI, [*two, *photos], {"env": {"PYTHONPATH": str(base / name)}})
    failing = {"env": {"PYTHONPATH": str(base / "raise")}}
    calls["launched raise"] = (MULTI, photos, {"launcher": "launch", "processes": 2, **failing})
    return scripts.side_by_side(
        {
            name: lambda name=name, call=call: begin(base, f"work {name}", call[0], *call[1], **call[2])
            for name, call in calls.items()
        }
    )


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_sentence_and_exit_code_two(base, ended, name):
    result = ended[name]
    assert result.returncode == 2, result.text
    (sentence,) = result.stderr.splitlines()
    assert sentence.startswith("error: ")
    for word in MISTAKES[name][1]:
        assert word in sentence
    assert result.stdout == ""
    assert [*(base / f"work_{name.replace(' ', '_')}").iterdir()] == []


def test_two_processes_say_it_once(ended):
    result = ended["two"]
    assert result.returncode == 2
    (sentence,) = result.stderr.splitlines()
    assert "nowhere: no such folder" in sentence
    assert result.stdout == ""


def test_under_a_launcher_the_sentence_stands_above_the_summary_and_as_its_root_cause(ended):
    result = ended["launched"]
    assert result.returncode == 1  # torch's launcher answers 1, whatever its workers' code was
    lines = result.stderr.splitlines()
    said = [number for number, line in enumerate(lines) if line.startswith("error: ")]
    (root_cause,) = (number for number, line in enumerate(lines) if "Root Cause" in line)
    assert len(said) == 1
    assert said[0] < root_cause
    assert "nowhere: no such folder" in lines[said[0]]
    assert sum("nowhere: no such folder" in line for line in lines[root_cause:]) == 1
    # No traceback of ours; the launcher, which may lie in our .venv, shows its own.
    assert not re.search(rf'File "{re.escape(str(scripts.ROOT))}/(?!\.venv)', result.stderr)


@pytest.mark.parametrize("name", ["one damaged", "two damaged"])
def test_a_damaged_photo_that_one_process_meets_ends_all(ended, name):
    result = ended[name]
    assert result.returncode == 2, result.text
    (sentence,) = result.stderr.splitlines()
    assert sentence.startswith("error: ")
    assert "/dog/00" in sentence
    assert_quick_and_quiet(result, 60)  # the start counts here


def test_a_bug_in_one_process_is_told_once_with_its_traceback(ended):
    result = ended["two raise"]
    assert result.returncode == 1
    assert result.stderr.count("RuntimeError: the sky fell") == 1
    assert result.stderr.count("Traceback (most recent call last)") == 1
    assert_quick_and_quiet(result)


def test_a_bug_under_a_launcher_is_the_root_cause(ended):
    result = ended["launched raise"]
    assert result.returncode == 1
    above, _, summary = result.stderr.partition("Root Cause")
    assert above.count("RuntimeError: the sky fell") == 1
    assert "the sky fell" in summary
    assert_quick_and_quiet(result)


def test_a_process_that_is_killed_ends_the_other_and_is_told(ended):
    """As when memory runs out: the killed process cannot speak for itself."""
    result = ended["two kill"]
    assert result.returncode == 128 + 9
    assert result.stderr.strip()
    assert any(sign in result.stderr for sign in ("SIGKILL", "signal 9", "killed"))
    assert_quick_and_quiet(result)


def assert_quick_and_quiet(result, limit=15):
    """Both processes would have trained for 50 epochs; a peer's loss is a consequence, not a cause."""
    assert result.seconds < limit
    for noise in ("Connection closed by peer", "Connection reset", "DistBackendError", "destroy_process_group"):
        assert noise not in result.stderr


def test_no_process_outlives_its_launcher(base, ended):
    """Every worker has its data folder on its command line, and that folder is this test's own."""
    listed = subprocess.run(["ps", "-A", "-o", "command="], capture_output=True, text=True, check=True).stdout
    assert not [line for line in listed.splitlines() if str(base) in line]

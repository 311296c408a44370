"""Every option in a real run: a few runs that use each, and, in `make test-all`, each alone and every pair.

"Used" means: given a value other than the one that leaving the option out gives. Both is computed from the parsers, so
an option that is added later fails here until a run uses it.
"""

import argparse
import itertools
import json
import random
import shutil
from functools import partial
from unittest import mock

import pytest

from tests import scripts
from tests.scripts import MULTI, PREDICT, SINGLE, read_checkpoint, read_metrics, run_script, words
from utils import options
from utils.schedule import Schedule

# What no machine without CUDA can run: option, value and why it is left out here.
NEEDS_CUDA = {("amp", "fp16"): "its loss scaling exists on CUDA only"}

EVERYTHING = """--data-path {photos} --num-classes 3 --val-rate 0.25 --image-size 48 --crop-scale 0.5 --hflip 0.1
    --workers 1 --model resnet18 --no-pretrained --epochs 1 --batch-size 4 --accumulate 2 --lr 0.001 --lrf 0.5
    --warmup-steps 2 --momentum 0.8 --weight-decay 0.001 --label-smoothing 0.05 --amp bf16 --eval-amp
    --device cpu --no-syncBN --run-dir kept --seed 7
    --save-minutes 5 --save-steps 2 --deterministic"""
WHAT_EXCLUDES = """--data-path {photos} --image-size 16 --workers 0 --model resnet18 --weights {weights} --freeze-layers
    --epochs 1 --global-batch-size 8 --float64 --device cpu --run-dir kept"""
TWO = " --world-size 2 --timeout 5 --dist-url file://{cwd}/meeting"

# A BatchNorm over two or three values would make the training explode: hence 4 images of 48 pixels at a time.
# The covering set, at most 8 runs: script and command line. The first leaves the weights that later ones start from.
RUNS = {
    "one process": (SINGLE, EVERYTHING + " --lr-scaling sqrt --data-parallel"),
    "one process, from weights": (SINGLE, WHAT_EXCLUDES),
    "two processes": (MULTI, EVERYTHING + " --lr-scaling none --find-unused-parameters" + TWO),
    "two processes, from weights": (MULTI, WHAT_EXCLUDES + TWO),
    "goes on, one process": (SINGLE, "--resume {copy} --device cpu"),
    "goes on, two processes": (MULTI, "--resume {copy} --device cpu --world-size 2"),
    "prediction": (PREDICT, "{photos} --weights {weights} --top-k 2 --output rows.json --device cpu"),
}


def prediction_parser() -> argparse.ArgumentParser:
    """The parser inside parse_prediction_options, caught at work."""
    with mock.patch.object(options.Parser, "parse_args", autospec=True) as parse_args:
        parse_args.return_value = argparse.Namespace(output=None)
        options.parse_prediction_options("")
    return parse_args.call_args.args[0]


PARSERS = {
    SINGLE: options.training_parser("", distributed=False),
    MULTI: options.training_parser("", distributed=True),
    PREDICT: prediction_parser(),
}
PARSE = {
    SINGLE: partial(options.parse_training_options, "", False),
    MULTI: partial(options.parse_training_options, "", True),
    PREDICT: partial(options.parse_prediction_options, ""),
}


def documented(parser: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    """The options and arguments that --help shows, by the name of their value."""
    actions = {action.dest: action for action in parser._actions if action.help != argparse.SUPPRESS}
    return {name: action for name, action in actions.items() if name != "help"}


def used(script: str, line: str) -> dict[str, object]:
    """The values of a command line that leaving the option out would not give."""
    values, defaults = vars(PARSE[script](words(line))), {}
    for name, action in documented(PARSERS[script]).items():
        both = options.DEFAULTS.get(name) if script != PREDICT else None
        defaults[name] = both[values["data_path"] is None] if both else action.default
    return {name: values[name] for name, default in defaults.items() if values[name] != default}


# ---------------------------------------------------------------------------------------------- the covering set


@pytest.mark.parametrize("script", PARSERS)
def test_the_set_uses_every_option_of_every_script(script):
    together = set().union(*(used(name, line) for name, line in RUNS.values() if name == script))
    assert together == documented(PARSERS[script]).keys()


def test_the_set_uses_every_choice_of_every_option():
    taken = {pair for script, line in RUNS.values() for pair in vars(PARSE[script](words(line))).items()
             if isinstance(pair[1], str)}  # fmt: skip
    for parser in PARSERS.values():
        for name, action in documented(parser).items():
            wanted = {(name, choice) for choice in action.choices or ()}
            assert wanted - taken <= NEEDS_CUDA.keys() | {(name, action.default)}


def test_the_set_is_small_and_has_two_processes():
    assert len(RUNS) <= 8
    assert any(used(script, line).get("world_size") == 2 for script, line in RUNS.values())


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cover")
    scripts.make_photos(folder / "photos", ["cat", "dog", "owl"], each=8)
    yield folder
    shutil.rmtree(folder)  # checkpoints of 100 MB and more


def run(base, name, script, line):
    """One run in a working folder of its own; returns that folder, the line as it was typed, and how it ended."""
    cwd = base / name.replace(" ", "_").replace(",", "")
    cwd.mkdir()
    weights = next((base / "one_process").glob("kept/*/best.pth"), "not yet there")
    copy = cwd / "copied"
    if "{copy}" in line:  # each goes on in a folder of its own
        shutil.copytree(weights.parent, copy)
    typed = words(line.format(photos=base / "photos", weights=weights, copy=copy, cwd=cwd))
    return cwd, typed, run_script(script, *typed, cwd=cwd)


@pytest.fixture(scope="module")
def ended(base):
    first, *others = RUNS
    results = {first: run(base, first, *RUNS[first])}
    return results | scripts.side_by_side({name: partial(run, base, name, *RUNS[name]) for name in others})


@pytest.mark.parametrize("name", RUNS)
def test_every_run_ends_well(ended, name):
    finished = ended[name][2]
    assert finished.returncode == 0, finished.text
    assert "Traceback" not in finished.text
    # DDP itself says that there was nothing to find.
    assert not [row for row in finished.text.splitlines() if "Warning" in row and "find_unused_parameters" not in row]


@pytest.mark.parametrize("name", [name for name, (_, line) in RUNS.items() if "--run-dir" in line])
def test_a_new_run_writes_down_the_values_that_were_typed(ended, name):
    cwd, typed, _ = ended[name]
    assert not (cwd / "runs").exists()  # --run-dir
    (folder,) = (cwd / "kept").iterdir()
    written = json.loads((folder / "args.json").read_text(encoding="utf-8"))
    expected = vars(PARSE[RUNS[name][0]](typed))
    assert written | {"local_rank": None} == expected | {"local_rank": None}  # that one is the launcher's


@pytest.mark.parametrize(("name", "steps", "factor"), [("one process", 2, 2**0.5), ("two processes", 1, 1)])
def test_the_learning_rate_follows_from_the_options(ended, name, steps, factor):
    """18 training images, 4 x 2 a step and process; metrics.csv names the highest rate of the epoch."""
    (folder,) = (ended[name][0] / "kept").iterdir()
    plan = Schedule(
        batch_size=4, accumulate=2, world_size=1, images=8 * steps, epochs=1, lr=0.001 * factor, lrf=0.5,
        warmup_steps=2, notes=(),
    )  # fmt: skip
    assert read_metrics(folder)[0]["lr"] == pytest.approx(max(map(plan.learning_rate, range(steps))))


@pytest.mark.parametrize("name", ["one process, from weights", "two processes, from weights"])
def test_frozen_float64_layers_are_those_of_the_weights_file(base, ended, name):
    start = read_checkpoint(next((base / "one_process").glob("kept/*/best.pth")))["model"]
    trained = read_checkpoint(next((ended[name][0] / "kept").glob("*/last.pth")))["model"]
    assert trained["conv1.weight"].dtype.is_floating_point
    assert trained["conv1.weight"].itemsize == 8  # --float64
    assert all((trained[key] == start[key]).all() for key in start if not key.startswith("fc."))
    assert (trained["fc.weight"] != start["fc.weight"]).any()


def test_prediction_names_two_classes_of_every_photo(ended):
    cwd, _, finished = ended["prediction"]
    rows = json.loads((cwd / "rows.json").read_text(encoding="utf-8"))
    assert len(rows) == len(finished.stdout.splitlines()) == 24
    assert all(len(row["top"]) == 2 for row in rows)


# ------------------------------------------------------------------------------------------------ the full matrix

ALWAYS = "--data-path {photos} --model resnet18 --epochs 1 --device cpu --no-pretrained"
# What may be added to it, in groups of words that exclude one another.
ADDED = {
    "--num-classes": ["3"],
    "--val-rate": ["0.25"],
    "--image-size": ["16"],
    "--crop-scale": ["1"],
    "--hflip": ["0"],
    "--workers": ["0"],
    "--weights": ["{weights}"],
    "--freeze-layers": [""],
    "": ["--batch-size 4", "--global-batch-size 8"],
    "--accumulate": ["2"],
    "--lr": ["0.02"],
    "--lrf": ["0.5"],
    "--lr-scaling": ["sqrt", "none"],
    "--warmup-steps": ["0"],
    "--momentum": ["0"],
    "--weight-decay": ["0"],
    "--label-smoothing": ["0"],
    " ": ["--amp bf16", "--float64"],
    "--eval-amp": [""],
    "--no-syncBN": [""],
    "--seed": ["7"],
    "--run-dir": ["kept"],
    "--save-minutes": ["0.001"],
    "--save-steps": ["1"],
    "--deterministic": [""],
}
OWN = {
    SINGLE: {"--data-parallel": [""]},
    MULTI: {"--world-size": ["2"], "--timeout": ["5"], "--find-unused-parameters": [""]},
}


def choices(script: str) -> list[list[str]]:
    """For each group of words: nothing, or one of them."""
    groups = ADDED | OWN[script]
    return [["", *(f"{name} {value}".strip() for value in values)] for name, values in groups.items()]


def all_pairs(groups: list[list[str]], seed: int = 0) -> list[tuple[str, ...]]:
    """Few rows, one choice of each group in each, in which every two choices of different groups stand together."""
    dice = random.Random(seed)
    stood = [[(place, choice) for choice in group] for place, group in enumerate(groups)]
    left = {pair for one, two in itertools.combinations(stood, 2) for pair in itertools.product(one, two)}
    rows = []
    while left:
        candidates = [tuple(dice.choice(group) for group in groups) for _ in range(200)]
        gain = {row: left.intersection(itertools.combinations(enumerate(row), 2)) for row in candidates}
        rows.append(max(candidates, key=lambda row: len(gain[row])))
        left -= gain[rows[-1]]
    return rows


def matrix(script: str) -> dict[str, str]:
    """Command lines by their own added words: each choice alone, and the rows that hold every pair."""
    groups = choices(script)
    alone = [choice for group in groups for choice in group[1:]] if script == MULTI else words("--data-parallel")
    pairs = [" ".join(word for word in row if word) for row in all_pairs(groups)]
    # Small images keep a run short; where the size is itself the choice, it stands in the words.
    return {added: f"{ALWAYS} {added}" + ("" if "--image-size" in added else " --image-size 24")
            for added in [*alone, *pairs]}  # fmt: skip


@pytest.mark.parametrize("script", OWN)
def test_the_matrix_has_every_option(script):
    reached = set().union(*(used(script, line) for line in matrix(script).values()))
    assert documented(PARSERS[script]).keys() - reached <= {
        "dist_url",
        "resume",
    }  # they need a place, a run: used in the set above


@pytest.mark.slow
@pytest.mark.parametrize("script", OWN)
def test_each_option_alone_and_every_pair(base, ended, script):
    def work(number, line):
        cwd, _, finished = run(base, f"{script} {number}", script, line)
        shutil.rmtree(cwd)
        return finished

    lines = matrix(script)
    results = scripts.side_by_side(
        {added: partial(work, number, line) for number, (added, line) in enumerate(lines.items())}
    )
    failed = {added: finished.text for added, finished in results.items() if finished.returncode != 0}
    assert not failed

"""The README says what is so: its options are the parsers', its commands parse, what it names exists."""

import ast
import math
import re
import shlex
from pathlib import Path

import pytest

from tests.scripts import MULTI, PREDICT, SINGLE
from tests.test_options_cover import PARSE, PARSERS, documented
from utils.options import DEFAULTS

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
SCRIPTS = (SINGLE, MULTI, PREDICT)


def section(heading: str) -> str:
    """The text below a heading, up to the next one of the same or a higher level."""
    level = heading.split()[0]
    body = README.split(f"\n{heading}\n", 1)[1]
    return re.split(rf"^#{{1,{len(level)}}} ", body, maxsplit=1, flags=re.MULTILINE)[0]


def blocks(language: str = "sh") -> list[str]:
    found = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    return [text for kind, text in found if kind == language]


def commands() -> list[list[str]]:
    """The words of each line of the blocks that are to be typed, without comments."""
    lines = [line for block in blocks() for line in block.splitlines()]
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def rows(text: str) -> dict[str, list[str]]:
    """A table's other cells by its first, without the heading."""
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in text.splitlines() if line[:1] == "|"]
    return {name.strip("`"): others for name, *others in cells[2:]}


# ------------------------------------------------------------------------------------------------------- options


def spelling(action) -> str:
    return action.option_strings[0] if action.option_strings else action.metavar


def default_shown(action) -> str:
    """What --help says in its last brackets."""
    found = re.search(r"\(([^()]*)\)$", action.help)
    return found[1] if found else "none"


@pytest.mark.parametrize("scripts", [SCRIPTS[:2], SCRIPTS[2:]])
def test_the_tables_hold_every_option_with_its_default_and_no_other(scripts):
    table = rows(section("### " + " and ".join(scripts)))
    actions = {spelling(action): action for name in scripts for action in documented(PARSERS[name]).values()}
    assert table.keys() == actions.keys()
    assert {name: cells[0] for name, cells in table.items()} == {
        name: default_shown(action) for name, action in actions.items()
    }


def test_options_of_one_training_script_say_so():
    table = rows(section(f"### {SINGLE} and {MULTI}"))
    for script, other in ((SINGLE, MULTI), (MULTI, SINGLE)):
        own = documented(PARSERS[script]).keys() - documented(PARSERS[other]).keys()
        said = {name for name, cells in table.items() if cells[1].startswith(f"{script} only: ")}
        assert said == {spelling(documented(PARSERS[script])[name]) for name in own}


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_shows_the_defaults_that_are_used(script):
    own_size = "the model's own"
    for name, action in documented(PARSERS[script]).items():
        shown, pair = default_shown(action), DEFAULTS.get(name) if script != PREDICT else None
        if pair and not isinstance(pair[0], bool):
            assert shown == f"{pair[0] or own_size}; {pair[1]} on the digits", name
        elif isinstance(action.default, bool):
            assert shown == ("on" if action.default else "off"), name
        elif isinstance(action.default, (int, float)):
            assert math.isclose(float(shown), action.default), name
        elif action.default is not None:
            assert shown == action.default, name


# ------------------------------------------------------------------------------------------------------ commands


def test_every_command_parses():
    """Each line that calls one of the scripts, without recipe files and shell variables."""
    seen = set()
    for line in commands():
        place = next((number for number, word in enumerate(line) if word in SCRIPTS), None)
        if place is None:
            continue
        script, typed = line[place], line[place + 1 :]
        seen.add(script)
        PARSE[script]([word for word in typed if not word.startswith(("@", "$", "&"))])
    assert seen == set(SCRIPTS)


def test_every_way_to_launch_is_there():
    typed = "\n".join(blocks())
    launchers = ["torchrun --standalone", "torchrun --nnodes", "python -m torch.distributed.launch", "srun --nodes"]
    assert all(launcher in typed for launcher in [*launchers, f"python {MULTI}", "--data-parallel", "--world-size 2"])


def test_recipe_files_are_read(tmp_path):
    (recipe,) = (block for block in blocks("") if block.startswith("# "))
    path = tmp_path / "recipe.txt"
    path.write_text(recipe)
    assert PARSE[SINGLE]([f"@{path}"]).epochs == 20


def test_make_has_the_targets_that_are_named():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"\bmake ([a-z][a-z-]*)", "\n".join([*blocks(), *re.findall(r"`(make [^`]*)`", README)])))
    assert {"demo", "test", "test-all"} <= named <= targets
    assert README.index("make demo") < README.index("## Train")


# ----------------------------------------------------------------------------------------------- files and names


def names_in(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.ClassDef))}


def test_each_point_of_the_recipe_names_functions_that_exist():
    table = rows(section("## Distributed training, point by point"))
    for point, cells in table.items():
        named = re.findall(r"`([\w/]+\.py)`: ((?:`\w+`(?:, )?)+)", cells[-1])
        assert named, point
        for path, functions in named:
            assert set(re.findall(r"`(\w+)`", functions)) <= names_in(ROOT / path), point


@pytest.mark.parametrize(
    ("point", "path", "words"),
    [
        ("Set the device", "utils/distributed_utils.py", "torch.cuda.set_device("),
        ("Init the process group", "utils/distributed_utils.py", "dist.init_process_group("),
        ("DistributedSampler", MULTI, "DistributedSampler("),
        ("BatchSampler", MULTI, "BatchSampler("),
        ("Equal initial weights", "utils/experiment.py", "torch.manual_seed(args.seed)"),
        ("SyncBN", MULTI, "convert_sync_batchnorm(model, device)"),
        ("DDP", MULTI, "DistributedDataParallel("),
        ("set_epoch", "utils/train_eval_utils.py", ".set_epoch("),
        ("no_sync", "utils/train_eval_utils.py", "model.no_sync()"),
        ("reduce_value", "utils/metrics.py", "reduce_value("),
        ("Process 0 writes", MULTI, "start_run("),
        ("destroy_process_group", "utils/distributed_utils.py", "dist.destroy_process_group()"),
    ],
)
def test_the_recipe_is_in_the_code(point, path, words):
    assert point in rows(section("## Distributed training, point by point"))
    assert words in (ROOT / path).read_text(encoding="utf-8")


def test_the_folder_tree_names_what_exists_and_every_script():
    lines = re.search(r"```\n(.*?)```", section("## What lies where"), re.DOTALL)[1].splitlines()
    named = [line.split()[0] for line in lines]
    assert [path for path in named if not (ROOT / path).exists()] == []
    assert {path.name for path in ROOT.glob("*.py")} <= set(named)
    assert len(named) == len(set(named))


def test_every_file_named_anywhere_exists():
    links = re.findall(r"\]\((?!https?:|#)([^)]+)\)", README)
    files = re.findall(r"`((?:tests|utils|data|models|docs)/[\w/.]+)`", README)
    assert [path for path in [*links, *files] if not (ROOT / path).exists()] == []
    assert "docs/run.png" in links
    assert (ROOT / "docs/run.png").stat().st_size < 150_000


def test_every_promise_names_its_tests():
    promises = section("## What is promised").split("\n- ")[1:]
    assert len(promises) >= 5
    assert all(re.findall(r"`tests/test_\w+\.py`", promise) for promise in promises)


def test_each_dependency_has_a_reason():
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    packages = {re.match(r"[\w-]+", line)[0].lower() for line in lines if line[:1].isalpha()}
    reasons = README.split("Dependencies beyond")[1].split("\n\n")[0].lower()
    assert {package for package in packages if package not in reasons} == set()
    assert {"scikit-learn", "matplotlib", "tqdm"} <= set(re.findall(r"\*\*([\w-]+)\*\*", reasons))


def test_fences_have_a_language_or_none_and_are_closed():
    fences = re.findall(r"^```(.*)$", README, re.MULTILINE)
    assert len(fences) % 2 == 0
    assert set(fences[::2]) <= {"", "sh", "json"}
    assert set(fences[1::2]) == {""}

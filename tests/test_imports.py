"""The import arrows: scripts -> utils -> {data, models}; and what a script must not load."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import models
from tests.makers import make_photo

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = {path.stem for path in ROOT.glob("*.py")}
PACKAGES = ("data", "models", "utils")
ALLOWED = {"data": {"data"}, "models": {"models"}, "utils": {"utils", "data", "models"}}


def imported_modules(path: Path) -> set[str]:
    """Full names of all that a file imports, inside functions too; relative imports resolved."""
    package, found = path.relative_to(ROOT).parts[:-1], set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            base = ".".join([*above, *([node.module] if node.module else [])])
            found |= {f"{base}.{alias.name}" if base else alias.name for alias in node.names}
    return found


def tops(path: Path) -> set[str]:
    return {name.partition(".")[0] for name in imported_modules(path)}


def files_of(package: str) -> list[Path]:
    files = sorted((ROOT / package).rglob("*.py"))
    assert files
    return files


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_imports_only_what_stands_below_it(package):
    ours = {*PACKAGES, *SCRIPTS, "tests", "benchmarks"}
    wrong = {path.name: tops(path) & ours - ALLOWED[package] for path in files_of(package)}
    assert not {name: names for name, names in wrong.items() if names}


def test_nothing_imports_a_script_and_scripts_import_no_tests():
    for path in ROOT.glob("*.py"):
        assert not tops(path) & {*SCRIPTS, "tests", "benchmarks"}, path.name
    assert {"train_multi_gpu", "train_single_gpu", "predict"} <= SCRIPTS


@pytest.mark.parametrize("package", ["data", "models"])
def test_data_and_models_never_import_torchvision(package):
    assert not [path.name for path in files_of(package) if "torchvision" in tops(path)]


def test_relative_imports_are_resolved(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    (tmp_path / "models").mkdir()
    file = tmp_path / "models" / "a.py"
    file.write_text("from . import b\nfrom .c import d\nfrom .. import utils\ndef f():\n    import data.split as s\n")
    assert imported_modules(file) == {"models.b", "models.c.d", "utils", "data.split"}


def modules_after(code: str, *arguments: str) -> tuple[set[str], str]:
    """The top-level modules loaded after `code` in a fresh process, and what it printed."""
    code += "\nimport sys; print('MODULES', *{name.partition('.')[0] for name in sys.modules})"
    command, environ = [sys.executable, "-c", code, *arguments], os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environ)
    assert done.returncode == 0, done.stderr
    text, _, names = done.stdout.rpartition("MODULES")
    return set(names.split()), text


def test_prediction_with_our_own_resnet_loads_neither_torchvision_nor_timm_nor_the_rest(tmp_path):
    model = models.create_model("resnet18", 2)
    content = {
        "model": model.state_dict(),
        "model_name": "resnet18",
        "classes": ["cat", "dog"],
        "preprocessing": models.model_config(model) | {"image_size": 32},
    }
    torch.save(content, tmp_path / "best.pth")
    photo = make_photo(tmp_path / "photo.jpg", (200, 30, 30), 0)
    code = "import runpy; runpy.run_path('predict.py', run_name='__main__')"
    loaded, text = modules_after(code, photo, "--weights", str(tmp_path / "best.pth"), "--device", "cpu")
    assert text.startswith(f"{photo}: ")
    unwanted = {"torchvision", "timm", "tensorboard", "matplotlib", "sklearn", "scipy", "pandas", "torch_xla"}
    assert not loaded & unwanted
    assert {"torch", "PIL"} <= loaded


def test_options_and_errors_need_no_torch():
    loaded, _ = modules_after("import utils.options, utils.errors")
    assert not loaded & {"torch", "numpy", "PIL"}

"""predict.py from outside: what it prints, writes and answers, for good and bad input."""

import csv
import io
import json
import pickle
import shutil

import pytest

from tests import scripts
from tests.scripts import PREDICT, SINGLE, newest_run, read_metrics, run_script, words

# Names that terminals, CSV files and ASCII locales trip over. One class name, too, is not ASCII.
ODD_NAMES = ["with space.png", "comma, and 'quotes'.png", "花.PNG", "emoji 🌻.png"]
CLASSES = ["cat, small", "dog", "花"]
PLAIN_KEYS = {"path", "class", "probability", "accepted", "top"}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A working folder with a trained model in it, photos with odd names, and files that are no photos."""
    cwd = tmp_path_factory.mktemp("predict") / "work"
    scripts.make_photos(cwd / "photos", CLASSES, each=16)
    options = words("--model resnet18 --no-pretrained --image-size 16 --batch-size 8 --epochs 2 --val-rate 0.5")
    ended = run_script(SINGLE, "--data-path", "photos", *options, "--device", "cpu", "--workers", "0", cwd=cwd)
    assert ended.returncode == 0, ended.text
    (cwd / "odd" / "deeper").mkdir(parents=True)
    for index, name in enumerate(ODD_NAMES):
        scripts.stripes(1, index).save(cwd / "odd" / name, format="PNG")
    shutil.copy(cwd / "odd" / ODD_NAMES[0], cwd / "odd" / "deeper" / "x.png")
    (cwd / "broken.jpg").write_bytes(b"this is no picture")
    (cwd / "empty").mkdir()
    (cwd / "elsewhere").mkdir()
    (cwd / "code.pth").write_bytes(pickle.dumps(RunsCode()))
    return cwd


class RunsCode:
    """A pickle of it makes a folder when it is loaded."""

    def __reduce__(self):
        import os

        return os.mkdir, ("made_by_a_pickle",)


@pytest.fixture(scope="module")
def ended(base):
    """How predict.py ended for each of these command lines, by a name."""
    validation = [row["path"] for row in scripts.read_rows(newest_run(base) / "split.csv") if row["split"] == "val"]
    ascii_only = {"LC_ALL": "C", "PYTHONIOENCODING": "ascii"}
    lines = {
        "validation": [*validation, "--top-k", "9", "--output", "all.json"],
        "ascii": ["odd", "--output", "odd.csv"],
        "some": ["odd/with space.png", "broken.jpg", "gone.jpg", f"odd/{ODD_NAMES[2]}", "--output", "some.jsonl"],
        "bad_csv": ["broken.jpg", "--output", "bad.csv"],
        "address": ["https://example.org/cat.jpg"],
        "suffix": ["odd", "--output", "rows.txt"],
        "no folder": ["odd/with space.png", "--output", "nowhere/rows.csv"],
        "empty": ["empty"],
        "pickle": ["odd", "--weights", "code.pth"],
        "no weights": ["odd", "--weights", "gone.pth"],
    }
    calls = {
        name: lambda name=name, line=line: run_script(
            PREDICT, *line, cwd=base, env=ascii_only if name == "ascii" else None
        )
        for name, line in lines.items()
    }
    calls["no run"] = lambda: run_script(PREDICT, base / "odd" / ODD_NAMES[0], cwd=base / "elsewhere")
    return scripts.side_by_side(calls)


def test_the_rows_over_the_validation_photos_give_exactly_the_logged_accuracy(base, ended):
    """Law L4. The newest run's best.pth is found without being named."""
    assert ended["validation"].returncode == 0, ended["validation"].text
    rows = json.loads((base / "all.json").read_text(encoding="utf-8"))
    truth = {row["path"]: row["label"] for row in scripts.read_rows(newest_run(base) / "split.csv")}
    assert len(rows) == 24
    right = sum(row["class"] == truth[row["path"]] for row in rows)
    assert right / len(rows) == max(row["val_top1"] for row in read_metrics(newest_run(base)))
    assert 0 < right < len(rows)  # all or nothing would prove little


def test_json_rows_have_the_contracts_keys_and_every_class_once(base, ended):
    rows = json.loads((base / "all.json").read_text(encoding="utf-8"))
    for row in rows:
        assert row.keys() == PLAIN_KEYS
        assert row["accepted"] is True
        assert sorted(best["class"] for best in row["top"]) == CLASSES  # --top-k 9 of three classes
        assert all(best.keys() == {"class", "probability"} for best in row["top"])
        probabilities = [best["probability"] for best in row["top"]]
        assert probabilities == sorted(probabilities, reverse=True)
        assert sum(probabilities) == pytest.approx(1, abs=1e-6)
        assert row["top"][0] == {"class": row["class"], "probability": row["probability"]}


def test_one_line_an_image_stands_on_standard_output(base, ended):
    rows = json.loads((base / "all.json").read_text(encoding="utf-8"))
    lines = ended["validation"].stdout.splitlines()
    assert ended["validation"].stderr == ""
    assert len(lines) == len(rows)
    for line, row in zip(lines, rows, strict=True):
        guesses = ", ".join(f"{best['class']} {best['probability']:.4f}" for best in row["top"])
        assert line == f"{row['path']}: {guesses}"


def test_a_folder_with_odd_names_under_an_ascii_locale(base, ended):
    assert ended["ascii"].returncode == 0, ended["ascii"].text
    assert len(ended["ascii"].stdout.splitlines()) == 5
    rows = scripts.read_rows(base / "odd.csv")
    expected = sorted([*ODD_NAMES, "deeper/x.png"])
    assert sorted(row["path"].removeprefix("odd/").removeprefix(f"{base}/odd/") for row in rows) == expected
    with open(base / "odd.csv", newline="", encoding="utf-8") as file:
        assert next(csv.reader(file))[:3] == ["path", "class", "probability"]
    for row in rows:
        assert row["class"] in CLASSES
        assert 1 / 3 - 1e-6 <= float(row["probability"]) <= 1
        assert row["error"] == ""
    copies = {row["path"].rpartition("/")[2]: row["probability"] for row in rows}
    assert copies["x.png"] == copies[ODD_NAMES[0]]


def test_bad_files_are_named_and_the_others_classified(base, ended):
    result = ended["some"]
    assert result.returncode == 1
    rows = [json.loads(line) for line in (base / "some.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [row["path"] for row in rows] == [
        "odd/with space.png",
        "broken.jpg",
        "gone.jpg",
        f"odd/{ODD_NAMES[2]}",
    ]
    assert [row.keys() == PLAIN_KEYS for row in rows] == [True, False, False, True]
    for row in rows[1:3]:
        assert row.keys() == {"path", "error"}
        assert row["path"] in row["error"]
        assert row["error"] in result.stderr
        assert "\n" not in row["error"]
    assert "broken.jpg" not in result.stdout
    assert len(result.stdout.splitlines()) == 2
    assert "2 of 4" in result.stderr
    assert "Traceback" not in result.stderr


def test_csv_holds_the_failures_too(base, ended):
    assert ended["bad_csv"].returncode == 1
    (row,) = csv.DictReader(io.StringIO((base / "bad.csv").read_text(encoding="utf-8")))
    assert (row["path"], row["class"], row["probability"]) == ("broken.jpg", "", "")
    assert "broken.jpg" in row["error"]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("address", ["https://example.org/cat.jpg", "download"]),
        ("suffix", ["rows.txt", ".csv", ".json", ".jsonl"]),
        ("no folder", ["nowhere/rows.csv", "--output"]),
        ("empty", ["no images", "empty"]),
        ("pickle", ["code.pth", "refused"]),
        ("no weights", ["gone.pth"]),
        ("no run", ["runs", "--weights"]),
    ],
)
def test_a_usage_error_is_one_sentence_and_exit_code_two(base, ended, name, expected):
    assert ended[name].returncode == 2, ended[name].text
    (sentence,) = ended[name].stderr.splitlines()
    assert sentence.startswith("error: ")
    for word in expected:
        assert word in sentence
    assert not (base / "made_by_a_pickle").exists()


def test_nothing_is_left_but_what_was_asked_for(base, ended):
    made = {"all.json", "odd.csv", "some.jsonl", "bad.csv"}
    given = {"photos", "runs", "odd", "broken.jpg", "empty", "elsewhere", "code.pth"}
    assert {path.name for path in base.iterdir()} - {"elsewhere_temporary"} == made | given
    assert scripts.left_in_temporary_folder(base) == []

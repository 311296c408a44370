"""What a training run does with its options and leaves in its folder, seen from outside."""

import csv
import json
import math
import shutil
from datetime import datetime

import pytest
import torch

from tests import scripts
from tests.scripts import MULTI, SINGLE, newest_run, read_checkpoint, read_metrics, run_script

COLUMNS = ["epoch", "train_loss", "val_loss", "val_top1", "val_top5", "lr", "images_per_second", "seconds"]
TINY = ["--device", "cpu", "--model", "resnet18", "--image-size", "16", "--workers", "0"]
FROZEN = [
    "--freeze-layers",
    "--global-batch-size",
    "8",
    "--float64",
    "--epochs",
    "2",
    "--val-rate",
    "0.25",
    "--lr",
    "0.05",
]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("training")
    scripts.make_photos(folder / "photos", ["cat", "dog", "owl"], each=12)
    scripts.make_photos(folder / "pairs", ["left", "right"], each=12)
    for part in ("train", "val"):  # 17 images a part
        scripts.make_photos(folder / "parts" / part, ["a", "b"], each=8)
        scripts.stripes(0, 8).save(folder / "parts" / part / "a" / "odd.png")
    for part, each in (("train", 1), ("val", 1)):  # 3 to train on, 2 to validate
        scripts.make_photos(folder / "three" / part, ["a", "b"], each=each)
    scripts.stripes(0, 5).save(folder / "three" / "train" / "a" / "third.png")
    yield folder
    shutil.rmtree(folder)  # checkpoints of 100 MB and more


def begin(base, name, script, *options, env=None):
    """A run in a working folder of its own below `base`."""
    cwd = base / name
    cwd.mkdir()
    return run_script(script, *TINY, *options, cwd=cwd, env=env)


@pytest.fixture(scope="module")
def plain(base):
    """Two epochs on one process, in float32, with the options' own names and spellings."""
    options = [
        "--no-pretrained",
        "--batch_size",
        "8",
        "--epochs",
        "2",
        "--val_rate",
        "0.25",
        "--seed",
        "5",
        "--num_classes",
        "3",
        "--workers",
        "1",
    ]
    return begin(base, "plain", SINGLE, "--data_path", base / "photos", *options), newest_run(base / "plain")


@pytest.fixture(scope="module")
def ended(base, plain):
    """How all other runs ended, by the name of their working folder."""
    frozen = ["--data-path", base / "pairs", "--weights", plain[1] / "best.pth", *FROZEN]
    mixed = [
        "--data-path",
        base / "parts",
        "--no-pretrained",
        "--amp",
        "bf16",
        "--no-syncBN",
        "--batch-size",
        "4",
        "--image-size",
        "32",
    ]
    few = ["--data-path", base / "three", "--no-pretrained", "--batch-size", "16", "--epochs", "1"]
    huge = ["--data-path", base / "photos", "--no-pretrained", "--epochs", "2", "--val-rate", "0.25"]
    one_step = ["--data-path", base / "three", "--no-pretrained", "--epochs", "3", "--warmup-steps", "0"]
    calls = {
        "frozen": (SINGLE, *frozen),
        "frozen-by-two": (MULTI, "--world-size", "2", "--accumulate", "2", *frozen),
        "mixed": (MULTI, "--world-size", "2", "--epochs", "1", *mixed),
        "few": (SINGLE, *few),
        "few-by-four": (MULTI, "--world-size", "4", *few),
        "classes": (SINGLE, "--data-path", base / "photos", "--no-pretrained", "--num_classes", "5"),
        "huge-by-two": (MULTI, "--world-size", "2", "--lr", "1e30", "--batch-size", "2", *huge),
        "overflow": (SINGLE, "--lr", "3e38", "--batch-size", "3", *one_step),
    }
    return scripts.side_by_side(
        {name: lambda name=name, call=call: begin(base, name, *call) for name, call in calls.items()}
    )


# ------------------------------------------------------------------------------------------------ the run folder


def test_a_run_ends_quietly_in_a_folder_named_by_date_and_model(plain):
    result, run = plain
    assert result.returncode == 0, result.text
    assert "Warning" not in result.text
    stamp, _, model = run.name.rpartition("_")
    assert model == "resnet18"
    assert abs((datetime.now() - datetime.strptime(stamp, "%Y%m%d-%H%M%S")).total_seconds()) < 900


def test_the_json_files_say_the_options_and_the_classes(plain, base):
    args = json.loads((plain[1] / "args.json").read_text(encoding="utf-8"))
    assert args["data_path"] == str(base / "photos")
    said = {"batch_size": 8, "epochs": 2, "val_rate": 0.25, "seed": 5, "num_classes": 3, "pretrained": False}
    assert said.items() <= args.items()
    classes = json.loads((plain[1] / "class_indices.json").read_text(encoding="utf-8"))
    assert classes == {"0": "cat", "1": "dog", "2": "owl"}


def test_split_csv_lists_each_photo_once(plain, base):
    rows = scripts.read_rows(plain[1] / "split.csv")
    assert [*rows[0]] == ["path", "label", "split"]
    assert sorted(row["path"] for row in rows) == sorted(map(str, (base / "photos").glob("*/*.png")))
    assert all(f"/{row['label']}/" in row["path"] for row in rows)
    sides = [(row["label"], row["split"]) for row in rows]
    for name in ("cat", "dog", "owl"):
        assert (sides.count((name, "train")), sides.count((name, "val"))) == (9, 3)


def test_metrics_csv_has_the_contracts_columns_and_fractions(plain):
    with open(plain[1] / "metrics.csv", newline="", encoding="utf-8") as file:
        assert next(csv.reader(file)) == COLUMNS
    rows = read_metrics(plain[1])
    assert [row["epoch"] for row in rows] == [0, 1]
    for row in rows:
        assert (9 * row["val_top1"]) == pytest.approx(round(9 * row["val_top1"]), abs=1e-12)
        assert 0 <= row["val_top1"] <= row["val_top5"] == 1  # three classes: all are among the five best
        assert all(math.isfinite(value) for value in row.values())
        assert row["images_per_second"] > 0
        assert row["seconds"] > 0
    assert rows[0]["lr"] > rows[1]["lr"] > 0


def test_best_pth_holds_what_prediction_needs_and_last_pth_more(plain):
    best, last = (read_checkpoint(plain[1] / name) for name in ("best.pth", "last.pth"))
    assert "optimizer" not in best
    assert "optimizer" in last
    assert best["classes"] == ["cat", "dog", "owl"]
    assert best["model_name"] == "resnet18"
    assert best["preprocessing"]["image_size"] == 16
    assert all(type(value) is str for value in best["versions"].values())
    rows = read_metrics(plain[1])
    assert best["metrics"]["val_top1"] == max(row["val_top1"] for row in rows)
    assert {name: last["metrics"][name] for name in rows[-1]} == pytest.approx(rows[-1], rel=1e-15)
    for state in (best["model"], last["model"]):
        assert {"conv1.weight", "bn1.running_mean", "fc.bias"} <= state.keys()
        assert not [key for key in state if key.startswith("module.")]
        assert state["fc.weight"].shape == (3, 512)


# --------------------------------------------------------------------------------- weights, freezing, accumulation


@pytest.mark.parametrize("name", ["frozen", "frozen-by-two"])
def test_earlier_weights_get_a_new_head_and_freezing_holds_the_trunk(base, plain, ended, name):
    assert ended[name].returncode == 0, ended[name].text
    assert "classifier is new, for 2 classes" in ended[name].stdout
    for key in ("fc.weight", "fc.bias"):
        assert key in ended[name].stdout  # what was not used is named
    before = read_checkpoint(plain[1] / "best.pth")["model"]
    after = read_checkpoint(newest_run(base / name) / "last.pth")["model"]
    for key, tensor in after.items():
        if not key.startswith("fc."):
            assert torch.equal(tensor, before[key].to(tensor.dtype)), key
    assert after["fc.weight"].shape == (2, 512)
    assert after["fc.weight"].abs().max() > 1e-4


def test_two_processes_that_accumulate_take_the_steps_of_one(base, ended):
    """With the trunk frozen no BatchNorm sees its batch, so that batches of 2 x 2 processes x 2 are a batch of 8."""
    one, two = (newest_run(base / name) for name in ("frozen", "frozen-by-two"))
    args = json.loads((two / "args.json").read_text(encoding="utf-8"))
    assert (args["accumulate"], args["global_batch_size"], args["world_size"]) == (2, 8, 2)
    for row, other in zip(read_metrics(one), read_metrics(two), strict=True):
        assert (row["lr"], row["val_top1"]) == (other["lr"], other["val_top1"])
        assert row["train_loss"] == pytest.approx(other["train_loss"], rel=1e-9)
        assert row["val_loss"] == pytest.approx(other["val_loss"], rel=1e-9)
    states = [read_checkpoint(run / "last.pth")["model"] for run in (one, two)]
    assert torch.allclose(states[0]["fc.weight"], states[1]["fc.weight"], rtol=1e-9, atol=1e-12)


def test_bf16_without_sync_bn_on_train_and_val_folders_with_a_last_batch_of_one(base, ended):
    """17 + 17 images, 2 processes x 4: a step takes 8 of them; of 9 validation images the ninth comes alone."""
    assert ended["mixed"].returncode == 0, ended["mixed"].text
    assert "Warning" not in ended["mixed"].text
    run = newest_run(base / "mixed")
    (row,) = read_metrics(run)
    assert 17 * row["val_top1"] == pytest.approx(round(17 * row["val_top1"]), abs=1e-12)
    assert math.isfinite(row["train_loss"])
    assert all(tensor.dtype != torch.bfloat16 for tensor in read_checkpoint(run / "best.pth")["model"].values())
    args = json.loads((run / "args.json").read_text(encoding="utf-8"))
    assert (args["amp"], args["syncBN"]) == ("bf16", False)
    for split in scripts.read_rows(run / "split.csv"):
        assert f"/parts/{split['split']}/{split['label']}/" in split["path"]
    assert int(read_checkpoint(run / "last.pth")["model"]["bn1.num_batches_tracked"]) == 2


# ------------------------------------------------------------------------------------------------------ small and wrong


def test_three_images_are_a_step_of_three(base, ended):
    assert ended["few"].returncode == 0, ended["few"].text
    assert "16 is lowered to 3" in ended["few"].stdout
    (row,) = read_metrics(newest_run(base / "few"))
    assert row["train_loss"] > 0
    assert row["val_top1"] in (0, 0.5, 1)


def test_fewer_images_than_processes_is_one_sentence(base, ended):
    assert ended["few-by-four"].returncode == 2
    assert "3 training images for 4 processes" in ended["few-by-four"].stderr
    assert len(ended["few-by-four"].stderr.splitlines()) == 1
    assert not (base / "few-by-four" / "runs").exists()


def test_a_wrong_number_of_classes_is_one_sentence(ended):
    assert ended["classes"].returncode == 2
    (sentence,) = ended["classes"].stderr.splitlines()
    assert sentence.startswith("error: ")
    assert {"5", "3"} <= set(sentence.replace(",", " ").replace(";", " ").replace(":", " ").split())
    assert "num_classes" in sentence.replace("-", "_")


@pytest.mark.parametrize("name", ["huge-by-two", "overflow"])
def test_a_loss_that_is_not_finite_ends_the_run_and_spares_the_checkpoints(base, ended, name):
    assert ended[name].returncode == 2, ended[name].text
    (sentence,) = ended[name].stderr.splitlines()
    assert sentence.startswith("error: ")
    assert f"step {0 if name == 'overflow' else 1} " in sentence  # the weights after it, or the next step's loss
    assert "learning rate" in sentence
    assert "e+" in sentence
    for checkpoint in (base / name).glob("runs/*/*.pth"):
        for key, tensor in read_checkpoint(checkpoint)["model"].items():
            assert tensor.isfinite().all(), f"{checkpoint.name}: {key}"


def test_tensorboard_finds_every_figure_of_a_run(plain):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(plain[1])).Reload()
    tags = events.Tags()
    assert set(tags["scalars"]) >= {
        *("step/loss", "step/learning_rate", "loss/training", "loss/validation", "learning_rate/epoch"),
        *("validation/top1", "validation/top5", "validation/macro_f1"),
        *("speed/images_per_second", "speed/share_of_time_waiting_for_data"),
        *("best/val_top1", "best/val_macro_f1", "best/val_loss"),
    }
    images = {"images/training", "figures/confusion", "figures/per_class", "figures/curves"}
    assert images <= set(tags["images"]) <= images | {"images/worst"}
    assert tags["tensors"] == ["options/text_summary"]
    assert len(events.PluginTagToContent("hparams")) == 3
    rows = read_metrics(plain[1])
    assert [event.value for event in events.Scalars("validation/top1")] == pytest.approx(
        [row["val_top1"] for row in rows], rel=1e-6
    )
    assert {path.stem for path in plain[1].glob("*.png")} >= {
        *("training_images", "confusion_matrix", "per_class", "curves")
    }

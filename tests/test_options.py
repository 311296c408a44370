"""The command lines: no `type=bool`, no abbreviations, dash is underscore, and a sentence for each mistake."""

import subprocess
import sys
from pathlib import Path

import pytest

from utils.errors import UserError
from utils.options import DEFAULTS, parse_prediction_options, parse_training_options

ROOT = Path(__file__).resolve().parent.parent
SWITCHES = ["syncBN", "pretrained", "freeze-layers", "eval-amp", "float64", "find-unused-parameters"]


def parse(*words: str, distributed: bool = True):
    return parse_training_options("", distributed, list(words))


def refused(*words: str) -> str:
    with pytest.raises(UserError) as caught:
        parse(*words)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("name", SWITCHES)
def test_a_switch_reads_what_people_write(name):
    place = name.replace("-", "_")
    for words in ([f"--{name}"], [f"--{name}", "True"], [f"--{name}=1"], [f"--{name}", "yes"], [f"--{name}", "ON"]):
        assert getattr(parse(*words), place) is True, words
    for words in ([f"--no-{name}"], [f"--{name}", "False"], [f"--{name}=0"], [f"--{name}", "no"], [f"--{name}=off"]):
        assert getattr(parse(*words), place) is False, words
    assert f"--{name}" in refused(f"--{name}", "perhaps")
    assert "perhaps" in refused(f"--{name}=perhaps")
    assert f"--no-{name}" in refused(f"--no-{name}", "False")  # a double negation is not guessed at


def test_the_later_of_two_words_counts_and_a_bare_switch_takes_no_option_for_its_value():
    assert parse("--no-syncBN", "--syncBN").syncBN is True
    args = parse("--syncBN", "--epochs", "3", "--freeze-layers")
    assert (args.syncBN, args.epochs, args.freeze_layers) == (True, 3, True)
    assert parse("--syncbn", "False").syncBN is False
    assert parse("--data-parallel", distributed=False).data_parallel is True


def test_dash_and_underscore_are_the_same_in_names_and_untouched_in_values():
    words = ["--data_path", "my_photos", "--num_classes=5", "--global_batch_size", "24", "--lr_scaling=sqrt"]
    args = parse(*words, "--no_syncBN")
    assert (args.data_path, args.num_classes, args.global_batch_size) == ("my_photos", 5, 24)
    assert (args.lr_scaling, args.syncBN) == ("sqrt", False)
    assert parse("--freeze_layers", "False").freeze_layers is False
    assert parse("--data-path=a_b/c_d").data_path == "a_b/c_d"


@pytest.mark.parametrize("word", ["--epoch", "--data", "--batch", "--pretrain", "--no-sync"])
def test_abbreviations_are_refused_with_the_whole_name(word):
    assert word in refused(word, "3")


@pytest.mark.parametrize(
    ("wrong", "right"),
    [("--epoch", "--epochs"), ("--batchsize", "--batch-size"), ("--data_pth", "--data-path"), ("--model-name", "")],
)
def test_an_unknown_option_gets_its_near_match(wrong, right):
    message = refused(wrong, "3")
    assert f"unknown option {wrong.replace('_', '-')}" in message
    assert not right or f"did you mean {right}?" in message
    assert "--help" in message


@pytest.mark.parametrize(
    "words",
    [
        "--epochs 0", "--epochs 1.5", "--epochs many", "--epochs", "--batch-size -4", "--lr 0", "--lr nan", "--lr -1",
        "--lr inf", "--val-rate 0", "--val-rate 1.5", "--label-smoothing 2", "--hflip -0.1", "--crop-scale 0",
        "--seed -1", "--workers -1", "--amp fp8", "--lr-scaling cubic", "--world-size 0", "--image-size 0",
        "--weight-decay inf",
        "--batch-size 4 --global-batch-size 8", "--amp --float64", "photos",
    ],
)  # fmt: skip
def test_a_value_out_of_range_is_one_sentence(words):
    message = refused(*words.split())
    assert words.split()[0] in message


def test_amp_alone_is_bf16():
    assert parse("--amp").amp == "bf16"
    assert parse("--amp", "--epochs", "1").amp == "bf16"
    assert parse("--amp", "fp16").amp == "fp16"
    assert parse().amp is None


def test_weights_and_pretrained_exclude_one_another():
    assert "--weights and --pretrained" in refused("--weights", "a.pth", "--pretrained")
    assert parse("--weights", "a.pth", "--data-path", "photos").pretrained is False
    assert parse("--weights", "a.pth", "--no-pretrained").pretrained is False


def test_the_launchers_local_rank_is_accepted_in_every_spelling():
    for words in (["--local_rank=0"], ["--local-rank=1"], ["--local_rank", "0"], ["--local-rank", "1"]):
        assert parse(*words, "--epochs", "2").epochs == 2


def test_defaults_on_photos_and_on_the_digits():
    photos, digits = parse("--data-path", "photos"), parse()
    for name, values in DEFAULTS.items():
        assert (getattr(photos, name), getattr(digits, name)) == values
    assert (photos.batch_size, photos.global_batch_size, photos.accumulate) == (16, None, 1)
    assert parse("--global-batch-size", "24").batch_size is None
    assert parse("--epochs", "3").epochs == 3
    assert parse("--hflip", "0", "--data-path", "photos").hflip == 0.0


def test_options_come_from_a_recipe_file(tmp_path):
    recipe = tmp_path / "recipe.txt"
    recipe.write_text(
        "# for the garden\n\n--data_path 'my photos/2_a'  # with a blank\n"
        "--epochs 7 --no_syncBN\n--lr=0.03\n--model\nresnet50\n"
    )
    args = parse(f"@{recipe}", "--lr", "0.5")
    assert (args.data_path, args.epochs, args.syncBN) == ("my photos/2_a", 7, False)
    assert (args.lr, args.model) == (0.5, "resnet50")  # what stands behind the file wins
    assert parse("--lr", "0.5", f"@{recipe}").lr == 0.03


def test_a_recipe_file_that_cannot_be_read_is_one_sentence(tmp_path):
    assert "nowhere.txt" in refused(f"@{tmp_path / 'nowhere.txt'}")
    assert str(tmp_path) in refused(f"@{tmp_path}")


def test_a_recipe_file_with_an_open_quote_is_one_sentence(tmp_path):
    (tmp_path / "recipe.txt").write_text("--epochs 3\n--data-path 'my photos\n")
    assert "my photos" in refused(f"@{tmp_path / 'recipe.txt'}")


def test_an_unknown_option_in_a_recipe_file_is_named(tmp_path):
    (tmp_path / "recipe.txt").write_text("--epoch 3\n")
    assert "did you mean --epochs?" in refused(f"@{tmp_path / 'recipe.txt'}")


def test_predictions_options():
    args = parse_prediction_options("", ["a.jpg", "b_c/", "--top_k", "3", "--output", "found.JSONL"])
    assert (args.paths, args.top_k, args.output, args.weights) == (["a.jpg", "b_c/"], 3, "found.JSONL", None)
    for words in (["--top-k", "2"], ["a.jpg", "--output", "found.txt"], ["a.jpg", "--top-k", "0"], ["a.jpg", "--top"]):
        with pytest.raises(UserError):
            parse_prediction_options("", words)
    assert parse_prediction_options("", ["@photo.jpg"]).paths == ["@photo.jpg"]  # a file name may begin with @


def test_help_names_every_switch_and_needs_no_torch():
    code = "import sys, utils.options as o; assert 'torch' not in sys.modules; o.parse_training_options('x', True)"
    done = subprocess.run([sys.executable, "-c", code, "--help"], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert all(f"--no-{name}" in done.stdout for name in SWITCHES)
    assert "local-rank" not in done.stdout
    done = subprocess.run([sys.executable, "-c", code, "--epoch", "3"], capture_output=True, text=True, cwd=ROOT)
    assert "did you mean --epochs" in done.stderr

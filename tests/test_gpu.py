"""What needs a CUDA device: nccl, torch's SyncBatchNorm, mixed precision, checkpoints that a CPU reads."""

import pytest
import torch

from tests.makers import make_photos
from tests.scripts import MULTI, PREDICT, SINGLE, newest_run, read_checkpoint, read_metrics, run_script, words

pytestmark = pytest.mark.gpu
TRAINING = words("--device cuda --model resnet18 --no-pretrained --image-size 32 --epochs 2 --workers 0 --lr 0.001")
VISIBLE = {"CUDA_VISIBLE_DEVICES": "0"}


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    return make_photos(tmp_path_factory.mktemp("gpu") / "photos", {"cat": 20, "dog": 20, "owl": 20})


@pytest.mark.parametrize("amp", [[], ["--amp", "bf16"], ["--amp", "fp16"]], ids=["float32", "bf16", "fp16"])
def test_nccl_trains_in_every_precision_and_a_cpu_predicts(photos, tmp_path, amp):
    options = [*TRAINING, "--data-path", photos, "--batch-size", "8", *amp]
    trained = run_script(MULTI, *options, cwd=tmp_path, env=VISIBLE, launcher="torchrun", processes=1)
    assert trained.returncode == 0, trained.text
    assert "destroy_process_group" not in trained.text
    last = read_checkpoint(newest_run(tmp_path) / "last.pth")
    assert bool(last["scaler"]) == (amp[-1:] == ["fp16"])  # the loss scale is saved where there is one
    assert all(row["val_loss"] < float("inf") for row in read_metrics(newest_run(tmp_path)))
    predicted = run_script(PREDICT, photos / "cat", "--device", "cpu", cwd=tmp_path, env={"CUDA_VISIBLE_DEVICES": ""})
    assert predicted.returncode == 0, predicted.text
    assert len(predicted.stdout.splitlines()) == 20


def test_the_loss_scale_goes_on_where_it_was(photos, tmp_path):
    options = [*TRAINING, "--data-path", photos, "--batch-size", "8", "--amp", "fp16"]
    assert run_script(SINGLE, *options, cwd=tmp_path, env=VISIBLE).returncode == 0
    before = read_checkpoint(newest_run(tmp_path) / "last.pth")["scaler"]
    more = run_script(SINGLE, "--resume", "--epochs", "3", "--device", "cuda", cwd=tmp_path, env=VISIBLE)
    assert more.returncode == 0, more.text
    after = read_checkpoint(newest_run(tmp_path) / "last.pth")["scaler"]
    assert after["scale"] in (before["scale"], before["scale"] / 2, before["scale"] * 2)


def test_more_processes_than_gpus_are_one_sentence(photos, tmp_path):
    many = str(torch.cuda.device_count() + 1)
    ended = run_script(MULTI, *TRAINING, "--data-path", photos, "--world-size", many, cwd=tmp_path, env=VISIBLE)
    assert ended.returncode == 2
    (sentence,) = ended.stderr.splitlines()
    assert "1 visible GPU" in sentence


def test_validation_is_the_same_with_mixed_precision_off_and_on(photos, tmp_path):
    """Training in bf16 leaves validation in float32: predict.py finds exactly the logged accuracy."""
    options = [*TRAINING, "--data-path", photos, "--batch-size", "8", "--amp", "bf16"]
    assert run_script(SINGLE, *options, cwd=tmp_path, env=VISIBLE).returncode == 0
    best = read_checkpoint(newest_run(tmp_path) / "best.pth")
    assert all(tensor.dtype != torch.bfloat16 for tensor in best["model"].values())

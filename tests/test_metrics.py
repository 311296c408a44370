"""Every validation image counts once (law L2), on any number of processes and in batches of any size."""

import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from data.loaders import ImageDataset, eval_loader
from data.samplers import ShardSampler
from data.split import make_split
from data.transforms import EvalTransform, Preprocessing
from tests.makers import make_photos, small_net
from tests.ranks import run_ranks
from utils.distributed_utils import barrier, broadcast_buffers, get_rank, get_world_size, is_main_process, reduce_value
from utils.experiment import Experiment
from utils.metrics import Metrics, Totals
from utils.precision import Precision
from utils.train_eval_utils import evaluate

CPU = torch.device("cpu")


def seven_images() -> tuple[torch.Tensor, torch.Tensor]:
    """Logits 7 x 10 and labels 7; the guesses are right for all but the last image."""
    logits = torch.randn(7, 10, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    labels = logits.argmax(dim=1)
    labels[6] = logits[6].argmin()
    return logits, labels


def shard_metrics(rank, world_size, logits, labels, batch_size) -> Metrics:
    totals = Totals(logits.shape[1], CPU)
    shard = list(ShardSampler(len(labels), rank, world_size))
    for first in range(0, len(shard), batch_size):
        batch = shard[first : first + batch_size]
        totals.update(logits[batch], labels[batch])
    return totals.reduce()


def check_equal(ours: Metrics, theirs: Metrics) -> None:
    assert (ours.correct, ours.correct5, ours.count) == (theirs.correct, theirs.correct5, theirs.count)
    assert torch.equal(ours.confusion, theirs.confusion)
    assert ours.loss == pytest.approx(theirs.loss, rel=1e-14)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_six_right_of_seven_are_six_sevenths(world_size):
    logits, labels = seven_images()
    alone = shard_metrics(0, 1, logits, labels, 7)
    for metrics in run_ranks(shard_metrics, world_size, logits, labels, 2):
        check_equal(metrics, alone)
        assert metrics.top1 == 6 / 7
        assert f"{metrics.top1:.6f}" == "0.857143"
        assert (metrics.correct, metrics.count, metrics.not_finite) == (6, 7, 0)


@pytest.mark.parametrize("batch_size", [1, 2, 3, 5, 7, 100])
def test_the_size_of_a_batch_does_not_matter(batch_size):
    logits, labels = seven_images()
    check_equal(shard_metrics(0, 1, logits, labels, batch_size), shard_metrics(0, 1, logits, labels, 7))


def test_the_loss_is_the_mean_over_images_not_over_batches():
    logits, labels = seven_images()
    metrics = shard_metrics(0, 1, logits, labels, 5)  # batches of 5 and 2
    assert metrics.loss == pytest.approx(float(F.cross_entropy(logits, labels)), rel=1e-14)
    halves = [float(F.cross_entropy(logits[part], labels[part])) for part in (slice(5), slice(5, 7))]
    assert abs(metrics.loss - sum(halves) / 2) > 1e-3  # the test can tell them apart


def test_a_process_without_images_changes_nothing():
    logits, labels = (values[:1] for values in seven_images())
    for metrics in run_ranks(shard_metrics, 3, logits, labels, 4):
        check_equal(metrics, shard_metrics(0, 1, logits, labels, 1))


def test_top5_counts_what_is_among_the_five_best():
    logits = torch.arange(10.0).repeat(10, 1)  # the best five are 9, 8, 7, 6, 5
    metrics = shard_metrics(0, 1, logits, torch.arange(10), 4)
    assert (metrics.top1, metrics.top5) == (0.1, 0.5)


@pytest.mark.parametrize("classes", [2, 3, 4, 5])
def test_top5_is_capped_at_the_number_of_classes(classes):
    metrics = shard_metrics(0, 1, torch.randn(20, classes), torch.arange(20) % classes, 7)
    assert metrics.top5 == 1.0
    assert metrics.confusion.shape == (classes, classes)


def test_rows_of_the_confusion_matrix_are_true_classes():
    logits = F.one_hot(torch.tensor([0, 1, 1, 2]), 3).float()
    metrics = shard_metrics(0, 1, logits, torch.tensor([0, 0, 1, 1]), 4)
    assert metrics.confusion.tolist() == [[1, 1, 0], [0, 1, 1], [0, 0, 0]]
    assert metrics.confusion.dtype == torch.int64


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 2])
def test_logits_that_are_not_finite_count_as_wrong_and_are_reported(bad, place):
    logits = F.one_hot(torch.tensor([0, 1, 2, 0]), 3).float()
    logits[2, place] = bad
    metrics = shard_metrics(0, 1, logits, torch.tensor([0, 1, 2, 0]), 2)
    assert (metrics.correct, metrics.correct5, metrics.count, metrics.not_finite) == (3, 3, 4, 1)
    assert int(metrics.confusion.sum()) == 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_logits_of_any_format_are_taken(dtype):
    logits, labels = seven_images()
    assert shard_metrics(0, 1, logits.to(dtype), labels, 3).top1 == 6 / 7


# ---------------------------------------------------------------------------------------------------- reduce_value


def reduce_on_rank(rank, world_size):
    value = torch.tensor([1.0 + rank, 10.0])
    results = reduce_value(value), reduce_value(value, average=False), reduce_value(value, average=True)
    return value, *results


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_reduce_value_averages_or_sums_and_leaves_its_argument_alone(world_size):
    total = sum(range(1, world_size + 1))
    for rank, (value, default, summed, averaged) in enumerate(run_ranks(reduce_on_rank, world_size)):
        assert value.tolist() == [1.0 + rank, 10.0]
        assert summed.tolist() == [total, 10.0 * world_size]
        assert averaged.tolist() == default.tolist() == [total / world_size, 10.0]


def test_the_right_answers_without_a_process_group():
    value = torch.tensor([3.0], requires_grad=True)
    assert (get_rank(), get_world_size(), is_main_process()) == (0, 1, True)
    assert reduce_value(value).tolist() == reduce_value(value, average=False).tolist() == [3.0]
    barrier()
    broadcast_buffers(torch.nn.BatchNorm1d(2))


# -------------------------------------------------------------------------------------------------------- evaluate


def experiment_for(model: torch.nn.Module, root: str) -> Experiment:
    split = make_split(root, val_rate=0.5, seed=0)
    preprocessing = Preprocessing(16, 0.875, "bilinear", (0.5,) * 3, (0.25,) * 3)
    dataset = ImageDataset(split.val, EvalTransform(preprocessing))
    return Experiment("small", model, split, preprocessing, dataset, dataset, 0, ())


def net_of(rank: int) -> torch.nn.Module:
    """Equal weights everywhere, running statistics that differ from rank to rank, as without SyncBN."""
    model = small_net(3).double()
    generator = torch.Generator().manual_seed(100 + rank)
    for buffer in model.buffers():
        if buffer.is_floating_point():
            buffer.copy_(torch.rand(buffer.shape, generator=generator, dtype=torch.float64) + 0.1)
    return model


def evaluate_on_rank(rank, world_size, root, batch_size):
    model = net_of(rank)
    if world_size > 1:
        model = torch.nn.parallel.DistributedDataParallel(model, broadcast_buffers=False)
        if rank:  # as after a step without SyncBN; DDP's own start has made them equal
            model.module.load_state_dict(net_of(rank).state_dict())
    experiment = experiment_for(model, root)
    shard = ShardSampler(len(experiment.val_set), rank, world_size)
    loader = eval_loader(experiment.val_set, shard, batch_size, 0, CPU)
    return evaluate(model, loader, experiment, Precision(CPU, float64=True))


def test_evaluation_uses_the_buffers_of_rank_0(tmp_path: Path):
    make_photos(tmp_path, {"a": 14, "b": 10, "c": 6})
    alone = evaluate_on_rank(0, 1, str(tmp_path), 4)
    assert alone.count == 15
    for metrics in run_ranks(evaluate_on_rank, 3, str(tmp_path), 2):
        check_equal(metrics, alone)
    other = evaluate_on_rank(0, 1, str(tmp_path), 15)
    check_equal(other, alone)


def test_evaluation_leaves_no_training_mode_and_no_gradients(tmp_path: Path):
    make_photos(tmp_path, 3, 4)
    model = net_of(0).train()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    experiment = experiment_for(model, str(tmp_path))
    shard = ShardSampler(len(experiment.val_set), 0, 1)
    evaluate(model, eval_loader(experiment.val_set, shard, 4, 0, CPU), experiment, Precision(CPU, float64=True))
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_evaluation_computes_in_full_precision_whatever_amp_says(tmp_path: Path):
    make_photos(tmp_path, 3, 6)
    model, found = small_net(3), []
    experiment = experiment_for(model, str(tmp_path))
    for precision in (Precision(CPU), Precision(CPU, amp="bf16"), Precision(CPU, amp="bf16", eval_amp=True)):
        shard = ShardSampler(len(experiment.val_set), 0, 1)
        found.append(evaluate(model, eval_loader(experiment.val_set, shard, 4, 0, CPU), experiment, precision).loss)
    assert found[0] == found[1] != found[2]

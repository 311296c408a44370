"""A loss that is not finite stops all processes together, told a few steps later and never too late."""

import math

import pytest
import torch

from tests.ranks import run_ranks
from utils.errors import UserError
from utils.step_watch import LAG, LAG_ON_CUDA, StepWatch

CPU = torch.device("cpu")


def push_all(watch: StepWatch, losses: list[float], rate: float = 0.1) -> tuple[int, str]:
    """Pushes until the watch raises: the step of that push, and what it said."""
    for step, loss in enumerate(losses):
        try:
            watch.push(step, torch.tensor(loss), rate * (step + 1))
        except UserError as error:
            return step, str(error)
    return -1, ""


def watch_on_rank(rank, world_size, bad_rank, bad_step, bad):
    seen = []
    watch = StepWatch(CPU, lambda *report: seen.append(report))
    losses = [float(rank + step) for step in range(12)]
    if rank == bad_rank:
        losses[bad_step:] = [bad] * (12 - bad_step)
    return (*push_all(watch, losses), seen)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_one_bad_loss_of_three_stops_all_at_the_same_step_with_the_same_words(bad):
    results = run_ranks(watch_on_rank, 3, 1, 5, bad)
    assert results[0] == results[1] == results[2]
    stopped, message, seen = results[0]
    assert stopped == 5 + LAG
    assert "step 5 " in message
    assert "learning rate 0.6)" in message
    assert "\n" not in message
    assert [step for step, _, _ in seen] == [0, 1, 2, 3, 4]


def test_opposite_infinities_on_two_processes_do_not_cancel():
    results = run_ranks(opposite_infinities, 2)
    assert results[0] == results[1]
    assert "step 0 " in results[0]


def opposite_infinities(rank, world_size):
    watch = StepWatch(CPU, lambda *report: None)
    watch.push(0, torch.tensor((math.inf, -math.inf)[rank]), 0.1)
    with pytest.raises(UserError) as caught:
        watch.drain()
    return str(caught.value)


def report_means(rank, world_size):
    seen = []
    watch = StepWatch(CPU, lambda *report: seen.append(report))
    losses = [torch.tensor(float(10 * step + rank), dtype=torch.float64) for step in range(7)]
    for step, loss in enumerate(losses):
        watch.push(step, loss, 0.5)
    early = len(seen)
    watch.drain()
    return early, seen, [float(loss) for loss in losses]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_each_step_is_told_once_in_order_with_the_mean_over_the_processes(world_size):
    for rank, (early, seen, losses) in enumerate(run_ranks(report_means, world_size)):
        assert early == 7 - LAG
        assert seen == [(step, 10 * step + (world_size - 1) / 2, 0.5) for step in range(7)]
        assert losses == [10 * step + rank for step in range(7)]  # the training loss itself is left alone


def test_nothing_is_read_before_its_time_and_drain_reads_the_rest():
    seen = []
    watch = StepWatch(CPU, lambda *report: seen.append(report))
    assert push_all(watch, [math.nan] * LAG) == (-1, "")
    assert seen == []
    with pytest.raises(UserError, match="step 0 "):
        watch.drain()


def test_one_step_more_than_the_lag_raises():
    assert push_all(StepWatch(CPU, lambda *report: None), [math.nan] * 20)[0] == LAG


def test_a_sound_run_drains_in_silence_and_may_go_on():
    seen = []
    watch = StepWatch(CPU, lambda *report: seen.append(report[0]))
    for epoch in range(2):
        for step in range(3):
            watch.push(3 * epoch + step, torch.tensor(1.0, requires_grad=True), 0.1)
        watch.drain()
        watch.drain()
    assert seen == list(range(6))


def test_the_first_bad_step_is_named_when_several_are_under_way():
    watch = StepWatch(CPU, lambda *report: None)
    watch.lag = LAG_ON_CUDA
    push_all(watch, [1.0, 2.0, math.inf, math.nan])
    with pytest.raises(UserError, match=r"step 2 \(learning rate 0.3\)"):
        watch.drain()

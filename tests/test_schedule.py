"""The arithmetic of batches and learning rates, and the sentences about what cannot be shared."""

import math

import pytest

from utils.errors import UserError
from utils.options import parse_training_options
from utils.schedule import Schedule, make_schedule


def schedule(words: str, images: int = 1000, world_size: int = 1) -> Schedule:
    return make_schedule(parse_training_options("", True, words.split()), images, world_size)


def test_the_cosine_at_the_starts_of_four_epochs():
    plan = schedule("--global-batch-size 100 --lr 0.01 --lrf 0.1 --epochs 4 --warmup-steps 0")
    starts = [plan.learning_rate(epoch * plan.steps_per_epoch) for epoch in range(4)]
    assert plan.steps_per_epoch == 10
    assert starts == pytest.approx([0.01, 0.00868198, 0.0055, 0.00231802], abs=5e-9)
    assert plan.learning_rate(40) == pytest.approx(0.001, rel=1e-12)


def test_warm_up_rises_evenly_to_the_cosine_and_never_from_zero():
    plan = schedule("--global-batch-size 10 --lr 0.5 --lrf 1 --epochs 1 --warmup-steps 4")
    assert [plan.learning_rate(step) for step in range(6)] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5, 0.5])
    cold = schedule("--global-batch-size 10 --lr 0.5 --lrf 0.1 --epochs 1 --warmup-steps 0")
    warm = schedule("--global-batch-size 10 --lr 0.5 --lrf 0.1 --epochs 1 --warmup-steps 4")
    assert [warm.learning_rate(step) for step in range(4, 100)] == [cold.learning_rate(step) for step in range(4, 100)]


def test_left_to_itself_warm_up_is_a_tenth_and_at_most_a_hundred_steps():
    assert schedule("--global-batch-size 10 --epochs 3").warmup_steps == 30
    assert schedule("--global-batch-size 10 --epochs 300").warmup_steps == 100
    assert schedule("--global-batch-size 500 --epochs 2").warmup_steps == 0


@pytest.mark.parametrize(("scaling", "factor"), [("linear", 8.0), ("sqrt", math.sqrt(8)), ("none", 1.0)])
def test_the_learning_rate_of_one_batch_is_scaled_with_processes_and_accumulation(scaling, factor):
    plan = schedule(f"--batch-size 5 --accumulate 2 --lr 0.01 --lr-scaling {scaling}", world_size=4)
    assert plan.lr == pytest.approx(0.01 * factor, rel=1e-15)
    assert (plan.batch_size, plan.global_batch_size, plan.steps_per_epoch) == (5, 40, 25)
    assert f"{0.01 * factor:g}" in " ".join(plan.notes)
    assert scaling in " ".join(plan.notes)


def test_the_learning_rate_of_the_global_batch_is_not_scaled():
    for world_size in (1, 2, 3, 4):
        plan = schedule("--global-batch-size 24 --lr 0.01", world_size=world_size)
        assert (plan.lr, plan.global_batch_size, plan.batch_size) == (0.01, 24, 24 // world_size)
        assert "not scaled" in " ".join(plan.notes)


def test_with_a_global_batch_the_learning_rates_are_the_same_on_any_number_of_processes():
    plans = [schedule("--global-batch-size 24 --lr 0.01", world_size=world_size) for world_size in (1, 2, 3, 4)]
    rates = [[plan.learning_rate(step) for step in range(plan.total_steps)] for plan in plans]
    assert rates[1:] == rates[:1] * 3


@pytest.mark.parametrize(
    ("batch", "world_size", "accumulate", "nearest"),
    [(32, 3, 1, "30 or 33"), (2, 3, 1, "take 3"), (10, 2, 2, "8 or 12"), (97, 4, 1, "96 or 100")],
)
def test_a_global_batch_that_cannot_be_shared_names_the_nearest(batch, world_size, accumulate, nearest):
    with pytest.raises(UserError, match=rf"--global-batch-size {batch} .*{world_size} processes.*{nearest}") as caught:
        schedule(f"--global-batch-size {batch} --accumulate {accumulate}", world_size=world_size)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("images", [12, 25, 47, 50, 99])
def test_a_small_data_set_lowers_the_global_batch_equally_for_one_to_four_processes(images):
    plans = [schedule("--global-batch-size 120", images, world_size) for world_size in (1, 2, 3, 4)]
    (batch,) = {plan.global_batch_size for plan in plans}
    assert batch == images // 12 * 12
    for plan in plans:
        assert plan.steps_per_epoch >= 1
        assert f"120 is lowered to {batch}" in plan.notes[0]
        assert f"{images} training images" in plan.notes[0]


@pytest.mark.parametrize("words", ["--batch-size 64", "--batch-size 64 --accumulate 3", "--global-batch-size 240"])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("extra", [0, 1, 2, 9])
def test_there_is_never_an_epoch_without_steps(words, world_size, extra):
    plan = schedule(f"{words} --epochs 2", world_size + extra, world_size)
    assert plan.steps_per_epoch >= 1
    assert plan.batch_size >= 1
    assert plan.global_batch_size == plan.batch_size * plan.accumulate * world_size <= world_size + extra
    assert "lowered" in plan.notes[0]
    assert all(0 < plan.learning_rate(step) < 1 for step in range(plan.total_steps))


def test_lowering_says_that_it_stops_accumulating():
    assert "not accumulated" in schedule("--batch-size 64 --accumulate 3", 50).notes[0]


def test_a_data_set_of_exactly_one_batch_is_not_lowered():
    plan = schedule("--batch-size 8", 16, 2)
    assert (plan.global_batch_size, plan.steps_per_epoch) == (16, 1)
    assert "lowered" not in " ".join(plan.notes)


@pytest.mark.parametrize("words", ["--batch-size 4", "--global-batch-size 12"])
def test_fewer_images_than_processes_is_one_sentence(words):
    with pytest.raises(UserError, match="2 training images for 3 processes: start at most 2") as caught:
        schedule(words, 2, 3)
    assert "\n" not in str(caught.value)


def test_the_notes_say_what_is_left_out_of_an_epoch():
    assert "10 steps an epoch, 30 in all, 3 of warm-up; 7 images are left out" in " ".join(
        schedule("--global-batch-size 100 --epochs 3", 1007).notes
    )

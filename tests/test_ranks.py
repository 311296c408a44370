"""run_ranks is what the other tests stand on: it must order, fail and end as it says."""

import os
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.ranks import RankError, run_ranks


def report(rank, world_size, offset):
    total = offset + rank
    dist.all_reduce(total)
    return {
        "rank": rank,
        "world": dist.get_world_size(),
        "size": world_size,
        "sum": total,
        "threads": torch.get_num_threads(),
    }


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_results_come_in_rank_order_from_one_group(world_size):
    results = run_ranks(report, world_size, torch.tensor([10.0]))
    total = 10.0 * world_size + sum(range(world_size))
    for rank, result in enumerate(results):
        assert result == {
            "rank": rank,
            "world": world_size,
            "size": world_size,
            "sum": torch.tensor([total]),
            "threads": 1,
        }


def surroundings(rank, world_size):
    return sys.path, os.environ.get("RANKS_TEST"), os.getpid()


def test_children_have_the_project_root_and_todays_environment(monkeypatch):
    run_ranks(surroundings, 1)  # the server runs from here on, without the variable
    monkeypatch.setenv("RANKS_TEST", "yes")
    (path, value, first), (_, _, second) = run_ranks(surroundings, 2)
    assert str(Path(__file__).resolve().parent.parent) in path
    assert value == "yes"
    assert len({first, second, os.getpid()}) == 3


def fail_on_rank_one(rank, world_size):
    if rank == 1:
        raise LookupError("nothing here")
    dist.barrier()


def test_the_first_failure_is_raised_again_with_its_traceback():
    with pytest.raises(LookupError, match="nothing here") as caught:
        run_ranks(fail_on_rank_one, 2)
    assert "rank 1" in str(caught.value.__cause__)
    assert "in fail_on_rank_one" in str(caught.value.__cause__)


class Stubborn(Exception):
    def __init__(self, one, two):
        super().__init__("only one argument, so no pickle")


def fail_stubbornly(rank, world_size):
    raise Stubborn(1, 2)


def test_an_exception_that_cannot_travel_is_told_by_its_text():
    with pytest.raises(RankError) as caught:
        run_ranks(fail_stubbornly, 1)
    assert "only one argument" in str(caught.value.__cause__)


def die_on_rank_zero(rank, world_size):
    if rank == 0:
        os._exit(7)
    dist.barrier()


def test_a_process_that_dies_silently_is_named():
    with pytest.raises(RankError, match="rank 0") as caught:
        run_ranks(die_on_rank_zero, 2)
    assert "exit code 7" in str(caught.value.__cause__)


def hang_on_rank_one(rank, world_size, folder):
    Path(folder, str(rank)).write_text(str(os.getpid()))
    if rank == 1:
        time.sleep(60)


def test_a_hanging_rank_ends_at_the_timeout_and_leaves_no_process(tmp_path):
    run_ranks(surroundings, 1)  # the server's own start does not count
    start = time.monotonic()
    with pytest.raises(TimeoutError, match=r"ranks \[0, 1\]"):
        run_ranks(hang_on_rank_one, 2, str(tmp_path), timeout=3)
    assert time.monotonic() - start < 15
    for rank in "01":
        with pytest.raises(ProcessLookupError):
            os.kill(int((tmp_path / rank).read_text()), 0)

"""The same samples with the same dice in each global batch, on any number of processes; validation counts once."""

import pytest
import torch
from torch.utils.data import BatchSampler
from torch.utils.data.distributed import DistributedSampler

from data.loaders import ImageDataset, Loader
from data.samplers import SeededSampler, ShardSampler, sample_seed


def seeded(length: int, world_size: int, rank: int, seed: int = 0) -> SeededSampler:
    sampler = DistributedSampler(range(length), num_replicas=world_size, rank=rank, seed=seed, drop_last=True)
    return SeededSampler(sampler, seed)


def order(sampler: SeededSampler, epoch: int) -> list[int]:
    sampler.set_epoch(epoch)
    return [index for index, _ in sampler]


def test_the_order_is_torchs_and_changes_with_the_epoch():
    first, second = seeded(8, 2, 0), seeded(8, 2, 1)
    assert order(first, 0) == [4, 7, 2, 1]
    assert order(first, 1) == [5, 2, 7, 1]
    for epoch in (0, 1):
        assert sorted(order(first, epoch) + order(second, epoch)) == list(range(8))
    assert order(first, 0) == [4, 7, 2, 1]  # a function of the epoch, not of what was drawn before


def global_batches(length: int, batch: int, world_size: int, epoch: int) -> list[set[tuple[int, int]]]:
    """The k-th batches of all processes together: sets of (index, seed)."""
    ranks = [seeded(length, world_size, rank) for rank in range(world_size)]
    for rank in ranks:
        rank.set_epoch(epoch)
    batches = [list(BatchSampler(rank, batch // world_size, drop_last=True)) for rank in ranks]
    assert len({len(own) for own in batches}) == 1
    return [set().union(*step) for step in zip(*batches, strict=True)]


@pytest.mark.parametrize("length", [48, 53, 61])
@pytest.mark.parametrize("epoch", [0, 3])
def test_the_global_batches_do_not_depend_on_the_number_of_processes(length, epoch):
    expected = global_batches(length, 12, 1, epoch)
    assert len(expected) == length // 12
    assert all(len(batch) == 12 for batch in expected)
    for world_size in (2, 3, 4):
        assert global_batches(length, 12, world_size, epoch) == expected


def test_a_samples_seed_depends_on_run_seed_epoch_and_index_only():
    for world_size in (1, 2, 4):
        for rank in range(world_size):
            sampler = seeded(40, world_size, rank, seed=7)
            sampler.set_epoch(5)
            assert all(seed == sample_seed(7, 5, index) for index, seed in sampler)


def test_seeds_differ_wherever_an_argument_does():
    seeds = {sample_seed(run, epoch, index) for run in range(10) for epoch in range(20) for index in range(50)}
    assert len(seeds) == 10 * 20 * 50
    assert len({sample_seed(*arguments) for arguments in [(1, 23, 4), (12, 3, 4), (1, 2, 34), (123, 4, 0)]}) == 4
    assert all(0 <= seed < 2**64 for seed in seeds)


@pytest.mark.parametrize("length", [0, 1, 7, 12])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_validation_shards_hold_each_index_once_unpadded(length, world_size):
    shards = [ShardSampler(length, rank, world_size) for rank in range(world_size)]
    assert sorted(index for shard in shards for index in shard) == list(range(length))
    assert [len(shard) for shard in shards] == [len(list(shard)) for shard in shards]
    assert [list(shard) for shard in shards] == [list(range(length))[rank::world_size] for rank in range(world_size)]


def test_set_epoch_reaches_torchs_sampler_through_the_loader():
    sampler = seeded(8, 2, 0)
    dataset = ImageDataset([("", 0)] * 8, transform=None)
    loader = Loader(dataset, BatchSampler(sampler, 2, drop_last=True), 0, torch.device("cpu"))
    loader.set_epoch(1)
    assert sampler.sampler.epoch == 1
    assert [index for batch in loader.batches for index, _ in batch] == [5, 2, 7, 1]

"""Which sample, in which order, with which dice.

torch's `DistributedSampler(drop_last=True)` shuffles all indices with a seed that every process shares and gives
process r of W every W-th of them from the r-th on. With a `BatchSampler` in each process, the union of their k-th
batches is therefore the same stretch of the same permutation, however many processes share it. The dice of an
augmentation come from (run seed, epoch, index) alone: they depend neither on the process nor on the worker.
"""

import hashlib
from collections.abc import Iterator
from itertools import islice

from torch.utils.data import Sampler
from torch.utils.data.distributed import DistributedSampler


def sample_seed(run_seed: int, epoch: int, index: int) -> int:
    """A 64-bit seed for one sample in one epoch; neighbouring arguments give unrelated seeds."""
    digest = hashlib.blake2b(b"%d,%d,%d" % (run_seed, epoch, index), digest_size=8).digest()
    return int.from_bytes(digest, "little")


class SeededSampler(Sampler[tuple[int, int]]):
    """Makes (index, seed) pairs of the indices of a DistributedSampler.

    Args:
        sampler: gives this process's indices; its `epoch` is set through `set_epoch` here.
        seed: the run's seed, the same on every process.
    """

    def __init__(self, sampler: DistributedSampler, seed: int):
        self.sampler, self.seed, self.start = sampler, seed, 0

    def set_epoch(self, epoch: int, start: int = 0) -> None:
        """Another order and other augmentations in each epoch; without this call every epoch is the same.

        `start` is the number of this process's samples that were used before an interruption: they are passed over
        here, so that nothing is read in vain.
        """
        self.sampler.set_epoch(epoch)
        self.start = start

    def __iter__(self) -> Iterator[tuple[int, int]]:
        epoch = self.sampler.epoch
        return ((index, sample_seed(self.seed, epoch, index)) for index in islice(self.sampler, self.start, None))

    def __len__(self) -> int:
        return len(self.sampler) - self.start


class ShardSampler(Sampler[int]):
    """Every `world_size`-th index from `rank` on: together the processes see each sample exactly once.

    A DistributedSampler would repeat some samples until all shards are equally long, and a validation result would
    count those twice.
    """

    def __init__(self, length: int, rank: int, world_size: int):
        self.indices = range(rank, length, world_size)

    def __iter__(self) -> Iterator[int]:
        return iter(self.indices)

    def __len__(self) -> int:
        return len(self.indices)

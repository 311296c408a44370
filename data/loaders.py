"""From a list of samples to batches of uint8 images: the data set and the loaders made from it."""

import signal
from collections.abc import Callable, Iterator, Sequence

import torch
from PIL import Image
from torch.utils.data import BatchSampler, DataLoader, Dataset, Sampler

from data.errors import DataError
from data.images import load_image

Batch = tuple[torch.Tensor, torch.Tensor]


class ImageDataset(Dataset):
    """Samples read from files.

    Args:
        samples: (path, label) pairs.
        transform: called with an RGB image, and with a seed too where the sampler gives (index, seed) pairs.
    """

    def __init__(self, samples: Sequence[tuple[str, int]], transform: Callable[..., torch.Tensor]):
        self.samples, self.transform = samples, transform

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, item: int | tuple[int, int]) -> tuple[torch.Tensor, int] | DataError:
        index, *seed = item if isinstance(item, tuple) else (item,)
        path, label = self.samples[index]
        try:
            image: Image.Image = load_image(path)
        except DataError as error:
            return error  # raised in a worker it would arrive wrapped in that worker's traceback
        return self.transform(image, *seed), label


def collate(samples: list[tuple[torch.Tensor, int] | DataError]) -> Batch | DataError:
    """Images N x 3 x S x S uint8 and labels N int64, or the first error among the samples."""
    for sample in samples:
        if isinstance(sample, DataError):
            return sample
    images, labels = zip(*samples, strict=True)
    return torch.stack(images), torch.tensor(labels)


def unbroken(batch: Batch | DataError) -> Batch:
    """The batch, or its error raised in the process that asked for it."""
    if isinstance(batch, DataError):
        raise batch
    return batch


def _leave_signals_to_the_process(worker: int) -> None:
    """A launcher sends a signal to the whole group; the process decides what it means, and its workers end with it."""
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)


class Loader:
    """Batches of (images, labels) on `device`. Raises DataError, with the file's path, when an image cannot be read.

    Iterating gives len(loader) batches; `set_epoch` is passed on to a sampler that shuffles.
    """

    def __init__(self, dataset: ImageDataset, batches: Sampler, workers: int, device: torch.device):
        self.batches, self.device = batches, device
        self.loader = DataLoader(
            dataset,
            batch_sampler=batches,
            num_workers=workers,
            collate_fn=collate,
            pin_memory=device.type == "cuda",
            persistent_workers=workers > 0,
            worker_init_fn=_leave_signals_to_the_process,
            # A generator of its own: fetching data draws nothing from the one that the training steps are seeded with.
            generator=torch.Generator().manual_seed(0),
        )

    def set_epoch(self, epoch: int, start: int = 0) -> None:
        self.batches.sampler.set_epoch(epoch, start)

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Batch]:
        for batch in self.loader:
            images, labels = unbroken(batch)
            yield images.to(self.device, non_blocking=True), labels.to(self.device, non_blocking=True)


def eval_loader(dataset: ImageDataset, sampler: Sampler[int], batch_size: int, workers: int, device: torch.device):
    """A Loader over a shard for validation or prediction; every sample once, the last batch may be smaller."""
    return Loader(dataset, BatchSampler(sampler, batch_size, drop_last=False), workers, device)

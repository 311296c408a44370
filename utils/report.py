"""The first and the last lines of a training run."""

import shlex
from argparse import Namespace

import torch

from utils.distributed_utils import get_world_size, say
from utils.experiment import Experiment
from utils.run import NullRun
from utils.schedule import Schedule

CLASSES_SHOWN = 10


def say_start(args: Namespace, experiment: Experiment, schedule: Schedule, device: torch.device, run: NullRun) -> None:
    """What is about to be trained, on what, with which arithmetic, and where it goes."""
    parameters = sum(parameter.numel() for parameter in experiment.model.parameters())
    trainable = sum(p.numel() for p in experiment.model.parameters() if p.requires_grad)
    preprocessing = experiment.preprocessing
    say(f"device    {_device_name(device)}, {get_world_size()} process(es), {experiment.workers} workers each")
    say(f"data      {experiment.split.root}: {_counts(experiment)}")
    say(
        f"model     {experiment.model_name}, {parameters / 1e6:.1f} M parameters, {trainable / 1e6:.1f} M trained, "
        f"{preprocessing.image_size} px {preprocessing.interpolation}"
    )
    if args.syncBN and get_world_size() == 1:
        say("          --syncBN has no effect with one process")
    for note in (*experiment.notes, *schedule.notes):
        say(f"          {note}")
    say(f"run       {run.folder}")


def say_end(run: NullRun) -> None:
    """Where the result lies, and what to type next."""
    if run.folder is not None:
        say(f"best model: {run.folder / 'best.pth'}")
        say(f"predict:    python predict.py PHOTO --weights {shlex.quote(str(run.folder / 'best.pth'))}")
        say(f"watch:      tensorboard --logdir {shlex.quote(str(run.folder.parent))}")


def _device_name(device: torch.device) -> str:
    return f"{device} ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else str(device)


def _counts(experiment: Experiment) -> str:
    split = experiment.split
    rows = split.counts()
    shown = ", ".join(f"{name} {train}+{val}" for name, train, val in rows[:CLASSES_SHOWN])
    more = f", and {len(rows) - CLASSES_SHOWN} more" if len(rows) > CLASSES_SHOWN else ""
    return f"{len(rows)} classes, {len(split.train)} training + {len(split.val)} validation images ({shown}{more})"

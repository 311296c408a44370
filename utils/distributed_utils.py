"""Processes: how they start, find one another, agree and end. With a single process every answer is right too.

`rank` is the number of a process among all of them, `local_rank` its number on its machine, `world_size` counts them.
"""

import os
import re
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from utils.errors import UserError
from utils.interruption import EXIT_CODES


def is_dist_avail_and_initialized() -> bool:
    return dist.is_available() and dist.is_initialized()


def get_rank() -> int:
    return dist.get_rank() if is_dist_avail_and_initialized() else 0


def get_world_size() -> int:
    return dist.get_world_size() if is_dist_avail_and_initialized() else 1


def get_local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", "0"))


def get_local_world_size() -> int:
    """Processes on this machine, at least 1: what its cores and its GPUs are shared among."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def is_main_process() -> bool:
    """True in the one process that writes files and prints."""
    return get_rank() == 0


def say(text: str = "") -> None:
    """Prints on the main process only."""
    if is_main_process():
        print(text, flush=True)


def barrier() -> None:
    """Waits until every process has come here."""
    if is_dist_avail_and_initialized():
        dist.barrier()


def reduce_value(value: torch.Tensor, average: bool = True) -> torch.Tensor:
    """The sum of `value` over all processes, or its mean; every process gets the result.

    Args:
        value: a tensor of the same shape and dtype on every process; it is left as it is.
        average: divide the sum by the number of processes. Sums and counts want False: a mean of means is not a mean.
    """
    if get_world_size() == 1:
        return value
    total = value.detach().clone()
    dist.all_reduce(total)
    return total / get_world_size() if average else total


def broadcast_buffers(model: torch.nn.Module) -> None:
    """Gives every process rank 0's buffers (BatchNorm's running statistics): what is evaluated is what is saved."""
    if get_world_size() > 1:
        for buffer in model.buffers():
            dist.broadcast(buffer, src=0)


@contextmanager
def first_on_each_machine() -> Iterator[None]:
    """The block is run by one process of each machine, and only then by the others, who find the work done."""
    if get_local_rank() == 0:
        yield
        barrier()
    else:
        barrier()
        yield


# ---------------------------------------------------------------------------------------------------- starting


def is_launched() -> bool:
    """Whether a launcher (torchrun, torch.distributed.launch, srun) has started this process as one of a group."""
    _adopt_slurm()
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def processes_to_start(device: str, world_size: int | None) -> int:
    """How many processes plain `python train_multi_gpu.py` means: as asked, else one for each visible GPU."""
    wants_gpu = device.startswith("cuda") or (device == "auto" and torch.cuda.is_available())
    return world_size or (max(torch.cuda.device_count(), 1) if wants_gpu else 1)


def launch(script: str, arguments: list[str], processes: int) -> None:
    """Starts `script` in so many processes on this machine: what `torchrun --standalone` does, in this process.

    Raises SystemExit with the first failed process's exit code; that process has said why.
    """
    import logging

    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    logging.disable(logging.ERROR)  # of the launcher's own words; the processes speak for themselves
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, usable_cpus() // processes)))
    with tempfile.TemporaryDirectory(prefix="launch-") as folder:
        standalone = ["--standalone", f"--nproc-per-node={processes}", f"--log-dir={folder}"]
        standalone += ["--signals-to-handle", "SIGTERM,SIGINT,SIGUSR1"]  # passed on to the processes
        try:
            run.run(run.parse_args([*standalone, script, *arguments]))
        except SignalException as stopped:
            sys.exit(EXIT_CODES[stopped.sigval])
        except ChildFailedError as failed:
            rank, first = failed.get_first_failure()
            if first.exitcode > 0:
                sys.exit(first.exitcode)
            print(
                f"error: process {rank} was ended by {first.signal_name()}; if nobody sent it, the system may have "
                "run out of memory: try a smaller --batch-size or fewer --workers",
                file=sys.stderr,
            )
            sys.exit(128 - first.exitcode)


def init_distributed_mode(
    device: str = "auto", world_size: int | None = None, dist_url: str = "env://", minutes: float = 30.0
) -> torch.device:
    """Joins the processes into a group and gives this one its device.

    Args:
        device: auto, cuda, mps or cpu.
        world_size: if given, the number of processes that the user expects.
        dist_url: where the processes meet; env:// reads MASTER_ADDR and MASTER_PORT, which every launcher sets.
        minutes: how long a process waits for another one before it fails.

    Returns:
        The torch.device of this process.

    Raises:
        UserError: more processes than GPUs, or another number of processes than expected.
    """
    launched = is_launched()
    started = int(os.environ["WORLD_SIZE"]) if launched else 1
    if world_size not in (None, started):
        raise UserError(
            f"--world-size {world_size}, but the launcher started {started} processes: "
            f"leave --world-size out or start {world_size}, for example with --nproc_per_node={world_size}"
        )
    process_device = _device_of_this_process(device)
    if process_device.type == "cuda":
        torch.cuda.set_device(process_device)
    on_gpu = process_device.type == "cuda"
    dist.init_process_group(
        backend="nccl" if on_gpu else "gloo",
        # One process alone needs nobody to meet, and so no port.
        **({"init_method": dist_url} if launched else {"store": dist.HashStore()}),
        rank=int(os.environ["RANK"]) if launched else 0,
        world_size=started,
        timeout=timedelta(minutes=minutes),
        device_id=process_device if on_gpu else None,
    )
    _mention_idle_gpus(process_device)
    return process_device


def cleanup() -> None:
    """Waits for the others and leaves the group, so that no process is cut off in the middle of a message."""
    if is_dist_avail_and_initialized():
        dist.barrier()
        dist.destroy_process_group()


def choose_device(device: str) -> torch.device:
    """The device for `--device`: auto takes cuda, else mps, else cpu. Raises UserError if it is not there."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        chosen = torch.device(device)
    except RuntimeError:
        raise UserError(f"--device {device} is not a device; it can be auto, cuda, cuda:1, mps or cpu") from None
    if chosen.type not in ("cuda", "mps", "cpu"):
        raise UserError(f"--device {device} is not supported; it can be auto, cuda, cuda:1, mps or cpu")
    if chosen.type == "mps" and not torch.backends.mps.is_available():
        raise UserError("--device mps, but this machine or this torch has no MPS; use --device cpu")
    if chosen.type == "cuda" and (chosen.index or 0) >= torch.cuda.device_count():
        raise UserError(f"--device {device}, but {_count(torch.cuda.device_count(), 'GPU')} visible; use --device cpu")
    return chosen


def _device_of_this_process(device: str) -> torch.device:
    chosen = choose_device(device)
    if chosen.type != "cuda":
        return torch.device("cpu") if device == "auto" else chosen  # gloo cannot reduce on mps
    if chosen.index is not None and get_local_world_size() > 1:
        raise UserError(f"--device {device} names one GPU, but each process takes its own; use --device cuda")
    visible, local = torch.cuda.device_count(), get_local_world_size()
    if "SLURM_PROCID" in os.environ and visible == 1:
        return torch.device("cuda", 0)  # SLURM can show each task a GPU of its own, which is number 0 to it
    if local > visible:
        raise UserError(
            f"{local} processes on this machine, but {_count(visible, 'visible GPU')}: "
            f"start {visible} (--nproc_per_node={visible}), or add --device cpu"
        )
    return torch.device("cuda", chosen.index if chosen.index is not None else get_local_rank())


def _mention_idle_gpus(device: torch.device) -> None:
    visible, used = torch.cuda.device_count(), get_local_world_size()
    if device.type == "cuda" and used < visible and "SLURM_PROCID" not in os.environ:
        say(
            f"{_count(used, 'process', 'es')} on a machine with {visible} visible GPUs; to use all of them: "
            f"torchrun --standalone --nproc-per-node={visible} {' '.join(sys.argv)}"
        )


def _count(number: int, noun: str, plural: str = "s") -> str:
    return f"{number} {noun}{'' if number == 1 else plural}"


def usable_cpus() -> int:
    """The cores that this process may use, which a container or a cluster can make fewer than there are."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _adopt_slurm() -> None:
    """Under srun: tells torch what SLURM knows, in the variables that torch's launchers set.

    The port comes from the job's number, so that two jobs on one machine do not meet.
    """
    environ = os.environ
    tasks = environ.get("SLURM_STEP_NUM_TASKS") or environ.get("SLURM_NTASKS")
    if "RANK" in environ or "SLURM_PROCID" not in environ or tasks is None:
        return
    environ["RANK"], environ["WORLD_SIZE"] = environ["SLURM_PROCID"], tasks
    environ["LOCAL_RANK"] = environ.get("SLURM_LOCALID", "0")
    per_node = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE") or tasks
    environ["LOCAL_WORLD_SIZE"] = re.match(r"\d+", per_node).group()  # "4(x2),3": this machine's or the first one's
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST")
    environ.setdefault("MASTER_ADDR", first_slurm_host(nodes) if nodes else "127.0.0.1")
    number = int(environ.get("SLURM_JOB_ID") or environ.get("SLURM_JOBID") or 0)
    step = environ.get("SLURM_STEP_ID", "0")
    environ.setdefault("MASTER_PORT", str(15000 + (number * 7 + (int(step) if step.isdigit() else 0)) % 15000))


def first_slurm_host(nodes: str) -> str:
    """The first machine of SLURM's list: `gpu[03-05,9],login` is gpu03."""
    prefix, bracket, rest = re.match(r"([^,\[]*)(\[?)(.*)", nodes).groups()
    return prefix + re.match(r"[^-,\]]*", rest).group() if bracket else prefix

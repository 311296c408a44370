"""Trains an image classifier on every GPU of a machine, one process each (DistributedDataParallel).

    python train_multi_gpu.py --data-path photos                       one process per visible GPU
    python -m torch.distributed.launch --nproc_per_node=4 train_multi_gpu.py --data-path photos
    torchrun --standalone --nproc-per-node=4 train_multi_gpu.py --data-path photos
    python train_multi_gpu.py --device cpu --world-size 2              two processes on the CPU, the built-in digits

Options may stand in a file, named as @FILE. Everything that a run leaves behind lies in runs/.
"""

import sys

from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler
from torch.utils.data.distributed import DistributedSampler

from data.loaders import Loader, eval_loader
from data.samplers import SeededSampler, ShardSampler
from utils import distributed_utils as processes
from utils.errors import run_script
from utils.experiment import prepare_experiment
from utils.options import parse_training_options
from utils.report import say_end, say_start
from utils.resume import resume_or_start
from utils.run import start_run
from utils.schedule import make_schedule
from utils.sync_batchnorm import convert_sync_batchnorm
from utils.train_eval_utils import fit


def main() -> None:
    args = parse_training_options(__doc__, distributed=True)

    # 0. Without a launcher: become one. It starts this script again, once per process.
    if not processes.is_launched():
        count = processes.processes_to_start(args.device, args.world_size)
        if count > 1:
            return processes.launch(__file__, sys.argv[1:], count)

    # 1. Take a device and join the group of processes.
    device = processes.init_distributed_mode(args.device, args.world_size, args.dist_url, args.timeout)
    rank, world_size = processes.get_rank(), processes.get_world_size()

    # 2. The same data, split and initial weights on every process: all are made from --seed, or those of the run that
    #    goes on, which rank 0 sends.
    args, resumed = resume_or_start(args, distributed=True)
    experiment = prepare_experiment(args, device, resumed)
    schedule = make_schedule(args, len(experiment.train_set), world_size, resumed and resumed.state["schedule"])

    # 3. Each process gets its own part of one shuffled order, in batches.
    sampler = DistributedSampler(
        experiment.train_set, num_replicas=world_size, rank=rank, seed=args.seed, drop_last=True
    )
    batches = BatchSampler(SeededSampler(sampler, args.seed), schedule.batch_size, drop_last=True)
    train_loader = Loader(experiment.train_set, batches, experiment.workers, device)
    shard = ShardSampler(len(experiment.val_set), rank, world_size)  # unpadded: each image counts once
    val_loader = eval_loader(experiment.val_set, shard, 2 * schedule.batch_size, experiment.workers, device)

    # 4. BatchNorm over the images of all processes, as one process with the whole batch would have it.
    model = experiment.model
    if args.syncBN is not False and world_size > 1:
        model = convert_sync_batchnorm(model, device)

    # 5. DDP sends rank 0's weights to every process here, and averages the gradients in every backward pass.
    model = DistributedDataParallel(
        model,
        device_ids=[device] if device.type == "cuda" else None,
        find_unused_parameters=args.find_unused_parameters,
    )

    # 6. Train; only the run of rank 0 writes files.
    run = start_run(args, experiment, resumed)
    say_start(args, experiment, schedule, device, run)
    fit(model, experiment, schedule, train_loader, val_loader, args, run, resumed)
    say_end(run)

    # 7. Leave the group together.
    run.close()
    processes.cleanup()


if __name__ == "__main__":
    run_script(main)

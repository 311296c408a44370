"""Trains an image classifier in one process, on one device (cuda, mps or cpu).

    python train_single_gpu.py                                     the built-in digits: a minute on a CPU
    python train_single_gpu.py --data-path photos                  your own: a folder per class
    python train_single_gpu.py --data-path photos --data-parallel  nn.DataParallel over all visible GPUs, to compare

Options may stand in a file, named as @FILE. Everything that a run leaves behind lies in runs/.
"""

from torch import nn
from torch.utils.data import BatchSampler
from torch.utils.data.distributed import DistributedSampler

from data.loaders import Loader, eval_loader
from data.samplers import SeededSampler, ShardSampler
from utils.distributed_utils import choose_device
from utils.errors import run_script
from utils.experiment import prepare_experiment
from utils.options import parse_training_options
from utils.report import say_end, say_start
from utils.resume import resume_or_start
from utils.run import start_run
from utils.schedule import make_schedule
from utils.train_eval_utils import fit


def main() -> None:
    args = parse_training_options(__doc__, distributed=False)
    device = choose_device(args.device)

    # 1. Data, split, preprocessing and initial weights: all made from --seed, or those of the run that goes on.
    args, resumed = resume_or_start(args, distributed=False)
    experiment = prepare_experiment(args, device, resumed)
    schedule = make_schedule(args, len(experiment.train_set), 1, resumed and resumed.state["schedule"])

    # 2. The same samplers as for many processes: one process is number 0 of 1.
    sampler = DistributedSampler(experiment.train_set, num_replicas=1, rank=0, seed=args.seed, drop_last=True)
    batches = BatchSampler(SeededSampler(sampler, args.seed), schedule.batch_size, drop_last=True)
    train_loader = Loader(experiment.train_set, batches, experiment.workers, device)
    shard = ShardSampler(len(experiment.val_set), rank=0, world_size=1)
    val_loader = eval_loader(experiment.val_set, shard, 2 * schedule.batch_size, experiment.workers, device)

    # 3. DataParallel splits each batch over the GPUs; one thread drives them all, which is why DDP is faster.
    model = nn.DataParallel(experiment.model) if args.data_parallel else experiment.model

    # 4. Train.
    run = start_run(args, experiment, resumed)
    say_start(args, experiment, schedule, device, run)
    fit(model, experiment, schedule, train_loader, val_loader, args, run, resumed)
    say_end(run)
    run.close()


if __name__ == "__main__":
    run_script(main)

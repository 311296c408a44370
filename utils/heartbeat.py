"""Tells which process the others wait for, before the wait ends in an error that names nobody."""

import os
import sys
import time
from datetime import timedelta

import torch.distributed as dist

from utils.distributed_utils import get_rank, get_world_size
from utils.errors import first_to_report

SECONDS_BEFORE_THE_END = 5.0


class Heartbeat:
    """Notes in the processes' common store how far each one is.

    `tick` is called every second by a thread, so that it still speaks while the main thread waits for the others.

    Args:
        minutes: how long the process group waits for a process.
    """

    def __init__(self, minutes: float):
        self.limit, self.place, self.moved_at, self.beats = 60 * minutes, (0, ""), time.monotonic(), 0
        self.store: dist.Store | None = None
        self.told = False

    def at(self, step: int, doing: str) -> None:
        """This process has come to `step` (counted from 0) and is `doing` something."""
        self.place, self.moved_at = (step, doing), time.monotonic()

    def tick(self) -> None:
        if get_world_size() == 1 or "MASTER_ADDR" not in os.environ or self.told:
            return
        try:
            self._beat()
            if time.monotonic() - self.moved_at > max(self.limit / 2, self.limit - SECONDS_BEFORE_THE_END):
                self.told = True
                self._tell()
        except (RuntimeError, dist.DistError):
            self.told = True  # the store has gone with the process that kept it; that process's end is told elsewhere

    def _beat(self) -> None:
        if self.store is None:  # a connection of the thread's own
            address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            self.store = dist.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=5))
        self.beats += 1
        self.store.set(f"heartbeat/{get_rank()}", f"{self.beats}|{self.place[0]}|{self.place[1]}")

    def _tell(self) -> None:
        before = self._everyone()
        time.sleep(2.5)
        self._beat()
        now = self._everyone()
        silent = [rank for rank in now if rank != get_rank() and now[rank] == before[rank]]
        steps = {rank: int(beat[1]) for rank, beat in now.items()}
        waiting = max(steps.values())
        behind = [rank for rank, step in steps.items() if step < waiting]
        if silent:
            missing = f"{_ranks(silent)} did not arrive and shows no sign of life"
        elif behind:
            missing = f"{_ranks(behind)} did not arrive (at step {steps[behind[0]]}, {now[behind[0]][2]})"
        else:
            doing = "; ".join(f"rank {rank} is {beat[2]}" for rank, beat in now.items())
            missing = f"no process is behind the others ({doing})"
        if first_to_report():
            print(f"error: waited {self.limit:.0f} seconds at step {waiting}: {missing}", file=sys.stderr, flush=True)

    def _everyone(self) -> dict[int, list[str]]:
        return {
            rank: self.store.get(f"heartbeat/{rank}").decode().split("|")
            for rank in range(get_world_size())
            if self.store.check([f"heartbeat/{rank}"])
        }


def _ranks(ranks: list[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))

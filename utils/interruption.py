"""What can end a run from outside: signals, a launcher that is gone, a process that does not come along.

A signal is only noted here; the training loop reads the note, lets all processes agree, saves and ends. A thread sees
to it that a process ends all the same when the loop cannot: it is woken by the signal itself, even while the main
thread waits inside a collective, where Python would not run a handler.
"""

import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable

EXIT_CODES = {signal.SIGTERM: 143, signal.SIGINT: 130, signal.SIGUSR1: 138}
SECONDS_TO_END = 10.0  # after the first signal
# A launcher passes on a signal that the system has perhaps sent to every process already: the same one, at once.
SECONDS_OF_ECHO = 1.0


class Interruption:
    """Notes signals and watches over the process.

    Attributes:
        signal: the first signal that came, or None.
    """

    def __init__(self):
        self.signal: signal.Signals | None = None
        self.noted_at = 0.0
        self.on_tick: Callable[[], None] = lambda: None

    def watch(self) -> None:
        """Takes over SIGTERM, SIGINT and SIGUSR1 and starts the thread. To be called once, from the main thread."""
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        for number in EXIT_CODES:
            signal.signal(number, lambda number, frame: None)  # without a handler of Python's no byte is written
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        threading.Thread(target=self._run, args=(reader,), daemon=True, name="interruption").start()

    @property
    def exit_code(self) -> int | None:
        return None if self.signal is None else EXIT_CODES[self.signal]

    def _run(self, reader: int) -> None:
        launched = "TORCHELASTIC_RUN_ID" in os.environ
        while True:
            ready, _, _ = select.select([reader], [], [], 1.0)
            for number in os.read(reader, 64) if ready else b"":
                self._note(number)
            if self.signal is not None and time.monotonic() - self.noted_at > SECONDS_TO_END:
                self._leave(f"not done {SECONDS_TO_END:.0f} seconds after {self.signal.name}")
            if launched and os.getppid() != _PARENT:
                os._exit(1)  # the launcher was killed; the others notice the same, and nobody restarts us
            self.on_tick()

    def _note(self, number: int) -> None:
        if number not in EXIT_CODES:
            return  # of a data loader's worker, for example
        if self.signal is None:
            self.noted_at, self.signal = time.monotonic(), signal.Signals(number)
        elif time.monotonic() - self.noted_at > SECONDS_OF_ECHO:
            self._leave(f"a second signal, {signal.Signals(number).name}")

    def _leave(self, why: str) -> None:
        rank, hint = os.environ.get("RANK", "0"), "ended without saving; --resume goes on from the last save"
        print(f"error: process {rank}: {why}: {hint}", file=sys.stderr, flush=True)
        os._exit(self.exit_code)


_PARENT = os.getppid()  # seen as early as possible: the launcher's process, where there is a launcher
interruption = Interruption()  # signals come to the process, so there is one of it

"""From an exception to what a person reads: one sentence for a user's mistake, a traceback for a bug, each once.

This module loads no torch, so that a mistyped option is answered at once.
"""

import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable

from data.files import ESCAPE_BYTES
from utils.interruption import interruption

USER_ERROR_EXIT_CODE = 2
SECONDS_FOR_THE_AGENT_TO_STOP_US = 8.0


class UserError(ValueError):
    """A user's mistake found in `utils` or a script: one sentence that says what, where, and what to type."""


def run_script(main: Callable[[], None]) -> None:
    """Runs a script's main function and ends the process as the project's contract says.

    A user's mistake is one sentence on standard error and exit code 2; a bug keeps its traceback and gives 1. Of many
    processes that fail alike one speaks, and a process that fails only because another one is gone says nothing.
    """
    for stream in (sys.stdout, sys.stderr):  # a class named in Chinese must not end a run on an ASCII terminal
        stream.reconfigure(errors=ESCAPE_BYTES)
    try:
        _recorded(main)()
    except SystemExit as end:
        _leave(end.code)
    except KeyboardInterrupt:
        _leave(130)
    except _user_errors() as error:
        if first_to_report():
            print(f"error: {error}", file=sys.stderr, flush=True)
        _leave(USER_ERROR_EXIT_CODE)
    except Exception as error:
        if _is_lost_peer(error):
            _leave_with_the_peer()
        if first_to_report():
            traceback.print_exc()
        _leave(1)


def _leave_with_the_peer() -> None:
    """Ends this process once a signal says why: all were sent one, or the launcher's agent ends us because of the peer.

    Comes back if none arrives: then nobody else has failed, and the broken connection is itself the cause to be told.
    """
    deadline = time.monotonic() + SECONDS_FOR_THE_AGENT_TO_STOP_US
    while time.monotonic() < deadline:
        if interruption.signal:
            _leave(interruption.exit_code)
        time.sleep(0.05)


def _leave(code: int) -> None:
    """Ends this process and its image loaders; in a group that is still in use, without Python's own tidying up.

    In there Python would wait for the loaders, which leave signals to us, and a collective that is still under way
    would abort the process, so that its exit code were lost.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # nobody is told of the loaders' end
    for child in multiprocessing.active_children():
        child.kill()
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        sys.exit(code)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code or 0)


def _user_errors() -> tuple[type[Exception], ...]:
    """Our own error types. Those of packages that were never imported cannot have been raised."""
    from data.errors import DataError

    models = sys.modules.get("models")
    return (UserError, DataError, *([models.ModelError] if hasattr(models, "ModelError") else []))


def _recorded(main: Callable[[], None]) -> Callable[[], None]:
    """Under a launcher: the error also goes into the file that the launcher shows as the root cause."""
    if "TORCHELASTIC_ERROR_FILE" not in os.environ:
        return main
    from torch.distributed.elastic.multiprocessing.errors import record
    from torch.distributed.elastic.multiprocessing.errors.error_handler import ErrorHandler

    class OneCause(ErrorHandler):
        def record_exception(self, e: BaseException) -> None:
            if _is_lost_peer(e):
                return
            if isinstance(e, _user_errors()):
                e.__traceback__ = e.__cause__ = None  # a sentence, no traceback
            super().record_exception(e)

    return record(main, OneCause())


def _is_lost_peer(error: BaseException) -> bool:
    """Whether a collective failed because the process at its other end has gone."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return False
    if isinstance(error, (distributed.DistBackendError, distributed.DistNetworkError)):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and any(
        sign in text for sign in ("Connection closed by peer", "Connection reset by peer", "gloo/transport")
    )


def first_to_report() -> bool:
    """True in the first process that asks. Every process can reach the launcher's store, or that of the group."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return True
    try:
        store = _shared_store()
        return store.add(f"reported/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", 1) == 1
    except Exception:  # the store went with the process that kept it: better told twice than not at all
        return True


def _shared_store():
    import torch.distributed as dist

    if dist.is_initialized():
        return dist.distributed_c10d._get_default_store()
    from datetime import timedelta

    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return dist.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=5))

"""Being told to stop, by Slurm, by a scheduler, or with Ctrl-C: the step at hand is finished and its state saved."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def stop_after_the_step() -> Iterator[Callable[[], bool]]:
    """Within the block SIGTERM and a first Ctrl-C end nothing; the given function tells whether there was one.

    A second Ctrl-C ends the process at once. A scheduler may send SIGTERM several times, and to many processes; of those that
    train one run together the first says so.
    """
    came: list[int] = []
    first = os.environ.get("RANK", "0") == "0"

    def note(signum: int, frame: Any) -> None:
        if signum == signal.SIGINT and signum in came:
            raise KeyboardInterrupt
        if not came and first:  # by os.write, since the signal may have come in the middle of a print
            os.write(2, b"\ntold to stop: finishing the step and saving the state (Ctrl-C twice ends it at once)\n")
        came.append(signum)

    before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield lambda: bool(came)
    finally:
        # Torchrun and who started it both signal to each of several processes, the second perhaps when all is saved.
        ignored = {signal.SIGTERM: signal.SIG_IGN} if came and "RANK" in os.environ else {}
        for number, handler in (before | ignored).items():
            signal.signal(number, handler)

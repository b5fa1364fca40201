"""Stop a run cleanly on SIGTERM or Ctrl-C: finish the step and save the state."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def stop_after_the_step() -> Iterator[Callable[[], bool]]:
    """Catch SIGTERM and the first Ctrl-C within the block; the yielded function returns whether a signal arrived.

    A second Ctrl-C ends the process at once. A scheduler may send SIGTERM several times and to many processes; only the first
    process of a run prints a message.
    """
    came: list[int] = []
    first = os.environ.get("RANK", "0") == "0"

    def note(signum: int, frame: Any) -> None:
        if signum == signal.SIGINT and signum in came:
            raise KeyboardInterrupt
        if not came and first:  # os.write, as the signal may interrupt a print
            os.write(2, b"\nasked to stop: finishing the step and saving the state (press Ctrl-C twice to end at once)\n")
        came.append(signum)

    before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield lambda: bool(came)
    finally:
        # Under torchrun a process may get a second SIGTERM, from torchrun or its parent, after its state is saved.
        ignored = {signal.SIGTERM: signal.SIG_IGN} if came and "RANK" in os.environ else {}
        for number, handler in (before | ignored).items():
            signal.signal(number, handler)

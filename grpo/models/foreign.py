"""Foreign code that comes with a tokenizer (chat templates, patterns that read a response), within limits."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

SECONDS, BYTES = 5, 1 << 30  # limits of one call


def try_out(calls: Sequence[Callable[[], object]]) -> None:
    """Call foreign code in a forked process with limits of time and memory; in this process no signal would stop it.

    The limit of time holds for each call, that of memory for all.

    Raises:
        TimeoutError, MemoryError: it exceeds a limit. Its other errors are ignored here; the next call raises them again.
    """
    child = os.fork()
    if child == 0:
        too_much = False
        try:
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            signal.signal(signal.SIGPROF, signal.SIG_DFL)
            memory = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
            hard = resource.getrlimit(resource.RLIMIT_AS)[1]
            most = memory + BYTES if hard == resource.RLIM_INFINITY else min(memory + BYTES, hard)
            resource.setrlimit(resource.RLIMIT_AS, (most, hard))
            for call in calls:
                signal.setitimer(signal.ITIMER_PROF, SECONDS)  # then SIGPROF ends the process
                try:
                    call()
                except MemoryError:
                    raise
                except Exception:  # of the foreign code
                    continue
        except MemoryError:
            too_much = True
        except BaseException:  # the forked process must end here
            pass
        os._exit(too_much)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code == 1:
        raise MemoryError(f"it takes more than {BYTES >> 20} MiB")
    if code:
        raise TimeoutError(f"it takes longer than {SECONDS} s, or crashes")


def keep_limits(calls: Sequence[Callable[[], object]]) -> list[bool]:
    """Whether each call keeps the limits: one process tries all, and halves of them only if one does not."""
    try:
        try_out(calls)
    except (TimeoutError, MemoryError):
        half = len(calls) // 2
        return keep_limits(calls[:half]) + keep_limits(calls[half:]) if half else [False]
    return [True] * len(calls)

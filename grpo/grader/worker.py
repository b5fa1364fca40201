"""The grading processes: a zygote, which imports the computer algebra once, and the workers that it forks.

:mod:`grpo.grader.pool` runs this module as ``python -m grpo.grader.worker CONTROL MODULE:FUNCTION MEMORY CPU WALL``: the
number of a socket, the grading function, the memory (MiB) that a worker may use beyond its initial size, and the seconds of CPU
and wall-clock time per answer. The zygote has a single thread and never grades a model's answer, so forking it is safe. Forking
takes milliseconds; importing sympy takes over a second. A worker may hang, fill its memory or crash: the kernel ends a worker
whose time is up, and the pool has another forked.

For each byte on the control socket, the zygote forks a worker that serves the connection attached to the byte. The worker
first sends ``null``, then answers each message ``[answer, truth]`` (JSON) with ``[equal, spent]``; ``spent`` says that it ends
after this answer. For a function that scores, ``equal`` is a float. A worker ends when its connection is closed. The zygote and
all its workers end when the control socket is closed, also by the death of the parent process.
"""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import os
import signal
import socket
import sys
import warnings
from collections.abc import Callable
from importlib import import_module
from multiprocessing.connection import Connection
from typing import Any, NoReturn

import psutil

GradeFn = Callable[[str, str], bool | float]

_DEFAULT_FUNCTION = "grpo.grader.grader:full_verdict"
_MIB = 1 << 20
# First use builds the parser's tables and imports parts of sympy. Workers inherit the result, so that no answer's time limit
# includes it.
_WARM_UP = [
    (r"\frac{\sqrt{2}}{2}", r"\frac{1}{\sqrt{2}}"),
    (r"\sin 60^\circ+\log_2 7", r"\frac{\sqrt{3}}{2}+\log_2 7"),
    (r"\begin{pmatrix} 1/2 \\ 3 \end{pmatrix}", r"\begin{pmatrix} 0.5 \\ 3 \end{pmatrix}"),
    (r"x > \sqrt{3}", r"(\sqrt{3},\infty)"),
    (r"\left\{\sqrt{8},|x|\right\}", r"\{|x|,2\sqrt{2}\}"),
    (r"\binom{5}{2}\pi e^{x}", r"10\pi e^x"),
]


def main(control: socket.socket, function: str, memory_limit_mb: int, limits_s: dict[int, float]) -> None:
    """Fork workers until the other end of the control socket is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGPROF, signal.SIGALRM])
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    module, _, name = function.partition(":")
    grade: GradeFn = getattr(import_module(module), name)
    if function == _DEFAULT_FUNCTION:
        _warm_up(grade)
    gc.collect()
    gc.freeze()  # so that garbage collection in workers does not copy the memory shared with the zygote
    os.dup2(os.open(os.devnull, os.O_RDWR), 2)  # before, the parent reads stderr to show it if the start fails
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps workers
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not message:
            os.killpg(0, signal.SIGKILL)
        with Connection(descriptors[0]) as connection:
            if os.fork() == 0:
                control.close()
                _work(connection, grade, memory_limit_mb, limits_s)


def _warm_up(grade: GradeFn) -> None:
    """Import the computer algebra and use it for all examples, also those that the grader decides without."""
    from grpo.grader.symbolic import symbolically_equal

    for answer, truth in _WARM_UP:
        grade(answer, truth)
        symbolically_equal(answer, truth)


def _work(connection: Connection[Any, Any], grade: GradeFn, memory_limit_mb: int, limits_s: dict[int, float]) -> NoReturn:
    """Answer requests in a forked worker until its connection is closed; never return to the zygote's code.

    The worker also ends after an answer that leaves more than half of the memory in use or runs out of it.

    Args:
        limits_s: timers, which end the process, and their seconds per answer.
    """
    with contextlib.suppress(BaseException):
        for its_signal in (signal.SIGCHLD, signal.SIGPROF, signal.SIGALRM):
            signal.signal(its_signal, signal.SIG_DFL)
        _limit_resources(memory_limit_mb)
        most_memory = _address_space() + memory_limit_mb * _MIB // 2
        connection.send_bytes(b"null")
        spent = False
        while not spent:
            answer, truth = json.loads(connection.recv_bytes())
            for timer, seconds in limits_s.items():
                signal.setitimer(timer, seconds)
            equal, spent = _grade(grade, answer, truth)
            for timer in limits_s:
                signal.setitimer(timer, 0)
            spent = spent or _address_space() > most_memory
            connection.send_bytes(json.dumps([equal, spent]).encode())
    os._exit(0)


def _grade(grade: GradeFn, answer: str, truth: str) -> tuple[bool | float, bool]:
    """The verdict, and whether memory ran out; an answer that makes the grader fail is wrong."""
    try:
        verdict = grade(answer, truth)
        return verdict if isinstance(verdict, float) else bool(verdict), False
    except MemoryError:
        return False, True
    except BaseException:
        return False, False


def _limit_resources(memory_limit_mb: int) -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    memory = _address_space() + memory_limit_mb * _MIB
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    memory = memory if hard == resource.RLIM_INFINITY else min(memory, hard)
    with contextlib.suppress(ValueError, OSError):  # macOS refuses
        resource.setrlimit(resource.RLIMIT_AS, (memory, hard))


def _address_space() -> int:
    return int(psutil.Process().memory_info().vms)


if __name__ == "__main__":
    _, descriptor, function, memory, cpu_s, wall_s = sys.argv
    limits_s = {signal.ITIMER_PROF: float(cpu_s), signal.ITIMER_REAL: float(wall_s)}
    main(socket.socket(fileno=int(descriptor)), function, int(memory), limits_s)

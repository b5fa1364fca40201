"""The grading process: it grades what it is sent, until its connection closes, as when its parent dies.

:mod:`grpo.grader.process` runs this module as ``python -m grpo.grader.worker CONNECTION MODULE:FUNCTION MEMORY CPU WALL``: the
file descriptor of a connection, the grading function, the memory (MiB) that it may use beyond its initial size, and the seconds
of CPU and wall-clock time per answer. The process first sends ``null``, then answers each message ``[answer, truth]`` (JSON)
with ``[equal, spent]``; ``spent`` says that it ends after this answer, as memory ran out or is half used. An answer may hang,
fill the memory or crash: the kernel ends a process whose time is up.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import resource
import signal
import sys
import warnings
from collections.abc import Callable
from importlib import import_module
from multiprocessing.connection import Connection
from typing import Any

import psutil

GradeFn = Callable[[str, str], bool | float]

_DEFAULT_FUNCTION = "grpo.grader.grader:full_verdict"
_MIB = 1 << 20
# First use builds the parser's tables and imports parts of sympy, which no answer's time limit should include.
_WARM_UP = [
    (r"\frac{\sqrt{2}}{2}", r"\frac{1}{\sqrt{2}}"),
    (r"\sin 60^\circ+\log_2 7", r"\frac{\sqrt{3}}{2}+\log_2 7"),
    (r"\begin{pmatrix} 1/2 \\ 3 \end{pmatrix}", r"\begin{pmatrix} 0.5 \\ 3 \end{pmatrix}"),
    (r"x > \sqrt{3}", r"(\sqrt{3},\infty)"),
    (r"\left\{\sqrt{8},|x|\right\}", r"\{|x|,2\sqrt{2}\}"),
    (r"\binom{5}{2}\pi e^{x}", r"10\pi e^x"),
]


def main(connection: Connection[Any, Any], function: str, memory_mb: int, limits_s: dict[int, float]) -> None:
    """Import the grading function, limit this process, and answer requests.

    ``limits_s``: timers, which end the process, and their seconds per answer.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGPROF, signal.SIGALRM])
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    module, _, name = function.partition(":")
    grade: GradeFn = getattr(import_module(module), name)
    if function == _DEFAULT_FUNCTION:
        from grpo.grader.symbolic import symbolically_equal

        for pair in _WARM_UP:  # also by the computer algebra where the grader decides without
            grade(*pair)
            symbolically_equal(*pair)
    most_memory = _limit_resources(memory_mb)
    os.dup2(os.open(os.devnull, os.O_RDWR), 2)  # before, the parent reads stderr to show it if the start fails
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


def _grade(grade: GradeFn, answer: str, truth: str) -> tuple[bool | float, bool]:
    """The verdict, and whether memory ran out; an answer that makes the grader fail is wrong."""
    try:
        verdict = grade(answer, truth)
        return verdict if isinstance(verdict, float) else bool(verdict), False
    except BaseException as error:
        return False, isinstance(error, MemoryError)


def _limit_resources(memory_mb: int) -> int:
    """Limit this process's address space and core files; returns the address space (bytes) that is half of the rise."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    now, (_, hard) = _address_space(), resource.getrlimit(resource.RLIMIT_AS)
    memory = now + memory_mb * _MIB
    with contextlib.suppress(ValueError, OSError):  # macOS refuses
        resource.setrlimit(resource.RLIMIT_AS, (memory if hard == resource.RLIM_INFINITY else min(memory, hard), hard))
    return now + memory_mb * _MIB // 2


def _address_space() -> int:
    return int(psutil.Process().memory_info().vms)


if __name__ == "__main__":
    _, descriptor, function, memory, cpu_s, wall_s = sys.argv
    limits_s = {signal.ITIMER_PROF: float(cpu_s), signal.ITIMER_REAL: float(wall_s)}
    with contextlib.suppress(EOFError, BrokenPipeError):  # the parent closed the connection, or died
        main(Connection(int(descriptor)), function, int(memory), limits_s)

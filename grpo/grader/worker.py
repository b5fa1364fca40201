"""The grading processes: a zygote, which imports the computer algebra once, and the workers that it forks.

:mod:`grpo.grader.pool` runs this module as ``python -m grpo.grader.worker CONTROL MODULE:FUNCTION MEMORY SECONDS``: the number
of a socket, the grading function, the memory (MiB) that a worker may use beyond its initial size, and the CPU time per answer.
The zygote has a single thread and never grades a model's answer, so forking it is safe. Forking takes milliseconds; importing
sympy takes over a second. A worker may hang, fill its memory or crash: the kernel ends a worker whose CPU time is up, the pool
ends one that does not answer, and then forks another.

Protocol of the control socket, with one line per reply: ``fork``, with the worker's socket attached, is answered by the
worker's process id or ``error: ...``; ``kill PID`` kills and reaps a worker. A worker reads lines ``[[answer, truth], ...]``
(ASCII JSON, so any string is one line) and writes for each pair a line ``[equal, spent]`` as soon as it is decided; ``spent``
says that the worker ends after this answer. For a function that scores, ``equal`` is a float.
"""

from __future__ import annotations

import contextlib
import ctypes
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
from pathlib import Path
from typing import NoReturn

GradeFn = Callable[[str, str], bool | float]

_DEFAULT_FUNCTION = "grpo.grader.grader:full_verdict"
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
_PR_SET_PDEATHSIG = 1
_MIB = 1 << 20
# First use builds the parser's tables and imports parts of sympy. Workers inherit the result, so that no answer's time limit
# includes it.
_WARM_UP = [
    (r"\frac{\sqrt{2}}{2}", r"\frac{1}{\sqrt{2}}"),
    ("2x^2+4x", "2x(x+2)"),
    (r"y=\frac{2}{3}x+3", "3y = 9+2x"),
    (r"y=\frac{3}{x+1}", "xy+y = 3"),
    (r"\sin 60^\circ+\log_2 7", r"\frac{\sqrt{3}}{2}+\log_2 7"),
    (r"\begin{pmatrix} 1/2 \\ 3 \end{pmatrix}", r"\begin{pmatrix} 0.5 \\ 3 \end{pmatrix}"),
    (r"(-\infty,\sqrt{2})\cup(2\pi,\infty)", r"(2\pi,\infty) \cup (-\infty,\frac{2}{\sqrt{2}})"),
    (r"x > \sqrt{3}", r"(\sqrt{3},\infty)"),
    (r"\left\{\sqrt{8},|x|\right\}", r"\{|x|,2\sqrt{2}\}"),
    ("3-i", r"\sqrt[3]{27}-i"),
    (r"\binom{5}{2}\pi e^{x}", r"10\pi e^x"),
]


def main(control: socket.socket, function: str, memory_limit_mb: int, limit_s: float) -> None:
    """Serve the control socket until its other end is closed, also by the death of the parent process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # ends a worker whose time is up
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGPROF])
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    module, _, name = function.partition(":")
    grade: GradeFn = getattr(import_module(module), name)
    if function == _DEFAULT_FUNCTION:
        _warm_up(grade)
    gc.collect()
    gc.freeze()  # so that garbage collection in workers does not copy the memory shared with the zygote
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 2)  # before, stderr is a file that the parent shows if the start fails
    control.sendall(b"ready\n")

    workers: set[int] = set()
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, 64, 1)
        if not message:
            break
        if descriptors:
            reply = _fork(control, socket.socket(fileno=descriptors[0]), _limited(grade, limit_s), memory_limit_mb, workers)
        else:
            reply = _kill(int(message.split()[1]), workers)
        control.sendall(reply.encode() + b"\n")
    for pid in list(workers):  # for systems without a parent-death signal
        _kill(pid, workers)


def _warm_up(grade: GradeFn) -> None:
    """Import the computer algebra and use it for all examples, also those that the grader decides without."""
    from grpo.grader.symbolic import symbolically_equal

    for answer, truth in _WARM_UP:
        grade(answer, truth)
        symbolically_equal(answer, truth)


def _limited(grade: GradeFn, limit_s: float) -> GradeFn:
    """Wrap ``grade`` so that the kernel ends the process when an answer exceeds its CPU time."""

    def limited(answer: str, truth: str) -> bool | float:
        signal.setitimer(signal.ITIMER_PROF, limit_s)
        try:
            return grade(answer, truth)
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)

    return limited


def _fork(control: socket.socket, connection: socket.socket, grade: GradeFn, memory_limit_mb: int, workers: set[int]) -> str:
    """Fork a worker that serves ``connection``; return its process id or an error."""
    zygote = os.getpid()
    with connection:
        try:
            pid = os.fork()
        except OSError as error:
            return f"error: {error}"
        if pid == 0:
            control.close()
            _work(connection, grade, memory_limit_mb, zygote)
    workers.add(pid)
    return str(pid)


def _kill(pid: int, workers: set[int]) -> str:
    """Kill a worker. Nothing else reaps workers, so the id cannot belong to another process."""
    if pid in workers:
        workers.discard(pid)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return "killed"


def _work(connection: socket.socket, grade: GradeFn, memory_limit_mb: int, zygote: int) -> NoReturn:
    """Run a forked worker until the pool closes ``connection``; never returns to the zygote's code."""
    with contextlib.suppress(BaseException):
        if _LIBC is not None:
            _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # it dies with the zygote
        if os.getppid() == zygote:
            _limit_resources(memory_limit_mb)
            _serve(connection, grade, _address_space() + memory_limit_mb * _MIB // 2)
    os._exit(0)


def _serve(connection: socket.socket, grade: GradeFn, most_memory: int) -> None:
    """Answer requests; end after an answer that leaves more than ``most_memory`` bytes in use or runs out of memory."""
    with connection.makefile("rb") as requests:
        for request in requests:
            for answer, truth in json.loads(request):
                equal, spent = _grade(grade, answer, truth)
                spent = spent or _address_space() > most_memory
                connection.sendall(json.dumps([equal, spent]).encode() + b"\n")
                if spent:
                    return


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
    """Bytes of address space in use; 0 without /proc."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])), sys.argv[2], int(sys.argv[3]), float(sys.argv[4]))

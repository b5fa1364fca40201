"""Grading with limits: answers that need computer algebra are decided in a worker process, which they may hang, fill or crash.

:mod:`grpo.grader.grader` decides an answer: in this process if no computer algebra is needed, else in a worker process, which
runs ``_run_worker``. A worker that exceeds its limit ends and is replaced, which takes 1.5 s. The limit counts the worker's CPU
time, so that a busy machine does not turn right answers into wrong ones; ten times the limit in wall-clock time ends an answer
in any case. No process starts before the first answer that needs one.
"""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

from grpo.common.imports import safe_environment
from grpo.grader.grader import cheap_verdict

TIME_LIMIT_S = 0.8
MEMORY_LIMIT_MB = 1024  # of address space that the worker may use beyond its initial size

_WALL_FACTOR = 10
_START_LIMIT_S = 300.0  # a cold file server may take minutes to deliver sympy
_GRACE_S = 5.0  # the worker ends itself at its limit of wall-clock time
_MIB = 1 << 20
_DEFAULT_FUNCTION = "grpo.grader.grader:full_verdict"
# First use builds the parser's tables and imports parts of sympy, which no answer's time limit should include.
_WARM_UP = [
    (r"\frac{\sqrt{2}}{2}", r"\frac{1}{\sqrt{2}}"),
    (r"\sin 60^\circ+\log_2 7", r"\frac{\sqrt{3}}{2}+\log_2 7"),
    (r"\begin{pmatrix} 1/2 \\ 3 \end{pmatrix}", r"\begin{pmatrix} 0.5 \\ 3 \end{pmatrix}"),
    (r"x > \sqrt{3}", r"(\sqrt{3},\infty)"),
    (r"\left\{\sqrt{8},|x|\right\}", r"\{|x|,2\sqrt{2}\}"),
    (r"\binom{5}{2}\pi e^{x}", r"10\pi e^x"),
]


@dataclass(frozen=True)
class Grade:
    """The grade of an answer."""

    equal: bool | float  # whether the answer is right; a float from a function that scores
    timed_out: bool = False  # undecided, because the time was up or the worker died; then ``equal`` is False


class GraderProcess:
    """A worker process that grades answers one by one, and ends with this process. Methods are thread-safe.

    A child made by ``os.fork`` starts a worker of its own.
    """

    def __init__(self, function: str = _DEFAULT_FUNCTION, time_limit_s: float = TIME_LIMIT_S) -> None:
        """Prepare without starting a process.

        ``function``: ``module:function`` called in the worker with the answer and the truth; it returns a bool, or a score
        (float). ``time_limit_s``: seconds of CPU time per answer; the wall-clock limit is ten times as long.
        """
        wall_limit_s = _WALL_FACTOR * time_limit_s
        self._reply_limit_s = wall_limit_s + _GRACE_S
        self._arguments = [function, *map(str, (MEMORY_LIMIT_MB, time_limit_s, wall_limit_s))]
        self._forget()
        os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        """Start afresh; in a forked child, the lock may be held by a thread of the parent, which also owns the worker."""
        self._lock = threading.Lock()
        self._worker: _Worker | None = None

    def verdict(self, answer: str, truth: str) -> Grade:
        """Grade one answer, after those of other threads. Raises RuntimeError if the worker cannot start."""
        with self._lock:
            worker = self._ready_worker()
            spent = True  # also after an interrupt: the late reply must not answer the next request
            try:
                worker.connection.send((answer, truth))
                equal, spent = worker.receive(self._reply_limit_s)
                return Grade(equal)
            except (OSError, EOFError):  # the worker died: its time was up, or it crashed
                return Grade(equal=False, timed_out=True)
            finally:
                if spent:
                    worker.end()
                    self._worker = _Worker(self._arguments)  # imports while this process goes on

    def verdicts(self, pairs: Sequence[tuple[str, str]]) -> list[Grade]:
        """Grade (answer, truth) pairs in order; raises as :meth:`verdict` does."""
        return [self.verdict(*pair) for pair in pairs]

    def end(self) -> None:
        """End the worker; the next answer starts another one."""
        with self._lock:
            if self._worker is not None:
                self._worker.end()
                self._worker = None

    def _ready_worker(self) -> _Worker:
        """The worker, started anew if it died."""
        failure = ""
        for _ in range(2):  # twice, as it may have been killed
            worker = self._worker = self._worker or _Worker(self._arguments)
            try:
                worker.wait_until_ready()
                return worker
            except (OSError, EOFError) as error:
                self._worker, failure = None, worker.end() or repr(error)
        raise RuntimeError(f"The grading process could not be started: {failure}")


class _Worker:
    """A process that runs ``_run_worker``; its imports take about 1.5 s."""

    def __init__(self, arguments: Sequence[str]) -> None:
        self.connection: Connection[Any, Any]
        self.connection, theirs = Pipe()
        self._is_ready = False
        with theirs:
            self._process: subprocess.Popen[bytes] = subprocess.Popen(
                [sys.executable, "-m", "grpo.grader.process", str(theirs.fileno()), *arguments],
                env=safe_environment() | {"PYTHONHASHSEED": "0"},  # this process's module path, and equal runs
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )

    def wait_until_ready(self) -> None:
        """Wait for the imports; OSError or EOFError if the process has died."""
        if not self._is_ready or self.connection.poll():  # an idle worker has something to read only if it has died
            self.receive(_START_LIMIT_S)
            self._is_ready = True

    def receive(self, limit_s: float) -> Any:
        """Receive a message; OSError or EOFError if none comes within ``limit_s`` seconds."""
        if not self.connection.poll(limit_s):
            raise TimeoutError(f"There was no reply within {limit_s} s.")
        return self.connection.recv()

    def end(self) -> str:
        """Kill the process; return what it wrote to stderr while it started."""
        self.connection.close()
        self._process.kill()
        return self._process.communicate()[1].decode(errors="replace").strip()


@cache
def default_process() -> GraderProcess:
    """The grading process shared by this process's reward functions."""
    return GraderProcess()


def is_equal(answer: str, truth: str) -> Grade:
    """Grade one answer as :func:`grade_batch` does: in microseconds if no computer algebra is needed."""
    return grade_batch([(answer, truth)])[0]


def grade_batch(pairs: Sequence[tuple[str, str]]) -> list[Grade]:
    """Grade (answer, truth) pairs, in order: in this process, or in the default one if computer algebra is needed.

    Raises RuntimeError: computer algebra is needed, and its process cannot start.
    """
    cheap = {pair: cheap_verdict(*pair) for pair in dict.fromkeys(pairs)}
    verdicts = {pair: default_process().verdict(*pair) if equal is None else Grade(equal) for pair, equal in cheap.items()}
    return [verdicts[pair] for pair in pairs]


# -------------------------------------------------------------------------------------------------- in the worker process


def _run_worker(connection: Connection[Any, Any], function: str, memory_mb: int, limits_s: dict[int, float]) -> None:
    """Import the grading function, limit this process, and grade what it is sent.

    The process first sends None, then answers each message (answer, truth) with (equal, spent); ``spent`` says that it ends
    after this answer, as memory ran out or is half used. An answer may hang, fill the memory or crash: the kernel ends a
    process whose time is up. ``memory_mb``: MiB that it may use beyond its initial size. ``limits_s``: timers, which end the
    process, and their seconds per answer.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGPROF, signal.SIGALRM])
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    module, _, name = function.partition(":")
    grade: Callable[[str, str], bool | float] = getattr(import_module(module), name)
    if function == _DEFAULT_FUNCTION:
        from grpo.grader.symbolic import symbolically_equal

        for pair in _WARM_UP:  # also by the computer algebra where the grader decides without
            grade(*pair)
            symbolically_equal(*pair)
    most_memory = _limit_resources(memory_mb)
    os.dup2(os.open(os.devnull, os.O_RDWR), 2)  # before, the parent reads stderr to show it if the start fails
    connection.send(None)
    spent = False
    while not spent:
        answer, truth = connection.recv()
        for timer, seconds in limits_s.items():
            signal.setitimer(timer, seconds)
        equal, spent = _grade(grade, answer, truth)
        for timer in limits_s:
            signal.setitimer(timer, 0)
        spent = spent or _address_space() > most_memory
        connection.send((equal, spent))


def _grade(grade: Callable[[str, str], bool | float], answer: str, truth: str) -> tuple[bool | float, bool]:
    """The verdict, and whether memory ran out; an answer that makes the grader fail is wrong."""
    try:
        verdict = grade(answer, truth)
        return verdict if isinstance(verdict, float) else bool(verdict), False
    except BaseException as error:
        return False, isinstance(error, MemoryError)


def _limit_resources(memory_mb: int) -> int:
    """Limit this process's address space and core files; returns the address space (bytes) that is half of the rise."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    now, rise, (_, hard) = _address_space(), memory_mb * _MIB, resource.getrlimit(resource.RLIMIT_AS)
    with contextlib.suppress(ValueError, OSError):  # macOS refuses
        resource.setrlimit(resource.RLIMIT_AS, (now + rise if hard < 0 else min(now + rise, hard), hard))
    return now + rise // 2


def _address_space() -> int:
    import psutil  # a bare GPU machine, which starts no worker, lacks it

    return int(psutil.Process().memory_info().vms)


if __name__ == "__main__":
    _, descriptor, function, memory, cpu_s, wall_s = sys.argv
    limits_s = {signal.ITIMER_PROF: float(cpu_s), signal.ITIMER_REAL: float(wall_s)}
    with contextlib.suppress(EOFError, BrokenPipeError):  # the parent closed the connection, or died
        _run_worker(Connection(int(descriptor)), function, int(memory), limits_s)

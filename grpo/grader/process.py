"""Grading with limits: answers that need computer algebra are decided in a worker process, which they may hang, fill or crash.

:mod:`grpo.grader.grader` decides an answer: in this process if no computer algebra is needed, else in a worker process
(:mod:`grpo.grader.worker`). A worker that exceeds its limit ends and is replaced, which takes 1.5 s. The limit counts the
worker's CPU time, so that a busy machine does not turn right answers into wrong ones; ten times the limit in wall-clock time
ends an answer in any case. No process starts before the first answer that needs one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
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


@dataclass(frozen=True)
class Verdict:
    """The verdict on an answer.

    Attributes:
        equal: whether the answer is right; a float from a function that scores.
        timed_out: undecided, because the time was up or the worker died; then ``equal`` is False.
    """

    equal: bool | float
    timed_out: bool = False


class GraderProcess:
    """A worker process that grades answers one by one, and ends with this process. Methods are thread-safe.

    A child made by ``os.fork`` starts a worker of its own.
    """

    def __init__(self, function: str = "grpo.grader.grader:full_verdict", time_limit_s: float = TIME_LIMIT_S) -> None:
        """Prepare without starting a process.

        Args:
            function: ``module:function`` called in the worker with the answer and the truth; it returns a bool, or a score
                (float).
            time_limit_s: seconds of CPU time per answer; the wall-clock limit is ten times as long.
        """
        wall_limit_s = _WALL_FACTOR * time_limit_s
        self._reply_limit_s = wall_limit_s + _GRACE_S
        self._arguments = [function, str(MEMORY_LIMIT_MB), str(time_limit_s), str(wall_limit_s)]
        self._forget()
        os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        """Start afresh; in a forked child, the lock may be held by a thread of the parent, which also owns the worker."""
        self._lock = threading.Lock()
        self._worker: _Worker | None = None

    def verdict(self, answer: str, truth: str) -> Verdict:
        """Grade one answer, after those of other threads. Raises RuntimeError if the worker cannot start."""
        with self._lock:
            worker = self._ready_worker()
            usable = False  # also after an interrupt: the late reply must not answer the next request
            try:
                worker.connection.send_bytes(json.dumps([answer, truth]).encode())
                equal, spent = worker.receive(self._reply_limit_s)
                usable = not spent
                return Verdict(equal)
            except (OSError, EOFError):  # the worker died: its time was up, or it crashed
                return Verdict(equal=False, timed_out=True)
            finally:
                if not usable:
                    worker.end()
                    self._worker = _Worker(self._arguments)  # imports while this process goes on

    def verdicts(self, pairs: Sequence[tuple[str, str]]) -> list[Verdict]:
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
            self._worker = self._worker or _Worker(self._arguments)
            try:
                self._worker.wait_until_ready()
                return self._worker
            except (OSError, EOFError) as error:
                failure = self._worker.end() or repr(error)
                self._worker = None
        raise RuntimeError(f"The grading process could not be started: {failure}")


class _Worker:
    """A process that runs :mod:`grpo.grader.worker`; its imports take about 1.5 s."""

    def __init__(self, arguments: Sequence[str]) -> None:
        self.connection: Connection[Any, Any]
        self.connection, theirs = Pipe()
        self._is_ready = False
        with theirs:
            self._process: subprocess.Popen[bytes] = subprocess.Popen(
                [sys.executable, "-m", "grpo.grader.worker", str(theirs.fileno()), *arguments],
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
        return json.loads(self.connection.recv_bytes())

    def end(self) -> str:
        """Kill the process; return what it wrote to stderr while it started."""
        self.connection.close()
        self._process.kill()
        return self._process.communicate()[1].decode(errors="replace").strip()


@cache
def default_process() -> GraderProcess:
    """The grading process shared by this process's reward functions."""
    return GraderProcess()


def is_equal(answer: str, truth: str) -> Verdict:
    """Grade one answer as :func:`grade_batch` does: in microseconds if no computer algebra is needed."""
    return grade_batch([(answer, truth)])[0]


def grade_batch(pairs: Sequence[tuple[str, str]]) -> list[Verdict]:
    """Grade (answer, truth) pairs, in order: in this process, or in the default one if computer algebra is needed.

    Raises RuntimeError: computer algebra is needed, and its process cannot start.
    """
    cheap = {pair: cheap_verdict(*pair) for pair in dict.fromkeys(pairs)}
    verdicts = {pair: default_process().verdict(*pair) if equal is None else Verdict(equal) for pair, equal in cheap.items()}
    return [verdicts[pair] for pair in pairs]

"""Parallel grading in worker processes, which a hostile answer may hang, fill or crash without harm.

:mod:`grpo.grader.grader` decides an answer: in this process if no computer algebra is needed, else in a worker
(:mod:`grpo.grader.worker`). A worker that exceeds its limit is ended and replaced, which takes milliseconds. The limit counts
the worker's CPU time, so that a busy machine does not turn right answers into wrong ones; ten times the limit in wall-clock
time ends an answer in any case. This process handles no signals, so any thread may grade, and a process made by ``os.fork``
starts its own workers. No process starts before the first answer that needs one.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

from grpo.common.imports import safe_environment
from grpo.grader.grader import cheap_verdict

__all__ = ["GraderPool", "Verdict", "available_cores", "default_pool", "grade_batch", "is_equal"]

TIME_LIMIT_S = 0.8
MEMORY_LIMIT_MB = 1024  # of address space that a worker may use beyond its initial size

_WALL_FACTOR = 10
_START_LIMIT_S = 300.0  # a cold file server may take minutes to deliver sympy
_GRACE_S = 5.0  # a worker ends itself at its limit of wall-clock time


@dataclass(frozen=True)
class Verdict:
    """The verdict on an answer.

    Attributes:
        equal: whether the answer is right; a float from a function that scores.
        timed_out: undecided, because the time was up or the worker died; then ``equal`` is False.
    """

    equal: bool | float
    timed_out: bool = False


class GraderPool:
    """A pool of worker processes that grade answers, which end with this process. Methods are thread-safe."""

    def __init__(
        self,
        workers: int | None = None,
        time_limit_s: float = TIME_LIMIT_S,
        function: str = "grpo.grader.grader:full_verdict",
    ) -> None:
        """Create a pool without starting a process.

        Args:
            workers: number of answers graded at once; None for the number of available CPU cores.
            time_limit_s: seconds of CPU time per answer; the wall-clock limit is ten times as long.
            function: ``module:function`` called in a worker with the answer and the truth; it returns a bool, or a score
                (float).
        """
        self.workers = available_cores() if workers is None else workers
        wall_limit_s = _WALL_FACTOR * time_limit_s
        self._reply_limit_s = wall_limit_s + _GRACE_S
        self._arguments = [function, str(MEMORY_LIMIT_MB), str(time_limit_s), str(wall_limit_s)]
        self._reset()
        _POOLS.add(self)

    def _reset(self) -> None:
        """Forget all processes; in a forked child they belong to the parent."""
        self._lock = threading.Lock()  # guards the zygote
        self._zygote: _Zygote | None = None
        # Last in, first out, so that a single thread never starts a second worker.
        self._idle: queue.LifoQueue[Connection[Any, Any] | None] = queue.LifoQueue()
        for _ in range(self.workers):
            self._idle.put(None)

    def verdict(self, answer: str, truth: str) -> Verdict:
        """Grade one answer, after waiting for a free worker.

        Raises:
            RuntimeError: the pool's processes cannot start.
        """
        worker = self._idle.get()
        usable = False  # also after an interrupt, so that its reply is not taken for that to the next request
        try:
            if worker is None or worker.poll():  # there is something to read only if it has died
                worker = self._new_worker()
            worker.send_bytes(json.dumps([answer, truth]).encode())
            equal, spent = _reply(worker, self._reply_limit_s)
            usable = not spent
            return Verdict(equal)
        except (OSError, EOFError):  # the worker died: its time was up, or it crashed
            return Verdict(equal=False, timed_out=True)
        finally:
            self._idle.put(worker if usable else None)

    def verdicts(self, pairs: Sequence[tuple[str, str]]) -> list[Verdict]:
        """Grade (answer, truth) pairs with all workers, and keep their order; raises as :meth:`verdict` does."""
        if len(pairs) == 1:
            return [self.verdict(*pairs[0])]
        with ThreadPoolExecutor(self.workers) as threads:
            try:
                return list(threads.map(lambda pair: self.verdict(*pair), pairs))
            except KeyboardInterrupt:
                self.end_processes()  # which wakes the threads
                raise

    def end_processes(self) -> None:
        """End all processes; the next answer that needs one starts others."""
        with self._lock:
            if self._zygote is not None:
                self._zygote.close()
                self._zygote = None

    def _new_worker(self) -> Connection[Any, Any]:
        failure = ""
        with self._lock:
            for _ in range(2):  # twice, as the zygote may have been killed
                self._zygote = self._zygote or _Zygote(self._arguments)
                try:
                    return self._zygote.fork()
                except (OSError, EOFError) as error:
                    failure = self._zygote.close() or repr(error)
                    self._zygote = None
        raise RuntimeError(f"No grading process could be started: {failure}")


class _Zygote:
    """The process that forks workers, which belong to its process group."""

    def __init__(self, arguments: Sequence[str]) -> None:
        self._control, theirs = socket.socketpair()
        with theirs:
            self._process: subprocess.Popen[bytes] = subprocess.Popen(
                **run_as_here("grpo.grader.worker", str(theirs.fileno()), *arguments),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )

    def fork(self) -> Connection[Any, Any]:
        """Wait for the imports (about 1.5 s at first) and for a new worker; OSError or EOFError if there is none."""
        worker, theirs = Pipe()
        with theirs:
            socket.send_fds(self._control, [b"."], [theirs.fileno()])
        _reply(worker, _START_LIMIT_S)
        return worker

    def close(self) -> str:
        """Kill the process and its workers; return what it wrote to stderr."""
        self._control.close()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        return self._process.communicate()[1].decode(errors="replace").strip()


def run_as_here(module: str, *arguments: str) -> dict[str, Any]:
    """What subprocess takes to run a module with this process's module path, and a hash seed that makes runs equal."""
    return {"args": [sys.executable, "-m", module, *arguments], "env": safe_environment() | {"PYTHONHASHSEED": "0"}}


def _reply(worker: Connection[Any, Any], limit_s: float) -> Any:
    if not worker.poll(limit_s):
        raise TimeoutError(f"There was no reply within {limit_s} s.")
    return json.loads(worker.recv_bytes())


# ------------------------------------------------------------------------------------------------- for the whole process


@cache
def default_pool() -> GraderPool:
    """The pool shared by this process's reward functions; its processes end with this one."""
    return GraderPool()


def is_equal(answer: str, truth: str) -> Verdict:
    """Grade one answer as :func:`grade_batch` does: in microseconds if no computer algebra is needed."""
    return grade_batch([(answer, truth)])[0]


def grade_batch(pairs: Sequence[tuple[str, str]]) -> list[Verdict]:
    """Grade (answer, truth) pairs, in order: in this process, or with the default pool if computer algebra is needed.

    Raises:
        RuntimeError: computer algebra is needed, and its processes cannot start.
    """
    cheap = {pair: cheap_verdict(*pair) for pair in dict.fromkeys(pairs)}
    verdicts = {pair: Verdict(equal) for pair, equal in cheap.items() if equal is not None}
    if unknown := [pair for pair in cheap if pair not in verdicts]:
        verdicts |= zip(unknown, default_pool().verdicts(unknown), strict=True)
    return [verdicts[pair] for pair in pairs]


def available_cores() -> int:
    """Number of CPU cores for this process; processes started together by torchrun share them."""
    cores = os.cpu_count() or 1
    with contextlib.suppress(AttributeError):
        cores = len(os.sched_getaffinity(0))
    return max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


_POOLS: weakref.WeakSet[GraderPool] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    """Replace locks, which threads of the parent may hold, and processes, which belong to the parent."""
    for pool in list(_POOLS):
        pool._reset()


os.register_at_fork(after_in_child=_after_fork_in_child)

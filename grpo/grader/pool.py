"""Parallel grading in worker processes, which a hostile answer may hang, fill or crash without harm.

:mod:`grpo.grader.grader` decides an answer: in this process if no computer algebra is needed, else in a worker
(:mod:`grpo.grader.worker`). A worker that exceeds its limit is killed and replaced, which takes milliseconds. The limit counts
the worker's CPU time, so that a busy machine does not turn right answers into wrong ones; ten times the limit in wall-clock
time ends an answer in any case. This process handles no signals, so any thread may grade, and a process made by ``os.fork``
starts its own workers. No process starts before the first answer that needs one.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import queue
import threading
import weakref
from collections.abc import Sequence

from cachetools import LRUCache

from grpo.common.errors import UserError
from grpo.grader.grader import cheap_verdict
from grpo.grader.processes import Verdict, Worker, Zygote

__all__ = ["GraderPool", "Verdict", "available_cores", "default_pool", "forget_verdicts", "grade_batch", "is_equal"]

TIME_LIMIT_S = 0.8
MEMORY_LIMIT_MB = 1024
CACHED_VERDICTS = 20_000

_WALL_FACTOR = 10
_CHUNK = 16  # pairs sent to a worker at a time


class GraderPool:
    """A pool of worker processes that grade answers; close it, or use it as a context manager. Methods are thread-safe."""

    def __init__(
        self,
        workers: int | None = None,
        time_limit_s: float = TIME_LIMIT_S,
        memory_limit_mb: int = MEMORY_LIMIT_MB,
        function: str = "grpo.grader.grader:full_verdict",
    ) -> None:
        """Create a pool without starting a process.

        Args:
            workers: number of answers graded at once; None for the number of available CPU cores.
            time_limit_s: seconds of CPU time per answer; the wall-clock limit is ten times as long.
            memory_limit_mb: MiB of address space that a worker may use beyond its initial size.
            function: ``module:function`` called in a worker with the answer and the truth; it returns a bool, or a score
                (float).

        Raises:
            UserError: ``workers`` or ``time_limit_s`` is not positive.
        """
        self.workers = available_cores() if workers is None else workers
        if self.workers < 1 or time_limit_s <= 0:
            raise UserError(f"A grading pool needs at least 1 worker and a time limit above 0 s: {workers=}, {time_limit_s=}.")
        self._wall_limit_s = _WALL_FACTOR * time_limit_s
        self._arguments = (function, str(memory_limit_mb), str(time_limit_s))
        self._closed = False
        self._reset()
        _POOLS.add(self)

    def _reset(self) -> None:
        self._lock = threading.Lock()  # guards the zygote: one request at a time
        self._zygote: Zygote | None = None
        self._alive: set[Worker] = set()
        # Last in, first out, so that a single thread never starts a second worker.
        self._idle: queue.LifoQueue[Worker | None] = queue.LifoQueue()
        for _ in range(self.workers):
            self._idle.put(None)

    def verdict(self, answer: str, truth: str) -> Verdict:
        """Grade one answer, after waiting for a free worker.

        Raises:
            RuntimeError: the pool is closed, or its processes cannot start.
        """
        return self._grade_chunk([(answer, truth)])[0]

    def verdicts(self, pairs: Sequence[tuple[str, str]]) -> list[Verdict]:
        """Grade (answer, truth) pairs with all workers, and keep their order; raises as :meth:`verdict` does."""
        size = max(1, min(_CHUNK, len(pairs) // (4 * self.workers)))
        starts: queue.SimpleQueue[int] = queue.SimpleQueue()
        for start in range(0, len(pairs), size):
            starts.put(start)
        graded: dict[int, list[Verdict]] = {}
        failures: list[BaseException] = []

        def grade_chunks() -> None:
            with contextlib.suppress(queue.Empty):
                while not failures:
                    start = starts.get_nowait()
                    try:
                        graded[start] = self._grade_chunk(pairs[start : start + size])
                    except BaseException as error:
                        failures.append(error)

        # Daemon threads, so that Python does not wait for them after Ctrl-C.
        threads = [threading.Thread(target=grade_chunks, daemon=True) for _ in range(min(self.workers, starts.qsize()))]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        except BaseException as error:
            failures.append(error)
        if failures:
            raise failures[0]
        return [verdict for start in sorted(graded) for verdict in graded[start]]

    def close(self) -> None:
        """End all processes. Threads that still wait for a verdict get a RuntimeError. Closing twice is allowed."""
        with self._lock:
            self._closed = True
            if self._zygote is not None:
                self._zygote.close()
                self._zygote = None
        # A worker in use is closed by the thread that reads from it, which wakes when the worker dies.
        idle = []
        with contextlib.suppress(queue.Empty):
            while True:
                idle.append(self._idle.get_nowait())
        for worker in idle:
            if worker is not None:
                worker.close()
                self._alive.discard(worker)
            self._idle.put(None)

    def __enter__(self) -> GraderPool:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _grade_chunk(self, pairs: Sequence[tuple[str, str]]) -> list[Verdict]:
        """Grade ``pairs`` with one worker, which is replaced whenever it has to be killed."""
        verdicts: list[Verdict] = []
        worker = self._idle.get()
        usable = True  # False while the worker computes, so that an interrupt of this thread also ends the worker
        try:
            while len(verdicts) < len(pairs):
                if worker is None or not worker.is_alive():
                    self._discard(worker)
                    worker = self._new_worker()
                usable = False
                done, usable = worker.grade(pairs[len(verdicts) :], self._wall_limit_s)
                if not usable:
                    self._discard(worker)
                    worker = None
                    if self._closed:
                        raise RuntimeError("The grading pool was closed while it was grading.")
                verdicts += done
        finally:
            if not usable:
                self._discard(worker)
                worker = None
            self._idle.put(worker)
        return verdicts

    def _new_worker(self) -> Worker:
        failure = OSError()
        with self._lock:
            for _ in range(2):  # twice, as the zygote may have been killed
                if self._closed:
                    raise RuntimeError("The grading pool is closed.")
                try:
                    if self._zygote is None:
                        self._zygote = Zygote(self._arguments)
                    worker = self._zygote.fork()
                except OSError as error:
                    failure, self._zygote = error, None
                else:
                    self._alive.add(worker)
                    return worker
        raise RuntimeError(f"No grading process could be started: {failure}") from failure

    def _discard(self, worker: Worker | None) -> None:
        if worker is None:
            return
        worker.close()
        self._alive.discard(worker)
        with self._lock, contextlib.suppress(OSError):  # if the zygote is dead, the worker is too
            worker.zygote.kill(worker.pid)

    def _forget(self) -> None:
        """Reset the pool in a forked child, whose processes and sockets belong to the parent."""
        for worker in self._alive:
            worker.close()
        if self._zygote is not None:
            self._zygote.abandon()
        self._reset()


# ------------------------------------------------------------------------------------------------- for the whole process


def default_pool() -> GraderPool:
    """The pool shared by this process's reward functions; created at first use, closed when Python exits."""
    global _default
    with _default_lock:
        if _default is None:
            _default = GraderPool()
        return _default


def is_equal(answer: str, truth: str) -> Verdict:
    """Grade one answer: in microseconds if no computer algebra is needed, else with the default pool.

    The pool's verdicts are cached, except timeouts, as another attempt may succeed.

    Raises:
        RuntimeError: computer algebra is needed, and its processes cannot start.
    """
    cheap = cheap_verdict(answer, truth)
    if cheap is not None:
        return Verdict(cheap)
    pair = (answer, truth)
    verdict = _recall(pair)
    if verdict is None:
        verdict = default_pool().verdict(answer, truth)
        _remember(pair, verdict)
    return verdict


def grade_batch(pairs: Sequence[tuple[str, str]]) -> list[Verdict]:
    """Grade (answer, truth) pairs as :func:`is_equal` does, in order; all workers share those that need algebra."""
    verdicts: dict[tuple[str, str], Verdict] = {}
    hard: list[tuple[str, str]] = []
    for pair in dict.fromkeys(pairs):
        cheap = cheap_verdict(*pair)
        known = _recall(pair) if cheap is None else Verdict(cheap)
        if known is None:
            hard.append(pair)
        else:
            verdicts[pair] = known
    if hard:
        for pair, verdict in zip(hard, default_pool().verdicts(hard), strict=True):
            verdicts[pair] = verdict
            _remember(pair, verdict)
    return [verdicts[pair] for pair in pairs]


def forget_verdicts() -> None:
    """Empty the cache of :func:`is_equal`, for benchmarks and tests."""
    with _memory_lock:
        _memory.clear()


def available_cores() -> int:
    """Number of CPU cores for this process; processes started together by torchrun share them."""
    cores = os.cpu_count() or 1
    with contextlib.suppress(AttributeError):
        cores = len(os.sched_getaffinity(0))
    return max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def _recall(pair: tuple[str, str]) -> Verdict | None:
    with _memory_lock:
        return _memory.get(pair)


def _remember(pair: tuple[str, str], verdict: Verdict) -> None:
    if not verdict.timed_out:
        with _memory_lock:
            _memory[pair] = verdict


_POOLS: weakref.WeakSet[GraderPool] = weakref.WeakSet()
_default: GraderPool | None = None
_default_lock = threading.Lock()
_memory: LRUCache[tuple[str, str], Verdict] = LRUCache(CACHED_VERDICTS)
_memory_lock = threading.Lock()


def _close_default() -> None:
    global _default
    if _default is not None:
        _default.close()
        _default = None


def _after_fork_in_child() -> None:
    """Reset locks, which threads of the parent may hold, and pools, whose processes belong to the parent."""
    global _default_lock, _memory, _memory_lock
    _default_lock, _memory_lock, _memory = threading.Lock(), threading.Lock(), LRUCache(CACHED_VERDICTS)
    for pool in list(_POOLS):
        pool._forget()


atexit.register(_close_default)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)

"""Grading many answers at once, in processes that a hostile answer may hang, fill or crash without harm.

What the answers say is decided by :mod:`grpo.grader.grader`: in this process where no computer algebra is needed, else in
a worker (:mod:`grpo.grader.worker`). A worker that exceeds the limit is killed and replaced, which takes milliseconds.
The limit counts the worker's own CPU time, so that a busy machine does not turn right answers into wrong ones; ten times
the limit on the clock ends an answer in any case. This process handles no signals, so any thread may grade, and a process
made by ``os.fork`` starts workers of its own. No process is started before the first answer that needs one.
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
    """Worker processes that grade answers; to be closed, or used as a context manager. All methods are thread safe."""

    def __init__(
        self,
        workers: int | None = None,
        time_limit_s: float = TIME_LIMIT_S,
        memory_limit_mb: int = MEMORY_LIMIT_MB,
        function: str = "grpo.grader.grader:full_verdict",
    ) -> None:
        """Start nothing yet: processes start when they are needed.

        Args:
            workers: how many answers are graded at once; as many as this process may use CPU cores if None.
            time_limit_s: seconds of CPU time for one answer; ten times as many on the clock.
            memory_limit_mb: MiB of address space that a worker may take beyond what it starts with.
            function: ``module:function`` that grades, called with the answer and the truth in a worker; a float is a score.

        Raises:
            UserError: there are no workers, or no time for them.
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
        # The last one back is the first one out, so that one thread alone never starts a second worker.
        self._idle: queue.LifoQueue[Worker | None] = queue.LifoQueue()
        for _ in range(self.workers):
            self._idle.put(None)

    def verdict(self, answer: str, truth: str) -> Verdict:
        """Grade one answer; waits until a worker is free.

        Raises:
            RuntimeError: the pool is closed, or its processes cannot start.
        """
        return self._grade_chunk([(answer, truth)])[0]

    def verdicts(self, pairs: Sequence[tuple[str, str]]) -> list[Verdict]:
        """Grade (answer, truth) pairs with all workers at once, in the order given; errors as in :meth:`verdict`."""
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

        # Daemons: after Ctrl-C, Python need not wait for the answers at hand before it ends.
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
        """End all processes. Who still waits for a verdict gets a RuntimeError; closing twice is no mistake."""
        with self._lock:
            self._closed = True
            if self._zygote is not None:
                self._zygote.close()
                self._zygote = None
        # Those that some thread still reads from are closed by that thread, which the death of the worker wakes.
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
        """Grade ``pairs`` with one worker, and with its replacements where it has to be killed."""
        verdicts: list[Verdict] = []
        worker = self._idle.get()
        usable = True  # False while the worker is at work: whatever interrupts this thread then ends the worker too
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
            for _ in range(2):  # the zygote may have been killed, or be killed now
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
        with self._lock, contextlib.suppress(OSError):  # where the zygote is dead, the worker is too
            worker.zygote.kill(worker.pid)

    def _forget(self) -> None:
        """In a forked child: the processes are the parent's. Drop the copies of their sockets and start afresh."""
        for worker in self._alive:
            worker.close()
        if self._zygote is not None:
            self._zygote.abandon()
        self._reset()


# ------------------------------------------------------------------------------------------------- for the whole process


def default_pool() -> GraderPool:
    """The pool that this process's reward functions share: made at first use, closed when Python exits."""
    global _default
    with _default_lock:
        if _default is None:
            _default = GraderPool()
        return _default


def is_equal(answer: str, truth: str) -> Verdict:
    """Grade one answer: in microseconds where no computer algebra is needed, else with the default pool.

    Verdicts of the pool are remembered, except those that ran out of time: the next try may be luckier.

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
    """:func:`is_equal` for (answer, truth) pairs, in order; what needs computer algebra is spread over all workers."""
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
    """Empty :func:`is_equal`'s memory, for benchmarks and tests."""
    with _memory_lock:
        _memory.clear()


def available_cores() -> int:
    """How many CPU cores this process may use; those that torchrun starts together share them."""
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
    """Locks may be held by threads that the child does not have, and the pools' processes are the parent's."""
    global _default_lock, _memory, _memory_lock
    _default_lock, _memory_lock, _memory = threading.Lock(), threading.Lock(), LRUCache(CACHED_VERDICTS)
    for pool in list(_POOLS):
        pool._forget()


atexit.register(_close_default)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)

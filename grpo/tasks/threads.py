"""Threads of episodes: each runs all methods of one environment, so that state may be bound to a thread or an event loop."""

from __future__ import annotations

import asyncio
import faulthandler
import inspect
import resource
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, TypeVar, cast

Result = TypeVar("Result")
AT_ONCE = 64  # calls at the same time
LOCKED_SECONDS = 60.0  # a call that keeps Python's lock so long after its time limit ends the process

Outcome = tuple[Any, BaseException | None, float]  # a call's result, its error, and how long it took
Job = tuple[Callable[[], Any], Callable[[Outcome], None]]  # a call, and where its outcome goes

_OF_THREAD = threading.local()


def finished(result: Any) -> Any:
    """Await a result that is awaitable, in the event loop of this thread, which stays open."""
    if not inspect.isawaitable(result):
        return result
    if not hasattr(_OF_THREAD, "runner"):
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        with suppress(ValueError, OSError):  # a loop has three files, and many systems allow 1,024 unless asked for more
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        _OF_THREAD.runner = asyncio.Runner()

    async def wait() -> Any:
        return await result

    return _OF_THREAD.runner.run(wait())


class Thread:
    """A thread that makes one call after another.

    Its event loop, which needs files of its own, is opened by the first ``async`` method, and then runs between the calls too.
    """

    def __init__(self) -> None:
        self._runner: asyncio.Runner | None = None
        self._jobs = SimpleQueue[Job | None]()
        threading.Thread(target=self._work, daemon=True).start()

    def put(self, job: Job | None) -> None:
        """Make a call, and pass on what came of it; None ends the thread, and abandons what its call awaits."""
        if self._runner is None:
            self._jobs.put(job)
            return
        loop = self._runner.get_loop()

        def arrive() -> None:
            self._jobs.put(job)
            loop.stop()

        loop.call_soon_threadsafe(arrive)

    def result_of(self, call: Callable[[], Result]) -> Result:
        """Make a call, and wait for it."""
        outcome = SimpleQueue[Outcome]()
        self.put((call, outcome.put))
        result, error, _ = outcome.get()
        if error is not None:
            raise error
        return cast(Result, result)

    def _work(self) -> None:
        while True:
            if self._runner is not None and self._jobs.empty():
                self._runner.get_loop().run_forever()
            if (job := self._jobs.get()) is None:
                break
            began, result, error = time.monotonic(), None, None
            try:
                result = job[0]()
            except BaseException as raised:  # such as PanicException of Rust's libraries
                error = raised
            self._runner = getattr(_OF_THREAD, "runner", None)
            job[1]((result, error, time.monotonic() - began))
        if self._runner is not None:
            self._runner.close()


def in_threads(calls: Sequence[tuple[Thread, Callable[[], Result]]], seconds: float) -> list[Result | None]:
    """Make calls side by side, each in its thread and with a time limit; None for one that takes longer.

    A late call cannot be stopped: it goes on until the process ends, and nothing waits for it. One of C code that keeps
    Python's lock, such as ``9**9**9``, stops all threads; the process then ends with a traceback that names its line. Raises
    BaseException if the first that a function raises.
    """
    results: list[Result | None] = [None] * len(calls)
    outcomes = SimpleQueue[tuple[int, Outcome]]()
    waiting, late_at = deque(range(len(calls))), dict[int, float]()  # the calls that run, the first to be late first

    def start(place: int) -> None:
        late_at[place] = time.monotonic() + seconds
        thread, call = calls[place]
        thread.put((call, lambda outcome: outcomes.put((place, outcome))))

    try:
        while waiting or late_at:
            while waiting and len(late_at) < AT_ONCE:
                start(waiting.popleft())
            faulthandler.dump_traceback_later(seconds + LOCKED_SECONDS, exit=True, file=sys.__stderr__ or 2)
            first, at = next(iter(late_at.items()))
            try:
                place, (result, error, took) = outcomes.get(timeout=max(0.0, at - time.monotonic()))
            except Empty:
                del late_at[first]
                continue
            if late_at.pop(place, None) is None or took > seconds:
                continue
            if error is not None:
                raise error
            results[place] = result
    finally:
        faulthandler.cancel_dump_traceback_later()
    return results

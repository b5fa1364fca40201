"""A Ray actor that is restarted when it dies or hangs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

import ray
from ray.exceptions import GetTimeoutError, ObjectLostError, RayActorError, RayTaskError
from tqdm import tqdm

ATTEMPTS = 4  # of one call
START_S = 900.0  # time limit of an actor's start: imports, the model, vLLM
CONCURRENT = "concurrent"  # Ray concurrency group with its own thread in the actor; needs ``concurrency_groups`` in the options
T = TypeVar("T")


class WorkerLost(Exception):
    """The actor has died or hangs."""


@dataclass
class ActorWorker:
    """Caller of an actor's methods, each of which returns its value and its :class:`grpo.training.asynchronous.actors.Cost`.

    One call runs at a time, except for :meth:`call_concurrently`. If the actor dies or times out during a call, a new actor is
    started, ``recovery`` restores its state, and the call is repeated. The unfinished work is lost with the old actor, so
    nothing is done twice.

    Attributes:
        name: for messages.
        actor_class: a plain class, not decorated by Ray; its ``start()`` is called first.
        arguments: of its constructor.
        options: of the Ray actor, such as num_cpus and num_gpus.
        stuck_after_s: time limit of a call, after which the actor counts as hanging.
        recovery: calls (method, arguments) that bring a new actor to the state of the old one.
        restarts: number of restarts so far.
        lock: held during a call; hold it to make a call and change ``recovery`` together.
    """

    name: str
    actor_class: type
    arguments: tuple[Any, ...]
    options: dict[str, Any]
    stuck_after_s: float
    recovery: list[tuple[str, tuple[Any, ...]]] = field(default_factory=list)
    restarts: int = 0
    lock: Any = field(default_factory=threading.RLock)
    _actor: Any = None
    _up: bool = False
    _closed: bool = False

    def call(
        self, method: str, *arguments: Any, keep: bool = False, before: Callable[[Any], None] | None = None
    ) -> tuple[Any, Any]:
        """Call a method.

        Args:
            keep: leave the value in Ray's object store, and return a reference to it.
            before: called with the actor's handle before each attempt; may raise WorkerLost.

        Returns:
            the value and its cost.

        Raises:
            UserError: the method raised one.
            RuntimeError: the actor was lost in each of ATTEMPTS attempts.
        """

        def do() -> tuple[Any, Any]:
            if before is not None:
                before(self._actor)
            return self._ask(method, arguments, keep)

        return self._retry(method, do)

    def call_concurrently(self, method: str, *arguments: Any) -> tuple[Any, Any]:
        """Call a method concurrently with other calls, without a second attempt.

        Raises:
            WorkerLost: the actor was lost. The next call starts a new one.
            UserError, RuntimeError: as :meth:`call`.
        """
        if not self._up:
            self.start()
        actor = self._actor
        try:
            return self._ask(method, arguments, keep=False, group=CONCURRENT)
        except WorkerLost as lost:
            with self.lock:
                if self._actor is actor and not self._closed:
                    self._give_up(f"{lost} at {method}")
            raise

    def start(self) -> None:
        """Start the actor now instead of at its first call.

        Raises:
            UserError, RuntimeError: as :meth:`call`.
        """
        self._retry("start", lambda: None)

    def close(self) -> None:
        """Kill the actor, whatever it is doing."""
        self._closed = True
        self._end()

    def _retry(self, what: str, do: Callable[[], T]) -> T:
        """Run ``do`` with a live actor, and again with a new one if that is lost meanwhile."""
        with self.lock:
            for attempt in range(1, ATTEMPTS + 1):
                try:
                    if not self._up:
                        self._bring_up()
                    return do()
                except WorkerLost as lost:
                    if self._closed:
                        raise
                    self._give_up(f"{lost}: attempt {attempt} of {ATTEMPTS} at {what}")
        raise RuntimeError(
            f"the {self.name} was lost {ATTEMPTS} times in a row at {what}. Its last messages stand above, and in the logs of "
            "its node (session_latest/logs in Ray's temporary folder)."
        )

    def _bring_up(self) -> None:
        """Start an actor and restore its state."""
        self._actor = ray.remote(**self.options)(self.actor_class).remote(*self.arguments)
        if self._closed:  # by another thread, meanwhile
            self._end()
        self._ask("start", (), keep=False, limit_s=START_S)
        for method, arguments in self.recovery:
            self._ask(method, arguments, keep=True)
        self._up = True

    def _give_up(self, why: str) -> None:
        """Kill a lost actor; the next call starts a new one."""
        self.restarts += 1
        tqdm.write(f"The {self.name} {why}. It is restarted.")
        self._end()

    def _ask(
        self, method: str, arguments: tuple[Any, ...], keep: bool, limit_s: float | None = None, group: str | None = None
    ) -> tuple[Any, Any]:
        limit_s, actor = limit_s or self.stuck_after_s, self._actor
        if actor is None:
            raise WorkerLost("was closed")
        try:
            value, cost = getattr(actor, method).options(num_returns=2, concurrency_group=group).remote(*arguments)
            costs = ray.get(cost, timeout=limit_s)
            return (value if keep else ray.get(value, timeout=limit_s)), costs
        except GetTimeoutError:
            raise WorkerLost(f"has not answered {method} for {limit_s:g} s") from None
        except (RayActorError, ObjectLostError) as error:
            raise WorkerLost(f"has died ({type(error).__name__})") from error
        except RayTaskError as error:
            raise error.cause from error  # with the actor's own traceback above

    def _end(self) -> None:
        if self._actor is not None:
            with suppress(Exception):
                ray.kill(self._actor, no_restart=True)
        self._actor, self._up = None, False

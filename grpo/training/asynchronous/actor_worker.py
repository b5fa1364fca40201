"""A Ray actor that is started again when it dies or hangs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

import ray
from ray.exceptions import GetTimeoutError, ObjectLostError, RayActorError, RayTaskError
from tqdm import tqdm

ATTEMPTS = 4  # for one call
START_S = 900.0  # an actor may take so long to import its libraries and load its model, vLLM included
BESIDE = "beside"  # Ray's name for a thread of its own in the actor; ``concurrency_groups`` in its options makes it
T = TypeVar("T")


class WorkerLost(Exception):
    """The actor has died or hangs; the message says which."""


@dataclass
class ActorWorker:
    """Calls an actor's methods, each of which returns its value and its :class:`grpo.training.asynchronous.actors.Cost`.

    One call runs at a time, but for :meth:`beside`. When the actor dies during a call, or has not answered in time, a new one
    is started, brought to where the old one was, and asked again. What it had begun is lost with it, so nothing is done twice.

    Attributes:
        name: for messages.
        actor_class: the actor's class, not yet a Ray one; ``start()`` is called first.
        arguments: of its constructor.
        options: Ray's, such as num_cpus and num_gpus.
        stuck_after_s: a call that takes longer counts as hanging.
        recovery: calls (method, arguments) that bring a new actor to where the old one was.
        restarts: how often that was needed.
        lock: held while a call runs; to be held where a call and ``recovery`` must change together.
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
            keep: leave the value in Ray's object store.
            before: called with the actor's handle first, and again with that of a new actor; may raise WorkerLost.

        Returns:
            the value, or a reference to it, and what it cost.

        Raises:
            UserError: the method raised one.
            RuntimeError: the actor was lost at each of several attempts.
        """

        def do() -> tuple[Any, Any]:
            if before is not None:
                before(self._actor)
            return self._ask(method, arguments, keep)

        return self._until_it_holds(method, do)

    def beside(self, method: str, *arguments: Any) -> tuple[Any, Any]:
        """Call a method that does not wait for the others, and only once.

        Raises:
            WorkerLost: the actor was lost. The next call starts a new one.
            UserError, RuntimeError: as :meth:`call`.
        """
        if not self._up:
            self.start()
        actor = self._actor
        try:
            return self._ask(method, arguments, keep=False, group=BESIDE)
        except WorkerLost as lost:
            with self.lock:
                if self._actor is actor and not self._closed:
                    self._give_up(f"{lost} at {method}")
            raise

    def start(self) -> None:
        """Start the actor now, and not only when it is first called.

        Raises:
            UserError, RuntimeError: as :meth:`call`.
        """
        self._until_it_holds("start", lambda: None)

    def close(self) -> None:
        """End the actor, whatever it is doing."""
        self._closed = True
        self._end()

    def _until_it_holds(self, what: str, do: Callable[[], T]) -> T:
        """Do something with a running actor; with a new one where that is lost meanwhile."""
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
        """A new actor, brought to where the one before was."""
        self._actor = ray.remote(**self.options)(self.actor_class).remote(*self.arguments)
        if self._closed:  # in the meantime, by another thread
            self._end()
        self._ask("start", (), keep=False, limit_s=START_S)
        for method, arguments in self.recovery:
            self._ask(method, arguments, keep=True)
        self._up = True

    def _give_up(self, why: str) -> None:
        """End an actor that is lost; the next call starts a new one."""
        self.restarts += 1
        tqdm.write(f"The {self.name} {why}. It is started again.")
        self._end()

    def _ask(
        self, method: str, arguments: tuple[Any, ...], keep: bool, limit_s: float | None = None, group: str | None = None
    ) -> tuple[Any, Any]:
        limit_s, actor = limit_s or self.stuck_after_s, self._actor
        if actor is None:
            raise WorkerLost("was ended")
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

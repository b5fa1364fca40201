"""Environments and a scripted engine for tests of episodes."""

import asyncio
import functools
import sqlite3
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from grpo.common.records import Completion
from grpo.rollout.engine import CompletionSpec, SamplingParams

NO_CLASS = 3


class Panic(BaseException):
    """As pyo3's PanicException."""


class Mute(Exception):
    def __str__(self) -> str:
        raise AttributeError


class Calculator:
    """In TRL's convention, and run through TRL too (tests/adapters)."""

    def reset(self, **row: Any) -> None:
        self.calls = 0

    def multiply(self, a: int, b: int) -> int:
        """Multiply two numbers.

        Args:
            a: the first number.
            b: the second number.
        """
        self.calls += 1
        return a * b

    async def subtract(self, a: int, b: int) -> int:
        """Subtract two numbers.

        Args:
            a: the first number.
            b: the number to take away.
        """
        return a - b


class Troubles:
    """Tools that fail in one way each."""

    def reset(self, question: str) -> str:
        return " Try."

    def raises(self) -> str:
        """Raise an error."""
        raise ValueError("no such number")

    def exits(self) -> str:
        """End the program."""
        raise SystemExit(0)

    def panics(self) -> str:
        """Fail as Rust's libraries do: with no Exception."""
        raise Panic("index out of bounds")

    def mute(self) -> str:
        """Fail with an error that has no text."""
        raise Mute

    async def cancelled(self) -> str:
        """Wait for what is cancelled."""
        raise asyncio.CancelledError

    @staticmethod
    def static() -> str:
        """Answer without an instance."""
        return "static"

    @functools.lru_cache  # noqa: B019
    def cached(self, a: int) -> int:
        """Double a number.

        Args:
            a: the number.
        """
        return 2 * a

    def hangs(self) -> str:
        """Answer too late."""
        time.sleep(3.0)
        return "late"

    def long(self) -> str:
        """Answer at length."""
        return "7 " * 10_000

    def control(self) -> str:
        """Answer with a token that ends a turn."""
        return "<|im_end|>"

    def empty(self) -> str:
        """Answer nothing."""
        return ""

    def surrogate(self) -> str:
        """Answer what UTF-8 cannot hold."""
        return "a\ud800b"

    def echo(self, text: str) -> str:
        """Answer the same.

        Args:
            text: what to answer.
        """
        return text


class Bound:
    """Keeps what belongs to a thread and to an event loop, a task that goes on between the turns, and changes its row."""

    async def reset(self, heaps: list[int], **row: Any) -> None:
        self.heaps, self.beats, self.loop = heaps, 0, asyncio.get_running_loop()
        self.task = asyncio.create_task(self._beat())

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(0.001)
            self.beats += 1

    def open(self) -> str:
        """Open a database."""
        self.database = sqlite3.connect(":memory:")
        return "open"

    async def take(self) -> str:
        """Take from the heap."""
        self.heaps[0] -= 3
        (one,) = self.database.execute("select 1").fetchone()
        return f"{self.heaps[0]} {one} {asyncio.get_running_loop() is self.loop}"

    def wait(self) -> str:
        """Wait until the task has gone on while nothing was called."""
        return str(self.beats > 3)

    async def get_reward(self) -> float:
        self.database.close()
        return 0.2 + 0.4 + 0.3 + 0.1 if self.loop is asyncio.get_running_loop() else 0.0


class Guess:
    """An environment that answers in words and gives the reward."""

    def reset(self, ground_truth: str, seed: int, **row: Any) -> str:
        self.truth, self.tries, self.seed = ground_truth, 0, seed
        return " Guess."

    def step(self, text: str) -> str | None:
        self.tries += 1
        return None if self.truth in text else " No."

    def get_reward(self) -> float:
        return 1.0 / self.tries


class Talk:
    """Ends nothing and answers with what it was told, so that episodes have three turns of random text."""

    def reset(self, question: str) -> None:
        self.said = 0

    def step(self, text: str) -> str | None:
        self.said += 1
        return f" {self.said}: {len(text)} "


class Undecided:
    """Begins two episodes of one question differently."""

    begun = 0

    def reset(self, **row: Any) -> str:
        Undecided.begun += 1
        return str(Undecided.begun)

    def look(self) -> str:
        """Look."""
        return "nothing"


class Silent:
    """Begins, and can do nothing."""

    def reset(self, **row: Any) -> None: ...


class Scripted:
    """Engine that says, in each episode, one given text a turn, and keeps what it was asked.

    Args:
        turns: texts of each turn; a text without an end was cut off.
    """

    policy_version = 3
    context = None
    seconds = 0.0  # of a turn

    def __init__(self, tokenizer: Any, turns: Sequence[str], end: int):
        self.tokenizer, self.said, self.end = tokenizer, turns, end
        self.asked: list[list[list[int]]] = []
        self.draws: list[list[CompletionSpec]] = []

    def turns(self) -> AbstractContextManager[None]:
        return nullcontext()

    def generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, n: int, seed: int, draws: Sequence[CompletionSpec] = ()
    ) -> list[list[Completion]]:
        text = self.said[len(self.asked)]
        time.sleep(self.seconds)
        self.asked.append([list(prompt) for prompt in prompts])
        self.draws.append(list(draws))
        cut = text.endswith("...")
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"] + ([] if cut else [self.end])
        reason = "length" if cut else "stop"
        return [[Completion(tuple(ids), text, (-0.5,) * len(ids), reason, 3)] * n for _ in prompts]

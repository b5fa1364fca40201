"""Environments and a scripted engine for tests of episodes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from grpo.common.records import Completion
from grpo.rollout.engine import Draw, SamplingParams

NO_CLASS = 3


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


class Scripted:
    """Engine that says, in each episode, one given text a turn, and keeps what it was asked.

    Args:
        turns: texts of each turn; a text without an end was cut off.
    """

    policy_version = 3
    context = None

    def __init__(self, tokenizer: Any, turns: Sequence[str], end: int):
        self.tokenizer, self.said, self.end = tokenizer, turns, end
        self.asked: list[list[list[int]]] = []
        self.draws: list[list[Draw]] = []

    def turns(self) -> AbstractContextManager[None]:
        return nullcontext()

    def generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, n: int, seed: int, draws: Sequence[Draw] = ()
    ) -> list[list[Completion]]:
        text = self.said[len(self.asked)]
        self.asked.append([list(prompt) for prompt in prompts])
        self.draws.append(list(draws))
        cut = text.endswith("...")
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"] + ([] if cut else [self.end])
        reason = "length" if cut else "stop"
        return [[Completion(tuple(ids), text, (-0.5,) * len(ids), reason, 3)] * n for _ in prompts]

"""Which of its data a run uses, and in which order."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import lru_cache
from typing import TypeVar

from grpo.common.errors import UserError
from grpo.common.records import Example, Problem
from grpo.study.methods import SftConfig

Item = TypeVar("Item")


def choose_examples(examples: Sequence[Example], config: SftConfig, seed: int) -> list[Example]:
    """Those that ``config`` asks for: only the ones that earn the reward, or so many of them, or both, or all.

    A smaller choice is part of a larger one of the same seed.

    Raises:
        UserError: there are fewer than asked for.
    """
    candidates = [example for example in examples if example.reward == 1.0] if config.filtered else list(examples)
    n = len(candidates) if config.examples is None else config.examples
    if not candidates or n > len(candidates):
        kind = "examples that earn the reward" if config.filtered else "examples"
        raise UserError(
            f"sft.examples: {n} {kind} are asked for, but data/sft_dataset has {len(candidates)}. Lower it, or use another "
            "`sft_dataset:` in params.yaml."
        )
    return random.Random(f"examples {seed}").sample(candidates, len(candidates))[:n]


def items_of_step(items: Sequence[Item], seed: int, step: int, n: int) -> list[Item]:
    """The ``n`` items of one step (from 1): all of them in a new seeded order each time through.

    It depends on nothing but its arguments, so a run that is taken up again sees the same items.
    """
    chosen = []
    for position in range((step - 1) * n, step * n):
        epoch, index = divmod(position, len(items))
        chosen.append(items[_order(len(items), seed, epoch)[index]])
    return chosen


def other_problems(problems: Sequence[Problem], asked: Sequence[Problem], seed: int, step: int, n: int) -> list[Problem]:
    """``n`` problems that are not among those ``asked`` in a step so far, or as many as there are.

    It depends on nothing but its arguments, too.
    """
    known = {problem.id for problem in asked}
    drawn = random.Random(f"others {seed} {step} {len(asked)}").sample(problems, min(len(problems), n + len(asked)))
    return [problem for problem in drawn if problem.id not in known][:n]


@lru_cache(maxsize=2)
def _order(n: int, seed: int, epoch: int) -> list[int]:
    return random.Random(f"order {seed} {epoch}").sample(range(n), n)

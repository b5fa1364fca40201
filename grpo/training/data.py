"""A run's data: reading, choice of examples, and order."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, TypeVar

from grpo.common.errors import UserError
from grpo.common.records import Example, Problem, read_examples, read_problems
from grpo.study.config import GrpoConfig, SftConfig
from grpo.study.effective import EffectiveRun

Item = TypeVar("Item")


Data = tuple[list[Any], list[Problem]]  # what is trained on, problems or chosen examples, and the validation problems


def read_data(run: EffectiveRun) -> Data:
    validation = read_problems(run.validation)
    if isinstance(run.config, SftConfig):
        return choose_examples(read_examples(run.train), run.config, run.seed), validation
    questions = run.config.questions if isinstance(run.config, GrpoConfig) else None
    return choose_questions(read_problems(run.train), questions, run.seed), validation


def choose_questions(problems: list[Problem], n: int | None, seed: int) -> list[Problem]:
    """Draw ``n`` training questions; None takes all, in their order. A smaller draw of a seed is part of a larger one."""
    if n is None:
        return problems
    if n > len(problems):
        raise UserError(f"grpo.questions: {n} are asked for, but the task has {len(problems)} training questions. Lower it.")
    return random.Random(f"questions {seed}").sample(problems, len(problems))[:n]


def choose_examples(examples: Sequence[Example], config: SftConfig, seed: int) -> list[Example]:
    """Choose the examples to fine-tune on: with ``filtered`` those with reward 1, and of these ``examples`` random ones.

    With the same seed, a smaller choice is part of a larger one.
    """
    candidates = [example for example in examples if example.reward == 1.0] if config.filtered else list(examples)
    n = len(candidates) if config.examples is None else config.examples
    if not candidates or n > len(candidates):
        kind = "examples with reward 1" if config.filtered else "examples"
        raise UserError(
            f"sft.examples: {n} {kind} are asked for, but data/sft_dataset has {len(candidates)}. Lower it, or use another "
            "`sft_dataset:` in params.yaml."
        )
    return random.Random(f"examples {seed}").sample(candidates, len(candidates))[:n]


def items_of_step(items: Sequence[Item], seed: int, step: int, n: int) -> list[Item]:
    """The ``n`` items of one step (from 1). Each epoch goes through all items in a new seeded order.

    The result depends on the arguments only, so a resumed run sees the same items.
    """
    places = (divmod(position, len(items)) for position in range((step - 1) * n, step * n))
    return [items[_order(len(items), seed, epoch)[index]] for epoch, index in places]


def other_problems(problems: Sequence[Problem], asked: Sequence[Problem], seed: int, step: int, n: int) -> list[Problem]:
    """Draw ``n`` problems, or as many as there are, that the step has not ``asked`` yet; depends on the arguments only."""
    known = {problem.id for problem in asked}
    drawn = random.Random(f"others {seed} {step} {len(asked)}").sample(problems, min(len(problems), n + len(asked)))
    return [problem for problem in drawn if problem.id not in known][:n]


@lru_cache(maxsize=2)
def _order(n: int, seed: int, epoch: int) -> list[int]:
    return random.Random(f"order {seed} {epoch}").sample(range(n), n)

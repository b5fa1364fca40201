"""The reward functions of the handouts' two prompts, with their names, arguments and keys."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from numbers import Rational, Real
from typing import Any

from grpo.common.errors import UserError
from grpo.common.imports import import_object
from grpo.common.records import Completion, Problem
from grpo.grader.extract import boxed_answer
from grpo.grader.pool import is_equal
from grpo.grader.unevaluated import counts_as_answer
from grpo.tasks.formats import tagged_answer
from grpo.tasks.task import OWN_REWARDS, ScoredBatch, rewards

SingleTruth = str | int | float | Fraction
GroundTruth = SingleTruth | Sequence[SingleTruth]
"""A short answer, or a list or tuple of those of which one must be met."""


def r1_zero_reward_fn(response: str, ground_truth: GroundTruth, fast: bool = True) -> dict[str, float]:
    r"""Reward of a response to the r1_zero prompt.

    The form is right where :func:`grpo.tasks.formats.tagged_answer` reads an answer.

    Args:
        response: the completion, with or without the prompt before it.
        ground_truth: the short answer as text or number, or a list or tuple of which one must be met.
        fast: accepted because the handouts' signature has it. There is one grader, so both values do the same.

    Returns:
        ``format_reward``, ``answer_reward`` and ``reward``, each 0.0 or 1.0. ``reward`` is 1.0 if both others are; a wrong
        form makes all three 0.0.

    Raises:
        UserError: ``ground_truth`` is an empty list, not finite, or neither text nor number.
    """
    return _score(tagged_answer(response), ground_truth)


def question_only_reward_fn(response: str, ground_truth: GroundTruth, fast: bool = True) -> dict[str, float]:
    r"""Reward of a response to the question_only prompt: the form is right if it holds a ``\boxed{}`` or ``\fbox{}``.

    The content of the last one is the answer; if that one is not closed, the form is wrong. Everything else is as in
    :func:`r1_zero_reward_fn`.
    """
    return _score(boxed_answer(response), ground_truth)


def _score(answer: str | None, ground_truth: GroundTruth) -> dict[str, float]:
    truths = _alternatives(ground_truth)
    right = answer is not None and any(is_equal(answer, truth).equal and counts_as_answer(answer, truth) for truth in truths)
    return rewards(answer is not None, right)


def _alternatives(ground_truth: GroundTruth) -> list[str]:
    if not isinstance(ground_truth, (list, tuple)):
        return [_as_text(ground_truth)]
    if not ground_truth:
        raise UserError("ground_truth: an empty list of alternatives; no answer could be right.")
    return [_as_text(truth) for truth in ground_truth]


def _as_text(truth: object) -> str:
    """A ground truth as the grader reads it: 5.0 as ``5``, 1e-07 as ``1e-07``, Fraction(1, 3) as ``1/3``."""
    if isinstance(truth, str):
        return truth
    if isinstance(truth, bool) or not isinstance(truth, (Rational, Real)):
        raise UserError(
            f"ground_truth: expected text, a number, or a list of those, but got {truth!r}, a {type(truth).__name__}."
        )
    if not isinstance(truth, Rational) and not math.isfinite(truth):
        raise UserError(f"ground_truth: {truth!r} is no number that an answer could state.")
    return str(truth).removesuffix(".0")


# ------------------------------------------------------------------------------------------ rewards of the user's own

REWARD_ARGUMENTS = (
    *("prompts", "completions", "completion_ids", "question", "ground_truth", "level", "subject"),
    *("format_reward", "answer_reward"),
)


def find_rewards(reward: str | Mapping[str, float]) -> dict[str, tuple[Callable[..., Any], float]]:
    """The functions that :func:`apply_reward` is to call, each with its weight.

    Args:
        reward: MODULE:NAME; or several of them, or of :data:`OWN_REWARDS`, with their weights.

    Raises:
        UserError: there is none of that name, or it does not take what it is called with.
    """
    weights = {reward: 1.0} if isinstance(reward, str) else reward
    return {name: (_own_reward(name) if name in OWN_REWARDS else find_reward(name), weights[name]) for name in weights}


def _own_reward(name: str) -> Callable[..., Any]:
    return lambda **columns: columns[name]


def find_reward(path: str) -> Callable[..., Any]:
    """The function that an import path names.

    Raises:
        UserError: there is none, or it does not take what it is called with.
    """
    reward: Callable[..., Any] = import_object(path)
    try:
        inspect.signature(reward).bind(**dict.fromkeys(REWARD_ARGUMENTS))
    except TypeError as error:
        raise UserError(
            f"reward: {path}: {error}. It is called with the keywords {', '.join(REWARD_ARGUMENTS)}: name those that it needs, "
            "and end with `**columns` for the others."
        ) from None
    return reward


def apply_reward(
    reward: str | Mapping[str, float],
    prompts: Sequence[str],
    completions: Sequence[Completion],
    problems: Sequence[Problem],
    scored: ScoredBatch,
) -> ScoredBatch:
    """Let functions of the user's own give the reward, in the signature of TRL's reward functions.

    Each is called once, with keywords, each a list with one element for each completion: ``prompts`` and ``completions``
    (text), ``completion_ids`` (token ids), of the problems ``question``, ``ground_truth``, ``level`` and ``subject``, and the
    task's own ``format_reward`` and ``answer_reward``. It returns as many numbers, of any size. (Where several processes train
    one run together, each calls it once, with the whole groups that it has sampled.)

    Args:
        reward: MODULE:NAME; or several with their weights: the reward is then the weighted sum, as under TRL's
            ``reward_weights``, and of a function that gives None for a completion (it does not apply) nothing is added.
        scored: by the task. Its ``format_reward`` and ``answer_reward`` stay.

    Returns:
        ``scored`` with that ``reward``.

    Raises:
        UserError: see :func:`find_rewards`; or a function does not return one finite number for each completion.
    """
    columns = {
        "prompts": list(prompts),
        "completions": [completion.text for completion in completions],
        "completion_ids": [list(completion.token_ids) for completion in completions],
        **{name: [getattr(p, name) for p in problems] for name in ("question", "ground_truth", "level", "subject")},
        **{name: [rewards[name] for rewards in scored.rewards] for name in OWN_REWARDS},
    }
    returned = {
        name: (_checked(name, function(**columns), len(completions), may_be_none=not isinstance(reward, str)), weight)
        for name, (function, weight) in find_rewards(reward).items()
    }
    totals = []
    for i in range(len(completions)):
        given = [weight * float(values[i]) for values, weight in returned.values() if values[i] is not None]
        if not given:
            raise UserError(f"reward: none of {', '.join(returned)} gives completion {i} of {len(completions)} a reward.")
        totals.append(sum(given[1:], given[0]))
    return ScoredBatch([own | {"reward": total} for own, total in zip(scored.rewards, totals, strict=True)], scored.out_of_time)


def _checked(path: str, returned: Any, n: int, may_be_none: bool) -> Sequence[Any]:
    if not hasattr(returned, "__len__"):
        raise UserError(f"reward: {path} returned {returned!r}. Return a list with one number for each completion.")
    if len(returned) != n:
        raise UserError(f"reward: {path} returned {len(returned)} rewards for {n} completions. Return as many.")
    for i, value in enumerate(returned):
        if value is None and may_be_none:
            continue
        if not isinstance(value, Real) or not math.isfinite(value):
            raise UserError(f"reward: {path} returned {value!r} for completion {i} of {n}. Return finite numbers.")
    values: Sequence[Any] = returned
    return values


def soft_overlong_punishment(length: int, max_tokens: int, buffer: int) -> float:
    """What a long response loses: 0 up to ``max_tokens - buffer`` tokens, then linearly more, -1 at ``max_tokens`` and beyond.

    DAPO's soft overlong punishment (arXiv 2503.14476, Eq. 13).
    """
    return max(-1.0, min(0.0, (max_tokens - buffer - length) / buffer))

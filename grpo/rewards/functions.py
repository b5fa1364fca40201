"""The reward functions of the two prompts, with the handouts' names, arguments and keys."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from grpo.errors import UserError
from grpo.rewards.extract import last_boxed
from grpo.rewards.grader import is_equivalent

GroundTruth = str | int | float | list[str] | list[int] | list[float]
RewardFn = Callable[..., dict[str, float]]

_ANSWER_FORM = "</think> <answer>"


def r1_zero_reward_fn(response: str, ground_truth: GroundTruth, fast: bool = True) -> dict[str, float]:
    r"""Reward of a response to the r1_zero prompt.

    The form is right if ``</think> <answer>`` occurs and the last ``<answer>`` is followed by ``</answer>``. What stands
    between the latter two is the answer or, if it holds a ``\boxed{}``, the content of the last one.

    Args:
        response: the completion, with or without the prompt before it.
        ground_truth: the short answer, or a list of which one must be met.
        fast: accepted because the handouts' signature has it. There is one grader, so both values do the same.

    Returns:
        ``format_reward``, ``answer_reward`` and ``reward``, each 0.0 or 1.0. ``reward`` is 1.0 if both others are; a wrong
        form makes all three 0.0.

    Raises:
        UserError: ``ground_truth`` is an empty list.
    """
    return _rewards(_tagged_answer(response), ground_truth)


def question_only_reward_fn(response: str, ground_truth: GroundTruth, fast: bool = True) -> dict[str, float]:
    r"""Reward of a response to the question_only prompt: the form is right if it holds a ``\boxed{}`` or ``\fbox{}``.

    The content of the last one is the answer; if that one is not closed, the form is wrong. Everything else is as in
    :func:`r1_zero_reward_fn`.
    """
    return _rewards(last_boxed(response), ground_truth)


def keyword_inclusion_reward_fn(response: str, keywords: Sequence[str]) -> dict[str, float]:
    """1.0 if every keyword occurs in ``response`` as a whole word, in upper or lower case, else 0.0.

    Any response that is not blank has the right form.

    Raises:
        UserError: there are no keywords, or one of them is blank.
    """
    if isinstance(keywords, str) or not keywords or not all(keyword.strip() for keyword in keywords):
        raise UserError(f"keywords: expected a list of at least one word, none of them blank, but got {keywords!r}.")
    found = all(re.search(rf"(?<!\w){re.escape(keyword.strip())}(?!\w)", response, re.IGNORECASE) for keyword in keywords)
    return {"format_reward": float(bool(response.strip())), "answer_reward": float(found), "reward": float(found)}


REWARD_FNS: dict[str, RewardFn] = {"r1_zero": r1_zero_reward_fn, "question_only": question_only_reward_fn}
"""Prompt name -> the reward function that reads what the prompt asks for."""


def _tagged_answer(response: str) -> str | None:
    """What the last pair of answer tags encloses; None unless the response has the r1_zero form."""
    form = response.find(_ANSWER_FORM)
    if form < 0:
        return None
    start = response.rindex("<answer>") + len("<answer>")
    end = response.find("</answer>", start)
    if end < 0:
        return None
    answer = response[start:end].strip()
    boxed = last_boxed(answer)
    return answer if boxed is None else boxed


def _rewards(answer: str | None, ground_truth: GroundTruth) -> dict[str, float]:
    truths = ground_truth if isinstance(ground_truth, list) else [ground_truth]
    if not truths:
        raise UserError("ground_truth: an empty list of alternatives; no answer could be right.")
    if answer is None:
        return {"format_reward": 0.0, "answer_reward": 0.0, "reward": 0.0}
    right = float(any(is_equivalent(answer, str(truth)) for truth in truths))
    return {"format_reward": 1.0, "answer_reward": right, "reward": right}

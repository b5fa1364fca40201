"""The reward functions of the two prompts, with the handouts' names, arguments and keys."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from numbers import Rational, Real
from typing import Any

from grpo.common.errors import UserError
from grpo.common.imports import import_object
from grpo.common.records import Completion, Problem
from grpo.grader.extract import last_boxed
from grpo.grader.pool import grade_batch, is_equal

SingleTruth = str | int | float | Fraction
GroundTruth = SingleTruth | Sequence[SingleTruth]
"""A short answer, or a list or tuple of those of which one must be met."""
RewardFn = Callable[..., dict[str, float]]
ScoreFn = Callable[[Sequence[str], Sequence[Any]], "ScoredBatch"]
"""Rewards many responses at once, given a ground truth for each: :func:`score_batch` or :func:`score_each`, bound to a prompt
or a reward function by :func:`functools.partial`."""

_ANSWER_FORM = "</think> <answer>"
_EXAMPLE = "</think> <answer> answer here </answer>"
"""How the r1_zero prompt shows the form. Where a response repeats the prompt, what counts comes after."""


@dataclass(frozen=True)
class ScoredBatch:
    """What a :data:`ScoreFn` returns.

    Attributes:
        rewards: of each response.
        out_of_time: for each response whether the grader ran out of time on its answer, which then counts as wrong.
    """

    rewards: list[dict[str, float]]
    out_of_time: list[bool]

    @property
    def timed_out(self) -> int:
        """How many answers ran out of time."""
        return sum(self.out_of_time)


def r1_zero_reward_fn(response: str, ground_truth: GroundTruth, fast: bool = True) -> dict[str, float]:
    r"""Reward of a response to the r1_zero prompt.

    The form is right if ``</think> <answer>`` occurs and the last ``<answer>`` is followed by ``</answer>``. What stands
    between these two is the answer or, if it holds a ``\boxed{}``, the content of the last one. ``</answer>`` may be repeated,
    as the course's own function allows, but with text between two of them no answer is right. Whatever precedes a copy of
    the prompt's own example, ``<answer> answer here </answer>``, does not count.

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
    return _score(_tagged_answer(response), ground_truth)


def question_only_reward_fn(response: str, ground_truth: GroundTruth, fast: bool = True) -> dict[str, float]:
    r"""Reward of a response to the question_only prompt: the form is right if it holds a ``\boxed{}`` or ``\fbox{}``.

    The content of the last one is the answer; if that one is not closed, the form is wrong. Everything else is as in
    :func:`r1_zero_reward_fn`.
    """
    return _score(last_boxed(response), ground_truth)


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


def score_batch(prompt: str, responses: Sequence[str], ground_truths: Sequence[GroundTruth]) -> ScoredBatch:
    """Reward many responses to one kind of prompt; answers that need computer algebra are spread over all cores.

    Args:
        prompt: ``r1_zero``, ``question_only`` or ``keyword``.
        responses: as for the prompt's reward function, which would give each the same rewards.
        ground_truths: one for each response.

    Raises:
        UserError: an unknown prompt, unequal numbers, or a ground truth that the reward functions refuse.
        RuntimeError: computer algebra is needed, and its processes cannot start.
    """
    if prompt not in REWARD_FNS:
        raise UserError(f"prompt: expected one of {', '.join(REWARD_FNS)}, but got {prompt!r}.")
    if len(responses) != len(ground_truths):
        raise UserError(f"There are {len(responses)} responses but {len(ground_truths)} ground truths; they must match.")
    if prompt not in _READERS:
        return score_each(REWARD_FNS[prompt], responses, ground_truths)
    answers = [_READERS[prompt](response) for response in responses]
    truths = [_alternatives(ground_truth) for ground_truth in ground_truths]
    pairs = [(a, truth) for a, ts in zip(answers, truths, strict=True) if a is not None for truth in ts]
    verdicts = dict(zip(pairs, grade_batch(pairs), strict=True))
    rewards, out_of_time = [], []
    for answer, alternatives in zip(answers, truths, strict=True):
        found = [] if answer is None else [verdicts[answer, truth] for truth in alternatives]
        right = any(verdict.equal for verdict in found)
        out_of_time.append(not right and any(verdict.timed_out for verdict in found))
        rewards.append(_rewards(answer is not None, right))
    return ScoredBatch(rewards, out_of_time)


def score_each(reward_fn: RewardFn, responses: Sequence[str], ground_truths: Sequence[Any]) -> ScoredBatch:
    """Reward many responses by any reward function, one by one; what ran out of time cannot be told."""
    rewards = [reward_fn(*pair) for pair in zip(responses, ground_truths, strict=True)]
    return ScoredBatch(rewards, [False] * len(rewards))


def read_answer(prompt: str, response: str) -> str | None:
    """The answer that the reward function of ``prompt`` reads from a response; None where the form is wrong.

    A prompt that asks for no answer in particular is answered by the whole response.
    """
    return _READERS[prompt](response) if prompt in _READERS else response


def _keyword_reward_fn(response: str, ground_truth: str) -> dict[str, float]:
    """:func:`keyword_inclusion_reward_fn` for keywords that stand in one text, such as ``apple, red``."""
    return keyword_inclusion_reward_fn(response, ground_truth.split(","))


REWARD_FNS: dict[str, RewardFn] = {
    "r1_zero": r1_zero_reward_fn,
    "question_only": question_only_reward_fn,
    "keyword": _keyword_reward_fn,
}
"""Prompt name -> the reward function that reads what the prompt asks for."""


def _tagged_answer(response: str) -> str | None:
    """What the last pair of answer tags encloses; None unless the response has the r1_zero form."""
    response = response.rpartition(_EXAMPLE)[2]
    if _ANSWER_FORM not in response:
        return None
    before_end, *after_end = response[response.rindex("<answer>") + len("<answer>") :].split("</answer>")
    if not after_end:
        return None
    if "".join(after_end[:-1]).strip():  # which tag ends the answer would be ours to choose, and an empty answer equals nothing
        return ""
    answer = before_end.strip()
    boxed = last_boxed(answer)
    return answer if boxed is None else boxed


_READERS: dict[str, Callable[[str], str | None]] = {"r1_zero": _tagged_answer, "question_only": last_boxed}


def _score(answer: str | None, ground_truth: GroundTruth) -> dict[str, float]:
    truths = _alternatives(ground_truth)
    return _rewards(answer is not None, answer is not None and any(is_equal(answer, truth).equal for truth in truths))


def _rewards(form: bool, right: bool) -> dict[str, float]:
    return {"format_reward": float(form), "answer_reward": float(right), "reward": float(right)}


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


def find_reward(path: str) -> Callable[..., Any]:
    """The function that an import path names, which :func:`apply_reward` is to call.

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
    path: str, prompts: Sequence[str], completions: Sequence[Completion], problems: Sequence[Problem], scored: ScoredBatch
) -> ScoredBatch:
    """Let a function of the user's own give the reward, in the signature of TRL's reward functions.

    It is called once, with keywords, each a list with one element for each completion: ``prompts`` and ``completions`` (text),
    ``completion_ids`` (token ids), of the problems ``question``, ``ground_truth``, ``level`` and ``subject``, and the task's
    own ``format_reward`` and ``answer_reward``. It returns as many numbers, of any size.

    Args:
        path: MODULE:NAME.
        scored: by the task. Its ``format_reward`` and ``answer_reward`` stay.

    Returns:
        ``scored`` with that ``reward``.

    Raises:
        UserError: see :func:`find_reward`; or it does not return one finite number for each completion.
    """
    returned = find_reward(path)(
        prompts=list(prompts),
        completions=[completion.text for completion in completions],
        completion_ids=[list(completion.token_ids) for completion in completions],
        **{name: [getattr(p, name) for p in problems] for name in ("question", "ground_truth", "level", "subject")},
        **{name: [rewards[name] for rewards in scored.rewards] for name in ("format_reward", "answer_reward")},
    )
    if not hasattr(returned, "__len__"):
        raise UserError(f"reward: {path} returned {returned!r}. Return a list with one number for each completion.")
    if len(returned) != len(completions):
        raise UserError(f"reward: {path} returned {len(returned)} rewards for {len(completions)} completions. Return as many.")
    for i, value in enumerate(returned):
        if not isinstance(value, Real) or not math.isfinite(value):
            raise UserError(
                f"reward: {path} returned {value!r} for completion {i} of {len(completions)}. Return finite numbers."
            )
    rewards = [own | {"reward": float(value)} for own, value in zip(scored.rewards, returned, strict=True)]
    return ScoredBatch(rewards, scored.out_of_time)

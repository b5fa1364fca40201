"""Reward functions: the handouts' two, with their names, arguments and keys, the user's own, and controls."""

from __future__ import annotations

import asyncio
import copy
import inspect
import math
import random
import reprlib
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from fractions import Fraction
from functools import partial
from itertools import groupby
from typing import Any

from grpo.common.errors import UserError, own_errors
from grpo.common.imports import import_object, require_arguments
from grpo.common.records import Completion, Problem, Rollout, is_number
from grpo.grader.extract import boxed_answer
from grpo.grader.process import grade_batch, is_equal
from grpo.grader.unevaluated import counts_as_answer
from grpo.tasks.formats import tagged_answer
from grpo.tasks.task import OWN_REWARDS, SHIPPED_REWARDS, ScoredBatch, Task, find_format, rewards
from grpo.tasks.threads import finished

ScoreFunction = Callable[[Sequence[Rollout]], ScoredBatch]
"""Function that scores a batch of rollouts."""

SingleTruth = str | int | float | Fraction
GroundTruth = SingleTruth | Sequence[SingleTruth]
"""A short answer, or a list or tuple of alternatives, any of which is right."""


def r1_zero_reward_fn(response: str, ground_truth: GroundTruth, fast: bool = True) -> dict[str, float]:
    r"""Reward of a response to the r1_zero prompt.

    The form is right if :func:`grpo.tasks.formats.tagged_answer` reads an answer. Returns ``format_reward``, ``answer_reward``
    and ``reward``, each 0.0 or 1.0. ``reward`` is 1.0 if both others are; a wrong form makes all three 0.0. Raises UserError:
    ``ground_truth`` is an empty list.

    Args:
        response: the completion, with or without the prompt before it.
        ground_truth: the short answer as text or number, or a list or tuple of alternatives.
        fast: part of the handouts' signature; without effect, because there is one grader.
    """
    return _score(tagged_answer(response), ground_truth)


def question_only_reward_fn(response: str, ground_truth: GroundTruth, fast: bool = True) -> dict[str, float]:
    r"""Reward of a response to the question_only prompt: the form is right if it has a ``\boxed{}`` or ``\fbox{}``.

    The content of the last one is the answer; if that one is not closed, the form is wrong. The rest is as in
    :func:`r1_zero_reward_fn`.
    """
    return _score(boxed_answer(response), ground_truth)


def _score(answer: str | None, ground_truth: GroundTruth) -> dict[str, float]:
    alternatives = ground_truth if isinstance(ground_truth, (list, tuple)) else [ground_truth]
    if not alternatives:
        raise UserError("ground_truth: an empty list of alternatives; no answer could be right.")
    truths = [one if isinstance(one, str) else str(one).removesuffix(".0") for one in alternatives]  # Fraction(1, 3) is 1/3
    right = answer is not None and any(is_equal(answer, truth).equal and counts_as_answer(answer, truth) for truth in truths)
    return rewards(answer is not None, right)


# ------------------------------------------------------------------------------------------ rewards of the user's own

REWARD_ARGUMENTS = (
    *("prompts", "completions", "completion_ids", "question", "ground_truth", "level", "subject"),
    *("format_reward", "answer_reward"),
)


def find_reward(path: str, columns: Sequence[str] = ()) -> Callable[..., Any]:
    """Import a reward function.

    Raises UserError if there is no such function, or it does not take :data:`REWARD_ARGUMENTS` and the task's columns.
    """
    reward: Callable[..., Any] = import_object(path)
    arguments = (*REWARD_ARGUMENTS, *columns)
    called = f"It is called with the keywords {', '.join(arguments)}"
    remedy = f"{called}: name those that it needs, and end with `**columns` for the others."
    require_arguments(reward, f"reward: {path}", remedy, **dict.fromkeys(arguments))
    return own_errors(f"reward: {path}")(reward)


def score_by_task(task: Task, prompt: str, rollouts: Sequence[Rollout]) -> ScoredBatch:
    """Score rollouts with a task, in one of its formats (:meth:`Task.score`), or by their environments."""
    scored = task.score(prompt, [r.problem for r in rollouts], [r.completion.text for r in rollouts])
    for place, episode in enumerate(rollout.completion.episode for rollout in rollouts):
        if episode is not None and episode.reward is not None:
            scored.rewards[place], scored.out_of_time[place] = rewards(True, episode.reward), False
    return scored


def score_of(task: Task, prompt: str, reward: str | Mapping[str, float] | None = None, seed: int = 0) -> ScoreFunction:
    """The score function of rollouts: their task's, with ``reward`` by the study's own reward functions if it has some.

    ``reward``: as in :func:`apply_reward`. ``seed``: of ``random_reward``.
    """
    by_task = partial(score_by_task, task, prompt)
    return by_task if reward is None else partial(_score_by_own_reward, reward, seed, task, prompt)


def _score_by_own_reward(
    reward: str | Mapping[str, float], seed: int, task: Task, prompt: str, rollouts: Sequence[Rollout]
) -> ScoredBatch:
    format, named = find_format(task, prompt), [reward] if isinstance(reward, str) else reward
    prompts = [format.prompt_of(rollout.problem) for rollout in rollouts]
    completions, problems = [r.completion for r in rollouts], [r.problem for r in rollouts]
    scored = score_by_task(task, prompt, rollouts)
    controls = {
        "random_reward": lambda: random_rewards(seed, problems, completions),
        "majority_reward": lambda: majority_rewards(problems, [format.read(one.text) for one in completions]),
    }
    for name in controls.keys() & set(named):
        for own, value in zip(scored.rewards, controls[name](), strict=True):
            own[name] = value
    environments = [one.episode and one.episode.instance for one in completions] if format.environment else None
    return apply_reward(reward, prompts, completions, problems, scored, task.reward_columns, environments)


def apply_reward(
    reward: str | Mapping[str, float],
    prompts: Sequence[str],
    completions: Sequence[Completion],
    problems: Sequence[Problem],
    scored: ScoredBatch,
    further: Sequence[str] = (),
    environments: Sequence[Any] | None = None,
) -> ScoredBatch:
    """Compute rewards with the user's own functions, which have the signature of TRL's reward functions.

    Each function is called once, with keyword arguments that are lists of its own, with one element per completion: ``prompts``
    and ``completions`` (text), ``completion_ids`` (token ids); ``question``, ``ground_truth``, ``level`` and ``subject`` of the
    problem; the task's ``format_reward`` and ``answer_reward``. It returns one number per completion, of any size. (If several
    processes train a run, each process calls it once with the groups that it has sampled.) Functions that are ``async def`` run
    concurrently. Returns ``scored`` with the new ``reward``. Raises UserError as :func:`find_reward`; or a function does not
    return one finite number per completion.

    Args:
        reward: MODULE:NAME or one of :data:`SHIPPED_REWARDS`; or several with weights. The reward is then the weighted sum, as
            with TRL's ``reward_weights``. A function that abstains (None for a completion) adds nothing; if all abstain, the
            reward is NaN.
        further: the task's columns; a problem without one has None.
        environments: what the episodes left, a keyword as in TRL: the instances themselves; None: there is no such keyword.
        scored: the task's scores, with those of the shipped rewards that are named. ``format_reward`` and ``answer_reward``
            stay.
    """
    columns = {
        "prompts": list(prompts),
        "completions": [completion.text for completion in completions],
        "completion_ids": [list(completion.token_ids) for completion in completions],
        **{name: [getattr(p, name) for p in problems] for name in ("question", "ground_truth", "level", "subject")},
        **{name: [rewards[name] for rewards in scored.rewards] for name in OWN_REWARDS},
        **{name: [problem.columns.get(name) for problem in problems] for name in further},
    }
    instances = {} if environments is None else {"environments": environments}
    weights = {reward: 1.0} if isinstance(reward, str) else reward
    functions = {name: find_reward(name, (*further, *instances)) for name in weights if name not in SHIPPED_REWARDS}
    returned: dict[str, list[Any]] = {name: [own[name] for own in scored.rewards] for name in weights if name not in functions}
    awaited: dict[str, Awaitable[Any]] = {}
    for name, function in functions.items():
        found = function(**copy.deepcopy(columns) | {name: list(those) for name, those in instances.items()})
        if inspect.isawaitable(found):
            awaited[name] = found
        else:
            returned[name] = _checked(name, found, len(completions))
    with own_errors(f"reward: {', '.join(awaited)}"):
        found_later = finished(_all_of(awaited.values())) if awaited else []  # in one loop: a client may outlive a batch
    returned |= {name: _checked(name, found, len(completions)) for name, found in zip(awaited, found_later, strict=True)}
    totals = []
    for i in range(len(completions)):
        given = [weight * float(returned[name][i]) for name, weight in weights.items() if returned[name][i] is not None]
        totals.append(sum(given[1:], given[0]) if given else math.nan)
    kept = [{name: own[name] for name in OWN_REWARDS} for own in scored.rewards]
    return ScoredBatch([own | {"reward": total} for own, total in zip(kept, totals, strict=True)], scored.out_of_time)


async def _all_of(awaited: Iterable[Awaitable[Any]]) -> list[Any]:
    return await asyncio.gather(*awaited)


def _checked(path: str, returned: Any, n: int) -> list[Any]:
    is_list = hasattr(returned, "__len__") and len(returned) == n
    if not is_list or not all(value is None or (is_number(value) and math.isfinite(value)) for value in returned):
        raise UserError(
            f"reward: {path} returned {reprlib.repr(returned)}. Return {n} finite numbers, one for each completion, or None "
            "for one to which it does not apply."
        )
    return list(returned)  # a function may use its list again


def random_rewards(seed: int, problems: Sequence[Problem], completions: Sequence[Completion]) -> list[float]:
    """Draw 0 or 1 for each response with equal chance (arXiv 2506.10947).

    A draw follows from ``seed``, the question, the policy's version, the response and the number of equal responses before it,
    so a resumed run draws the same.
    """
    before: Counter[str] = Counter()
    drawn = []
    for problem, completion in zip(problems, completions, strict=True):
        response = f"{seed} {completion.policy_version} {problem.id} {completion.token_ids}"
        drawn.append(float(random.Random(f"{response} {before[response]}").randrange(2)))
        before[response] += 1
    return drawn


def majority_rewards(problems: Sequence[Problem], answers: Sequence[str | None]) -> list[float]:
    """Pay the responses that give the most frequent answer of their group, the first of equals (arXiv 2504.16084).

    ``problems``: of each response; a group is what stands side by side for one problem. ``answers``: read from each response;
    None is paid nothing.
    """
    groups = [[answers[i] for i in group] for _, group in groupby(range(len(problems)), lambda i: problems[i].id)]
    paid = []
    for votes in votes_of(groups):
        counts = Counter(vote for vote in votes if vote >= 0)
        winner = max(counts, key=lambda vote: counts[vote], default=None)
        paid += [float(vote == winner) for vote in votes]
    return paid


def votes_of(answers: Sequence[Sequence[str | None]]) -> list[list[int]]:
    """Number the answers of each problem: equal numbers for answers that the grader finds equal, -1 without an answer.

    An answer gets the number of the first answer that it equals.
    """
    distinct = [list(dict.fromkeys(a for a in of_problem if a)) for of_problem in answers]
    pairs = [(later, earlier) for of_problem in distinct for i, later in enumerate(of_problem) for earlier in of_problem[:i]]
    equal = {pair for pair, verdict in zip(pairs, grade_batch(pairs), strict=True) if verdict.equal}
    votes = []
    for of_problem, options in zip(answers, distinct, strict=True):
        number = {a: next((j for j, other in enumerate(options[:i]) if (a, other) in equal), i) for i, a in enumerate(options)}
        votes.append([number[a] if a else -1 for a in of_problem])
    return votes


def soft_overlong_punishment(length: int, max_tokens: int, buffer: int) -> float:
    """Punishment of a long response: 0 up to ``max_tokens - buffer`` tokens, then falling linearly to -1 at ``max_tokens``.

    DAPO's soft overlong punishment (arXiv 2503.14476, Eq. 13).
    """
    return max(-1.0, min(0.0, (max_tokens - buffer - length) / buffer))

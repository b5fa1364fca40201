"""Scoring by any function of a response and its ground truth, in the place of a task's."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from grpo.common.records import Problem
from grpo.evaluation import evaluate
from grpo.tasks.task import ScoredBatch, ScoreFn, Task

_SCORE_SAMPLED = evaluate.score_sampled


def score_each(
    reward_fn: Callable[[str, str], dict[str, float]], problems: Sequence[Problem], responses: Sequence[str]
) -> ScoredBatch:
    """Rewards one by one."""
    rewards = [reward_fn(response, problem.ground_truth) for response, problem in zip(responses, problems, strict=True)]
    return ScoredBatch(rewards, [False] * len(rewards))


def score_all_by(monkeypatch: pytest.MonkeyPatch, score: ScoreFn) -> None:
    """Let every task score so, in training and evaluation."""
    monkeypatch.setattr(Task, "score", lambda self, format, problems, responses: score(problems, responses))


def evaluate_by(monkeypatch: pytest.MonkeyPatch, score: ScoreFn) -> None:
    """Let evaluations score so, and training as before."""
    monkeypatch.setattr(evaluate, "score_sampled", lambda _, sampled: _SCORE_SAMPLED(score, sampled))

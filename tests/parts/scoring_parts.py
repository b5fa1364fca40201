"""Scoring by any function of a response and its ground truth, in the place of a task's."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from grpo.common.records import Problem, Rollout
from grpo.evaluation import evaluator
from grpo.tasks.task import ScoredBatch, ScoreFn, Task


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

    def by(task: Task, format: str, rollouts: Sequence[Rollout]) -> ScoredBatch:
        return score([r.problem for r in rollouts], [r.completion.text for r in rollouts])

    monkeypatch.setattr(evaluator, "score_by_task", by)

"""What tests of learner and loops give to them: problems, scored rollouts, a run's context, and a stand-in for MLflow."""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from scoring_parts import score_each
from torch import Tensor, equal

from grpo.common.records import Problem, Rollout
from grpo.common.world import ALONE, World
from grpo.evaluation.evaluate import Sampler, Score
from grpo.study.schema import Study
from grpo.tasks.graded import GradedTask
from grpo.tasks.task import Format, ScoredBatch, Task
from grpo.training.context import RunContext, RunSetup
from grpo.training.monitor import Monitor
from grpo.training.validation import Validation


class NoMlflow:
    """Stands for an MlflowRun where MLflow is not what is tested."""

    def log(self, metrics: dict[str, float], step: int) -> None:
        assert all(isinstance(value, float | int) for value in metrics.values())

    def artifact(self, path: Path, folder: str | None = None) -> None: ...

    def tag(self, **tags: Any) -> None: ...

    def table(self, path: Path) -> None: ...

    def dataset(self, path: Path, digest: str, context: str) -> None: ...

    def checkpoints(self, folder: Path) -> None: ...

    def finish(self, status: str = "FINISHED") -> None: ...


def problems(n: int = 20) -> list[Problem]:
    return [Problem(f"p/{i}", f"Mia has {i} apples.", str(i)) for i in range(n)]


def scored(
    rollouts: Sequence[Rollout], rewards: Tensor, advantages: Tensor, old_log_probs: Sequence[Tensor] | None = None
) -> list[Rollout]:
    """The rollouts with made-up rewards and advantages, each (len(rollouts),)."""
    old = old_log_probs or [None] * len(rollouts)
    return [
        replace(rollout, rewards={**rollout.rewards, "reward": reward}, advantage=advantage, old_log_probs=log_probs)
        for rollout, reward, advantage, log_probs in zip(rollouts, rewards.tolist(), advantages.tolist(), old, strict=True)
    ]


def contains_a_t(text: str, _: str) -> dict[str, float]:
    """A toy reward that a tiny model learns in a few steps."""
    found = float("T" in text)
    return {"reward": found, "format_reward": 1.0, "answer_reward": found}


def without_a_t(text: str, truth: str) -> dict[str, float]:
    """The opposite of it."""
    return {key: 1.0 - value for key, value in contains_a_t(text, truth).items()}


def never(text: str, truth: str) -> dict[str, float]:
    """What nothing earns."""
    return dict.fromkeys(("reward", "format_reward", "answer_reward"), 0.0)


def read_csv(path: Path) -> list[dict[str, float]]:
    with path.open(newline="") as file:
        return [{key: float(value) for key, value in row.items()} for row in csv.DictReader(file)]


def same_weights(a: Any, b: Any) -> bool:
    return all(equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


def by(reward_fn: Callable[..., dict[str, float]]) -> Score:
    """Rewards rollouts by a function of response and ground truth."""
    return partial(score_texts, reward_fn)


def score_texts(reward_fn: Callable[..., dict[str, float]], rollouts: Sequence[Rollout]) -> ScoredBatch:
    return score_each(reward_fn, [r.problem for r in rollouts], [r.completion.text for r in rollouts])


def setup_of(
    config: Any, data: Sequence[Any] = (), format: Format | None = None, seed: int = 0, score: Any = None
) -> RunSetup[Any]:
    """A run's; without a score nothing can be rewarded. The format is by default the handouts' that the configuration names."""
    return RunSetup(config, seed, data, format or GradedTask.formats[config.prompt], score, Task())


def context(
    config: Any,
    log: Any,
    saved: Any,
    *,
    data: Sequence[Any] = (),
    engine: Any,
    learner: Any,
    tokenizer: Any = None,
    format: Format | None = None,
    seed: int = 0,
    reward: Any = None,
    validation: Callable[[int, list[dict[str, float]]], bool] = lambda step, updates: False,
    world: World = ALONE,
) -> RunContext[Any, Any]:
    """A run's; without a reward nothing can be scored."""
    setup = setup_of(config, data, format, seed, reward and by(reward))
    return RunContext(setup, Sampler(engine, tokenizer, setup.format, setup.score, world), learner, log, saved, validation)


def monitored(
    ctx: RunContext[Any, Any], study: Study, problems: Sequence[Problem], keep: Any = lambda kind, about: None
) -> tuple[RunContext[Any, Any], Monitor]:
    """The run, evaluated on these problems, and what evaluates it."""
    validation = Validation(ctx.setup, study.evaluation, problems, ctx.sampler, ctx.learner)
    monitor = Monitor(study, "run", validation, ctx.log, keep)
    return replace(ctx, validation=monitor), monitor

"""A run's inputs, its score function, and the places of its outputs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from grpo.common.records import Problem, Rollout, read_examples, read_problems
from grpo.evaluation.evaluate import Score, score_by_task
from grpo.study import paths
from grpo.study.effective import EffectiveRun
from grpo.study.methods import GrpoConfig, RunConfig, SftConfig
from grpo.tasks.rewards import apply_reward
from grpo.tasks.task import Format, ScoredBatch, Task, find_format
from grpo.tracking.mlflow_run import MlflowRun
from grpo.training.order import choose_examples


class ActorLost(Exception):
    """An actor of an asynchronous run has died or hangs. The run can go on from its last saved state."""


class RunData(NamedTuple):
    """Training data (problems, or chosen examples), validation problems, and problems of further evaluation sets by name."""

    train: list[Any]
    validation: list[Problem]
    also: Mapping[str, list[Problem]] = MappingProxyType({})


@dataclass
class Outputs:
    """Places of a run's outputs.

    Attributes:
        results, checkpoints: draft folders, renamed when they are complete.
        state: folder of the saved states. Each identity and code version has its own, so that no run resumes from another's.
        timing: wall-clock figures, filled in by the training.
    """

    results: Path
    checkpoints: Path
    state: Path
    mlflow: MlflowRun
    timing: dict[str, Any] = field(default_factory=dict)


def is_asynchronous(config: RunConfig) -> bool:
    """Whether generator, scorer and learner run concurrently, each in its own process."""
    return isinstance(config, GrpoConfig) and config.asynchronous is not None


def read_data(run: EffectiveRun, further: Iterable[str] = ()) -> RunData:
    """Read the run's training and evaluation data.

    Args:
        further: names of further evaluation sets.
    """
    validation, also = read_problems(run.validation), {name: read_problems(paths.also(run.task, name)) for name in further}
    if isinstance(run.config, SftConfig):
        return RunData(choose_examples(read_examples(run.train), run.config, run.seed), validation, also)
    return RunData(read_problems(run.train), validation, also)


def score_of(task: Task, run: EffectiveRun) -> Score:
    """The score function of the run's rollouts: its task, and the reward function that ``grpo.reward`` may add."""
    by_task = partial(score_by_task, task, run.config.prompt)
    own = run.config.reward if isinstance(run.config, GrpoConfig) else None
    format = find_format(task, run.config.prompt)
    return by_task if own is None else partial(_score_by_own_reward, own, by_task, format, task.reward_columns)


def _score_by_own_reward(
    reward: str | Mapping[str, float], by_task: Score, format: Format, columns: Sequence[str], rollouts: Sequence[Rollout]
) -> ScoredBatch:
    prompts = [format.prompt(rollout.problem.question) for rollout in rollouts]
    completions, problems = [r.completion for r in rollouts], [r.problem for r in rollouts]
    return apply_reward(reward, prompts, completions, problems, by_task(rollouts), columns)

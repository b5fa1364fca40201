"""What a run is given, and where its results go."""

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


class RunData(NamedTuple):
    """What a run is trained on (problems, or chosen examples), its validation problems, and those of further sets by name."""

    train: list[Any]
    validation: list[Problem]
    also: Mapping[str, list[Problem]] = MappingProxyType({})


@dataclass
class Outputs:
    """Where a run's results go.

    Attributes:
        results, checkpoints: folders, which get their names when they are whole.
        state: where the run's state is saved and found: one folder for each identity and code, as another's state is not to be
            gone on from.
        timing: the wall-clock figures, to be filled in.
    """

    results: Path
    checkpoints: Path
    state: Path
    mlflow: MlflowRun
    timing: dict[str, Any] = field(default_factory=dict)


def is_asynchronous(config: RunConfig) -> bool:
    """Whether generator, scorer and learner work at the same time, each in a process of its own."""
    return isinstance(config, GrpoConfig) and config.asynchronous is not None


def read_data(run: EffectiveRun, further: Iterable[str] = ()) -> RunData:
    """Read what the run is trained and evaluated on.

    Args:
        further: names of further evaluation sets.
    """
    validation, also = read_problems(run.validation), {name: read_problems(paths.also(run.task, name)) for name in further}
    if isinstance(run.config, SftConfig):
        return RunData(choose_examples(read_examples(run.train), run.config, run.seed), validation, also)
    return RunData(read_problems(run.train), validation, also)


def score_of(task: Task, run: EffectiveRun) -> Score:
    """What rewards the run's rollouts, in training and in validation: its task, and a function of the study's own."""
    by_task = partial(score_by_task, task, run.config.prompt)
    own = run.config.reward if isinstance(run.config, GrpoConfig) else None
    return by_task if own is None else partial(_score_by_own_reward, own, by_task, find_format(task, run.config.prompt))


def _score_by_own_reward(
    reward: str | Mapping[str, float], by_task: Score, format: Format, rollouts: Sequence[Rollout]
) -> ScoredBatch:
    prompts = [format.prompt(rollout.problem.question) for rollout in rollouts]
    completions, problems = [r.completion for r in rollouts], [r.problem for r in rollouts]
    return apply_reward(reward, prompts, completions, problems, by_task(rollouts))

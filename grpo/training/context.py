"""What a run's loop works with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from grpo.common.records import Rollout
from grpo.common.world import ALONE, World
from grpo.evaluation.evaluate import Score
from grpo.learner.learner import Learner
from grpo.rollout.engine import Engine
from grpo.study.methods import TrainingConfig
from grpo.tasks.task import Format
from grpo.tracking.run_log import RunLog
from grpo.training.state import SavedState

Config = TypeVar("Config", bound=TrainingConfig)
Updates = list[dict[str, float]]  # the metrics of a step's optimizer steps
Measures = Callable[[Sequence[Rollout]], dict[str, float]]
ABSENT: Any = None  # an asynchronous run's actors have contexts of their own, with what they need of it


@dataclass(kw_only=True)
class RunContext(Generic[Config]):
    """One run.

    Attributes:
        data: the training problems; in supervised fine-tuning the examples.
        format: how a problem is put, and an answer is read.
        score: rewards rollouts, in training and in validation.
        measures: what else validation measures of its rollouts.
        world: the processes that train the run together, each with a context of its own.
        engine: samples with the policy's weights, this process's share of the questions.
        learner: holds the policy and trains it.
        save: saves the policy as a checkpoint.
        log: receives one row for each optimizer step and the time of each phase.
        saved: where the run was taken up, and where its state is saved.
        validation: called with a step and its updates, before the first step (0) and after each; evaluates where that is due,
            and returns True if the run is to end here.
        restarts: of actors, by name; known when the run has ended.
    """

    config: Config
    seed: int
    data: Sequence[Any] = ()
    format: Format = ABSENT
    score: Score = ABSENT
    measures: Measures = lambda rollouts: {}
    world: World = ALONE
    tokenizer: Any = ABSENT
    engine: Engine = ABSENT
    learner: Learner = ABSENT
    save: Callable[[Path], None] = ABSENT
    log: RunLog = ABSENT
    saved: SavedState = ABSENT
    validation: Callable[[int, Updates], bool] = ABSENT
    restarts: dict[str, int] = field(default_factory=dict)

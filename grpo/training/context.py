"""What a run's loop works with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from grpo.common.world import ALONE, World
from grpo.evaluation.evaluate import Sampler, Score
from grpo.rollout.engine import Engine
from grpo.study.methods import TrainingConfig
from grpo.tasks.task import Format, Task
from grpo.tracking.run_log import RunLog
from grpo.training.state import SavedState

Config = TypeVar("Config", bound=TrainingConfig)
AnyLearner = TypeVar("AnyLearner")  # a Learner, or in an asynchronous run the RemoteLearner
Updates = list[dict[str, float]]  # the metrics of a step's optimizer steps


@dataclass(frozen=True)
class RunSetup(Generic[Config]):
    """What is known of a run before a model is loaded. Actors get it too.

    Attributes:
        data: the training problems; in supervised fine-tuning the examples.
        format: how a problem is put, and an answer is read.
        score: rewards rollouts, in training and in validation.
        task: says what else is measured of rollouts, in validation and in training.
    """

    config: Config
    seed: int
    data: Sequence[Any]
    format: Format
    score: Score
    task: Task


@dataclass(frozen=True)
class Workers(Generic[AnyLearner]):
    """What samples and what learns, in this process or in actors.

    Attributes:
        engine: samples with the policy's weights, this process's share of the questions.
        learner: holds the policy and trains it.
        save: saves the policy as a checkpoint.
        loop: the method's training loop.
        world: the processes that train the run together, each with workers of its own.
        restarts: how often each actor has been started again so far, by name.
    """

    tokenizer: Any
    engine: Engine
    learner: AnyLearner
    save: Callable[[Path], None]
    loop: Callable[[RunContext[Any, AnyLearner]], None]
    world: World = ALONE
    restarts: Callable[[], dict[str, int]] = dict


@dataclass(frozen=True)
class RunContext(Generic[Config, AnyLearner]):
    """One run, ready to be trained.

    Attributes:
        sampler: samples rollouts with the policy's weights, and rewards them.
        learner: holds the policy and trains it.
        log: receives one row for each optimizer step and the time of each phase.
        saved: where the run was taken up, and where its state is saved.
        validation: called with a step and its updates, before the first step (0) and after each; evaluates where that is due,
            and returns True if the run is to end here.
    """

    setup: RunSetup[Config]
    sampler: Sampler
    learner: AnyLearner
    log: RunLog
    saved: SavedState
    validation: Callable[[int, Updates], bool]

"""The objects that a training loop works with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from grpo.evaluation.evaluate import Sampler, Score
from grpo.study.methods import TrainingConfig
from grpo.tasks.task import Format, Task
from grpo.tracking.run_log import RunLog
from grpo.training.state import SavedState

Config = TypeVar("Config", bound=TrainingConfig)
AnyLearner = TypeVar("AnyLearner")  # a Learner; a RemoteLearner in an asynchronous run
Updates = list[dict[str, float]]  # the metrics of each optimizer step within one step of the loop


@dataclass(frozen=True)
class RunSetup(Generic[Config]):
    """The part of a run that is known before a model is loaded. Ray actors receive it too.

    Attributes:
        data: the training problems; the training examples in supervised fine-tuning.
        format: builds prompts and reads answers.
        score: rewards rollouts, in training and in validation.
        task: supplies further metrics of rollouts.
    """

    config: Config
    seed: int
    data: Sequence[Any]
    format: Format
    score: Score
    task: Task


@dataclass(frozen=True)
class Workers(Generic[AnyLearner]):
    """Engine and learner of a run, in this process or in Ray actors.

    Attributes:
        sampler: samples this process's share of the questions with the policy's weights.
        learner: holds the policy and trains it.
        save: saves the policy as a checkpoint.
        loop: the method's training loop.
    """

    sampler: Sampler
    learner: AnyLearner
    save: Callable[[Path], None]
    loop: Callable[[RunContext[Any, AnyLearner]], None]


@dataclass(frozen=True)
class RunContext(Generic[Config, AnyLearner]):
    """One run, ready to be trained.

    Attributes:
        sampler: samples rollouts with the policy's weights.
        learner: holds the policy and trains it.
        log: records one row for each optimizer step, and the time of each phase.
        saved: saves the run's state, and knows the step at which the run was resumed.
        validation: called with a step and its updates, first with step 0 and no updates, then after each step. It evaluates
            the policy if an evaluation is due, and returns True if the run ends here.
    """

    setup: RunSetup[Config]
    sampler: Sampler
    learner: AnyLearner
    log: RunLog
    saved: SavedState
    validation: Callable[[int, Updates], bool]

    def steps(self, loop_state: Callable[[], dict[str, Any]] = dict) -> Iterator[int]:
        """Yield the steps to train, from 1 or from where the run was resumed, and save the state between them.

        A new run first evaluates its starting policy (step 0). A loop that breaks saves no state for its last step.

        Args:
            loop_state: gives what the loop itself needs to resume.

        Raises:
            ToBeResumed: the process was told to stop; the run's state is saved.
        """
        if self.saved.step == 0:
            with self.log.phase("evaluation"):
                self.validation(0, [])
        for step in range(self.saved.step + 1, self.setup.config.n_steps + 1):
            yield step
            if self.saved.due(step):
                self.saved.save(step, loop_state())

"""Records of what a study found: intervals, contrasts, collapses, results of experiments."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

# What an interval covers: what would vary if the study were repeated.
RUNS_AND_PROBLEMS = "runs and problems"  # new seeds and new problems
PROBLEMS = "problems"  # new problems, the same runs: the untrained model
ASSUMED_RUNS = "problems, and runs by an assumed spread"  # one run per arm
RUNS_AND_STEPS = "runs and blocks of steps"  # levels of a training metric
STEPS = "blocks of steps, of one run an arm"
RUNS = "runs"  # new seeds: quantities without problems, such as seconds or gradient norms


@dataclass(frozen=True)
class Interval:
    """An estimate with its confidence interval."""

    value: float
    low: float
    high: float
    level: float  # confidence level; 0.95 unless the interval is adjusted for the number of contrasts
    covers: str  # one of the constants above
    runs: int  # their number; in a difference, of the arm with fewer
    problems: int
    se: float  # standard error
    df: float  # degrees of freedom of Student's t

    def negated(self) -> Interval:
        """The interval of the opposite difference."""
        return replace(self, value=-self.value, low=-self.high, high=-self.low)

    def __str__(self) -> str:
        return f"{self.value:.3f} ({self.low:.3f} to {self.high:.3f})"


@dataclass(frozen=True)
class Contrast:
    """The difference between two arms.

    ``adjusted`` takes the number of contrasts into account. Against an experiment's leader, the leader and the arms tied with
    it include the truly best arm with 95% (Hsu). In a claim, all intervals hold at once with 95% (Sidak).
    """

    arm: str  # EXPERIMENT/ARM if the two are of different experiments
    against: str
    difference: Interval  # ``arm`` minus ``against``, with 95%
    adjusted: Interval
    contrasts: int  # number of contrasts in the family

    def negated(self) -> Contrast:
        """The opposite contrast: ``against`` minus ``arm``."""
        return Contrast(self.against, self.arm, self.difference.negated(), self.adjusted.negated(), self.contrasts)

    @property
    def excludes_zero(self) -> bool:
        """Whether the adjusted interval excludes zero."""
        return self.adjusted.low > 0 or self.adjusted.high < 0


@dataclass(frozen=True)
class Collapse:
    """The collapse of a run."""

    run: str  # EXPERIMENT/ARM/SEED
    # ``divergence``: the run was stopped; ``training rewards``: between two evaluations.
    seen_in: Literal["divergence", "evaluations", "training rewards"]
    step: int  # of the best reward; of a run that was stopped, the step at which it was
    reached: float  # best reward, of what ``seen_in`` names
    ended: float  # final reward


@dataclass(frozen=True)
class ArmResult:
    """The result of an arm."""

    arm: str
    setting: str  # the arm's name without ``-rate_X``
    chosen: bool  # whether its learning rate is the one chosen for its setting
    overrides: dict[str, Any]  # hyperparameters that the arm sets
    runs: tuple[str, ...]  # names, in the order of the seeds
    by_run: tuple[float, ...]  # final answer reward of each run, in that order
    final: Interval  # mean final answer reward of all runs, on the problems that judge
    selection: float  # the same mean on the problems that select
    start: Interval  # mean answer reward of the untrained model
    collapses: tuple[Collapse, ...]
    contrast: Contrast | None  # the arm against the leader; None for the leader


@dataclass(frozen=True)
class ExperimentResult:
    """An experiment's arms, its leader, runner-up and winner: arms with the rate that is chosen for their setting."""

    experiment: str
    arms: tuple[ArmResult, ...]
    leader: str  # the arm with the highest reward on the problems that select, of those without a collapsed run
    runner_up: str | None  # the next one; None if no other arm may win
    margin: Interval | None  # the leader minus the runner-up, on the problems that select
    winner: str  # the first in params.yaml that is within one standard error of the leader, unless pinned
    pinned: bool
    reason: str  # why it won, in words

    def arm(self, name: str) -> ArmResult:
        """The result of one arm."""
        return next(arm for arm in self.arms if arm.arm == name)

"""Records of what a study found: intervals, contrasts, collapses, results of experiments, verdicts on claims."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

VerdictName = Literal["agrees", "disagrees", "no difference", "cannot tell", "not tested here"]
AGREES: VerdictName = "agrees"
DISAGREES: VerdictName = "disagrees"
NO_DIFFERENCE: VerdictName = "no difference"
CANNOT_TELL: VerdictName = "cannot tell"
NOT_TESTED: VerdictName = "not tested here"
VERDICTS = (AGREES, DISAGREES, NO_DIFFERENCE, CANNOT_TELL, NOT_TESTED)
DECIDED = (AGREES, DISAGREES, NO_DIFFERENCE)

# What an interval covers: what would vary if the study were repeated.
RUNS_AND_PROBLEMS = "runs and problems"  # new seeds and new problems
PROBLEMS = "problems"  # new problems, the same runs: the untrained model
ASSUMED_RUNS = "problems, and runs by an assumed spread"  # one run per arm
RUNS_AND_STEPS = "runs and blocks of steps"  # levels of a training metric
STEPS = "blocks of steps, of one run an arm"
RUNS = "runs"  # new seeds: quantities without problems, such as seconds or gradient norms


@dataclass(frozen=True)
class Interval:
    """An estimate with its confidence interval.

    Attributes:
        level: confidence level; 0.95 unless the interval is adjusted for the number of contrasts.
        covers: one of the constants above.
        runs: number of runs, without collapsed ones; in a difference, of the arm with fewer.
        se, df: standard error and degrees of freedom of Student's t.
    """

    value: float
    low: float
    high: float
    level: float
    covers: str
    runs: int
    problems: int
    se: float
    df: float

    @property
    def half(self) -> float:
        """Half of the interval's width."""
        return (self.high - self.low) / 2

    def turned(self) -> Interval:
        """The interval of the opposite difference."""
        return replace(self, value=-self.value, low=-self.high, high=-self.low)

    def __str__(self) -> str:
        return f"{self.value:.3f} ({self.low:.3f} to {self.high:.3f})"


@dataclass(frozen=True)
class Contrast:
    """The difference between two arms.

    Attributes:
        arm, against: names of arms; ``EXPERIMENT/ARM`` if they are of different experiments.
        difference: ``arm`` minus ``against`` with its 95% interval.
        adjusted: the same difference, adjusted for the number of ``contrasts``. Against an experiment's leader, the leader and
            the arms tied with it include the truly best arm with 95% (Hsu). In a claim, all intervals hold at once with 95%
            (Sidak).
        contrasts: number of contrasts in the family.
    """

    arm: str
    against: str
    difference: Interval
    adjusted: Interval
    contrasts: int

    def turned(self) -> Contrast:
        """The opposite contrast: ``against`` minus ``arm``."""
        return Contrast(self.against, self.arm, self.difference.turned(), self.adjusted.turned(), self.contrasts)

    @property
    def excludes_zero(self) -> bool:
        """Whether the adjusted interval excludes zero."""
        return self.adjusted.low > 0 or self.adjusted.high < 0


@dataclass(frozen=True)
class Collapse:
    """The collapse of a run.

    Attributes:
        run: ``EXPERIMENT/ARM/SEED``.
        seen_in: ``divergence`` (the run was stopped), ``evaluations`` or ``training rewards`` (between two evaluations).
        step: step of the best reward; of a run that was stopped, the step at which it was.
        reached, ended: best and final reward, of what ``seen_in`` names.
    """

    run: str
    seen_in: Literal["divergence", "evaluations", "training rewards"]
    step: int
    reached: float
    ended: float


@dataclass(frozen=True)
class ArmResult:
    """The result of an arm.

    Attributes:
        overrides: hyperparameters that the arm sets.
        runs: names, in the order of the seeds.
        by_run: final answer reward of each run, in that order, with collapsed runs.
        final: mean final answer reward of the runs that did not collapse; of all runs if all collapsed.
        start: mean answer reward of the untrained model.
        collapses: one record per collapsed run.
        contrast: the arm against the leader; None for the leader.
        run_sd: standard deviation between the runs of ``final``; None with one run.
    """

    arm: str
    overrides: dict[str, Any]
    runs: tuple[str, ...]
    by_run: tuple[float, ...]
    final: Interval
    start: Interval
    collapses: tuple[Collapse, ...]
    contrast: Contrast | None
    run_sd: float | None


@dataclass(frozen=True)
class ExperimentResult:
    """An experiment's arms, its leader and its winner.

    Attributes:
        last_k: number of last evaluations that the final answer reward averages.
        leader: the arm with the highest final reward, of those without a collapsed run.
        tied: other arms whose difference from the leader may be zero.
        winner: the first in params.yaml of the leader and the tied arms, unless pinned or decided by ``tie: leader``.
        reason: why it won, in words.
    """

    experiment: str
    last_k: int
    arms: tuple[ArmResult, ...]
    leader: str
    tied: tuple[str, ...]
    winner: str
    pinned: bool
    reason: str

    def arm(self, name: str) -> ArmResult:
        """The result of one arm."""
        return next(arm for arm in self.arms if arm.arm == name)


@dataclass(frozen=True)
class Verdict:
    """A published claim and the study's verdict on it. A test fills in what it measured, its verdict and the reason.

    Attributes:
        claim: id in claims.yaml.
        reported: source -> what it reports.
        published: source -> its difference of answer rewards, if it gives numbers.
        verdict: one of :data:`VERDICTS`.
        reason: the reason in a sentence; for ``not tested here``, the horizon or precondition that is not met.
        by_construction: whether the base model learned it from its pretraining documents, so that it is no finding.
        measured: the numbers that decide, as text.
        numbers: the same numbers, by name; None if nothing was measured.
        contrasts: contrasts of answer rewards, in the claim's direction, adjusted for the claim's number of contrasts.
        collapses: collapses of the runs that the claim is about.
        margin: smaller differences count as none; None if the test has no margin.
        p: the smallest level at which the verdict would be decided; None if no interval decides it.
        p_adjusted: ``p`` adjusted over all claims of the study that have one (Benjamini and Hochberg).
    """

    claim: str = ""
    experiment: str = ""
    statement: str = ""
    verdict: VerdictName = NOT_TESTED
    reason: str = ""
    measured: str = ""
    by_construction: bool = False
    reported: dict[str, str] = field(default_factory=dict)
    published: dict[str, float] = field(default_factory=dict)
    numbers: dict[str, float] | None = None
    contrasts: tuple[Contrast, ...] = ()
    collapses: tuple[Collapse, ...] = ()
    margin: float | None = None
    p: float | None = None
    p_adjusted: float | None = None

    @property
    def decided(self) -> bool:
        """Whether the verdict is one of :data:`DECIDED`."""
        return self.verdict in DECIDED

    @property
    def label(self) -> str:
        """The verdict as a table shows it."""
        return "by construction" if self.by_construction else self.verdict

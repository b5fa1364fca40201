"""What a study found, as plain records: intervals, contrasts, collapses, an experiment's result, a claim's verdict."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

VerdictName = Literal["agrees", "disagrees", "no difference", "cannot tell", "not tested here"]
AGREES: VerdictName = "agrees"
DISAGREES: VerdictName = "disagrees"
NO_DIFFERENCE: VerdictName = "no difference"
CANNOT_TELL: VerdictName = "cannot tell"
NOT_TESTED: VerdictName = "not tested here"
VERDICTS = (AGREES, DISAGREES, NO_DIFFERENCE, CANNOT_TELL, NOT_TESTED)
DECIDED = (AGREES, DISAGREES, NO_DIFFERENCE)

RUNS_AND_PROBLEMS = "runs and problems"  # new seeds and new problems
PROBLEMS = "problems"  # new problems, the same runs: the untrained model
ASSUMED_RUNS = "problems, and runs by an assumed spread"  # one run an arm
RUNS_AND_STEPS = "runs and blocks of steps"  # levels of a training metric
STEPS = "blocks of steps, of one run an arm"
RUNS = "runs"  # new seeds: quantities without problems, such as seconds or gradient norms


@dataclass(frozen=True)
class Interval:
    """An estimate with both ends of its confidence interval.

    Attributes:
        level: confidence level, 0.95 unless the interval is adjusted for the number of contrasts.
        covers: what would vary in a repetition: ``runs and problems``, ``problems``, ``runs`` or
            ``problems, and runs by an assumed spread``.
        runs: how many runs count (of the arm with fewer, in a difference), without collapsed ones.
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
        """The interval of the difference the other way round."""
        return replace(self, value=-self.value, low=-self.high, high=-self.low)

    def __str__(self) -> str:
        return f"{self.value:.3f} ({self.low:.3f} to {self.high:.3f})"


@dataclass(frozen=True)
class Contrast:
    """How far ``arm`` is above ``against``.

    Attributes:
        arm, against: names of arms; ``EXPERIMENT/ARM`` where the two are of different experiments.
        difference: ``arm`` minus ``against`` with its 95% interval.
        adjusted: the same difference, the number of ``contrasts`` taken into account: against an experiment's leader so that
            the leader and those tied with it hold the truly best arm with 95% (Hsu), in a claim so that all are covered at once
            with 95% (Sidak).
        contrasts: how many contrasts the family has.
    """

    arm: str
    against: str
    difference: Interval
    adjusted: Interval
    contrasts: int

    def turned(self) -> Contrast:
        """How far ``against`` is above ``arm``."""
        return Contrast(self.against, self.arm, self.difference.turned(), self.adjusted.turned(), self.contrasts)

    @property
    def told_apart(self) -> bool:
        """Whether the adjusted interval leaves zero out."""
        return self.adjusted.low > 0 or self.adjusted.high < 0


@dataclass(frozen=True)
class Collapse:
    """A run that fell from what it had reached.

    Attributes:
        run: ``EXPERIMENT/ARM/SEED``.
        seen_in: ``divergence`` (the run was stopped), ``evaluations`` or ``training rewards`` (between two evaluations).
        step: of the best reward, after which the run fell; where it was stopped, the step of that.
        reached, ended: reward at its best and at the end, of what ``seen_in`` names.
    """

    run: str
    seen_in: Literal["divergence", "evaluations", "training rewards"]
    step: int
    reached: float
    ended: float


@dataclass(frozen=True)
class ArmResult:
    """What an arm's runs came to.

    Attributes:
        overrides: what the arm changes.
        runs: names, in the order of the seeds.
        by_run: final answer reward of each run, in that order, collapsed ones included (the dots of a figure).
        final: mean final answer reward of the runs that did not collapse; of all where all did.
        start: the same of the untrained model.
        collapses: one record for each collapsed run.
        contrast: the arm against the leader; None for the leader.
        run_sd: standard deviation between the runs that ``final`` is about; None with one run.
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
        last_k: of how many last evaluations the final answer reward is the mean.
        leader: the arm with the highest final reward, of those without a collapsed run.
        tied: arms that cannot be told from the leader, itself left out.
        winner: of the leader and those tied with it the earliest in params.yaml, unless pinned.
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
    """A published claim beside what this study measured.

    Attributes:
        claim: id in claims.yaml.
        reported: by source, what it reports; ``published``: by source, the difference where it gives numbers.
        verdict: one of :data:`VERDICTS`.
        reason: why, in a sentence; with ``not tested here`` the horizon or precondition that is not met.
        by_construction: the study planted what the claim states, so that it is no finding.
        measured: the numbers that decide, in words.
        numbers: the same numbers, by name.
        contrasts: of answer rewards, in the claim's direction; the claim's own number of contrasts is taken into account.
        collapses: of the runs that the claim is about.
        margin: differences below it count as none; None where the test knows no margin.
        p: the smallest level at which the verdict would be decided; ``p_adjusted`` over all claims of the study that are
            decided by a p (Benjamini and Hochberg). None where the verdict is no matter of an interval.
    """

    claim: str
    experiment: str
    statement: str
    verdict: VerdictName
    reason: str
    measured: str = ""
    by_construction: bool = False
    reported: dict[str, str] | None = None
    published: dict[str, float] | None = None
    numbers: dict[str, float] | None = None
    contrasts: tuple[Contrast, ...] = ()
    collapses: tuple[Collapse, ...] = ()
    margin: float | None = None
    p: float | None = None
    p_adjusted: float | None = None

    @property
    def decided(self) -> bool:
        """Whether the study says something about the claim."""
        return self.verdict in DECIDED

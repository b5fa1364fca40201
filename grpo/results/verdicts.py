"""The rules that decide claims (:mod:`grpo.study.claims`): by a difference of rewards, or by a ratio of two levels.

Every verdict is that of the 95% interval that the report shows beside it. The claim holds if the whole interval lies on its
side of the margin, and does not hold if the whole interval lies on the other side. If the margin lies in the interval, the
claim stays open.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
from scipy import special, stats

from grpo.results.intervals import LEVEL, Scores, format_interval, mean_of_pairs
from grpo.results.pairs import Pairs, by_problems
from grpo.results.runs import Arm, NotMeasured, Run, final_scores, first_scores, identical, read_kept
from grpo.study.claims import DIFFERENCES, KEPT, OLD_TASK, REWARD, AnyClaim, Beats

VerdictName = Literal["holds", "does not hold", "same", "open", "not tested"]
HOLDS: VerdictName = "holds"
DOES_NOT_HOLD: VerdictName = "does not hold"
SAME: VerdictName = "same"
OPEN: VerdictName = "open"
NOT_TESTED: VerdictName = "not tested"
DECIDED = (HOLDS, DOES_NOT_HOLD, SAME)
VERDICTS = (*DECIDED, OPEN, NOT_TESTED)

MARGIN = 0.05  # differences of rewards below this do not count: equal runs of garg-2026 (claims.yaml) had a deviation of .045
POWER = 0.8
SMALLEST = 1e-8  # replaces smaller values before taking the logarithm
Ends = dict[str, float]  # value, low, high


@dataclass(frozen=True)
class Verdict:
    """A claim and the study's verdict on it."""

    id: str = ""
    experiment: str = ""
    kind: str = ""
    statement: str = ""
    own: bool = False  # of the study's own file; else published
    verdict: VerdictName = NOT_TESTED
    reason: str = ""  # where the interval lies; of a claim that is not tested, the condition that is not met
    measured: str = ""  # the numbers, in words
    interval: Ends | None = None  # the 95% interval that decides
    quantity: Literal["difference", "ratio", ""] = ""  # of what the interval is
    could_see: float | None = None  # smallest distance from the margin, or factor, that this design finds with 80% power
    by_design: str | None = None
    reported: Mapping[str, Any] = field(default_factory=dict)  # by source
    together: Mapping[str, Any] | None = None  # the same with the study's replicates, and how many studies and seeds
    pairs: Pairs | None = field(default=None, compare=False, repr=False)  # the runs that decide; not in the record


# ------------------------------------------------------------------------------------------------------ decisions


def decide(interval: Ends, bar: float, other: float | None = None) -> Verdict:
    """Decide "the true value is above ``bar``" by an interval.

    ``other``: a second bar; between the two there is no difference that counts.
    """
    low, high = interval["low"], interval["high"]
    if low > bar:
        return Verdict(verdict=HOLDS, reason=f"the interval lies above {bar:.3g}", interval=interval)
    if high >= bar:
        return Verdict(verdict=OPEN, reason=f"{bar:.3g} lies in the interval", interval=interval)
    if other is not None and low > other:
        reason = f"the interval lies between {other:.3g} and {bar:.3g}"
        return Verdict(verdict=SAME, reason=reason, interval=interval)
    return Verdict(verdict=DOES_NOT_HOLD, reason=f"the interval lies below {bar:.3g}", interval=interval)


def comparison(difference: Ends, margin: float = MARGIN) -> Literal["higher", "lower", "same", "open"]:
    """Say in a word what a difference's interval shows: higher or lower by at least the margin, the same within it, or open."""
    low, high = difference["low"], difference["high"]
    if low > margin or high < -margin:
        return "higher" if low > margin else "lower"
    return "same" if -margin < low and high < margin else "open"


def smallest_seen(se: float, df: float) -> float:
    """The distance of the true value from the margin at which the 95% interval leaves the margin in 80% of repetitions."""
    return float(special.nctdtrinc(df, 1 - POWER, stats.t.ppf((1 + LEVEL) / 2, df))) * se  # by the noncentral t


# ---------------------------------------------------------------------------------------------------------- kinds


def judge(claim: AnyClaim, arm: Arm, other: Arm) -> Verdict:
    """Judge a claim about two arms of one study by the rule of its kind.

    Raises NotMeasured: the study lacks what the rule needs.
    """
    pairs = pair(claim, arm, other)
    found = decide_by(claim, [pairs])
    gap = format_interval(found.interval or {})
    if claim.metric != REWARD:
        compared = "above" if claim.metric == OLD_TASK else "times"
        measured = f"{claim.metric} ({claim.at}) of {arm.name} is {gap} {compared} that of {other.name}"
    else:
        ends = [_in_words(one, _scores(claim, one), claim.at, arm.experiment != other.experiment) for one in (arm, other)]
        measured = f"{', '.join(ends)}; difference {gap}"
    return replace(found, measured=measured, pairs=pairs)


def pair(claim: AnyClaim, arm: Arm, other: Arm) -> Pairs:
    """Pair two arms' runs by seed, as a claim compares them: by answer rewards, or by the levels of a metric.

    Raises NotMeasured: see :func:`judge`.
    """
    if (arm.experiment, arm.name) == (other.experiment, other.name):  # such as the lowest rate, where it leads itself
        raise NotMeasured(f"{arm.name} is both arms that the claim compares, so nothing beyond it was tried")
    if identical(arm.runs, other.runs):
        settings = "the settings in which they differ had no effect"
        raise NotMeasured(f"{arm.name} and {other.name} have identical results: {settings}")
    both = [*zip(arm.runs, other.runs, strict=False)]
    seeds, not_asked = [run.seed for run, _ in both], np.empty((len(both), 0))
    if claim.metric != REWARD:
        return Pairs(arm.name, other.name, seeds, _differences_of_levels(claim, both), not_asked)
    moved = not_asked
    if claim.at != "start":
        whole = [run for run in (*arm.runs, *other.runs) if run.metrics["diverged_step"] is None]  # the others were stopped
        if arm.experiment == other.experiment and len({int(run.validation["step"].iloc[-1]) for run in whole}) > 1:
            raise NotMeasured(f"the runs of {arm.name} and {other.name} took different numbers of steps")
    if claim.at == "end":
        last, before = (np.stack([_evaluated(a, place) - _evaluated(b, place) for a, b in both]) for place in (-1, -2))
        moved = last - before
    first, second = (_scores(claim, one)[: len(both)] for one in (arm, other))
    return Pairs(arm.name, other.name, seeds, first - second, moved)


def decide_by(claim: AnyClaim, studies: Sequence[Pairs]) -> Verdict:
    """Decide a claim by the runs of one or several studies together (:func:`grpo.results.intervals.mean_of_pairs`).

    A verdict on ends is withdrawn if their difference still moved towards the margin between the last two evaluations: then one
    of the arms still climbs (or falls), and the runs compare speeds, so more steps may turn the verdict.
    """
    of_problems = by_problems(studies)
    gap = mean_of_pairs([pairs.differences for pairs in of_problems])
    ends, seen = gap.ends(), smallest_seen(gap.se, gap.df)
    if ratio := is_ratio(claim):  # exp(700) is finite
        ends, seen = {key: math.exp(min(end, 700)) for key, end in ends.items()}, math.exp(min(seen, 700))
        found = decide(ends, claim.by, 1 / claim.by)
    else:
        ends |= {"low": max(-1.0, ends["low"]), "high": min(1.0, ends["high"])}
        found = decide(ends, claim.by, -claim.by) if isinstance(claim, Beats) else decide(ends, -claim.by)  # non-inferiority
    found = replace(found, quantity="ratio" if ratio else "difference", could_see=seen)
    if not of_problems[0].moved.size:
        return found
    moved = mean_of_pairs([pairs.moved for pairs in of_problems])
    towards = {HOLDS: moved.high < 0, DOES_NOT_HOLD: moved.low > 0}
    if not towards.get(found.verdict):
        return found
    reason = f"still moving: between the last two evaluations the difference changed by {moved}, towards the margin"
    return replace(found, verdict=NOT_TESTED, reason=reason)


def is_ratio(claim: AnyClaim) -> bool:
    """Whether a claim is about the ratio of two arms' levels of a metric; else it is about a difference of rewards."""
    return claim.metric not in DIFFERENCES


def _scores(claim: AnyClaim, arm: Arm) -> Scores:
    """An arm's answer rewards at the start or the end, (runs, problems)."""
    return (first_scores if claim.at == "start" else final_scores)(arm.runs)


def _in_words(arm: Arm, scores: Scores, at: str, apart: bool) -> str:
    collapsed = f" ({len(arm.collapsed)} of {len(arm.runs)} runs collapsed)" if at != "start" and arm.collapsed else ""
    return f"{f'{arm.experiment}/' if apart else ''}{arm.name} {scores.mean():.3f}{collapsed}"


def _evaluated(run: Run, place: int) -> Scores:
    """A run's rewards at its last evaluation or the one before; a run that was stopped, or evaluated once, does not move."""
    moves = run.metrics["diverged_step"] is None and len(run.outcomes) > 2
    rewards: Scores = run.outcomes[place if moves else -1]
    return rewards


def _differences_of_levels(claim: AnyClaim, both: Sequence[tuple[Run, Run]]) -> Scores:
    """Differences of a metric's levels, or logarithms of their ratios, over the steps that both runs took, (runs, 1)."""
    levels = []
    for runs in both:
        last = min(float(run.history["step"].max()) for run in runs)
        levels.append([level(run, claim.metric, claim.at, last) for run in runs])
    if len(levels) < 2:
        raise NotMeasured("one seed does not show the spread between runs: this kind of claim needs two or more")
    values = np.array(levels) if claim.metric in DIFFERENCES else np.log(np.maximum(levels, SMALLEST))
    if not np.isfinite(values).all():
        raise NotMeasured("the metric is not finite in a run")
    found: Scores = values[:, :1] - values[:, 1:]
    return found


# ------------------------------------------------------------------------------------------------- levels of a metric


def level(run: Run, metric: str, at: str, last: float = math.inf) -> float:
    """The median of a metric over a part of a run's training steps, or of its evaluations for a validation metric.

    A step has the mean over its optimizer updates, infinite if one of them is not finite. A metric of kept checkpoints
    (``KEPT``) has the level of the last one, whatever ``last`` is.

    ``at``: ``start`` (the first sixteenth), ``late`` (the last quarter), ``end`` (the last sixteenth) or ``throughout``, each
    of which has at least one value; or ``peak``, the highest value of an optimizer update. ``last``: the last step that counts.
    Raises NotMeasured: the run does not have the metric, or fewer than two values of it.
    """
    if metric in KEPT:
        last = math.inf
    table = next((table for table in (run.history, run.validation, read_kept(run)) if metric in table), None)
    if table is None:
        raise NotMeasured(f"the runs have no {metric}")
    table = table[table["step"] <= last]
    values = table[metric].astype(float)
    values = values.where(np.isfinite(values), np.inf)
    by_step = values.groupby(table["step"]).mean().to_numpy()
    if len(by_step) < 2:
        raise NotMeasured(f"{run.name} has fewer than two values of {metric} up to step {last:g}")
    if at == "peak":
        return float(values.max())
    few, many = math.ceil(len(by_step) / 16), math.ceil(len(by_step) / 4)
    part = {"start": by_step[:few], "late": by_step[-many:], "end": by_step[-few:], "throughout": by_step}[at]
    return float(np.median(part))

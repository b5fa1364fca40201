"""The rules that decide claims: one for each of the five kinds of claim (:mod:`grpo.study.claims`).

Every verdict is that of the 95% interval that the report shows beside it. The claim agrees if the whole interval lies on its
side of the margin, and disagrees if the whole interval lies on the other side. If the interval holds the margin, the study
cannot tell.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from grpo.results.evidence import Evidence, NotMeasured
from grpo.results.intervals import difference_of
from grpo.results.levels import highest, last_common_step, log_levels, series
from grpo.results.runs import Run, first_scores, identical, value
from grpo.results.statistics import LEVEL, format_interval, wilson_interval
from grpo.study.claims import REWARD, AnyClaim, Beats, Collapses, NotBelow, Share, Trend

VerdictName = Literal["agrees", "disagrees", "no difference", "cannot tell", "not tested"]
AGREES: VerdictName = "agrees"
DISAGREES: VerdictName = "disagrees"
NO_DIFFERENCE: VerdictName = "no difference"
CANNOT_TELL: VerdictName = "cannot tell"
NOT_TESTED: VerdictName = "not tested"
DECIDED = (AGREES, DISAGREES, NO_DIFFERENCE)

HALF = 0.5  # "most runs" are more than this share
Ends = dict[str, float]  # value, low, high
Of = Callable[[str], tuple[Evidence, str]]  # finds an arm's evidence and its name there; see grpo.results.claims.Arms


@dataclass(frozen=True)
class Verdict:
    """A claim and the study's verdict on it."""

    id: str = ""
    experiment: str = ""
    kind: str = ""
    statement: str = ""
    own: bool = False  # of the study's own file; else published
    test: str = ""  # digest of what decides the claim; another wording leaves it as it is
    verdict: VerdictName = NOT_TESTED
    reason: str = ""  # where the interval lies; of a claim that is not tested, the condition that is not met
    measured: str = ""  # the numbers, in words
    numbers: dict[str, float] = field(default_factory=dict)  # by arm or name
    interval: Ends | None = None  # the 95% interval that decides
    quantity: Literal["difference", "ratio", "share", ""] = ""  # of what the interval and the margin are
    margin: float | None = None
    horizon: int = 0
    control: str | None = None
    by_design: str | None = None
    reported: dict[str, str] = field(default_factory=dict)  # by source
    written: Literal["before", "after", "unknown"] = "unknown"  # before or after the claim's runs
    fresh: Literal["same", "undecided", "turned round", "not tried"] = "not tried"  # on fresh seeds

    @property
    def decided(self) -> bool:
        """Whether it agrees, disagrees or finds no difference."""
        return self.verdict in DECIDED


# ------------------------------------------------------------------------------------------------------ decisions


def decide(interval: Ends, bar: float, other: float | None = None) -> Verdict:
    """Decide "the true value is above ``bar``" by an interval.

    Args:
        other: a second bar; between the two there is no difference that counts.
    """
    low, high = interval["low"], interval["high"]
    if low > bar:
        return Verdict(verdict=AGREES, reason=f"the interval lies above {bar:.3g}", interval=interval)
    if high >= bar:
        return Verdict(verdict=CANNOT_TELL, reason=f"the interval holds {bar:.3g}", interval=interval)
    if other is not None and low > other:
        reason = f"the interval lies between {other:.3g} and {bar:.3g}"
        return Verdict(verdict=NO_DIFFERENCE, reason=reason, interval=interval)
    return Verdict(verdict=DISAGREES, reason=f"the interval lies below {bar:.3g}", interval=interval)


def beside(arm: Verdict, control: Verdict | None) -> Verdict:
    """Decide a claim about a cause: the arm shows it, and the control, which lacks the cause, does not."""
    if control is None or arm.verdict != AGREES or control.verdict == DISAGREES:
        return arm
    if control.verdict == AGREES:
        return replace(arm, verdict=DISAGREES, reason=f"{arm.reason}, but the control shows it too")
    return replace(arm, verdict=CANNOT_TELL, reason=f"{arm.reason}, but that of the control does not lie on the other side")


def over_runs(values: NDArray[np.float64]) -> Ends:
    """The mean of one number per run with its 95% t-interval (Student 1908).

    Raises:
        NotMeasured: there is one run, or a number that is not finite.
    """
    if len(values) < 2:
        raise NotMeasured("one seed does not show the spread between runs: this kind of claim needs two or more")
    if not np.isfinite(values).all():
        raise NotMeasured("the metric is not finite in a run")
    half = float(stats.t.ppf((1 + LEVEL) / 2, len(values) - 1)) * float(stats.sem(values))
    return {"value": float(values.mean()), "low": float(values.mean()) - half, "high": float(values.mean()) + half}


def most(hits: Sequence[bool]) -> Verdict:
    """Decide "it holds in most runs" by the interval of their share (Wilson 1927)."""
    low, high = wilson_interval(sum(hits), len(hits))
    return decide({"value": sum(hits) / len(hits), "low": low, "high": high}, HALF)


# ---------------------------------------------------------------------------------------------------------- kinds


def beats(claim: Beats, of: Of) -> Verdict:
    """The arm has more than the other by ``by`` or more: the interval of the difference, or ratio, lies above ``by``."""
    if claim.metric != REWARD:
        return _larger(claim, of)
    difference, numbers, measured = _difference(claim.arm, claim.beats, of, claim.at)
    found = decide(difference, claim.by, -claim.by)
    return replace(found, measured=measured, numbers=numbers, quantity="difference", margin=claim.by)


def not_below(claim: NotBelow, of: Of) -> Verdict:
    """The arm costs nothing against the other: the interval of the difference lies above minus ``by`` (non-inferiority)."""
    difference, numbers, measured = _difference(claim.arm, claim.not_below, of, "end")
    found = decide(difference, -claim.by)
    return replace(found, measured=measured, numbers=numbers, quantity="difference", margin=claim.by)


def collapses(claim: Collapses, of: Of) -> Verdict:
    """Most runs of the arm collapse, and most of the control's do not: each share's interval lies on its side of a half."""
    shares, counts = {}, []
    for key in (claim.collapses, claim.control):
        evidence, arm = of(key)
        fallen, runs = {one.run for one in evidence.collapses(arm)}, evidence.runs(arm)
        shares[key] = most([run.name in fallen for run in runs])
        counts.append(f"{len(fallen)} of {len(runs)} runs of {arm} collapsed")
    return _shares(beside(*shares.values()), "; ".join(counts), shares)


def trend(claim: Trend, of: Of) -> Verdict:
    """The metric's last level is more than ``by`` times its first (falls: less than 1 / ``by``; stays: between the two).

    The interval is of the mean logarithm of that ratio over runs. A control must not show the same.
    """
    found, numbers, texts = [], {}, []
    for key in filter(None, (claim.arm, claim.control)):
        evidence, arm = of(key)
        runs = evidence.runs(arm)
        first, last = (float(step) for step in [*claim.steps, *(0, math.inf)[len(claim.steps) :]])
        if last_common_step(runs) < last < math.inf:
            raise NotMeasured(f"the claim is about the steps up to {last:g}, and a run of {arm} took fewer")
        logs = log_levels(runs, claim.metric, "late", (first, last)) - log_levels(runs, claim.metric, "start", (first, last))
        ratio = _ratio(over_runs(logs))
        found.append(_trend(claim, ratio))
        numbers[key] = ratio["value"]
        texts.append(f"{arm} {format_interval(ratio)}")
    measured = f"last level of {claim.metric} as a multiple of its first: {'; '.join(texts)}"
    decided = beside(found[0], found[1] if claim.control else None)
    return replace(decided, measured=measured, numbers=numbers, quantity="ratio", margin=claim.by)


def share(claim: Share, of: Of) -> Verdict:
    """The metric exceeds ``share_above`` times its level in control runs in most runs, and in most control runs it does not.

    Both shares have Wilson's interval. The level is the median over the control runs of their median step.
    """
    name = "runs that collapsed" if claim.arm is None else claim.arm
    (runs, until), controls, other = _groups(claim, of)
    bar = claim.share_above * float(np.median([np.median(series(run, claim.metric)[1]) for run in controls]))
    hits = [highest(run, claim.metric, last) > bar for run, last in zip(runs, until, strict=True)]
    others = [highest(run, claim.metric) > bar for run in controls]
    shares = {name: most(hits), other: most(others)}
    counts = [f"in {sum(of)} of {len(of)} {key}" for key, of in zip(shares, (hits, others), strict=True)]
    measured = f"{claim.metric} above {bar:.3g} {' and '.join(counts)}"
    return replace(_shares(beside(*shares.values()), measured, shares), margin=claim.share_above)


# -------------------------------------------------------------------------------------------------------- helpers


def _difference(first: str, second: str, of: Of, at: str) -> tuple[Ends, dict[str, float], str]:
    """The difference of two arms' answer rewards, paired by seed and problem, at the start or the end."""
    (evidence, arm), (other, against) = of(first), of(second)
    runs, rivals = evidence.runs(arm), other.runs(against)
    if identical(runs, rivals):
        raise NotMeasured(f"{arm} and {against} have identical results: the settings in which they differ had no effect")
    if at == "start":
        scores, controls = first_scores(runs), first_scores(rivals)
    else:
        _same_steps({arm: runs, against: rivals}, evidence is other)
        scores, controls = evidence.final(arm), other.final(against)
    found = difference_of(controls, scores)
    names = (arm, against) if evidence is other else (f"{evidence.experiment}/{arm}", f"{other.experiment}/{against}")
    numbers = {names[0]: float(scores.mean()), names[1]: float(controls.mean())}
    ends = [f"{name} {number:.3f}" for name, number in numbers.items()]
    if at == "end":
        ends = [text + _collapsed(*which) for text, which in zip(ends, ((evidence, arm), (other, against)), strict=True)]
    interval = {"value": found.value, "low": found.low, "high": found.high}
    return interval, numbers, f"{', '.join(ends)}; difference {format_interval(interval)}"


def _same_steps(arms: Mapping[str, Sequence[Run]], one_experiment: bool) -> None:
    """Raise NotMeasured if arms of one experiment took different numbers of steps, other than by collapsing."""
    whole = [run for runs in arms.values() for run in runs if run.metrics["diverged_step"] is None]
    if one_experiment and len({int(run.validation["step"].iloc[-1]) for run in whole}) > 1:
        raise NotMeasured(f"the runs of {' and '.join(arms)} took different numbers of steps")


def _collapsed(evidence: Evidence, arm: str) -> str:
    fallen = len(evidence.collapses(arm))
    return f" ({fallen} of {len(evidence.runs(arm))} runs collapsed)" if fallen else ""


def _larger(claim: Beats, of: Of) -> Verdict:
    """Compare two arms' levels of a metric of the training steps, over the steps that both runs of a seed have taken."""
    (evidence, arm), (other, against) = of(claim.arm), of(claim.beats)
    runs, rivals = evidence.runs(arm), other.runs(against)
    if identical(runs, rivals):
        raise NotMeasured(f"{arm} and {against} have identical results: the settings in which they differ had no effect")
    logs = [
        np.diff(log_levels([rival, run], claim.metric, claim.at, (0.0, last_common_step([run, rival]))))[0]
        for run, rival in zip(runs, rivals, strict=True)
    ]
    ratio = _ratio(over_runs(np.array(logs)))
    measured = f"{claim.metric} ({claim.at}) of {arm} is {format_interval(ratio)} times that of {against}"
    found = decide(ratio, claim.by, 1 / claim.by)
    return replace(found, measured=measured, numbers={"ratio": ratio["value"]}, quantity="ratio", margin=claim.by)


def _ratio(logs: Ends) -> Ends:
    return {key: math.exp(min(number, 700)) for key, number in logs.items()}  # 700: the largest that exp can take


def _trend(claim: Trend, ratio: Ends) -> Verdict:
    """Decide a trend by the interval of the last level as a multiple of the first."""
    falls = {"value": 1 / ratio["value"], "low": 1 / ratio["high"], "high": 1 / ratio["low"]}
    if claim.trend == "grows":
        return decide(ratio, claim.by)
    if claim.trend == "falls":
        found, bar = decide(falls, claim.by), 1 / claim.by
        where = {AGREES: "lies below", DISAGREES: "lies above"}.get(found.verdict, "holds")
        return replace(found, reason=f"the interval {where} {bar:.3g}", interval=ratio)
    away = [decide(one, claim.by).verdict for one in (ratio, falls)]
    verdict = DISAGREES if AGREES in away else CANNOT_TELL if CANNOT_TELL in away else AGREES
    where = {AGREES: "lies within", DISAGREES: "lies beyond"}.get(verdict, "holds")
    return Verdict(verdict=verdict, reason=f"the interval {where} a factor of {claim.by:g}", interval=ratio)


def _shares(found: Verdict, measured: str, shares: Mapping[str, Verdict]) -> Verdict:
    numbers = {name: one.interval["value"] for name, one in shares.items() if one.interval}
    return replace(found, measured=measured, numbers=numbers, quantity="share")


def _groups(claim: Share, of: Of) -> tuple[tuple[list[Run], list[float]], list[Run], str]:
    """The runs in question, the step up to which each counts, the control runs, and a name for these."""
    if claim.arm is not None and claim.control is not None:
        (evidence, arm), (other, control) = of(claim.arm), of(claim.control)
        runs = evidence.runs(arm)
        return (runs, [math.inf] * len(runs)), other.runs(control), claim.control
    evidence, _ = of("")
    fallen = {one.run for arm in evidence.arms for one in evidence.collapses(arm)}
    everything = [run for of_arm in evidence.arms.values() for run in of_arm]
    lost = [run for run in everything if run.name in fallen]
    batches = {value(run, "train_batch_size") for run in lost}
    held = [run for run in everything if run.name not in fallen and value(run, "train_batch_size") in batches]
    if not lost or not held:
        raise NotMeasured(f"{len(lost)} runs collapsed and {len(held)} with the same train batch held, and both are needed")
    return (lost, [_until_fallen(run) for run in lost]), held, "steady runs"


def _until_fallen(run: Run) -> float:
    """The step of the evaluation where, after the best one, the reward is first below half of the best."""
    means = run.outcomes.mean(axis=1)
    best = int(means.argmax())
    low = [place for place in range(best + 1, len(means)) if means[place] < HALF * means[best]]
    return float(run.validation["step"].iloc[low[0] if low else -1])


RULES: dict[str, Callable[[Any, Of], Verdict]] = {
    Beats.KIND: beats,
    NotBelow.KIND: not_below,
    Collapses.KIND: collapses,
    Trend.KIND: trend,
    Share.KIND: share,
}


def judge(claim: AnyClaim, of: Of) -> Verdict:
    """Judge a claim by the rule of its kind.

    Raises:
        NotMeasured: the study lacks what the rule needs.
    """
    arms = [of(getattr(claim, key)) for key in claim.ARMS if getattr(claim, key)]
    if len({(id(evidence), arm) for evidence, arm in arms}) < len(arms):  # such as the lowest rate, where it leads itself
        return Verdict(verdict=DISAGREES, reason=f"{arms[0][1]} is both arms that the claim compares")
    return RULES[claim.KIND](claim, of)

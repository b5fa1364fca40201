"""The rules that decide claims: one for each of the three kinds of claim (:mod:`grpo.study.claims`).

Every verdict is that of the 95% interval that the report shows beside it. The claim agrees if the whole interval lies on its
side of the margin, and disagrees if the whole interval lies on the other side. If the interval holds the margin, the study
cannot tell.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from grpo.results.evidence import Arm, NotMeasured
from grpo.results.intervals import difference_of
from grpo.results.runs import Run, final_scores, first_scores, identical
from grpo.results.statistics import format_interval, t_interval, wilson_interval
from grpo.study.claims import REWARD, AnyClaim, Beats, Collapses, NotBelow

VerdictName = Literal["agrees", "disagrees", "no difference", "cannot tell", "not tested"]
AGREES: VerdictName = "agrees"
DISAGREES: VerdictName = "disagrees"
NO_DIFFERENCE: VerdictName = "no difference"
CANNOT_TELL: VerdictName = "cannot tell"
NOT_TESTED: VerdictName = "not tested"
DECIDED = (AGREES, DISAGREES, NO_DIFFERENCE)

HALF = 0.5  # "most runs" are more than this share
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
    quantity: Literal["difference", "ratio", "share", ""] = ""  # of what the interval is
    by_design: str | None = None
    reported: Mapping[str, Any] = field(default_factory=dict)  # by source


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


def beside(arm: Verdict, control: Verdict) -> Verdict:
    """Decide a claim about a cause: the arm shows it, and the control, which lacks the cause, does not."""
    if arm.verdict != AGREES or control.verdict == DISAGREES:
        return arm
    if control.verdict == AGREES:
        return replace(arm, verdict=DISAGREES, reason=f"{arm.reason}, but the control shows it too")
    return replace(arm, verdict=CANNOT_TELL, reason=f"{arm.reason}, but that of the control does not lie on the other side")


# ---------------------------------------------------------------------------------------------------------- kinds


def judge(claim: AnyClaim, arm: Arm, other: Arm) -> Verdict:
    """Judge a claim about two arms by the rule of its kind.

    Raises:
        NotMeasured: the study lacks what the rule needs.
    """
    if (arm.experiment, arm.name) == (other.experiment, other.name):  # such as the lowest rate, where it leads itself
        raise NotMeasured(f"{arm.name} is both arms that the claim compares, so nothing beyond it was tried")
    match claim:
        case Beats() if claim.metric == REWARD:
            return _difference(arm, other, claim.at, claim.by, -claim.by)
        case Beats():
            return _ratio(claim, arm, other)
        case NotBelow():  # non-inferiority
            return _difference(arm, other, "end", -claim.by)
        case Collapses():
            return _collapses(arm, other)


def _difference(arm: Arm, other: Arm, at: str, bar: float, other_bar: float | None = None) -> Verdict:
    """Decide by the difference of two arms' answer rewards at the start or the end, paired by seed and problem."""
    _require_a_difference(arm, other)
    apart, texts = arm.experiment != other.experiment, []
    if at == "end":
        whole = [run for run in (*arm.runs, *other.runs) if run.metrics["diverged_step"] is None]  # the others were stopped
        if not apart and len({int(run.validation["step"].iloc[-1]) for run in whole}) > 1:
            raise NotMeasured(f"the runs of {arm.name} and {other.name} took different numbers of steps")
    scores = [(final_scores if at == "end" else first_scores)(one.runs) for one in (arm, other)]
    for of_arm, one in zip(scores, (arm, other), strict=True):
        name = f"{one.experiment}/{one.name}" if apart else one.name
        collapsed = f" ({len(one.collapsed)} of {len(one.runs)} runs collapsed)" if at == "end" and one.collapsed else ""
        texts.append(f"{name} {of_arm.mean():.3f}{collapsed}")
    interval = difference_of(scores[1], scores[0]).ends()
    measured = f"{', '.join(texts)}; difference {format_interval(interval)}"
    return replace(decide(interval, bar, other_bar), measured=measured, quantity="difference")


def _ratio(claim: Beats, arm: Arm, other: Arm) -> Verdict:
    """Decide by the ratio of two arms' levels of a metric, over the steps that both runs of a seed have taken."""
    _require_a_difference(arm, other)
    levels = []
    for runs in zip(arm.runs, other.runs, strict=True):
        last = min(float(run.history["step"].max()) for run in runs)
        levels.append([level(run, claim.metric, claim.at, last) for run in runs])
    if len(levels) < 2:
        raise NotMeasured("one seed does not show the spread between runs: this kind of claim needs two or more")
    logs = np.log(np.maximum(levels, SMALLEST))
    if not np.isfinite(logs).all():
        raise NotMeasured("the metric is not finite in a run")
    # The interval of the mean logarithm; exp(700) is finite.
    ratio = {key: math.exp(min(end, 700)) for key, end in t_interval(logs[:, 0] - logs[:, 1]).items()}
    measured = f"{claim.metric} ({claim.at}) of {arm.name} is {format_interval(ratio)} times that of {other.name}"
    return replace(decide(ratio, claim.by, 1 / claim.by), measured=measured, quantity="ratio")


def _collapses(arm: Arm, control: Arm) -> Verdict:
    """Most runs of the arm collapse, and most of the control's do not: each share's interval lies on its side of a half."""
    shares = []
    for one in (arm, control):
        low, high = wilson_interval(len(one.collapsed), len(one.runs))
        shares.append(decide({"value": len(one.collapsed) / len(one.runs), "low": low, "high": high}, HALF))
    counts = [f"{len(one.collapsed)} of {len(one.runs)} runs of {one.name} collapsed" for one in (arm, control)]
    return replace(beside(*shares), measured="; ".join(counts), quantity="share")


def _require_a_difference(arm: Arm, other: Arm) -> None:
    if identical(arm.runs, other.runs):
        raise NotMeasured(
            f"{arm.name} and {other.name} have identical results: the settings in which they differ had no effect"
        )


# ------------------------------------------------------------------------------------------------- levels of a metric


def level(run: Run, metric: str, at: str, last: float = math.inf) -> float:
    """The median of a metric over a part of a run's training steps, or of its evaluations for a validation metric.

    A step has the mean over its optimizer updates, infinite if one of them is not finite.

    Args:
        at: ``start`` (the first sixteenth), ``late`` (the last quarter), ``end`` (the last sixteenth) or ``throughout``; each
            has at least one value.
        last: the last step that counts.

    Raises:
        NotMeasured: the run does not have the metric, or fewer than two values of it.
    """
    table = next((table for table in (run.history, run.validation) if metric in table), None)
    if table is None:
        raise NotMeasured(f"the runs have no {metric}")
    table = table[table["step"] <= last]
    values = table[metric].astype(float)
    by_step = values.where(np.isfinite(values), np.inf).groupby(table["step"]).mean().to_numpy()
    if len(by_step) < 2:
        raise NotMeasured(f"{run.name} has fewer than two values of {metric} up to step {last:g}")
    few, many = math.ceil(len(by_step) / 16), math.ceil(len(by_step) / 4)
    part = {"start": by_step[:few], "late": by_step[-many:], "end": by_step[-few:], "throughout": by_step}[at]
    return float(np.median(part))

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

from grpo.common.files import read_json
from grpo.results.evidence import Arm, NotMeasured
from grpo.results.intervals import difference_of
from grpo.results.runs import Run, final_scores, first_scores, identical, value
from grpo.results.statistics import format_interval, t_interval, wilson_interval
from grpo.study import paths
from grpo.study.claims import REWARD, AnyClaim, Beats, Collapses, NotBelow, Share, Trend

VerdictName = Literal["agrees", "disagrees", "no difference", "cannot tell", "not tested"]
AGREES: VerdictName = "agrees"
DISAGREES: VerdictName = "disagrees"
NO_DIFFERENCE: VerdictName = "no difference"
CANNOT_TELL: VerdictName = "cannot tell"
NOT_TESTED: VerdictName = "not tested"
DECIDED = (AGREES, DISAGREES, NO_DIFFERENCE)

HALF = 0.5  # "most runs" are more than this share
BLOCK = 4  # steps
KL = "kl/"  # metrics of kept checkpoints, such as kl/per_token_low_variance
SMALLEST = 1e-8  # replaces smaller values before taking the logarithm
Ends = dict[str, float]  # value, low, high
Of = Callable[[str], Arm]  # finds an arm by a claim's name for it
Numbers = NDArray[np.float64]


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


def beside(arm: Verdict, control: Verdict | None) -> Verdict:
    """Decide a claim about a cause: the arm shows it, and the control, which lacks the cause, does not."""
    if control is None or arm.verdict != AGREES or control.verdict == DISAGREES:
        return arm
    if control.verdict == AGREES:
        return replace(arm, verdict=DISAGREES, reason=f"{arm.reason}, but the control shows it too")
    return replace(arm, verdict=CANNOT_TELL, reason=f"{arm.reason}, but that of the control does not lie on the other side")


def over_runs(values: Numbers) -> Ends:
    """The mean of one number per run with its 95% t-interval (Student 1908).

    Raises:
        NotMeasured: there is one run, or a number that is not finite.
    """
    if len(values) < 2:
        raise NotMeasured("one seed does not show the spread between runs: this kind of claim needs two or more")
    if not np.isfinite(values).all():
        raise NotMeasured("the metric is not finite in a run")
    return t_interval(values)


def most(hits: Sequence[bool]) -> Verdict:
    """Decide "it holds in most runs" by the interval of their share (Wilson 1927)."""
    low, high = wilson_interval(sum(hits), len(hits))
    return decide({"value": sum(hits) / len(hits), "low": low, "high": high}, HALF)


# ---------------------------------------------------------------------------------------------------------- kinds


def beats(claim: Beats, of: Of) -> Verdict:
    """The arm has more than the other by ``by`` or more: the interval of the difference, or ratio, lies above ``by``."""
    if claim.metric == REWARD:
        difference, known = _difference(of(claim.arm), of(claim.beats), claim.at)
        return replace(decide(difference, claim.by, -claim.by), **known)
    arm, other = of(claim.arm), of(claim.beats)
    _require_a_difference(arm, other)
    logs = []  # over the steps that both runs of a seed have taken
    for run, rival in zip(arm.runs, other.runs, strict=True):
        first, second = log_levels([rival, run], claim.metric, claim.at, (0.0, last_common_step([run, rival])))
        logs.append(second - first)
    ratio = _ratio(over_runs(np.array(logs)))
    measured = f"{claim.metric} ({claim.at}) of {arm.name} is {format_interval(ratio)} times that of {other.name}"
    found = decide(ratio, claim.by, 1 / claim.by)
    return replace(found, measured=measured, quantity="ratio")


def not_below(claim: NotBelow, of: Of) -> Verdict:
    """The arm costs nothing against the other: the interval of the difference lies above minus ``by`` (non-inferiority)."""
    difference, known = _difference(of(claim.arm), of(claim.not_below), "end")
    return replace(decide(difference, -claim.by), **known)


def collapses(claim: Collapses, of: Of) -> Verdict:
    """Most runs of the arm collapse, and most of the control's do not: each share's interval lies on its side of a half."""
    arms = [of(claim.collapses), of(claim.control)]
    counts = [f"{len(arm.collapsed)} of {len(arm.runs)} runs of {arm.name} collapsed" for arm in arms]
    decided = beside(*(most([run.name in arm.collapsed for run in arm.runs]) for arm in arms))
    return replace(decided, measured="; ".join(counts), quantity="share")


def trend(claim: Trend, of: Of) -> Verdict:
    """The metric's last level is more than ``by`` times its first (falls: less than 1 / ``by``; stays: between the two).

    The interval is of the mean logarithm of that ratio over runs. A control must not show the same.
    """
    first, last = (float(step) for step in [*claim.steps, *(0, math.inf)[len(claim.steps) :]])
    found, texts = [], []
    for key in filter(None, (claim.arm, claim.control)):
        arm = of(key)
        if last_common_step(arm.runs) < last < math.inf:
            raise NotMeasured(f"the claim is about the steps up to {last:g}, and a run of {arm.name} took fewer")
        late, start = (log_levels(arm.runs, claim.metric, at, (first, last)) for at in ("late", "start"))
        ratio = _ratio(over_runs(late - start))
        found.append(_trend(claim, ratio))
        texts.append(f"{arm.name} {format_interval(ratio)}")
    measured = f"last level of {claim.metric} as a multiple of its first: {'; '.join(texts)}"
    decided = beside(found[0], found[1] if claim.control else None)
    return replace(decided, measured=measured, quantity="ratio")


def share(claim: Share, of: Of) -> Verdict:
    """The metric exceeds ``share_above`` times its level in control runs in most runs, and in most control runs it does not.

    Both shares have Wilson's interval. The level is the median over the control runs of their median step. Of runs that
    collapsed, the steps count until the reward has fallen.
    """
    if claim.arm is not None and claim.control is not None:
        name, other = claim.arm, claim.control
        runs, controls = of(name).runs, of(other).runs
        until = [math.inf] * len(runs)
    else:
        name, other, every = "runs that collapsed", "steady runs", of("")
        runs = [run for run in every.runs if run.name in every.collapsed]
        until = [_until_fallen(run) for run in runs]
        batches = {value(run, "train_batch_size") for run in runs}
        controls = [run for run in every.runs if run.name not in every.collapsed and value(run, "train_batch_size") in batches]
        if not runs or not controls:
            lost = f"{len(runs)} runs collapsed and {len(controls)} with the same train batch held"
            raise NotMeasured(f"{lost}, and both are needed")
    bar = claim.share_above * float(np.median([np.median(series(run, claim.metric)[1]) for run in controls]))
    hits = {
        name: [highest(run, claim.metric, last) > bar for run, last in zip(runs, until, strict=True)],
        other: [highest(run, claim.metric) > bar for run in controls],
    }
    counts = " and ".join(f"in {sum(of_runs)} of {len(of_runs)} {key}" for key, of_runs in hits.items())
    decided = beside(*map(most, hits.values()))
    return replace(decided, measured=f"{claim.metric} above {bar:.3g} {counts}", quantity="share")


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
    if len({(arm.experiment, arm.name) for arm in arms}) < len(arms):  # such as the lowest rate, where it leads itself
        raise NotMeasured(f"{arms[0].name} is both arms that the claim compares, so nothing beyond it was tried")
    return RULES[claim.KIND](claim, of)


# -------------------------------------------------------------------------------------------------------- helpers


def _require_a_difference(arm: Arm, other: Arm) -> None:
    if identical(arm.runs, other.runs):
        raise NotMeasured(
            f"{arm.name} and {other.name} have identical results: the settings in which they differ had no effect"
        )


def _difference(arm: Arm, other: Arm, at: str) -> tuple[Ends, dict[str, Any]]:
    """The difference of two arms' answer rewards, paired by seed and problem, at the start or the end, and what it is of."""
    _require_a_difference(arm, other)
    apart, texts = arm.experiment != other.experiment, []
    if at == "end":
        whole = [run for run in (*arm.runs, *other.runs) if run.metrics["diverged_step"] is None]  # the others were stopped
        if not apart and len({int(run.validation["step"].iloc[-1]) for run in whole}) > 1:
            raise NotMeasured(f"the runs of {arm.name} and {other.name} took different numbers of steps")
    scores = [(final_scores if at == "end" else first_scores)(one.runs) for one in (arm, other)]
    names = [f"{one.experiment}/{one.name}" if apart else one.name for one in (arm, other)]
    for name, of, one in zip(names, scores, (arm, other), strict=True):
        collapsed = f" ({len(one.collapsed)} of {len(one.runs)} runs collapsed)" if at == "end" and one.collapsed else ""
        texts.append(f"{name} {of.mean():.3f}{collapsed}")
    interval = difference_of(scores[1], scores[0]).ends()
    measured = f"{', '.join(texts)}; difference {format_interval(interval)}"
    return interval, {"measured": measured, "quantity": "difference"}


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


def _until_fallen(run: Run) -> float:
    """The step of the evaluation where, after the best one, the reward is first below half of the best."""
    means = run.outcomes.mean(axis=1)
    best = int(means.argmax())
    low = [place for place in range(best + 1, len(means)) if means[place] < HALF * means[best]]
    return float(run.validation["step"].iloc[low[0] if low else -1])


# ---------------------------------------------------------------------------- levels of a metric over a stretch of a run


def series(run: Run, metric: str, how: str = "mean") -> tuple[Numbers, Numbers]:
    """Steps, and a metric's values at them: training steps, the evaluations of a validation metric, or kept checkpoints.

    Args:
        how: ``mean`` or ``max`` over a step's optimizer updates. The value is infinite if one of them is not finite.

    Raises:
        NotMeasured: the run has no such metric.
    """
    if metric.startswith(KL):
        return _kl(run, metric.removeprefix(KL))
    table = next((table for table in (run.history, run.validation) if metric in table), None)
    if table is None:
        raise NotMeasured(f"the runs have no {metric}")
    values = table[metric].astype(float)
    by_step = values.where(np.isfinite(values), np.inf).groupby(table["step"]).agg(how)
    return by_step.index.to_numpy(dtype=float), by_step.to_numpy(dtype=float)


def _kl(run: Run, estimate: str) -> tuple[Numbers, Numbers]:
    """Steps, and the KL of the run's kept checkpoints to its start, as the stage ``kl`` measured them."""
    path, made_by = paths.KL_REPORTS / f"{run.experiment}.json", f"kl@{run.experiment}"
    steps = read_json(path, made_by, keys=("arms",))["arms"].get(run.arm, []) if path.exists() else []
    points = [(one["step"], one["by_run"][run.name][estimate]) for one in steps if run.name in one["by_run"]]
    if not points:
        raise NotMeasured(f"the runs of {run.experiment} keep no checkpoints whose KL is measured (keep_steps)")
    places, values = np.array(points, dtype=float).T
    return places, values


def level(run: Run, metric: str, at: str, steps: tuple[float, float] = (0, math.inf)) -> float:
    """The median of a metric over a part of a stretch of steps.

    Args:
        at: ``start`` (the first sixteenth of the stretch), ``late`` (its last quarter), ``end`` (its last sixteenth) or
            ``throughout``; each has at least one value.
        steps: the first and the last step of the stretch.
    """
    places, values = series(run, metric)
    values = values[(places >= steps[0]) & (places <= steps[1])]
    if len(values) < 2:
        raise NotMeasured(f"{run.name} has fewer than two values of {metric} between the steps {steps[0]:g} and {steps[1]:g}")
    few, many = math.ceil(len(values) / 16), math.ceil(len(values) / 4)
    part = {"start": values[:few], "late": values[-many:], "end": values[-few:], "throughout": values}[at]
    return float(np.median(part))


def log_levels(runs: Sequence[Run], metric: str, at: str, steps: tuple[float, float] = (0, math.inf)) -> Numbers:
    """The logarithm of :func:`level` of each run, (runs,)."""
    return np.log(np.maximum([level(run, metric, at, steps) for run in runs], SMALLEST))


def last_common_step(runs: Sequence[Run]) -> float:
    """The last step that all runs have taken."""
    return min(float(run.history["step"].max()) for run in runs)


def highest(run: Run, metric: str, until: float = math.inf) -> float:
    """The highest median over a block of four steps of a metric's largest value in each step, up to a step."""
    places, values = series(run, metric, "max")
    values = values[places <= until]
    parts = np.array_split(values, max(1, len(values) // BLOCK))
    return max((float(np.median(part)) for part in parts if len(part)), default=-math.inf)

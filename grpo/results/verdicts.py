"""Tests that decide claims.

Each kind of test is a function of the evidence and the parameters that claims.yaml gives; its docstring's first line states
what the claim says.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any

import numpy as np
from scipy import stats

from grpo.results.evidence import Evidence, NotMeasured
from grpo.results.findings import AGREES, CANNOT_TELL, DISAGREES, NO_DIFFERENCE, Contrast, Interval, Verdict, VerdictName
from grpo.results.intervals import difference_of, p_beyond, p_within, simultaneous
from grpo.results.levels import blocks, changes, log_ratio, peaks, per_step
from grpo.results.runs import Run, first_scores, gain, identical
from grpo.results.statistics import format_interval

KL = "kl/per_token_low_variance"
ALPHA = 0.05


# ------------------------------------------------------------------------------------------------- decisions


def decide(intervals: Sequence[Interval], bar: float = 0.0, margin: float | None = None) -> Verdict:
    """Decide "each of these differences is above ``bar``".

    The verdict agrees if all intervals lie above the bar. This needs no correction for their number (intersection-union test,
    Berger 1982, Technometrics 24:295). It disagrees if one interval lies below the bar (Bonferroni). It finds no difference if
    all intervals lie within ``margin`` of zero, even if they exclude zero: a margin says which differences are too small to
    count. The result has a verdict, its reason and its p.
    """
    above = max(p_beyond(one, bar) if one.value > bar else 1.0 for one in intervals)
    below = min(1.0, min(p_beyond(one, bar) if one.value < bar else 1.0 for one in intervals) * len(intervals))
    within = max(p_within(one, margin) for one in intervals) if margin is not None else 1.0
    all_lie, one_lies, one_holds = "all intervals lie", "one interval lies", "an interval holds"
    if len(intervals) == 1:
        all_lie, one_lies, one_holds = "the interval lies", "the interval lies", "the interval holds"
    if within < ALPHA:
        return Verdict(verdict=NO_DIFFERENCE, reason=f"{all_lie} within the margin of {margin:g}", p=within)
    if above < ALPHA:
        return Verdict(verdict=AGREES, reason=f"{all_lie} above {bar:g}", p=above)
    if below < ALPHA:
        return Verdict(verdict=DISAGREES, reason=f"{one_lies} below {bar:g}", p=below)
    wider = "" if margin is None else f" and is wider than the margin of {margin:g}"
    return Verdict(verdict=CANNOT_TELL, reason=f"{one_holds} {bar:g}{wider}", p=min(above, below, within))


def _by_reward(evidence: Evidence, pairs: Sequence[tuple[str, str]], bar: float = 0.0, margin: float | None = None) -> Verdict:
    """Decide "of each pair, the first arm ends above the second"."""
    for pair in pairs:
        _require_a_difference(evidence, *pair)
    contrasts = tuple(evidence.contrast(*pair, contrasts=len(pairs)) for pair in pairs)
    found = _with_collapses(evidence, pairs, decide([contrast.difference for contrast in contrasts], bar, margin))
    arms = list(dict.fromkeys(arm for pair in pairs for arm in pair))
    ends = ", ".join(_ends_at(evidence, arm) for arm in arms)
    measured = "; ".join([ends, *(f"{c.arm} above {c.against} by {c.difference}" for c in contrasts)])
    numbers, fallen = {arm: evidence.mean(arm) for arm in arms}, evidence.collapses(*arms)
    return replace(found, measured=measured, numbers=numbers, contrasts=contrasts, collapses=fallen)


def _with_collapses(evidence: Evidence, pairs: Sequence[tuple[str, str]], found: Verdict) -> Verdict:
    """Withdraw a verdict in favour of an arm with more collapsed runs."""
    share = {arm: len(evidence.collapses(arm)) / len(evidence.runs(arm)) for pair in pairs for arm in pair}
    for first, second in pairs:
        more = {
            AGREES: "of the arm that ends higher collapsed" if share[first] > share[second] else "",
            DISAGREES: "of the arm that ends higher collapsed" if share[first] < share[second] and len(pairs) == 1 else "",
            NO_DIFFERENCE: "of one arm collapsed than of the other" if share[first] != share[second] else "",
        }.get(found.verdict)
        if more:
            return replace(found, verdict=CANNOT_TELL, reason=f"{found.reason}, but more runs {more}")
    return found


def _of_runs(hits: Sequence[bool], others: Sequence[bool] = ()) -> Verdict:
    """Decide a claim about single runs.

    ``agrees`` if it holds in all runs of the arm and in none of the other arm (which lacks the cause); ``disagrees`` if it
    holds in no run of the arm.
    """
    reason = f"it holds in {sum(hits)} of {len(hits)} runs"
    reason += f", and in {sum(others)} of {len(others)} of the other arm" if others else ""
    verdict: VerdictName = AGREES if all(hits) and not any(others) else CANNOT_TELL
    return Verdict(verdict=verdict if any(hits) else DISAGREES, reason=reason)


def _require_a_difference(evidence: Evidence, first: str, second: str) -> None:
    """Raise NotMeasured if two arms have identical results, so that their settings made no difference."""
    if identical(evidence.runs(first), evidence.runs(second)):
        raise NotMeasured(f"{first} and {second} have identical results: the settings in which they differ had no effect")


def _ends_at(evidence: Evidence, arm: str) -> str:
    """``ARM MEAN``, and how many of its runs collapsed."""
    fallen, runs = len(evidence.collapses(arm)), len(evidence.runs(arm))
    return f"{arm} {evidence.mean(arm):.3f}" + (f" ({fallen} of {runs} collapsed)" if fallen else "")


def _means(means: dict[str, float]) -> str:
    return ", ".join(f"{name} {mean:.3f}" for name, mean in means.items())


# ------------------------------------------------------------------------------------------- kinds: rewards


def ends_above(evidence: Evidence, better: str, worse: str, margin: float | None = None) -> Verdict:
    """Arm ``better`` ends above arm ``worse``."""
    return _by_reward(evidence, [(better, worse)], margin=margin)


def not_below(evidence: Evidence, better: str, worse: str | list[str], margin: float) -> Verdict:
    """Arm ``better`` ends at most ``margin`` below each of ``worse``, after the same number of steps."""
    rivals = [worse] if isinstance(worse, str) else worse
    steps = {
        arm: {int(run.validation["step"].iloc[-1]) for run in evidence.runs(arm) if run.metrics["diverged_step"] is None}
        for arm in (better, *rivals)
    }
    if len(set().union(*steps.values())) > 1:
        taken = ", ".join(f"{arm} {sorted(of_arm)}" for arm, of_arm in steps.items())
        raise NotMeasured(f"the runs took different numbers of steps: {taken}")
    return _by_reward(evidence, [(better, rival) for rival in rivals], bar=-margin)


def method_above(evidence: Evidence, other: Evidence, margin: float | None = None) -> Verdict:
    """The best arm of this method ends above the best arm of the ``other`` experiment.

    The leaders represent their methods, not the winners, which may win a tie because they are simpler. Each leader is the best
    of several arms, so the interval is adjusted for the number of arms of the method that has more.
    """
    names = f"{evidence.experiment}/{evidence.leader}", f"{other.experiment}/{other.leader}"
    contrasts = max(len(evidence.arms), len(other.arms))
    first, second = other.final(other.leader), evidence.final(evidence.leader)
    contrast = Contrast(*names, difference_of(first, second), difference_of(first, second, simultaneous(contrasts)), contrasts)
    found = decide([contrast.difference], margin=margin)
    assert found.p is not None
    p = min(1.0, found.p * contrasts)
    if found.decided and p >= ALPHA:
        reason = f"{found.reason}, but not once the number of arms is taken into account"
        found = replace(found, verdict=CANNOT_TELL, reason=reason)
    means = {names[0]: evidence.mean(evidence.leader), names[1]: other.mean(other.leader)}
    measured = f"{_means(means)}; difference {contrast.difference}"
    return replace(found, measured=measured, numbers=means, contrasts=(contrast,), p=p)


def starts_above(evidence: Evidence, better: str, worse: str, by: float) -> Verdict:
    """Before training, arm ``better`` has at least ``by`` more reward than arm ``worse``."""
    scores = {arm: first_scores(evidence.runs(arm)) for arm in (better, worse)}
    difference = difference_of(scores[worse], scores[better], fixed=True)
    means = {arm: float(values.mean()) for arm, values in scores.items()}
    measured = f"{_means(means)} before training; difference {difference}"
    contrast = Contrast(better, worse, difference, difference, 1)
    return replace(decide([difference], bar=by), measured=measured, numbers=means, contrasts=(contrast,))


def zero_shot_below(evidence: Evidence, prompt: str, below: float) -> Verdict:
    """The untrained model's accuracy under ``prompt`` is below ``below``."""
    if prompt not in evidence.baseline:
        raise NotMeasured(f"the study has no zero-shot evaluation under {prompt}")
    found = evidence.baseline[prompt]["accuracy"]
    verdict: VerdictName = AGREES if found["high"] < below else DISAGREES if found["low"] > below else CANNOT_TELL
    where = {AGREES: "lies below", DISAGREES: "lies above"}.get(verdict, "holds")
    numbers = {key: found[key] for key in ("value", "low", "high")}
    measured, reason = f"accuracy under {prompt} {format_interval(found)}", f"the interval {where} {below:g}"
    return Verdict(verdict=verdict, measured=measured, reason=reason, numbers=numbers)


def best_inside_range(evidence: Evidence) -> Verdict:
    """The best arm of a sweep lies between its first and its last arm, which both end below it.

    Disagrees if the best arm is the first or the last, and ends above all arms between them.
    """
    arms = _sweep(evidence, 3)
    best = max(arms, key=evidence.mean)
    inside = best not in (arms[0], arms[-1])
    found = _by_reward(evidence, [(best, arm) for arm in ([arms[0], arms[-1]] if inside else arms[1:-1])])
    verdict = found.verdict if inside or found.verdict != AGREES else DISAGREES
    where = "inside the range" if inside else "an end of the range"
    measured, reason = f"best is {best}, {where}; {found.measured}", f"{best} is {where}; {found.reason}"
    return replace(found, verdict=verdict, measured=measured, reason=reason)


def lags(evidence: Evidence, margin: float | None = None) -> Verdict:
    """The first arm of a sweep ends below the leader without having collapsed."""
    arms = _sweep(evidence, 2)
    first, leader = arms[0], evidence.leader
    fallen = evidence.collapses(first)
    if first == leader:
        measured, numbers = _ends_at(evidence, first), {first: evidence.mean(first)}
        return Verdict(verdict=DISAGREES, measured=measured, reason=f"{first} leads", numbers=numbers, collapses=fallen)
    found = _by_reward(evidence, [(leader, first)], margin=margin)
    if len(fallen) == len(evidence.runs(first)):
        return replace(found, verdict=DISAGREES, reason=f"{first} collapses")
    return replace(found, verdict=CANNOT_TELL, reason=f"some runs of {first} collapsed") if fallen else found


def descends(evidence: Evidence, arms: list[str], margin: float | None = None) -> Verdict:
    """Each arm ends below each arm before it; of ``arms``, those that the study has."""
    present = [arm for arm in arms if arm in evidence.arms]
    if len(present) < 2:
        raise NotMeasured(f"the study has {len(present)} of the arms {', '.join(arms)}, and two are needed")
    return _by_reward(evidence, list(combinations(present, 2)), margin=margin)


def collapses(evidence: Evidence, updates: int | None = None) -> Verdict:
    """All runs of a sweep's last arm collapse; with ``updates``, of the arm with the most updates per rollout batch.

    That arm must have at least ``updates`` updates. A run that never rises has not collapsed (:mod:`grpo.results.collapses`).
    """
    arm = _sweep(evidence, 2)[-1]
    if updates is not None:
        by_updates = {name: int(runs[0].config["updates_per_rollout_batch"]) for name, runs in evidence.arms.items()}
        arm = max(by_updates, key=lambda name: by_updates[name])
        if by_updates[arm] < updates:
            raise NotMeasured(f"the study has no arm with {updates} updates per rollout batch (most: {by_updates[arm]})")
    runs, fallen = evidence.runs(arm), evidence.collapses(arm)
    found = _of_runs([run.name in {one.run for one in fallen} for run in runs])
    start, best = float(first_scores(runs).mean()), float(np.mean([run.outcomes.mean(axis=1).max() for run in runs]))
    seen = "".join(f"; {one.run.split('/')[-1]}: from {one.reached:.3f} at step {one.step} ({one.seen_in})" for one in fallen)
    measured = f"{_ends_at(evidence, arm)}, started at {start:.3f}, best evaluation {best:.3f}{seen}"
    numbers = {"start": start, "best": best, "end": evidence.mean(arm)}
    return replace(found, measured=measured, numbers=numbers, collapses=fallen)


def _sweep(evidence: Evidence, fewest: int) -> list[str]:
    """The arms of a sweep, in its order.

    Raises:
        NotMeasured: it has fewer than ``fewest``.
    """
    if len(evidence.arms) < fewest:
        arms = "1 arm" if len(evidence.arms) == 1 else f"{len(evidence.arms)} arms"
        raise NotMeasured(f"the study has {arms} of a sweep that needs {fewest}")
    return list(evidence.arms)


# ----------------------------------------------------------------- kinds: norms, entropy, length, KL over the steps


def metric_larger(
    evidence: Evidence, larger: str, smaller: str, metric: str, late: bool = False, margin: float | None = None
) -> Verdict:
    """The level of ``metric`` is larger in arm ``larger`` than in arm ``smaller``; with ``late``, in the last quarter.

    Levels are medians over blocks of steps. The interval is that of the logarithm of their ratio; ``margin`` is a ratio.
    """
    _require_a_difference(evidence, larger, smaller)
    log = log_ratio(evidence.held(larger), evidence.held(smaller), metric, late)
    found = decide([log], margin=None if margin is None else math.log(margin))
    ratio = {key: math.exp(getattr(log, key)) for key in ("value", "low", "high")}
    reason = {
        AGREES: "the interval of the ratio lies above 1",
        DISAGREES: "the interval of the ratio lies below 1",
        NO_DIFFERENCE: f"the interval of the ratio lies within a factor of {margin}",
    }.get(found.verdict, "the interval of the ratio holds 1")
    when = " in the last quarter of the steps" if late else ""
    measured = (
        f"{metric}{when}: {larger} {ratio['value']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f}) times {smaller}; "
        f"the interval covers {log.covers}"
    )
    return replace(found, measured=measured, reason=reason, numbers=ratio, collapses=evidence.collapses(larger, smaller))


def metric_changes(evidence: Evidence, arm: str, metric: str, since: str, unlike: str | None = None, **bars: float) -> Verdict:
    """The final level of ``metric``, as a multiple of the run's first or highest level (``since``), meets a bar.

    It is ``below`` or ``above`` the bar, or ``within`` a factor either way, in all runs of ``arm`` and in none of ``unlike``.
    """
    arms, ((counts, bar),) = [arm, *([unlike] if unlike else [])], bars.items()
    times = {name: changes(evidence.held(name), metric, since) for name in arms}
    found = _of_runs(*([bool(BARS[counts](one, bar)) for one in of_arm] for of_arm in times.values()))
    texts = "; ".join(f"{name} {_listed(of_arm)}" for name, of_arm in times.items())
    measured = f"{metric} at the end as a multiple of its {since} level ({counts} {bar:g} counts): {texts}"
    numbers = {name: float(np.median(of_arm)) for name, of_arm in times.items()}
    return replace(found, measured=measured, numbers=numbers, collapses=evidence.collapses(*arms))


BARS: dict[str, Callable[[float, float], bool]] = {
    "below": lambda times, bar: times < bar,
    "above": lambda times, bar: times > bar,
    "within": lambda times, bar: 1 / bar <= times <= bar,
}


def falls(evidence: Evidence, arm: str, unlike: str, metric: str, below: float) -> Verdict:
    """The ``metric`` ends under ``below`` times the untrained model's, in ``arm`` and not in ``unlike``."""
    texts, hits, numbers = [], [], {}
    for name in (arm, unlike):
        ends = np.array([run.validation[metric].iloc[[0, -1]].to_numpy(dtype=float) for run in evidence.runs(name)])
        hits.append([bool(last < below * first) for first, last in ends])
        first, last = ends.mean(axis=0)
        numbers[name] = float(last / first) if first else math.nan
        texts.append(f"{name} from {first:.1f} to {last:.1f}")
    measured = f"{metric} (below {below:g} of its start counts): {'; '.join(texts)}"
    return replace(_of_runs(*hits), measured=measured, numbers=numbers)


def blows_up(evidence: Evidence, arm: str, unlike: str, metric: str, times: float) -> Verdict:
    """The peaks of ``metric`` in ``arm`` are above ``times`` those in the arm ``unlike`` it, seed by seed."""
    _require_a_difference(evidence, arm, unlike)
    high, low = (peaks(evidence.runs(name), metric) for name in (arm, unlike))
    found = _of_runs([bool(ratio > times) for ratio in high / low])
    measured = (
        f"peaks of {metric} (90% quantile over blocks of steps of the largest in a block): "
        f"{arm} {_listed(high)}; {unlike} {_listed(low)}; more than {times:g} times as high counts"
    )
    numbers = {"ratio": float(np.median(high / low)), arm: float(np.median(high)), unlike: float(np.median(low))}
    return replace(found, measured=measured, numbers=numbers, collapses=evidence.collapses(arm, unlike))


def warns(evidence: Evidence, metric: str, times: float) -> Verdict:
    """Before the reward falls, ``metric`` exceeds ``times`` its level in steady runs, in each collapsed run."""
    fallen = evidence.collapses(*evidence.arms)
    names = {collapse.run for collapse in fallen}
    steady = [run for runs in evidence.arms.values() for run in runs if run.name not in names]
    if not fallen or not steady:
        raise NotMeasured(f"{len(fallen)} runs collapsed and {len(steady)} held, and both are needed")
    level = float(np.median(np.concatenate([blocks(per_step(run, metric)) for run in steady])))
    by_name = {run.name: run for runs in evidence.arms.values() for run in runs}
    ratios = [_until_fallen(by_name[collapse.run], metric) / level for collapse in fallen]
    measured = (
        f"highest {metric} before the reward had fallen, as a multiple of the median {level:.3f} of the {len(steady)} runs "
        f"that held: {_listed(np.array(ratios))}; more than {times:g} counts"
    )
    numbers = {"ratio": float(np.median(ratios)), "level": level}
    return replace(_of_runs([ratio > times for ratio in ratios]), measured=measured, numbers=numbers, collapses=fallen)


def _until_fallen(run: Run, metric: str) -> float:
    """The highest value up to the evaluation where, after the best one, the reward is first below half of the best."""
    means = run.outcomes.mean(axis=1)
    best = int(means.argmax())
    low = [place for place in range(best + 1, len(means)) if means[place] < 0.5 * means[best]]
    until = int(run.validation["step"].iloc[low[0]]) if low else int(run.validation["step"].iloc[-1])
    steps = run.history["step"].unique()
    return float(per_step(run, metric, "max")[steps <= until].max())


def _listed(values: Sequence[float] | np.ndarray[Any, Any]) -> str:
    return ", ".join(f"{one:.2f}" for one in values)


def rises_with_kl(evidence: Evidence, arm: str) -> Verdict:
    """The reward ends above its start while the KL to the starting policy grows with the steps.

    The KL grows if its blocks of steps rank with their order (Kendall's tau above 0.5) in all runs.
    """
    runs = evidence.runs(arm)
    rise = gain(evidence.held(arm), evidence.last_k)
    levels = [blocks(per_step(run, KL)) for run in runs]
    if min(len(of_run) for of_run in levels) < 3:
        raise NotMeasured("the runs took too few steps")
    reward, kl = decide([rise]), _of_runs([bool(stats.kendalltau(range(len(one)), one).statistic > 0.5) for one in levels])
    first, last = (float(np.mean([of_run[end] for of_run in levels])) for end in (0, -1))
    return replace(
        reward,
        verdict=next((verdict for verdict in (DISAGREES, CANNOT_TELL) if verdict in (reward.verdict, kl.verdict)), AGREES),
        measured=f"answer reward above its start by {rise}; KL per token from {first:.4f} to {last:.4f} nats",
        reason=f"of the reward {reward.reason}; of growing KL {kl.reason}",
        numbers={"first": first, "last": last},
        contrasts=(Contrast(arm, "start", rise, rise, 1),),
        collapses=evidence.collapses(arm),
    )


# Events that may happen at any step: runs shorter than the horizon can confirm such a claim, but not refute it.
EVENTS = {"collapses", "falls", "blows_up"}

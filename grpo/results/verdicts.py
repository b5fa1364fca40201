"""The tests that decide claims: what each kind measures, and when it agrees, disagrees or cannot tell."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from grpo.results.evidence import Evidence, NotMeasured
from grpo.results.runs import COLLAPSED, Run, collapsed, first_scores, identical
from grpo.results.statistics import format_interval, two_level_difference

AGREES, DISAGREES, CANNOT_TELL = "agrees", "disagrees", "cannot tell"

KL = "kl/per_token_low_variance"
BLOCK = 5  # steps; gradient norms of neighbouring steps are dependent, those of blocks much less
# With n blocks the interval leaves zero out whenever all point the same way. Of equal arms fewer than six do so by chance in
# more than 1 of 20 studies (2 / 2**5 = 0.06).
FEWEST_BLOCKS = 6

Parameters = dict[str, Any]
Difference = dict[str, float]  # ``value``, ``low``, ``high``, ...: as two_level_difference gives it


class Judgement(NamedTuple):
    """What a test found.

    Attributes:
        measured: in words.
        verdict: ``agrees``, ``disagrees`` or ``cannot tell``.
        differences: of answer rewards, in the claim's direction, by what they are between; empty where the test is of
            another kind.
    """

    measured: str
    verdict: str
    differences: dict[str, Difference] = {}


def _above(low: float, high: float, bar: float = 0.0) -> str:
    """Whether a number with this interval is above ``bar``; an end that lies on the bar tells nothing."""
    if low > bar:
        return AGREES
    return DISAGREES if high < bar else CANNOT_TELL


def _of_all(hits: list[bool]) -> str:
    """``agrees`` if it is so in all runs, ``disagrees`` if in none."""
    if all(hits):
        return AGREES
    return CANNOT_TELL if any(hits) else DISAGREES


def _only(hits: list[bool], others: list[bool]) -> str:
    """``agrees`` if it is so in all runs of an arm and in none of another, ``disagrees`` if in none of its own.

    The other arm lacks the claimed cause: where it is so in both, the cause is another one.
    """
    return CANNOT_TELL if any(others) and any(hits) else _of_all(hits)


def _ends_at(evidence: Evidence, arm: str) -> str:
    """``ARM MEAN``, and how many of its runs diverged: those count by the last evaluations before they were stopped."""
    runs = evidence.runs(arm)
    diverged = sum(_diverged(run) for run in runs)
    return f"{arm} {evidence.final(arm).mean():.3f}" + (f" ({diverged} of {_count(runs)} diverged)" if diverged else "")


def _diverged(run: Run) -> bool:
    return run.metrics["diverged_step"] is not None


def _count(runs: list[Run]) -> str:
    return f"{len(runs)} run{'s' if len(runs) > 1 else ''}"


def ends_above(parameters: Parameters, evidence: Evidence) -> Judgement:
    """Final answer reward of ``better`` minus that of ``worse``: agrees if low > 0, disagrees if high < 0."""
    _require_a_difference(evidence, parameters["better"], parameters["worse"])
    better, worse = parameters["better"], parameters["worse"]
    measured, difference = _final_difference(evidence, better, worse)
    return Judgement(measured, _above(difference["low"], difference["high"]), {f"{better} above {worse}": difference})


def _require_a_difference(evidence: Evidence, first: str, second: str) -> None:
    """Raise NotMeasured where two arms trained alike, so that nothing of what sets them apart was tried."""
    if identical(evidence.runs(first), evidence.runs(second)):
        raise NotMeasured(f"{first} and {second} trained alike to the last number: what they differ in played no part")


def _final_difference(evidence: Evidence, better: str, worse: str) -> tuple[str, dict[str, float]]:
    difference = two_level_difference(evidence.final(worse), evidence.final(better))
    measured = f"{_ends_at(evidence, better)}, {_ends_at(evidence, worse)}; difference {format_interval(difference)}"
    return measured, difference


def not_below(parameters: Parameters, evidence: Evidence) -> Judgement:
    """Non-inferiority: agrees if ``better`` minus ``worse`` has low > -margin, disagrees if high < -margin.

    Of several arms ``worse`` the one with the highest mean counts, so that the claim is held against the hardest of them. All
    runs that did not diverge must have taken as many steps.
    """
    worse, margin = parameters["worse"], parameters["margin"]
    rivals = [worse] if isinstance(worse, str) else worse
    steps = {
        arm: {int(run.validation["step"].iloc[-1]) for run in evidence.runs(arm) if not _diverged(run)}
        for arm in (parameters["better"], *rivals)
    }
    if len(set().union(*steps.values())) > 1:
        taken = ", ".join(f"{arm} {sorted(of_arm)}" for arm, of_arm in steps.items())
        raise NotMeasured(f"the runs took different numbers of steps: {taken}")
    rival = hardest(worse, evidence)
    measured, difference = _final_difference(evidence, parameters["better"], rival)
    verdict = _above(difference["low"], difference["high"], -margin)
    return Judgement(f"{measured}; margin {margin:g}", verdict, {f"{parameters['better']} above {rival}": difference})


def hardest(worse: str | list[str], evidence: Evidence) -> str:
    """Of one arm, or of several, the one with the highest mean."""
    return max([worse] if isinstance(worse, str) else worse, key=lambda arm: float(evidence.final(arm).mean()))


def winner_above(parameters: Parameters, evidence: Evidence) -> Judgement:
    """Final answer reward of the winner minus that of experiment ``other``: agrees if low > 0, disagrees if high < 0."""
    other = evidence.other
    assert other is not None
    difference = two_level_difference(other.final(other.winner), evidence.final(evidence.winner))
    measured = (
        f"{_ends_at(evidence, evidence.winner)}; {parameters['other']}: {_ends_at(other, other.winner)}; "
        f"difference {format_interval(difference)}"
    )
    between = f"{evidence.winner} above {other.winner} of {parameters['other']}"
    return Judgement(measured, _above(difference["low"], difference["high"]), {between: difference})


def starts_above(parameters: Parameters, evidence: Evidence) -> Judgement:
    """Untrained answer reward of ``better`` minus that of ``worse``: agrees if low > margin, disagrees if high < margin."""
    better, worse, margin = parameters["better"], parameters["worse"], parameters["margin"]
    scores = {arm: first_scores(evidence.runs(arm)) for arm in (better, worse)}
    difference = two_level_difference(scores[worse], scores[better])
    means = ", ".join(f"{arm} {values.mean():.3f}" for arm, values in scores.items())
    measured = f"{means} before training; difference {format_interval(difference)}; margin {margin:g}"
    return Judgement(measured, _above(difference["low"], difference["high"], margin), {f"{better} above {worse}": difference})


def zero_shot_below(parameters: Parameters, evidence: Evidence) -> Judgement:
    """Accuracy of the untrained model under ``prompt``: agrees if high < below, disagrees if low > below."""
    prompt, below = parameters["prompt"], parameters["below"]
    if prompt not in evidence.baseline:
        raise NotMeasured(f"the study has no zero-shot evaluation under {prompt}")
    accuracy = evidence.baseline[prompt]["accuracy"]
    measured = f"accuracy under {prompt} {format_interval(accuracy)}; near zero means below {below:g}"
    return Judgement(measured, _above(-accuracy["high"], -accuracy["low"], -below))


def best_inside_range(parameters: Parameters, evidence: Evidence) -> Judgement:
    """The best arm of a sweep, whose arms stand in the sweep's order.

    Agrees if it lies between the ends and the differences to both ends have low > 0; disagrees if it is an end and its
    differences to all arms between the ends have low > 0.
    """
    arms = list(evidence.arms)
    means = {arm: float(evidence.final(arm).mean()) for arm in arms}
    best = max(arms, key=lambda arm: means[arm])  # max keeps the first of equals
    ends, inner = [arms[0], arms[-1]], arms[1:-1]
    shown = ends if best in inner else [arm for arm in arms if arm != best]
    ahead = {arm: two_level_difference(evidence.final(arm), evidence.final(best)) for arm in shown}
    decisive = [ahead[arm]["low"] > 0 for arm in (ends if best in inner else inner)]
    where = "inside the range" if best in inner else "an end of the range"
    measured = "; ".join(
        [f"best {best} ({means[best]:.3f}), {where}", *(f"above {a} by {format_interval(d)}" for a, d in ahead.items())]
    )
    differences = {f"{best} above {arm}": difference for arm, difference in ahead.items()}
    if not decisive or not all(decisive):
        return Judgement(measured, CANNOT_TELL, differences)
    return Judgement(measured, AGREES if best in inner else DISAGREES, differences)


def lags(parameters: Parameters, evidence: Evidence) -> Judgement:
    """The first arm of a sweep, whose arms stand in the sweep's order, against the best: it is behind, and has not fallen back.

    Agrees if the difference to the best arm has low > 0 and no run of the first has collapsed; disagrees if it is the best
    itself, or all its runs have collapsed.
    """
    first, best = next(iter(evidence.arms)), max(evidence.arms, key=lambda arm: float(evidence.final(arm).mean()))
    course, fallen = _course(evidence, first)
    if first == best:
        return Judgement(f"{course}; it is the best", DISAGREES)
    behind = two_level_difference(evidence.final(first), evidence.final(best))
    measured = f"{course}; below {best} ({evidence.final(best).mean():.3f}) by {format_interval(behind)}"
    differences = {f"{best} above {first}": behind}
    if all(fallen):
        return Judgement(measured, DISAGREES, differences)
    return Judgement(measured, AGREES if behind["low"] > 0 and not any(fallen) else CANNOT_TELL, differences)


def collapses(parameters: Parameters, evidence: Evidence) -> Judgement:
    """The last arm of a sweep: whether its runs fall from what they had reached (:func:`grpo.results.runs.collapsed`).

    A run that never rises has not collapsed, however far it stays behind others. Agrees if all runs have, disagrees if none
    has. With ``updates``, the arm with the most updates per rollout batch takes the last one's place, and must have so many.
    """
    arm, updates = list(evidence.arms)[-1], parameters.get("updates")
    if updates is not None:
        by_updates = {name: int(runs[0].config["updates_per_rollout_batch"]) for name, runs in evidence.arms.items()}
        arm = max(by_updates, key=lambda name: by_updates[name])
        if by_updates[arm] < updates:
            raise NotMeasured(f"the study has no arm with {updates} updates per rollout batch (most: {by_updates[arm]})")
    course, fallen = _course(evidence, arm)
    return Judgement(course, _of_all(fallen))


def _course(evidence: Evidence, arm: str) -> tuple[str, list[bool]]:
    """Where an arm started, how high it came and where it ended, in words; and which of its runs collapsed."""
    runs = evidence.runs(arm)
    best = float(np.mean([run.outcomes.mean(axis=1).max() for run in runs]))
    fallen = [collapsed(run, evidence.last_k) for run in runs]
    course = (
        f"started at {first_scores(runs).mean():.3f}, reached {best:.3f}; {sum(fallen)} of {_count(runs)} collapsed "
        f"(diverged, or fell below {COLLAPSED:g} of its own best)"
    )
    return f"{_ends_at(evidence, arm)}, {course}", fallen


def falls(parameters: Parameters, evidence: Evidence) -> Judgement:
    """Metric at a run's last evaluation, as a share of the untrained one, in ``arm`` and in the arm ``unlike`` it.

    Agrees if all runs of ``arm`` are below and none of ``unlike``, disagrees if none of ``arm`` is.
    """
    metric, below = parameters["metric"], parameters["below"]
    texts, hits = {}, {}
    for arm in (parameters["arm"], parameters["unlike"]):
        runs = evidence.runs(arm)
        first = np.array([run.validation[metric].iloc[0] for run in runs])
        last = np.array([run.validation[metric].iloc[-1] for run in runs])
        hits[arm] = [bool(share < below) for share in last / first]
        texts[arm] = f"{arm} from {first.mean():.1f} to {last.mean():.1f} in {sum(hits[arm])} of {_count(runs)}"
    return Judgement(f"{metric} below {below:g} of its start: {'; '.join(texts.values())}", _only(*hits.values()))


def descends(parameters: Parameters, evidence: Evidence) -> Judgement:
    """Each arm of the experiment, or of those in ``arms`` that the study has, against all that stand before it.

    Agrees if each ends below each before it (low > 0), disagrees if one ends above one before it (high < 0).
    """
    arms = arms_in_order(parameters, evidence)
    pairs = list(itertools.combinations(arms, 2))
    if not pairs:
        raise NotMeasured("the study has only one arm")
    drops = {pair: two_level_difference(evidence.final(pair[1]), evidence.final(pair[0])) for pair in pairs}
    means = ", ".join(_ends_at(evidence, arm) for arm in arms)
    measured = "; ".join([means, *(f"{a} above {b} by {format_interval(drop)}" for (a, b), drop in drops.items())])
    differences = {f"{first} above {second}": drop for (first, second), drop in drops.items()}
    if any(drop["high"] < 0 for drop in drops.values()):
        return Judgement(measured, DISAGREES, differences)
    return Judgement(measured, AGREES if all(drop["low"] > 0 for drop in drops.values()) else CANNOT_TELL, differences)


def arms_in_order(parameters: Parameters, evidence: Evidence) -> list[str]:
    """The arms that :func:`descends` compares."""
    return [arm for arm in parameters.get("arms", evidence.arms) if arm in evidence.arms]


def smaller_gradient_norms(parameters: Parameters, evidence: Evidence) -> Judgement:
    """Gradient norms of ``larger`` minus those of ``smaller``: agrees if low > 0, disagrees if high < 0.

    A step's norm is the mean over its optimizer steps. Only steps that all runs of both arms have count, without those where
    a norm is not finite. Blocks of consecutive steps take the place of problems.
    """
    smaller, larger = parameters["smaller"], parameters["larger"]
    _require_a_difference(evidence, smaller, larger)
    tables = {arm: pd.concat([_norms(run) for run in evidence.runs(arm)], axis=1, join="inner") for arm in (smaller, larger)}
    steps = tables[smaller].index.intersection(tables[larger].index).sort_values()
    norms = {arm: table.loc[steps].to_numpy(dtype=float) for arm, table in tables.items()}
    infinite = {arm: ~np.isfinite(values).all(axis=1) for arm, values in norms.items()}
    kept = ~(infinite[smaller] | infinite[larger])
    norms = {arm: values[kept] for arm, values in norms.items()}
    n = int(kept.sum())
    left_out = ", ".join(f"{arm} {count.sum()}" for arm, count in infinite.items() if count.any())
    tail = f"; steps left out because a norm is not finite: {left_out}" if left_out else ""
    if n < FEWEST_BLOCKS * BLOCK:
        return Judgement(f"only {n} steps in common, too few for an interval{tail}", CANNOT_TELL)
    difference = two_level_difference(_blocks(norms[smaller]), _blocks(norms[larger]))
    means = ", ".join(f"{arm} {norms[arm].mean():.3f}" for arm in (smaller, larger))
    measured = f"mean gradient norm over {n} steps: {means}; difference {format_interval(difference)}{tail}"
    return Judgement(measured, _above(difference["low"], difference["high"]))


def norms_blow_up(parameters: Parameters, evidence: Evidence) -> Judgement:
    """Gradient norms over a run, in ``arm`` and in the arm ``unlike`` it.

    They blow up if their mean over the last quarter of the steps is above ``times`` that over the first, or not finite. Agrees
    if they do in all runs of ``arm`` and in none of ``unlike``, disagrees if in none of ``arm``.
    """
    times = parameters["times"]
    texts, hits = {}, {}
    for arm in (parameters["arm"], parameters["unlike"]):
        runs = evidence.runs(arm)
        ends = [(quarters[0], quarters[-1]) for quarters in (_quarters(_norms(run).to_numpy(dtype=float)) for run in runs)]
        hits[arm] = [not np.isfinite(last) or bool(last > times * first) for first, last in ends]
        first, last = np.mean(ends, axis=0)
        texts[arm] = f"{arm} from {first:.3f} to {last:.3f}, in {sum(hits[arm])} of {_count(runs)}"
    measured = f"mean gradient norm of the last quarter of the steps above {times:g} times that of the first: "
    return Judgement(measured + "; ".join(texts.values()), _only(*hits.values()))


def _norms(run: Run) -> pd.Series[float]:
    """Mean gradient norm of each step, infinite where that of one of its optimizer steps is not finite."""
    norms = run.history["gradient_norm"]
    return norms.where(np.isfinite(norms), np.inf).groupby(run.history["step"]).mean()  # mean() would pass over a NaN


def _blocks(norms: NDArray[np.float64]) -> NDArray[np.float64]:
    """(steps, runs) to (runs, blocks): means of BLOCK consecutive steps, of a few more where the steps do not divide."""
    return np.stack([block.mean(axis=0) for block in np.array_split(norms, len(norms) // BLOCK)], axis=1)


def rises_with_kl(parameters: Parameters, evidence: Evidence) -> Judgement:
    """Answer reward at the end against the start, while the KL to the starting policy grows.

    The KL of a run grows steadily if its mean over each quarter of the steps is above that over the quarter before. Agrees if
    the reward's difference has low > 0 and the KL grows so in every run; disagrees if high < 0 or it does in none.
    """
    runs = evidence.runs(parameters["arm"])
    if any(KL not in run.history for run in runs):
        raise NotMeasured(f"the runs of {parameters['arm']} have no {KL}")
    gain = two_level_difference(first_scores(runs), evidence.final(parameters["arm"]))
    quarters = [_quarters(run.history.groupby("step")[KL].mean().to_numpy(dtype=float)) for run in runs]
    grows = [len(means) > 1 and bool((np.diff(means) > 0).all()) for means in quarters]
    first, last = (float(np.mean([means[end] for means in quarters])) for end in (0, -1))
    measured = (
        f"answer reward above its start by {format_interval(gain)}; KL per token from {first:.4f} to {last:.4f} nats, "
        f"growing from each quarter of the steps to the next in {sum(grows)} of {_count(runs)}"
    )
    reward, kl = _above(gain["low"], gain["high"]), _of_all(grows)
    differences = {f"{parameters['arm']} above its start": gain}
    if DISAGREES in (reward, kl):
        return Judgement(measured, DISAGREES, differences)
    return Judgement(measured, AGREES if reward == kl == AGREES else CANNOT_TELL, differences)


def _quarters(values: NDArray[np.floating[Any]]) -> NDArray[np.float64]:
    """Mean of each quarter, in their order; of each value where there are fewer than four."""
    return np.array([part.mean() for part in np.array_split(values, min(4, len(values)))])


KINDS: dict[str, Callable[[Parameters, Evidence], Judgement]] = {
    "ends_above": ends_above,
    "not_below": not_below,
    "winner_above": winner_above,
    "starts_above": starts_above,
    "zero_shot_below": zero_shot_below,
    "best_inside_range": best_inside_range,
    "lags": lags,
    "collapses": collapses,
    "falls": falls,
    "descends": descends,
    "smaller_gradient_norms": smaller_gradient_norms,
    "norms_blow_up": norms_blow_up,
    "rises_with_kl": rises_with_kl,
}

"""An experiment's numbers, and the sentences on them (templates/experiment_sentences.md.j2)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, is_dataclass
from typing import Any

import pandas as pd

from grpo.reporting.curves import FORM, LENGTH
from grpo.reporting.sentences import paragraphs
from grpo.reporting.trends import MEASURES, trend_of
from grpo.results.findings import ArmResult, ExperimentResult
from grpo.results.runs import REWARD, Run, by_arm, gain, identical
from grpo.study.schema import Study

Numbers = dict[str, Any]
RUNS = ("all", "held")  # an arm's runs, which a result file leaves out
METHODS = {"grpo": "GRPO", "sft": "Supervised fine-tuning", "expert_iteration": "Expert iteration"}


@dataclass(frozen=True)
class Split:
    """Answer reward as the product of the form's share and the accuracy given the form."""

    form: float
    answer: float

    @property
    def within(self) -> float | None:
        """Accuracy given the form; None if no response has it, or if answers are rewarded without it."""
        return self.answer / self.form if 0 < self.form >= self.answer else None


def split(runs: list[Run], rows: slice) -> Split | None:
    """The split over some evaluations (``rows``) of all runs; None if the form was not measured."""
    if any(FORM not in run.validation for run in runs):
        return None
    form, answer = (sum(run.validation[c].iloc[rows].mean() for run in runs) / len(runs) for c in (FORM, REWARD))
    return Split(float(form), float(answer))


def numbers_of(study: Study, runs: list[Run], result: ExperimentResult) -> Numbers:
    """Compute the numbers in the sentences about an experiment.

    Returns:
        ``title``, ``method``, ``last_k``, ``reason`` (why the winner won), ``seeds``, ``problems``; ``steps`` (fewest and most
        of a run that did not collapse); ``changed`` (keys that its arms set); ``covers`` (what its intervals cover);
        ``contrasts`` (number of differences from the leader for which they are adjusted); ``arms`` (see :func:`_arm`); of
        these ``leader``, ``winner``, ``next`` (the nearest arm below), ``tied``, ``collapsed`` and ``alike`` (identical to the
        leader); ``nothing_right`` (whether no answer was right in any run).
    """
    of_arm = by_arm(runs)
    arms = [_arm(of_arm[arm.arm], arm, result.last_k, of_arm[result.leader]) for arm in result.arms]
    leader, winner = (next(arm for arm in arms if arm["arm"] == name) for name in (result.leader, result.winner))
    rivals = [arm for arm in arms if arm is not leader and (not arm["collapses"] or leader["collapses"])]
    ends = [
        int(run.validation["step"].iloc[-1])
        for arm in arms
        for run in arm["held"]
        if len(arm["collapses"]) < len(arm["runs"]) or leader["collapses"]
    ]
    keys, first = dict.fromkeys(key for arm in result.arms for key in arm.overrides), result.arms[0].overrides
    return {
        "experiment": result.experiment,
        "title": study.title(result.experiment),
        "method": METHODS[study.experiments[result.experiment].method],
        "steps": sorted({min(ends), max(ends)}),
        "last_k": result.last_k,
        "reason": result.reason,
        "seeds": len(leader["runs"]),
        "problems": runs[0].outcomes.shape[1],
        "changed": [key for key in keys if any(arm.overrides.get(key) != first.get(key) for arm in result.arms)],
        "covers": leader["final"].covers,
        "contrasts": max((arm.contrast.contrasts for arm in result.arms if arm.contrast), default=0),
        "arms": arms,
        "leader": leader,
        "winner": winner,
        "next": max(rivals, key=lambda arm: arm["final"].value, default=None),
        "tied": sorted((arm for arm in rivals if arm["arm"] in result.tied), key=lambda arm: -arm["final"].value),
        "collapsed": [arm for arm in arms if arm["collapses"]],
        "alike": [arm for arm in arms if arm["alike"]],
        "nothing_right": not any(run.outcomes.any() for run in runs),
    }


def _arm(runs: list[Run], result: ArmResult, last_k: int, leading: list[Run]) -> Numbers:
    """An arm's result, gain, form and accuracy given the form, response length, and the trends of its curves.

    All but ``final`` and ``start`` use ``held``: its runs that did not collapse, or all if all collapsed.
    """
    collapsed = {collapse.run for collapse in result.collapses}
    held = [run for run in runs if run.name not in collapsed] or runs
    first, last = slice(1), slice(-last_k, None)
    length = None
    if LENGTH in held[0].validation:
        length = [float(pd.concat([run.validation[LENGTH].iloc[rows] for run in held]).mean()) for rows in (first, last)]
    return {
        "arm": result.arm,
        "overrides": result.overrides,
        "runs": result.runs,  # names
        "all": runs,
        "held": held,
        "final": result.final,
        "start": result.start,
        "gain": gain(held, last_k),
        "below": None if result.contrast is None else result.contrast.turned().adjusted,
        "apart": result.contrast is not None and result.contrast.excludes_zero,
        "collapses": result.collapses,
        "before": split(held, first),
        "after": split(held, last),
        "length": length,
        "courses": {measure.key: (measure, course) for measure in MEASURES if (course := trend_of(held, measure))},
        "alike": runs is not leading and identical(runs, leading),
    }


def updates_of(arm: Numbers) -> int:
    """An arm's optimizer updates per rollout batch."""
    return int(arm["all"][0].config["updates_per_rollout_batch"])


def as_plain(value: Any) -> Any:
    """Convert numbers to plain values for a result file, without runs."""
    if isinstance(value, Mapping):
        return {key: as_plain(of) for key, of in value.items() if key not in RUNS}
    if isinstance(value, Split):
        return asdict(value) | {"within": value.within}
    if is_dataclass(value) and not isinstance(value, type):
        return as_plain(asdict(value))
    return [as_plain(of) for of in value] if isinstance(value, list | tuple) else value


def result_paragraphs(numbers: Numbers, with_courses: bool) -> list[str]:
    """Paragraphs on an experiment: the leader and its margin first, then losses, collapses and curves.

    Args:
        with_courses: whether to describe the curves of entropy, length and gradient norm.
    """
    ratios = []  # of arms whose ratios to the sampling policy are not all 1
    for arm in numbers["arms"]:
        history = pd.concat([run.history for run in arm["all"]])
        if "ratio_max" in history and (history["ratio_max"] != 1).any():
            low, high, clipped = history["ratio_min"].min(), history["ratio_max"].max(), history["clip_fraction"].mean()
            ratios.append({"arm": arm["arm"], "low": low, "high": high, "clipped": clipped})
    return paragraphs("experiment_sentences.md.j2", n=numbers, ratios=ratios, with_courses=with_courses)

"""Comparisons that a study could not decide, with the seeds or problems that would decide them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from grpo.common.yaml_file import parse_yaml
from grpo.results.claims import PUBLISHED, read_verdicts, shown
from grpo.results.evidence import evidence_of
from grpo.results.experiments import read_result
from grpo.results.findings import CANNOT_TELL, Contrast, Verdict
from grpo.results.power import problems_needed, seeds_needed, spread_of
from grpo.study.schema import Study

SELECTION = "selection"
ROUNDING = 1e-9  # a difference below it is zero


class _Undecided(NamedTuple):
    """A contrast whose interval contains ``bar``; its arms are ``EXPERIMENT/ARM``."""

    contrast: Contrast
    asked_by: str  # a claim's id or ``selection``
    bar: float = 0.0


def undecided(study: Study) -> list[dict[str, Any]]:
    """List the undecided comparisons, a row for each pair of arms.

    Returns:
        ``experiments`` and ``arms`` (first, second), ``asked_by``, ``bar``, ``measured`` (second - first, with its interval),
        ``seeds`` (the study's), ``problems`` (their number), ``spread`` (variances; None with one seed). ``seeds_needed`` is
        the number that would detect a true difference of the measured size with a probability of 0.8; ``problems_needed`` is
        given if no number of seeds does. Both are None if unknown. ``needs_runs_of`` lists the experiments that more
        seeds would run.

    Raises:
        UserError: a run or a result file is missing.
    """
    found: dict[tuple[str, ...], dict[str, Any]] = {}
    for contrast, asked_by, bar in [*_of_selections(study), *_of_claims(study)]:
        arms = (contrast.against, contrast.arm)
        names = (*arms, str(bar)) if bar else tuple(sorted(arms))  # with a bar of zero in any order
        if names not in found:
            found[names] = _row(study, contrast, bar)
        if asked_by not in found[names]["asked_by"]:
            found[names]["asked_by"].append(asked_by)
    return list(found.values())


def not_a_matter_of_seeds(study: Study) -> list[Verdict]:
    """The claims with the verdict ``cannot tell`` for another reason than an interval that contains the bar."""
    asked = {one.asked_by for one in _of_claims(study)}
    return [verdict for verdict in _cannot_tell(study) if verdict.claim not in asked]


def _of_selections(study: Study) -> Iterator[_Undecided]:
    """The leader of each experiment against each arm that cannot be told from it."""
    for experiment in study.made:
        result = read_result(study, experiment)
        for arm in result.arms:
            if arm.contrast and not arm.contrast.excludes_zero and arm.contrast.difference.value:
                yield _Undecided(_named(arm.contrast.turned(), experiment), SELECTION)


def _of_claims(study: Study) -> Iterator[_Undecided]:
    """The contrasts of final rewards that left a claim undecided."""
    published = {claim["id"]: claim for claim in parse_yaml(PUBLISHED)["claims"]}
    for verdict in _cannot_tell(study):
        (kind,) = published[verdict.claim]["test"]
        bar = -(verdict.margin or 0.0) if kind == "not_below" else 0.0
        for contrast in verdict.contrasts:
            if contrast.against != "start" and contrast.adjusted.low <= bar <= contrast.adjusted.high:
                yield _Undecided(_named(contrast, verdict.experiment), verdict.claim, bar)


def _named(contrast: Contrast, experiment: str) -> Contrast:
    """The contrast with arms as ``EXPERIMENT/ARM``."""
    arm, against = (name if "/" in name else f"{experiment}/{name}" for name in (contrast.arm, contrast.against))
    return replace(contrast, arm=arm, against=against)


def _cannot_tell(study: Study) -> list[Verdict]:
    return [verdict for verdict in shown(read_verdicts(), study) if verdict.verdict == CANNOT_TELL]


def _row(study: Study, contrast: Contrast, bar: float) -> dict[str, Any]:
    experiments, arms = zip(*(name.split("/") for name in (contrast.against, contrast.arm)), strict=True)
    first, second = (evidence_of(study, experiment).final(arm) for experiment, arm in zip(experiments, arms, strict=True))
    measured, distance = contrast.adjusted, contrast.adjusted.value - bar
    several = min(len(first), len(second)) > 1 and not np.array_equal(first, second)
    spread = spread_of(first, second) if several else None
    seeds = problems = None
    if spread is not None and abs(distance) > ROUNDING:
        seeds = seeds_needed(spread, distance)
        problems = None if seeds else problems_needed(spread, distance)
    return {
        "experiments": list(experiments),
        "arms": list(arms),
        "asked_by": [],
        "bar": bar,
        "measured": {key: getattr(measured, key) for key in ("value", "low", "high", "level")},
        "seeds": list(study.seeds),
        "problems": first.shape[1],
        "spread": None if spread is None else {key: getattr(spread, key) for key in ("runs", "problems", "rest")},
        "seeds_needed": seeds,
        "problems_needed": problems,
        "needs_runs_of": _with_predecessors(study, experiments),
    }


def _with_predecessors(study: Study, experiments: Iterable[str]) -> list[str]:
    """The experiments and all that they build on or start from, in the study's order."""
    needed, new = set[str](), set(experiments)
    while new:
        needed |= new
        new = {before for name in new for before in study.needed_experiments(name)} - needed
    return [name for name in study.made if name in needed]

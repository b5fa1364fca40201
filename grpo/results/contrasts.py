"""Comparisons that a study could not decide, with the seeds or problems that would decide them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from grpo.results.claims import PUBLISHED, read_verdicts, shown
from grpo.results.evidence import evidence_of
from grpo.results.experiments import read_result
from grpo.results.findings import CANNOT_TELL, Contrast, Verdict
from grpo.results.power import problems_needed, seeds_needed, spread_of
from grpo.study.schema import Study, read_yaml

SELECTION = "selection"
ROUNDING = 1e-9  # a difference below it is zero
Arm = tuple[str, str]  # experiment and arm


@dataclass(frozen=True)
class _Undecided:
    """A contrast whose interval contains ``bar``; ``asked_by`` is a claim's id or ``selection``."""

    contrast: Contrast
    arms: tuple[Arm, Arm]
    asked_by: str
    bar: float = 0.0

    @property
    def names(self) -> tuple[str, ...]:
        """Identity of a contrast: its arms, in any order if the bar is zero, and the bar."""
        arms = ["/".join(arm) for arm in self.arms]
        return (*arms, str(self.bar)) if self.bar else tuple(sorted(arms))


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
    for one in [*_of_selections(study), *_of_claims(study)]:
        known = found.setdefault(one.names, _row(study, one))
        if one.asked_by not in known["asked_by"]:
            known["asked_by"].append(one.asked_by)
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
                yield _Undecided(arm.contrast.turned(), ((experiment, arm.arm), (experiment, result.leader)), SELECTION)


def _of_claims(study: Study) -> Iterator[_Undecided]:
    """The contrasts of final rewards that left a claim undecided."""
    published = {claim["id"]: claim for claim in read_yaml(PUBLISHED)["claims"]}
    for verdict in _cannot_tell(study):
        (kind,) = published[verdict.claim]["test"]
        bar = -(verdict.margin or 0.0) if kind == "not_below" else 0.0
        for contrast in verdict.contrasts:
            if contrast.against != "start" and contrast.adjusted.low <= bar <= contrast.adjusted.high:
                arms = _arm(contrast.against, verdict), _arm(contrast.arm, verdict)
                yield _Undecided(contrast, arms, verdict.claim, bar)


def _arm(name: str, verdict: Verdict) -> Arm:
    experiment, _, arm = name.rpartition("/")
    return experiment or verdict.experiment, arm


def _cannot_tell(study: Study) -> list[Verdict]:
    return [verdict for verdict in shown(read_verdicts(), study) if verdict.verdict == CANNOT_TELL]


def _row(study: Study, one: _Undecided) -> dict[str, Any]:
    first, second = (evidence_of(study, experiment).final(arm) for experiment, arm in one.arms)
    several = min(len(first), len(second)) > 1 and not np.array_equal(first, second)
    measured, spread = one.contrast.adjusted, spread_of(first, second) if several else None
    distance, experiments = measured.value - one.bar, [experiment for experiment, _ in one.arms]
    known = spread is not None and abs(distance) > ROUNDING
    seeds = seeds_needed(spread, distance) if spread and known else None
    return {
        "experiments": experiments,
        "arms": [arm for _, arm in one.arms],
        "asked_by": [one.asked_by],
        "bar": one.bar,
        "measured": {key: getattr(measured, key) for key in ("value", "low", "high", "level")},
        "seeds": list(study.seeds),
        "problems": first.shape[1],
        "spread": None if spread is None else {key: getattr(spread, key) for key in ("runs", "problems", "rest")},
        "seeds_needed": seeds,
        "problems_needed": problems_needed(spread, distance) if spread and known and seeds is None else None,
        "needs_runs_of": _with_predecessors(study, experiments),
    }


def _with_predecessors(study: Study, experiments: list[str]) -> list[str]:
    """The experiments and all that they build on or start from, in the study's order."""
    needed, queue = set(), [*experiments]
    while queue:
        name = queue.pop()
        if name not in needed:
            needed.add(name)
            entry = study.experiments[name]
            starts = [str(arm["start_from"]).split("/")[0] for arm in entry.arms.values() if arm.get("start_from")]
            queue += [*starts, *([entry.builds_on] if entry.builds_on else [])]
    return [name for name in study.made if name in needed]

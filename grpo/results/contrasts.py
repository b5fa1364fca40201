"""The comparisons that a study's runs could not decide, each with what it would take to decide it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from grpo.common.files import read_json
from grpo.results.claims import BASELINE, PUBLISHED, about_this_study
from grpo.results.evidence import Evidence, evidence_of
from grpo.results.power import Spread, problems_needed, seeds_needed, spread_of
from grpo.results.runs import by_arm, final_scores, first_scores, read_runs, read_selection
from grpo.results.statistics import two_level_difference
from grpo.results.verdicts import CANNOT_TELL, Parameters, arms_in_order, hardest
from grpo.study import paths
from grpo.study.schema import Study, read_yaml

SELECTION = "selection"


@dataclass(frozen=True)
class Contrast:
    """Two arms, of which ``second`` is thought to score at least ``bar`` above ``first``.

    Attributes:
        experiments: that of the first and of the second arm.
        asked_by: the ids of the claims that ask it, or ``selection``.
        scores: of the first and of the second arm, (runs, problems) each.
    """

    experiments: tuple[str, str]
    first: str
    second: str
    scores: tuple[NDArray[np.float64], NDArray[np.float64]]
    asked_by: str
    bar: float = 0.0

    @property
    def names(self) -> tuple[str, ...]:
        """What makes two contrasts the same: their arms, in any order where the bar is zero, and the bar."""
        arms = f"{self.experiments[0]}/{self.first}", f"{self.experiments[1]}/{self.second}"
        return (*arms, str(self.bar)) if self.bar else tuple(sorted(arms))

    def difference(self) -> dict[str, float]:
        """The project's own interval of it."""
        return two_level_difference(*self.scores)

    def undecided(self) -> bool:
        """Whether the interval holds the bar."""
        found = self.difference()
        return found["low"] <= self.bar <= found["high"]


def undecided(study: Study) -> list[dict[str, Any]]:
    """What the study's runs cannot tell, and what it would take: a row for each pair of arms.

    Returns:
        ``experiments`` and ``arms`` (first, second), ``asked_by``, ``bar``, ``measured`` (second - first, with its interval),
        ``seeds`` (the study's) and ``problems`` (their number); ``spread`` (variances, None with one seed);
        ``seeds_needed`` to tell, with a chance of 0.8, a true difference of the size that was measured, and
        ``problems_needed`` where no number of seeds does (both None where neither is known); ``needs_runs_of``, the
        experiments whose runs more seeds would make.

    Raises:
        UserError: a run or a result file is missing.
    """
    found: dict[tuple[str, ...], dict[str, Any]] = {}
    for contrast in [*_of_selections(study), *_of_claims(study)]:
        known = found.setdefault(contrast.names, _row(study, contrast))
        if contrast.asked_by not in known["asked_by"]:
            known["asked_by"].append(contrast.asked_by)
    return list(found.values())


def not_a_matter_of_seeds(study: Study) -> list[dict[str, Any]]:
    """The claims that cannot be told for another reason than an interval that holds the bar, as in reports/claims.json."""
    asked = {contrast.asked_by for contrast in _of_claims(study)}
    return [claim for claim in _cannot_tell(study) if claim["id"] not in asked]


def _of_selections(study: Study) -> Iterator[Contrast]:
    """The leader of each experiment against those arms that cannot be told from it."""
    for experiment in study.made:
        selection, arms = read_selection(experiment), by_arm(read_runs(study, experiment))
        last_k, leader = study.last_k(experiment), selection["leader"]
        for arm, runs in arms.items():
            scores = final_scores(runs, last_k), final_scores(arms[leader], last_k)
            contrast = Contrast((experiment, experiment), arm, leader, scores, SELECTION)
            if arm != leader and not np.array_equal(*scores) and contrast.undecided():
                yield contrast


def _of_claims(study: Study) -> Iterator[Contrast]:
    """The comparisons that kept a claim from being told."""
    published = {claim["id"]: claim for claim in read_yaml(PUBLISHED)["claims"]}
    for claim in _cannot_tell(study):
        ((kind, parameters),) = published[claim["id"]]["test"].items()
        if kind not in COMPARED or claim["experiment"] == BASELINE:
            continue
        evidence = evidence_of(study, claim["experiment"], parameters.get("other"))
        yield from (contrast for contrast in COMPARED[kind](_Claim(claim, parameters, study), evidence) if contrast.undecided())


def _cannot_tell(study: Study) -> list[dict[str, Any]]:
    claims = read_json(paths.CLAIMS, made_by="report", keys=("claims",))["claims"]
    return [claim for claim in about_this_study(claims, study.left_out) if claim["verdict"] == CANNOT_TELL]


# ------------------------------------------------------------------------- which arms a kind of claim compares


@dataclass(frozen=True)
class _Claim:
    claim: dict[str, Any]
    parameters: Parameters
    study: Study

    def contrast(self, evidence: Evidence, first: str, second: str, bar: float = 0.0) -> Contrast:
        names = self.claim["experiment"], self.claim["experiment"]
        return Contrast(names, first, second, (evidence.final(first), evidence.final(second)), self.claim["id"], bar)


def _two_named(claim: _Claim, evidence: Evidence) -> list[Contrast]:
    return [claim.contrast(evidence, claim.parameters["worse"], claim.parameters["better"])]


def _not_below(claim: _Claim, evidence: Evidence) -> list[Contrast]:
    rival = hardest(claim.parameters["worse"], evidence)
    return [claim.contrast(evidence, rival, claim.parameters["better"], -claim.parameters["margin"])]


def _starts(claim: _Claim, evidence: Evidence) -> list[Contrast]:
    worse, better = claim.parameters["worse"], claim.parameters["better"]
    plain = claim.contrast(evidence, worse, better, claim.parameters["margin"])
    scores = first_scores(evidence.runs(worse)), first_scores(evidence.runs(better))
    return [Contrast(plain.experiments, worse, better, scores, plain.asked_by, plain.bar)]


def _winners(claim: _Claim, evidence: Evidence) -> list[Contrast]:
    other = evidence.other
    assert other is not None
    scores = other.final(other.winner), evidence.final(evidence.winner)
    names = claim.parameters["other"], claim.claim["experiment"]
    return [Contrast(names, other.winner, evidence.winner, scores, claim.claim["id"])]


def _against_best(claim: _Claim, evidence: Evidence) -> list[Contrast]:
    best = _best(evidence)
    return [claim.contrast(evidence, arm, best) for arm in evidence.arms if arm != best]


def _first_against_best(claim: _Claim, evidence: Evidence) -> list[Contrast]:
    first, best = next(iter(evidence.arms)), _best(evidence)
    return [claim.contrast(evidence, first, best)] if first != best else []


def _in_order(claim: _Claim, evidence: Evidence) -> list[Contrast]:
    return [
        claim.contrast(evidence, after, before) for before, after in combinations(arms_in_order(claim.parameters, evidence), 2)
    ]


def _best(evidence: Evidence) -> str:
    return max(evidence.arms, key=lambda arm: float(evidence.final(arm).mean()))


# Of the kinds of grpo.results.verdicts those whose verdict is an interval of a difference of rewards.
COMPARED: dict[str, Callable[[_Claim, Evidence], list[Contrast]]] = {
    "ends_above": _two_named,
    "not_below": _not_below,
    "starts_above": _starts,
    "winner_above": _winners,
    "best_inside_range": _against_best,
    "lags": _first_against_best,
    "descends": _in_order,
}


# ------------------------------------------------------------------------------------------ what it would take


def _row(study: Study, contrast: Contrast) -> dict[str, Any]:
    measured, (first, second) = contrast.difference(), contrast.scores
    spread = spread_of(first, second) if min(len(first), len(second)) > 1 else None
    return {
        "experiments": list(contrast.experiments),
        "arms": [contrast.first, contrast.second],
        "asked_by": [contrast.asked_by],
        "bar": contrast.bar,
        "measured": {key: measured[key] for key in ("value", "low", "high")},
        "seeds": list(study.seeds),
        "problems": first.shape[1],
        "spread": None if spread is None else {key: getattr(spread, key) for key in ("runs", "problems", "rest")},
        **_needed(spread, measured["value"] - contrast.bar),
        "needs_runs_of": _made_again(study, contrast.experiments),
    }


def _needed(spread: Spread | None, distance: float) -> dict[str, int | None]:
    seeds = problems = None
    if spread is not None and distance != 0:
        seeds = seeds_needed(spread, distance)
        problems = problems_needed(spread, distance) if seeds is None else None
    return {"seeds_needed": seeds, "problems_needed": problems}


def _made_again(study: Study, experiments: tuple[str, str]) -> list[str]:
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

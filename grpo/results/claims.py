"""Verdicts on a study's claims: the published ones about its experiments, and its own.

claims.yaml holds the published ones; a study's file may hold others (``claims:``). :mod:`grpo.results.verdicts` has the rules.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import TypeAdapter

from grpo.common.yaml_file import parse_yaml
from grpo.results.evidence import Arm, Evidence, NotMeasured
from grpo.results.intervals import mean_of
from grpo.results.runs import first_scores, value
from grpo.results.verdicts import NOT_TESTED, Verdict, judge
from grpo.study.claims import PLACES, AnyClaim
from grpo.study.schema import Study
from grpo.study.settings import MAIN, setting_of

PUBLISHED = Path(__file__).with_name("claims.yaml")


@dataclass(frozen=True)
class Published:
    """The published claims, which are about one task."""

    task: str
    sources: dict[str, str]
    claims: list[AnyClaim]
    untested: list[dict[str, Any]]  # fields of the verdicts on claims that no study here can test


@cache
def read_published() -> Published:
    """Read claims.yaml."""
    values = parse_yaml(PUBLISHED)
    values["claims"] = TypeAdapter(list[AnyClaim]).validate_python(values["claims"])
    return Published(**values)


def judge_claims(study: Study, evidence: Mapping[str, Evidence]) -> list[Verdict]:
    """Judge each claim about an experiment of the study: published ones in the order of claims.yaml, then the study's own.

    Each interval has 95% by itself. It is not widened for the number of claims, so that the interval shown is the one that
    decides and means the same in every study; what one study decides by chance, other seeds do not repeat (`grpo replicate`).

    Args:
        evidence: by experiment (:func:`grpo.results.evidence.evidence_of`).
    """
    published, active = read_published(), study.active_experiments
    found = [_judged(study, claim, False, evidence) for claim in published.claims if claim.experiment in active]
    found += [_judged(study, claim, True, evidence) for claim in study.own_claims]
    return found + [Verdict(**entry) for entry in published.untested if entry["experiment"] in active]


def _judged(study: Study, claim: AnyClaim, own: bool, evidence: Mapping[str, Evidence]) -> Verdict:
    """Judge one claim."""
    known = Verdict(
        id=claim.id,
        experiment=claim.experiment,
        kind=claim.KIND,
        statement=claim.statement,
        own=own,
        by_design=claim.by_design if study.models[MAIN].source == "pretrain" else None,
        reported=claim.reported,
    )
    try:
        task = read_published().task
        if not own and study.task(study.experiments[claim.experiment].task).stands_for != task:
            raise NotMeasured(f"published for the task {task}, which this study's task does not stand for (Task.stands_for)")
        if missing := [name for name in claim.experiments() if name not in evidence]:
            raise NotMeasured(f"the study leaves {missing[0]} out")
        _require(claim, evidence[claim.experiment])
        arms = [_arm(evidence[experiment], name) for experiment, name in claim.arms()]
        found = judge(claim, *arms)
    except NotMeasured as lacking:
        return replace(known, reason=str(lacking))
    whole = [run for arm in arms for run in arm.runs if run.metrics["diverged_step"] is None]  # the others were stopped early
    steps = min((int(run.validation["step"].iloc[-1]) for run in whole), default=0)
    if steps < claim.horizon:
        reason = f"the claim is about step {claim.horizon} and later, and the runs took {steps} steps"
        found = replace(found, verdict=NOT_TESTED, reason=reason)
    decided = {key: getattr(found, key) for key in ("verdict", "reason", "measured", "interval", "quantity", "could_see")}
    return replace(known, **decided)


def _arm(evidence: Evidence, name: str) -> Arm:
    """Find an arm by its name in a claim. A setting stands for the arm with its best learning rate.

    The leader is the best arm on the problems that select, so that those that judge it did not choose it.

    Raises:
        NotMeasured: the study has no such arm.
    """
    places = dict(zip(PLACES, (evidence.leader, *[*evidence.arms][:1], *[*evidence.arms][-1:]), strict=True))
    return evidence.arm(places.get(name, name))


def _require(claim: AnyClaim, evidence: Evidence) -> None:
    """Check a claim's preconditions.

    Raises:
        NotMeasured: one of them is not met.
    """
    leader = evidence.leader
    if claim.requires.learns:
        final, start = mean_of(evidence.final(leader)), float(first_scores(evidence.runs(leader)).mean())
        if final.low <= start:
            raise NotMeasured(f"nothing was learned: the leader {leader} ends at {final} and starts at {start:.3f}")
    if tokens := claim.requires.response_tokens:
        length = float(np.mean([run.validation["val/response_length"].iloc[0] for run in evidence.runs(leader)]))
        if length < tokens:
            raise NotMeasured(f"the claim is about responses of {tokens} tokens or more, and these start with {length:.1f}")
    for arm in claim.requires.best_rate_inside:
        tried = [name for name in evidence.arms if setting_of(name) == arm]
        rates = [float(value(evidence.runs(name)[0], "learning_rate")) for name in tried]
        best = rates[tried.index(evidence.chosen[arm])] if rates else 0.0
        if len(rates) < 3 or best in (min(rates), max(rates)):
            raise NotMeasured(f"of the {len(rates)} learning rates of {arm}, the best ({best:g}) is the lowest or the highest")

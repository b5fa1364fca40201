"""Verdicts on a study's claims: the published ones about its experiments, and its own.

claims.yaml holds the published ones; a study's file may hold others (``claims:``). :mod:`grpo.results.verdicts` has the rules.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from grpo.results.evidence import Evidence, NotMeasured, evidence_of
from grpo.results.intervals import mean_of
from grpo.results.published import claims_of, digest_of, read_published, written
from grpo.results.replication import Replication, fresh, read_replication
from grpo.results.runs import first_scores, value
from grpo.results.verdicts import AGREES, NOT_TESTED, Verdict, judge
from grpo.study.claims import PLACES, AnyClaim, Collapses, Share
from grpo.study.schema import Study
from grpo.study.settings import MAIN, setting_of


def judge_claims(study: Study) -> list[Verdict]:
    """Judge each claim about an experiment of the study: published ones in the order of claims.yaml, then the study's own.

    Each interval has 95% by itself. It is not widened for the number of claims, so that the interval shown is the one that
    decides and means the same in every study; what one study decides by chance, fresh seeds do not repeat (``Verdict.fresh``).

    Raises:
        UserError: a run of an experiment is missing.
    """
    evidence: dict[str, Evidence] = {}

    def of_experiment(name: str) -> Evidence:
        if name not in evidence:
            evidence[name] = evidence_of(study, name)
        return evidence[name]

    replication = read_replication(study)
    found = [_judged(study, claim, own, of_experiment, replication) for claim, own in claims_of(study)]
    return found + [_untested(entry) for entry in read_published().untested if entry["experiment"] in study.active_experiments]


def _judged(
    study: Study, claim: AnyClaim, own: bool, of_experiment: Callable[[str], Evidence], replication: Replication | None
) -> Verdict:
    """Judge one claim."""
    known: Verdict = Verdict(
        id=claim.id,
        experiment=claim.experiment,
        kind=claim.KIND,
        statement=claim.statement,
        own=own,
        test=digest_of(claim),
        margin=getattr(claim, "by", None),
        horizon=claim.horizon,
        control=getattr(claim, "control", None),
        by_design=claim.by_design if study.models[MAIN].source == "pretrain" else None,
        reported={source: str(text) for source, text in claim.reported.items()},
    )
    try:
        if not own and study.task(study.experiments[claim.experiment].task).stands_for != read_published().task:
            task = read_published().task
            raise NotMeasured(f"published for the task {task}, which this study's task does not stand for (Task.stands_for)")
        involved = [of_experiment(name) for name in claim.experiments()]
        _require(claim, of_experiment(claim.experiment))
        about: list[tuple[Evidence, str]] = []  # the claim's arms

        def arm_called(name: str) -> tuple[Evidence, str]:
            about.append(_arm(claim, name, of_experiment))
            return about[-1]

        found = judge(claim, arm_called)
        steps = min(one.steps(*(arm for evidence, arm in about if evidence is one and arm)) for one in involved)
        if steps < claim.horizon and not (isinstance(claim, Collapses | Share) and found.verdict == AGREES):
            reason = f"the claim is about step {claim.horizon} and later, and the runs took {steps} steps"
            found = replace(found, verdict=NOT_TESTED, reason=reason)
    except NotMeasured as lacking:
        return replace(known, reason=str(lacking))
    decided = {key: getattr(found, key) for key in ("verdict", "reason", "measured", "numbers", "interval", "quantity")}
    runs = [run.name for one in involved for of_arm in one.arms.values() for run in of_arm]
    known = replace(known, **decided, margin=found.margin, written=written(claim, runs))
    return replace(known, fresh=fresh(known, replication))


def _arm(claim: AnyClaim, name: str, of_experiment: Callable[[str], Evidence]) -> tuple[Evidence, str]:
    """Find the evidence on an arm as a claim names it (``ARM`` or ``EXPERIMENT/ARM``), and the arm's name there.

    A setting stands for the arm with its best learning rate.

    Raises:
        NotMeasured: the study has no such arm.
    """
    experiment, _, arm = name.rpartition("/")
    evidence = of_experiment(experiment or claim.experiment)
    if not arm:
        return evidence, ""
    if arm in PLACES:
        return evidence, _leader(evidence) if arm == "leader" else [*evidence.arms][0 if arm == "first" else -1]
    return evidence, evidence.name_of(evidence.chosen.get(arm, arm))


def _leader(evidence: Evidence) -> str:
    """The best arm on the problems that select, so that those that judge it did not choose it."""
    return evidence.best([*evidence.chosen.values()])


def _require(claim: AnyClaim, evidence: Evidence) -> None:
    """Check a claim's preconditions.

    Raises:
        NotMeasured: one of them is not met.
    """
    leader = _leader(evidence)
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


def _untested(entry: dict[str, Any]) -> Verdict:
    reported = {source: str(text) for source, text in entry["reported"].items()}
    return Verdict(entry["id"], entry["experiment"], statement=entry["statement"], reason=entry["why"], reported=reported)

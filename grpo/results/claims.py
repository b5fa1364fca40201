"""Verdicts on published claims about the same experiments.

claims.yaml holds the claims, each with the test that decides it (:mod:`grpo.results.verdicts`), its horizon, its preconditions
and its margin. Every verdict is computed from the runs.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import TypeAdapter
from scipy import stats

from grpo.common.files import read_json, write_json
from grpo.common.yaml_file import parse_yaml
from grpo.results import verdicts as kinds
from grpo.results.evidence import Evidence, NotMeasured, evidence_of
from grpo.results.findings import CANNOT_TELL, DISAGREES, NOT_TESTED, Verdict
from grpo.results.runs import gain, read_baseline
from grpo.results.verdicts import ALPHA, EVENTS
from grpo.study import paths
from grpo.study.schema import Study
from grpo.study.settings import MAIN

PUBLISHED = Path(__file__).with_name("claims.yaml")
BASELINE = "math_baseline"


def judge_claims(study: Study) -> list[Verdict]:
    """Judge each claim of claims.yaml about an experiment that the study has, in the file's order.

    With many claims, a few intervals miss by chance. The p-values are therefore adjusted together: at most 5% of the decided
    verdicts are expected to be wrong (Benjamini and Hochberg 1995). A verdict that fails this becomes ``cannot tell``.

    Raises:
        UserError: a run of an experiment is missing.
    """
    published = parse_yaml(PUBLISHED)
    about = [claim for claim in published["claims"] if claim.get("experiment") in (BASELINE, *study.experiments)]
    return adjusted([_judge(study, claim, published["task"]) for claim in about])


def adjusted(verdicts: list[Verdict]) -> list[Verdict]:
    """Add ``p_adjusted`` to the verdicts; one whose adjusted p is too large becomes ``cannot tell``."""
    tested = [verdict for verdict in verdicts if verdict.p is not None and verdict.verdict != NOT_TESTED]
    if not tested:
        return verdicts
    together = stats.false_discovery_control([verdict.p for verdict in tested])
    p = {verdict.claim: float(adjusted) for verdict, adjusted in zip(tested, together, strict=True)}
    return [_adjusted(one, p[one.claim], len(p)) if one.claim in p else one for one in verdicts]


def _adjusted(verdict: Verdict, p: float, claims: int) -> Verdict:
    if not verdict.decided or p < ALPHA:
        return replace(verdict, p_adjusted=p)
    reason = f"alone it would be {verdict.verdict} ({verdict.reason}), but not as one of {claims} claims"
    return replace(verdict, verdict=CANNOT_TELL, reason=reason, p_adjusted=p)


def _judge(study: Study, claim: dict[str, Any], task: str) -> Verdict:
    """Judge one claim, without adjustment for the other claims."""
    ((kind, parameters),) = claim["test"].items()
    horizon = claim.get("horizon", 0)
    try:
        evidence = _evidence(study, claim["experiment"], task)
        _require(claim.get("requires", {}), evidence)
        if "other" in parameters:
            parameters = parameters | {"other": evidence_of(study, parameters["other"])}
        found: Verdict = getattr(kinds, kind)(evidence, **parameters)
        steps = evidence.steps()
        if claim.get("planted") and study.models[MAIN].source == "pretrain":
            reason = "by construction: the base model learned it from its pretraining documents, so it is no finding"
            found = replace(found, verdict=NOT_TESTED, reason=reason, by_construction=True)
        elif steps < horizon and not (kind in EVENTS and found.verdict != DISAGREES):
            reason = f"the claim is about step {horizon} and later, and the runs took {steps} steps"
            found = replace(found, verdict=NOT_TESTED, reason=reason)
    except NotMeasured as lacking:
        found = Verdict(reason=str(lacking))
    return replace(
        found,
        claim=claim["id"],
        experiment=claim["experiment"],
        statement=claim["statement"],
        reported={source: str(text) for source, text in claim["reported"].items()},
        published=claim.get("published", {}),
        margin=parameters.get("margin"),
    )


def _evidence(study: Study, experiment: str, task: str) -> Evidence:
    """Collect an experiment's runs, if its task stands for the task of the published claims."""
    name = MAIN if experiment not in study.experiments else study.experiments[experiment].task
    if study.task(name).stands_for != task:
        raise NotMeasured(f"published for the task {task}, which this study's task does not stand for (Task.stands_for)")
    if experiment == BASELINE:
        return Evidence(experiment, {}, study.selection.last_k, read_baseline(study))
    return evidence_of(study, experiment)


def _require(requires: dict[str, Any], evidence: Evidence) -> None:
    """Check a claim's preconditions.

    Raises:
        NotMeasured: one of them is not met.
    """
    if len(evidence.arms) < (arms := requires.get("arms", 0)):
        raise NotMeasured(f"the claim is about {arms} arms or more, and the study has {len(evidence.arms)}")
    if requires.get("learns"):
        rise = gain(evidence.held(evidence.leader), evidence.last_k)
        if rise.low <= 0:
            raise NotMeasured(f"nothing was learned: the leader {evidence.leader} ends above its start by {rise}")
    if tokens := requires.get("response_tokens"):
        runs = [run for of_arm in evidence.arms.values() for run in of_arm]
        length = float(np.mean([run.validation["val/response_length"].iloc[0] for run in runs]))  # of the untrained model
        if length < tokens:
            raise NotMeasured(f"the claim is about responses of {tokens} tokens or more, and these start with {length:.1f}")


def write_claims(study: Study) -> None:
    """Judge the claims and write reports/claims.json."""
    published, verdicts = parse_yaml(PUBLISHED), judge_claims(study)
    cited = {source for verdict in verdicts for source in verdict.reported}
    sources = {source: text for source, text in published["sources"].items() if source in cited}
    about = {"task": published["task"], "sources": sources, "notes": published["notes"]}
    write_json(paths.CLAIMS, {**about, "claims": [asdict(verdict) for verdict in verdicts]})


def read_verdicts(path: Path = paths.CLAIMS) -> list[Verdict]:
    """Read the verdicts of reports/claims.json."""
    claims = read_json(path, made_by="report", keys=("claims",))["claims"]
    return TypeAdapter(list[Verdict]).validate_python(claims)


def shown(verdicts: list[Verdict], study: Study) -> list[Verdict]:
    """The verdicts that a report shows: all but those about experiments that the study leaves out."""
    return [verdict for verdict in verdicts if verdict.experiment not in study.left_out]

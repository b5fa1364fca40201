"""What published studies of the same experiments reported, against what this study measured.

claims.yaml holds the published claims, each with the test that decides it (:mod:`grpo.results.verdicts`), its horizon, its
preconditions and its margin. No verdict is fixed: each is computed from the runs.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from scipy import stats

from grpo.common.files import read_json, write_json
from grpo.results.evidence import Evidence, NotMeasured, evidence_of
from grpo.results.findings import CANNOT_TELL, NOT_TESTED, Collapse, Contrast, Interval, Verdict
from grpo.results.runs import gain, read_baseline
from grpo.results.verdicts import ALPHA, EVENTS, KINDS, response_length
from grpo.study import paths
from grpo.study.schema import Study, read_yaml
from grpo.study.settings import MAIN

PUBLISHED = Path(__file__).with_name("claims.yaml")
BASELINE = "math_baseline"
KEYS = {"id", "experiment", "statement", "test", "horizon", "requires", "margin", "reported"}
REQUIREMENTS = {"learns", "arms", "response_tokens"}


def judge_claims(study: Study) -> list[Verdict]:
    """The verdict of each claim of claims.yaml about an experiment that the study knows, in the file's order.

    The claims are many, and a few of their intervals miss by chance. The p of all that are decided by one are adjusted
    together so that at most 5% of the verdicts they decide are expected to be wrong (Benjamini and Hochberg 1995); a verdict
    that does not stand then becomes ``cannot tell``.

    Raises:
        UserError: a run of an experiment is missing.
        ValueError: claims.yaml lacks a key, or names a test or requirement that does not exist.
    """
    published = read_yaml(PUBLISHED)
    about = [claim for claim in published["claims"] if claim.get("experiment") in (BASELINE, *study.experiments)]
    return adjusted([_judge(study, claim, published["task"]) for claim in about])


def adjusted(verdicts: list[Verdict]) -> list[Verdict]:
    """The verdicts with ``p_adjusted``; those that their number turns become ``cannot tell``."""
    p = {verdict.claim: verdict.p for verdict in verdicts if verdict.p is not None and verdict.verdict != NOT_TESTED}
    if not p:
        return verdicts
    together = dict(zip(p, stats.false_discovery_control([*p.values()]), strict=True))
    return [_adjusted(verdict, together.get(verdict.claim), len(p)) for verdict in verdicts]


def _adjusted(verdict: Verdict, p: float | None, claims: int) -> Verdict:
    if p is None:
        return verdict
    found = replace(verdict, p_adjusted=float(p))
    if not verdict.decided or p < ALPHA:
        return found
    reason = f"alone it would be {verdict.verdict} ({verdict.reason}), but not as one of {claims} claims"
    return replace(found, verdict=CANNOT_TELL, reason=reason)


def _judge(study: Study, claim: dict[str, Any], task: str) -> Verdict:
    """The verdict of one claim by itself."""
    kind, parameters = _test(claim)
    verdict = Verdict(
        claim["id"],
        claim["experiment"],
        claim["statement"],
        NOT_TESTED,
        "",
        reported={source: str(text) for source, text in claim["reported"].items()},
        published=claim.get("published", {}),
        margin=claim["margin"],
    )
    try:
        evidence = _evidence(study, claim["experiment"], parameters.get("other"), task)
        _require(claim["requires"], evidence)
        found = KINDS[kind](parameters, evidence)
    except NotMeasured as lacking:
        return replace(verdict, reason=str(lacking))
    verdict = replace(verdict, **{key: getattr(found, key) for key in ("measured", "contrasts", "collapses", "numbers", "p")})
    steps, horizon = evidence.steps(), claim["horizon"] or 0
    if claim.get("planted") and study.models[MAIN].source == "pretrain":
        reason = "by construction: the documents that the base model was pretrained on put it there, so that it is no finding"
        return replace(verdict, reason=reason, by_construction=True)
    if steps < horizon and not (kind in EVENTS and found.verdict != "disagrees"):
        return replace(verdict, reason=f"the claim is about step {horizon} and later, and the runs took {steps} steps")
    return replace(verdict, verdict=found.verdict, reason=found.reason)


def _test(claim: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """A claim's kind of test with its parameters, the margin among them."""
    missing, test = KEYS - claim.keys(), claim.get("test", {})
    if missing:
        raise ValueError(f"{PUBLISHED.name}: {claim.get('id')}: lacks {', '.join(sorted(missing))}")
    if len(test) != 1 or not set(test) <= set(KINDS):
        raise ValueError(f"{PUBLISHED.name}: {claim['id']}: needs one test of a known kind ({', '.join(KINDS)}), not {test}")
    if unknown := claim["requires"].keys() - REQUIREMENTS:
        raise ValueError(f"{PUBLISHED.name}: {claim['id']}: unknown requirement {', '.join(sorted(unknown))}")
    ((kind, parameters),) = test.items()
    return kind, {**parameters, "margin": claim["margin"]}


def _evidence(study: Study, experiment: str, other: str | None, task: str) -> Evidence:
    """What the study has of an experiment, if its task stands for the one that the claims were published of."""
    name = MAIN if experiment not in study.experiments else study.experiments[experiment].task
    if study.task(name).stands_for != task:
        raise NotMeasured(f"published of the task {task}, for which this study's task does not stand (Task.stands_for)")
    if experiment == BASELINE:
        return Evidence(experiment, {}, study.selection.last_k, read_baseline(study))
    return evidence_of(study, experiment, other)


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
        length = response_length([run for runs in evidence.arms.values() for run in runs])
        if length < tokens:
            raise NotMeasured(f"the claim is about responses of {tokens} tokens or more, and these start with {length:.1f}")


def write_claims(study: Study) -> None:
    """Judge the claims and write reports/claims.json."""
    published, verdicts = read_yaml(PUBLISHED), judge_claims(study)
    cited = {source for verdict in verdicts for source in verdict.reported or ()}
    sources = {source: text for source, text in published["sources"].items() if source in cited}
    about = {"task": published["task"], "sources": sources, "notes": published["notes"]}
    write_json(paths.CLAIMS, {**about, "claims": [asdict(verdict) for verdict in verdicts]})


def read_verdicts(path: Path = paths.CLAIMS) -> list[Verdict]:
    """The verdicts of reports/claims.json."""
    return [verdict_of(claim) for claim in read_json(path, made_by="report", keys=("claims",))["claims"]]


def verdict_of(claim: dict[str, Any]) -> Verdict:
    """A claim of reports/claims.json as a record."""
    contrasts = tuple(
        Contrast(one["arm"], one["against"], Interval(**one["difference"]), Interval(**one["adjusted"]), one["contrasts"])
        for one in claim["contrasts"]
    )
    return Verdict(**claim | {"contrasts": contrasts, "collapses": tuple(Collapse(**one) for one in claim["collapses"])})


def shown(verdicts: list[Verdict], study: Study) -> list[Verdict]:
    """The verdicts without those about experiments that the study leaves out, of which a report has nothing to say."""
    return [verdict for verdict in verdicts if verdict.experiment not in study.left_out]


def about_this_study(claims: list[dict[str, Any]], left_out: Collection[str]) -> list[dict[str, Any]]:
    """:func:`shown` for the rows of reports/claims.json."""
    return [claim for claim in claims if claim["experiment"] not in left_out]


def claims_table(claims: dict[str, Any], left_out: Collection[str] = ()) -> str:
    """The contents of reports/claims.json as a Markdown table, without the claims about experiments that are left out."""
    lines = ["| claim | experiment | reported | measured here | verdict |", "|---|---|---|---|---|"]
    for claim in about_this_study(claims["claims"], left_out):
        label = "by construction" if claim["by_construction"] else claim["verdict"]
        cells = [
            claim["statement"],
            claim["experiment"],
            "<br>".join(f"{source}: {text}" for source, text in claim["reported"].items()),
            claim["measured"],
            f"**{label}**<br>{claim['reason']}",
        ]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"

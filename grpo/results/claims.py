"""What published studies of the same experiments reported, against what this study measured.

claims.yaml holds the published claims, each with the test that decides it (:mod:`grpo.results.verdicts`). No verdict is fixed:
each is computed from the runs. A claim that a test can neither confirm nor refute is one that this study ``cannot tell``.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

from grpo.common.files import write_json
from grpo.results.evidence import Evidence, NotMeasured, evidence_of
from grpo.results.runs import read_baseline
from grpo.results.verdicts import KINDS, Judgement
from grpo.study import paths
from grpo.study.schema import Study, read_yaml

PUBLISHED = Path(__file__).with_name("claims.yaml")
BASELINE = "math_baseline"
NOT_MEASURED = "not measured"

ONE_RUN = "one run an arm, so the spread between runs is not in the interval"
# Kinds whose numbers have no spread between runs (the untrained model is one and the same) or no interval.
WITHOUT_SPREAD = {"zero_shot_below", "starts_above", "falls", "collapses", "norms_blow_up"}


def judge_claims(study: Study) -> list[dict[str, Any]]:
    """Each claim of claims.yaml with what this study measured.

    Returns:
        in the file's order ``id``, ``experiment``, ``statement``, ``reported`` (source -> text), ``published`` (source -> the
        difference of the same two, where the source gives numbers), ``measured``, ``verdict`` (``agrees``, ``disagrees``,
        ``cannot tell`` or ``not measured``), ``differences`` (see :class:`Judgement`) and ``note``, which says why where
        nothing was measured.

    Raises:
        UserError: a run of an experiment is missing.
        ValueError: claims.yaml names no test, or one that does not exist.
    """
    return [_judge(study, claim) for claim in read_yaml(PUBLISHED)["claims"]]


def _judge(study: Study, claim: dict[str, Any]) -> dict[str, Any]:
    try:
        judgement, note = _measure(study, claim)
    except NotMeasured as reason:
        judgement, note = Judgement("", NOT_MEASURED), str(reason)
    return {
        **{key: claim[key] for key in ("id", "experiment", "statement")},
        "reported": {source: str(text) for source, text in claim["reported"].items()},
        "published": claim.get("published", {}),
        "measured": judgement.measured,
        "verdict": judgement.verdict,
        "differences": judgement.differences,
        "note": note,
    }


def _measure(study: Study, claim: dict[str, Any]) -> tuple[Judgement, str]:
    """What the claim's test found, and a note."""
    experiment = claim["experiment"]
    if experiment != BASELINE and experiment not in study.experiments:
        raise NotMeasured(f"this version has no stage {experiment}")
    test = claim.get("test", {})
    if len(test) != 1 or not set(test) <= set(KINDS):
        raise ValueError(f"{PUBLISHED.name}: {claim['id']}: needs one test of a known kind ({', '.join(KINDS)}), not {test}")
    ((kind, parameters),) = test.items()
    if experiment == BASELINE:
        evidence = Evidence({}, study.selection.last_k, read_baseline(study))
    else:
        evidence = evidence_of(study, experiment, parameters.get("other"))
    note = ONE_RUN if len(study.seeds) == 1 and kind not in WITHOUT_SPREAD else ""
    return KINDS[kind](parameters, evidence), note


def write_claims(study: Study) -> None:
    """Judge the claims and write reports/claims.json."""
    published = read_yaml(PUBLISHED)
    write_json(paths.CLAIMS, {**{key: published[key] for key in ("sources", "notes")}, "claims": judge_claims(study)})


def about_this_study(claims: list[dict[str, Any]], left_out: Collection[str]) -> list[dict[str, Any]]:
    """The claims without those about experiments that the study leaves out, of which a report has nothing to say."""
    return [claim for claim in claims if claim["experiment"] not in left_out]


def claims_table(claims: dict[str, Any], left_out: Collection[str] = ()) -> str:
    """The contents of reports/claims.json as a Markdown table, without the claims about experiments that are left out."""
    lines = ["| claim | experiment | reported | measured here | verdict |", "|---|---|---|---|---|"]
    for claim in about_this_study(claims["claims"], left_out):
        cells = [
            claim["statement"],
            claim["experiment"],
            "<br>".join(f"{source}: {text}" for source, text in claim["reported"].items()),
            "<br>".join(text for text in (claim["measured"], claim["note"]) if text),
            claim["verdict"],
        ]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"

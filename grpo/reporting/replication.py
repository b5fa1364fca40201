"""Comparison of a study with replicates that use other seeds: verdicts on claims and winners of experiments."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo.common.files import read_json
from grpo.reporting.sentences import markdown_table, render
from grpo.results.claims import read_verdicts
from grpo.results.findings import AGREES, DISAGREES, NOT_TESTED, Verdict
from grpo.results.statistics import format_interval
from grpo.study import paths
from grpo.study.schema import Study

SAME, TURNED, OTHERWISE, UNDECIDED = "same", "turned round", "decided otherwise", "decided in one only"


@dataclass(frozen=True)
class Findings:
    """The verdicts and winners of a study."""

    name: str  # such as ``seeds 100, 101, 102``
    verdicts: list[Verdict]  # in the order of claims.yaml
    selections: dict[str, dict[str, Any]]  # of each experiment, as :func:`grpo.results.selection.select` wrote it


def read_findings(study: Study, name: str, folder: Path = Path()) -> Findings:
    """Read the findings of the study in a folder.

    Raises:
        UserError: it is not finished.
    """
    selections = {
        experiment: read_json(
            folder / paths.CANDIDATES / f"{experiment}.json", f"select@{experiment}", keys=("winner", "leader", "tied")
        )
        for experiment in study.made
    }
    return Findings(name, read_verdicts(folder / paths.CLAIMS), selections)


def agreement(first: Verdict, second: Verdict) -> str:
    """Compare two verdicts on one claim; empty if neither study decides it, or neither tested it."""
    names = {first.verdict, second.verdict}
    if names == {NOT_TESTED}:
        return ""
    if len(names) == 1:
        return SAME
    if names == {AGREES, DISAGREES}:
        return TURNED
    return OTHERWISE if first.decided and second.decided else UNDECIDED if first.decided or second.decided else ""


def counts(first: Findings, second: Findings) -> Counter[str]:
    """Number of claims by :func:`agreement`."""
    return Counter(agreement(*pair) for pair in zip(first.verdicts, second.verdicts, strict=True))


def replication_page(study: Study, here: Findings, replicates: Sequence[Findings]) -> str:
    """Write the page reports/replication.md."""
    others = []
    for other in replicates:
        pairs = zip(here.verdicts, other.verdicts, strict=True)
        claims = [(one.statement, _verdict(one), _verdict(two), agreement(one, two)) for one, two in pairs]
        winners = [_winner(name, here.selections[name], other.selections[name]) for name in study.made]
        heads = ("experiment", f"winner, {here.name}", f"winner, {other.name}", "")
        others.append(
            {
                "name": other.name,
                "count": counts(here, other),
                "claims": markdown_table(("claim", here.name, other.name, ""), claims),
                "new_winners": sum(row[-1] != SAME for row in winners),
                "winners": markdown_table(heads, winners),
            }
        )
    return render("replication.md.j2", study=study, here=here, others=others)


def _verdict(verdict: Verdict) -> str:
    return f"{verdict.label}: {verdict.measured or verdict.reason}"


def _winner(name: str, here: Mapping[str, Any], other: Mapping[str, Any]) -> Sequence[str]:
    """An experiment's row: both winners, and whether they are tied in both studies."""
    shown = [f"{one['winner']} {format_interval(one)}" for one in (here, other)]
    if here["winner"] == other["winner"]:
        return (name, *shown, SAME)
    tied = other["winner"] in (here["leader"], *here["tied"]) and here["winner"] in (other["leader"], *other["tied"])
    return (name, *shown, "another, tied in both" if tied else "another")

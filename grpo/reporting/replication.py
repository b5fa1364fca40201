"""The page reports/replication.md: a study's verdicts and winners beside those of its replicates."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from grpo.common.files import read_json
from grpo.reporting.labels import table
from grpo.reporting.record import has_clear_leader, winner_of
from grpo.results.replication import NOT_TRIED, SAME, TURNED, UNDECIDED, Replicate, agreement
from grpo.results.statistics import format_interval
from grpo.study import paths
from grpo.study.settings import setting_of

ANOTHER = "another"


def read_replicate(name: str, folder: Path = Path()) -> Replicate:
    """Read the verdicts and winners of the study in a folder.

    Args:
        name: such as ``seeds 100, 101``.

    Raises:
        UserError: the study is not finished.
    """
    record = read_json(folder / paths.RECORD, made_by="tables", keys=("claims", "experiments"))
    claims = [claim for claim in record["claims"] if claim["test"]]
    return Replicate(
        name,
        verdicts={claim["test"]: claim["verdict"] for claim in claims},
        measured={claim["test"]: claim["measured"] or claim["reason"] for claim in claims},
        statements={claim["test"]: claim["statement"] for claim in claims},
        winners={
            name: {"winner": entry["winner"]}
            | {key: winner_of(entry)[key] for key in ("value", "low", "high")}
            | {"told": has_clear_leader(entry)}
            for name, entry in record["experiments"].items()
        },
    )


def counts(here: Replicate, there: Replicate) -> Counter[str]:
    """The number of claims by :func:`grpo.results.replication.agreement`."""
    return Counter(agreement(verdict, there.verdicts.get(test)) for test, verdict in here.verdicts.items())


def replication_page(study: str, here: Replicate, replicates: Sequence[Replicate]) -> str:
    """Write the page.

    Args:
        study: digest of the study (:func:`grpo.results.replication.study_digest`).
    """
    lines = [
        "# On fresh seeds",
        "",
        f"The study ({here.name}) beside the same study with other seeds. The digest of its settings is `{study}`; of a study "
        f"with another one these replicates say nothing. *{TURNED}*: one agrees with the claim, and the other finds that it "
        f"does not hold. *{UNDECIDED}*: only one decides.",
    ]
    for there in replicates:
        number, others = counts(here, there), _winners(here, there)
        lines += [
            "",
            f"## {there.name[0].upper()}{there.name[1:]}",
            "",
            f"Of {len(here.verdicts)} claims {number[TURNED]} turned round, {number[UNDECIDED]} are decided in one only, "
            f"{number[SAME]} are the same, {number[NOT_TRIED]} are not tested in one. Of {len(others)} experiments "
            f"{sum(row[-1].startswith(ANOTHER) for row in others)} have another winner.",
            "",
            _table(("claim", here.name, there.name, ""), [_claim(here, there, test) for test in here.verdicts]),
            _table(("experiment", f"winner, {here.name}", f"winner, {there.name}", ""), others),
        ]
    return "\n".join(lines) + "\n"


def _claim(here: Replicate, there: Replicate, test: str) -> tuple[str, ...]:
    said = [
        f"{of.verdicts[test]}: {of.measured[test]}" if test in of.verdicts else "not one of its claims" for of in (here, there)
    ]
    return here.statements[test], *said, agreement(here.verdicts[test], there.verdicts.get(test))


def _winners(here: Replicate, there: Replicate) -> list[tuple[str, ...]]:
    """A row for each experiment of both: the winners, and if their settings differ, whether the study could tell its leader."""
    rows = []
    for name, one in here.winners.items():
        if (other := there.winners.get(name)) is None:
            continue
        shown = [f"{each['winner']} {format_interval(each)}" for each in (one, other)]
        if one["winner"] == other["winner"]:
            found = str(SAME)
        elif setting_of(one["winner"]) == setting_of(other["winner"]):
            found = f"{SAME}, at another rate"
        else:
            found = (
                f"{ANOTHER}, and here the leader could be told"
                if one["told"]
                else f"{ANOTHER}; here the leader could not be told"
            )
        rows.append((name, *shown, found))
    return rows


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return table(dict(zip(heads, (cell.replace("\n", " ") for cell in row), strict=True)) for row in rows)

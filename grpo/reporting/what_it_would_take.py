"""What it would take to know: seeds, runs and hours for each comparison that the study's runs could not decide."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from grpo.common.files import read_json
from grpo.results.findings import Verdict
from grpo.results.power import CHANCE, MOST_SEEDS
from grpo.results.statistics import format_interval
from grpo.study import paths

Row = dict[str, Any]  # as grpo.results.contrasts.undecided
NAME = "what_it_would_take"
KEYS = ("chance", "undecided", "not_a_matter_of_seeds")


def contents(rows: list[Row], others: list[Verdict]) -> dict[str, Any]:
    """The result file: the chance that is asked for, the contrasts, and the claims that seeds alone do not decide."""
    kept = ("claim", "experiment", "statement", "measured", "reason")
    return {
        "chance": CHANCE,
        "undecided": [row | {"command": command(row)} for row in rows],
        "not_a_matter_of_seeds": [{key: getattr(claim, key) for key in kept} for claim in others],
    }


def read_contents() -> dict[str, Any]:
    """reports/tables/what_it_would_take.json.

    Raises:
        UserError: it is missing or damaged.
    """
    found: dict[str, Any] = read_json(paths.TABLES / f"{NAME}.json", made_by="report", keys=KEYS)
    return found


def command(row: Row) -> str:
    """What makes a contrast's runs with the seeds that it lacks; empty where it lacks none, or no number is enough or known."""
    present, more = row["seeds"], (row["seeds_needed"] or 0) - len(row["seeds"])
    if more <= 0:
        return ""
    targets = " ".join(f"select@{name}" for name in dict.fromkeys(row["experiments"]))
    known, first = ",".join(map(str, present)), max(present) + 1
    return f'dvc exp run -S "seeds=[{known},$(seq -s, {first} {first + more - 1})]" {targets}'


def hours(row: Row, seconds: Mapping[str, float]) -> tuple[float, float] | None:
    """Hours of the missing runs of the two arms alone, and of all runs that the command makes; None where it is no such row.

    Args:
        seconds: of a run of each arm, ``EXPERIMENT/ARM``; 0 where it is taken over from an equal run.
    """
    if row["seeds_needed"] is None:
        return None
    more = max(0, row["seeds_needed"] - len(row["seeds"]))
    pair = [f"{experiment}/{arm}" for experiment, arm in zip(row["experiments"], row["arms"], strict=True)]
    every = [arm for arm in seconds if arm.partition("/")[0] in row["needs_runs_of"]]
    two, everything = (more * sum(seconds[arm] for arm in arms) / 3600 for arms in (pair, every))
    return two, everything


def table(rows: Sequence[Row], seconds: Mapping[str, float] | None = None) -> str:
    """A row for each contrast, Markdown.

    Args:
        seconds: as in :func:`hours`; without it the table is the same in every repetition.
    """
    if not rows:
        return "Nothing: no comparison of this study was left undecided.\n"
    columns = ["which is better", "experiment", "asked by", "difference (95% interval)", "seeds now", "seeds needed"]
    columns += [*(["hours, these two arms", "hours, the command"] if seconds is not None else []), "next command"]
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    for row in rows:
        cells = [
            f"{row['arms'][1]} or {row['arms'][0]}" + (f" (bar {row['bar']:g})" if row["bar"] else ""),
            " and ".join(dict.fromkeys(row["experiments"])),
            ", ".join(row["asked_by"]),
            format_interval(row["measured"]),
            str(len(row["seeds"])),
            _needed(row),
        ]
        if seconds is not None:
            cost = hours(row, seconds)
            cells += ["", ""] if cost is None else [_hours(one) for one in cost]
        cells.append(f"`{row['command']}`" if row["command"] else "")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _needed(row: Row) -> str:
    if row["seeds_needed"] is not None:
        return f"{row['seeds_needed']:,}"
    if row["spread"] is None:
        return "not known: one seed shows no spread between runs"
    if row["problems_needed"] is None:
        return "not to be said: the measured difference is zero"
    if row["problems_needed"] <= row["problems"]:
        return f"more than {MOST_SEEDS:,}"
    return f"no number: {row['problems']:,} problems are too few, {row['problems_needed']:,} at least are needed"


def _hours(hours: float) -> str:
    return f"{hours:.2f}" if hours < 10 else f"{hours:,.0f}"

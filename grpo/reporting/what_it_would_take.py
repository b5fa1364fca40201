"""Seeds, runs and hours that would decide each undecided comparison."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from grpo.reporting import sentences
from grpo.results.findings import Verdict
from grpo.results.power import CHANCE, MOST_SEEDS

Row = dict[str, Any]  # of grpo.results.contrasts.undecided


def contents(rows: list[Row], others: list[Verdict]) -> dict[str, Any]:
    """The result file: the required probability, the contrasts, and the claims that seeds alone do not decide."""
    kept = ("claim", "experiment", "statement", "measured", "reason")
    return {
        "chance": CHANCE,
        "undecided": [row | {"command": command(row)} for row in rows],
        "not_a_matter_of_seeds": [{key: getattr(claim, key) for key in kept} for claim in others],
    }


def command(row: Row) -> str:
    """The command that runs the missing seeds of a contrast; empty if none is missing or their number is unknown."""
    present, more = row["seeds"], (row["seeds_needed"] or 0) - len(row["seeds"])
    if more <= 0:
        return ""
    targets = " ".join(f"select@{name}" for name in dict.fromkeys(row["experiments"]))
    known, first = ",".join(map(str, present)), max(present) + 1
    return f'dvc exp run -S "seeds=[{known},$(seq -s, {first} {first + more - 1})]" {targets}'


def hours(row: Row, seconds: Mapping[str, float]) -> tuple[float, float] | None:
    """Hours of the missing runs of the two arms, and of all runs of the command; None if the number of seeds is unknown.

    Args:
        seconds: ``EXPERIMENT/ARM`` -> seconds of a run; 0 if it is taken over from an identical run.
    """
    if row["seeds_needed"] is None:
        return None
    more = max(0, row["seeds_needed"] - len(row["seeds"]))
    pair = [f"{experiment}/{arm}" for experiment, arm in zip(row["experiments"], row["arms"], strict=True)]
    every = [arm for arm in seconds if arm.partition("/")[0] in row["needs_runs_of"]]
    two, everything = (more * sum(seconds[arm] for arm in arms) / 3600 for arms in (pair, every))
    return two, everything


def table(rows: Sequence[Row], seconds: Mapping[str, float] | None = None) -> str:
    """Table of contrasts (Markdown).

    Args:
        seconds: as in :func:`hours`; without it, the table has no hours and is the same in every repetition.
    """
    if not rows:
        return "Nothing: this study left no comparison undecided.\n"
    lines = []
    for row in rows:
        line = {
            "which is better": f"{row['arms'][1]} or {row['arms'][0]}" + (f" (bar {row['bar']:g})" if row["bar"] else ""),
            "experiment": " and ".join(dict.fromkeys(row["experiments"])),
            "asked by": ", ".join(row["asked_by"]),
            "difference (95% interval)": sentences.interval(row["measured"]),
            "seeds now": len(row["seeds"]),
            "seeds needed": _needed(row),
        }
        if seconds is not None:
            two, everything = hours(row, seconds) or (None, None)
            line |= {"hours, these two arms": _hours(two), "hours, the command": _hours(everything)}
        lines.append(line | {"next command": f"`{row['command']}`" if row["command"] else ""})
    return sentences.table(lines)


def _needed(row: Row) -> str:
    if row["seeds_needed"] is not None and row["seeds_needed"] <= len(row["seeds"]):
        return "none for this comparison alone; it is one of several"
    if row["seeds_needed"] is not None:
        return f"{row['seeds_needed']:,}"
    if row["spread"] is None:
        return "unknown: one seed shows no spread between runs"
    if row["problems_needed"] is None:
        return "unknown: the measured difference is zero"
    if row["problems_needed"] <= row["problems"]:
        return f"more than {MOST_SEEDS:,}"
    return f"no number: {row['problems']:,} problems are too few, at least {row['problems_needed']:,} are needed"


def _hours(hours: float | None) -> str:
    return "" if hours is None else f"{hours:.2f}" if hours < 10 else f"{hours:,.0f}"

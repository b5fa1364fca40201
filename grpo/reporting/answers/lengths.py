"""What the runs say of the length normalizations: the lengths of right and of wrong responses."""

from __future__ import annotations

from collections.abc import Sequence

from grpo.results.runs import Run, by_arm

LENGTHS = ("val/response_length", "val/response_length_correct", "val/response_length_incorrect")


def lengths_table(runs: list[Run]) -> str:
    """Each arm's lengths before training and at the last evaluation (Markdown)."""
    lines = ["| arm | length at start | length at end | of right responses | of wrong responses |", "|---|---|---|---|---|"]
    for arm, of_arm in by_arm(runs).items():
        cells = [_mean(of_arm, LENGTHS[0], 0), *(_mean(of_arm, column, -1) for column in LENGTHS)]
        lines.append(f"| {arm} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _mean(runs: Sequence[Run], column: str, row: int) -> str:
    values = [run.validation[column].iloc[row] for run in runs if column in run.validation]
    known = [float(value) for value in values if value == value]
    return f"{sum(known) / len(known):.1f}" if known else ""

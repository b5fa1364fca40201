"""Lengths of right and of wrong responses, for the question on length normalization."""

from __future__ import annotations

from collections.abc import Sequence

from grpo.results.markdown import markdown_table
from grpo.results.runs import Run, by_arm

LENGTHS = ("val/response_length", "val/response_length_correct", "val/response_length_incorrect")


def lengths_table(runs: list[Run]) -> str:
    """Each arm's response lengths before training and at the last evaluation (Markdown)."""
    rows = [
        [arm, _mean(of_arm, LENGTHS[0], 0), *(_mean(of_arm, column, -1) for column in LENGTHS)]
        for arm, of_arm in by_arm(runs).items()
    ]
    return markdown_table(["arm", "length at start", "length at end", "of right responses", "of wrong responses"], rows)


def _mean(runs: Sequence[Run], column: str, row: int) -> str:
    values = [run.validation[column].iloc[row] for run in runs if column in run.validation]
    known = [float(value) for value in values if value == value]
    return f"{sum(known) / len(known):.1f}" if known else ""

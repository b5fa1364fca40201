"""What the runs say of the length normalisations: reward, and the lengths of right and of wrong responses."""

from __future__ import annotations

from collections.abc import Sequence

from grpo.results.runs import Run, by_arm, read_runs, read_selection
from grpo.results.statistics import format_interval
from grpo.study.schema import Study

LENGTHS = ("val/response_length", "val/response_length_correct", "val/response_length_incorrect")
KEY = "length_normalization"


def comparisons(study: Study) -> list[str]:
    """The experiments whose arms differ in the length normalisation."""
    return [name for name in study.made if len({arm.get(KEY) for arm in study.experiments[name].arms.values()}) > 1]


def measured(study: Study, experiment: str) -> str:
    """Each arm's answer reward and lengths at the end (Markdown)."""
    arms, selection = by_arm(read_runs(study, experiment)), read_selection(experiment)
    lines = [
        "| arm | answer reward (95% interval) | length at start | length at end | of right responses | of wrong responses |",
        "|---|---|---|---|---|---|",
    ]
    for candidate in selection["candidates"]:
        runs = arms[candidate["arm"]]
        cells = [_mean(runs, LENGTHS[0], 0), *(_mean(runs, column, -1) for column in LENGTHS)]
        lines.append(f"| {candidate['arm']} | {format_interval(candidate)} | " + " | ".join(cells) + " |")
    tied = selection["tied"]
    verdict = (
        f"These runs cannot tell {' and '.join([selection['leader'], *tied])} apart."
        if tied
        else f"{selection['leader']} leads, and each other arm is behind it by more than chance explains."
    )
    return "\n".join([*lines, "", verdict])


def _mean(runs: Sequence[Run], column: str, row: int) -> str:
    values = [run.validation[column].iloc[row] for run in runs if column in run.validation]
    known = [float(value) for value in values if value == value]
    return f"{sum(known) / len(known):.1f}" if known else ""

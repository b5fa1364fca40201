"""Forest plot of the contrasts that decided claims, with their seeds and published differences."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from grpo.reporting.answer import Found
from grpo.reporting.charts import INK, WIDTH
from grpo.reporting.style import readable
from grpo.results.findings import (
    AGREES,
    CANNOT_TELL,
    DISAGREES,
    NO_DIFFERENCE,
    NOT_TESTED,
    PROBLEMS,
    Contrast,
    Verdict,
)

Row = dict[str, Any]
VERDICTS = {
    AGREES: "#009E73",
    DISAGREES: "#D55E00",
    NO_DIFFERENCE: "#0072B2",
    CANNOT_TELL: "#E69F00",
    NOT_TESTED: "#999999",
}
START = "start"  # the rise above it decides only a part of its claim
LINE = 58  # characters


def forest_rows(verdicts: list[Verdict], found: Found) -> list[Row]:
    """The contrasts between two arms that decided a claim, as rows of :func:`draw_forest`."""
    ends = {
        f"{name}/{arm.arm}": {run.rpartition("/")[2]: end for run, end in zip(arm.runs, arm.by_run, strict=True)}
        for name, (_, result) in found.items()
        for arm in result.arms
    }
    return [
        {
            **{key: getattr(verdict, key) for key in ("statement", "verdict", "published")},
            "between": " above ".join(readable(arm.rpartition("/")[2]) for arm in (contrast.arm, contrast.against)),
            **{key: getattr(contrast.difference, key) for key in ("value", "low", "high")},
            "seeds": _by_seed(ends, verdict.experiment, contrast),
        }
        for verdict in verdicts
        for contrast in verdict.contrasts
        if contrast.against != START
    ]


def _by_seed(ends: Mapping[str, Mapping[str, float]], experiment: str, contrast: Contrast) -> list[float]:
    """The difference of the two arms' final rewards by seed; empty if the contrast is not one of final rewards."""
    if contrast.difference.covers == PROBLEMS:
        return []
    names = [of if "/" in of else f"{experiment}/{of}" for of in (contrast.arm, contrast.against)]
    first, second = (ends.get(name, {}) for name in names)
    return [first[seed] - second[seed] for seed in first if seed in second]


def draw_forest(rows: list[Row]) -> Figure:
    """Draw differences of answer rewards with intervals, seeds and published values with their sources.

    Args:
        rows: see :func:`forest_rows`.
    """
    names, heights, top = [], [], 0.0
    for place, row in enumerate(rows):
        repeated = place > 0 and rows[place - 1]["statement"] == row["statement"]  # a statement stands once
        lines = [*([] if repeated else textwrap.wrap(row["statement"], LINE)), *textwrap.wrap(f"({row['between']})", LINE)]
        heights.append(top + len(lines) / 2)
        names.append("\n".join(lines))
        top += len(lines) + 0.7
    figure = Figure(figsize=(2 * WIDTH, 0.6 + 0.15 * top), layout="constrained")
    axes = figure.subplots()
    axes.axvline(0, color=INK, linewidth=1)
    for y, row in zip(heights, rows, strict=True):
        color = VERDICTS[row["verdict"]]
        axes.hlines(y, row["low"], row["high"], color=color, linewidth=2.5)
        axes.plot(row["value"], y, "o", color=color)
        axes.plot(row["seeds"], [y] * len(row["seeds"]), "o", color=color, markersize=4.5, fillstyle="none")
        for source, value in row["published"].items():
            axes.plot(value, y + 0.7, "D", color=INK, markersize=4)
            axes.annotate(source, (value, y + 0.7), (5, 0), textcoords="offset points", va="center", fontsize=7)
    axes.set_yticks(heights, names, fontsize=8)
    axes.set_ylim(top, -0.5)
    axes.set_xlabel("difference of answer rewards: 95% interval; rings: seeds; diamonds: published, by source")
    axes.grid(axis="y", visible=False)
    shown = [verdict for verdict in VERDICTS if any(row["verdict"] == verdict for row in rows)]
    keys = [mpl.lines.Line2D([], [], color=VERDICTS[verdict], marker="o") for verdict in shown]
    figure.legend(keys, shown, loc="outside upper left", ncols=len(shown))
    return figure

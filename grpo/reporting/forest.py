"""The figure of all contrasts: each difference that decided a claim, its interval and runs, and what others published."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from grpo.reporting.answer import Found
from grpo.reporting.charts import INK, WIDTH
from grpo.reporting.style import readable
from grpo.results.findings import AGREES, CANNOT_TELL, DISAGREES, NO_DIFFERENCE, NOT_TESTED, PROBLEMS

Row = dict[str, Any]
VERDICTS = {
    AGREES: "#009E73",
    DISAGREES: "#D55E00",
    NO_DIFFERENCE: "#0072B2",
    CANNOT_TELL: "#E69F00",
    NOT_TESTED: "#999999",
}
START = "start"  # a rise above it is not all that its claim is judged by
LINE = 58  # letters


def forest_rows(claims: list[dict[str, Any]], found: Found) -> list[Row]:
    """Each difference between two arms that decided a published claim, as a row of :func:`draw_forest`."""
    ends = {
        f"{name}/{arm.arm}": {run.rpartition("/")[2]: end for run, end in zip(arm.runs, arm.by_run, strict=True)}
        for name, (_, result) in found.items()
        for arm in result.arms
    }
    return [
        {
            **{key: claim[key] for key in ("statement", "experiment", "verdict")},
            "between": " above ".join(readable(contrast[arm].rpartition("/")[2]) for arm in ("arm", "against")),
            **{key: contrast["difference"][key] for key in ("value", "low", "high")},
            "seeds": _by_seed(ends, claim, contrast),
            "published": claim["published"] or {},
        }
        for claim in claims
        for contrast in claim["contrasts"]
        if contrast["against"] != START
    ]


def _by_seed(ends: Mapping[str, Mapping[str, float]], claim: Mapping[str, Any], contrast: Mapping[str, Any]) -> list[float]:
    """The difference of the two arms' final rewards with each seed; none where it is not of final rewards."""
    if contrast["difference"]["covers"] == PROBLEMS:
        return []
    names = [of if "/" in of else f"{claim['experiment']}/{of}" for of in (contrast["arm"], contrast["against"])]
    first, second = (ends.get(name, {}) for name in names)
    return [first[seed] - second[seed] for seed in first if seed in second]


def draw_forest(rows: list[Row]) -> Figure:
    """Differences of answer rewards with their intervals, each seed, and what was published, with its source.

    Args:
        rows: as :func:`forest_rows` gives them.
    """
    names, heights, top = [], [], 0.0
    for place, row in enumerate(rows):
        said = place > 0 and rows[place - 1]["statement"] == row["statement"]  # once for all its differences
        lines = [*([] if said else textwrap.wrap(row["statement"], LINE)), *textwrap.wrap(f"({row['between']})", LINE)]
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

"""Forest plot of the contrasts that decided claims, with their seeds and published differences."""

from __future__ import annotations

import textwrap

import matplotlib as mpl
from matplotlib.figure import Figure

from grpo.reporting.charts import INK, WIDTH, draw_row
from grpo.reporting.record import Record
from grpo.reporting.style import readable
from grpo.results.findings import AGREES, CANNOT_TELL, DISAGREES, NO_DIFFERENCE, NOT_TESTED, PROBLEMS, Contrast, Verdict

COLOURS = {
    AGREES: "#009E73",
    DISAGREES: "#D55E00",
    NO_DIFFERENCE: "#0072B2",
    CANNOT_TELL: "#E69F00",
    NOT_TESTED: "#999999",
}
START = "start"  # the rise above it decides only a part of its claim
LINE = 58  # characters


def deciding(record: Record) -> list[tuple[Verdict, Contrast]]:
    """The contrasts between two arms that decided a claim."""
    return [(verdict, one) for verdict in record.verdicts for one in verdict.contrasts if one.against != START]


def by_seed(record: Record, experiment: str, contrast: Contrast) -> list[float]:
    """The difference of the two arms' final rewards by seed; empty if the contrast is not one of final rewards."""
    if contrast.difference.covers == PROBLEMS:
        return []
    ends = []
    for name in (contrast.arm, contrast.against):
        of, arm = name.split("/") if "/" in name else (experiment, name)
        result = record.results[of].arm(arm)
        ends.append({run.rpartition("/")[2]: end for run, end in zip(result.runs, result.by_run, strict=True)})
    first, second = ends
    return [first[seed] - second[seed] for seed in first if seed in second]


def draw_forest(record: Record) -> Figure:
    """Draw differences of answer rewards with intervals, seeds and published values with their sources."""
    rows, names, heights, top, above = deciding(record), [], [], 0.0, ""
    for verdict, contrast in rows:
        between = " above ".join(readable(arm.rpartition("/")[2]) for arm in (contrast.arm, contrast.against))
        lines = [] if verdict.statement == above else textwrap.wrap(verdict.statement, LINE)  # a statement stands once
        lines += textwrap.wrap(f"({between})", LINE)
        heights.append(top + len(lines) / 2)
        names.append("\n".join(lines))
        top, above = top + len(lines) + 0.7, verdict.statement
    figure = Figure(figsize=(2 * WIDTH, 0.6 + 0.15 * top), layout="constrained")
    axes = figure.subplots()
    axes.axvline(0, color=INK, linewidth=1)
    for y, (verdict, contrast) in zip(heights, rows, strict=True):
        draw_row(axes, y, contrast.difference, by_seed(record, verdict.experiment, contrast), COLOURS[verdict.verdict])
        for source, value in verdict.published.items():
            axes.plot(value, y + 0.7, "D", color=INK, markersize=4)
            axes.annotate(source, (value, y + 0.7), (5, 0), textcoords="offset points", va="center", fontsize=7)
    axes.set_yticks(heights, names, fontsize=8)
    axes.set_ylim(top, -0.5)
    axes.set_xlabel("difference of answer rewards: 95% interval;\nrings: seeds; diamonds: published, by source")
    axes.grid(axis="y", visible=False)
    shown = [name for name in COLOURS if any(verdict.verdict == name for verdict, _ in rows)]
    keys = [mpl.lines.Line2D([], [], color=COLOURS[name], marker="o") for name in shown]
    figure.legend(keys, shown, loc="outside upper left", ncols=len(shown))
    return figure

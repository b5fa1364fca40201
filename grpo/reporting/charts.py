"""Panels of curves, intervals and bars, drawn with matplotlib; equal results give equal bytes. Readable names of arms."""

from __future__ import annotations

import io
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from grpo.common.files import write_text
from grpo.results.findings import Interval

INK = "#767676"  # axes and text; readable on light and dark backgrounds
WIDTH, HEIGHT = 4.2, 2.35  # inches of a panel
FEW = 20  # a mean curve with at most so many points has markers
NEAR = 1.5  # labels of values on a logarithmic axis would touch where one is less than so many times another
LOG_FROM = 50.0  # an axis counts in powers where the largest value is so many times the smallest
SVG = {"Date": None, "Creator": None, "Format": None, "Type": None}
# Colours that colour-blind readers can distinguish (Okabe and Ito 2008); violet replaces their black, so that all can be read
# on light and dark backgrounds. From the ninth arm on, colours repeat with other dashes.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8A63C4", "#999999")
METHODS = {"grpo": COLOURS[0], "sft": COLOURS[1], "expert_iteration": COLOURS[2]}  # for figures that compare methods

# This process draws only the report's figures, so matplotlib's global settings hold the report's style.
mpl.rcParams.update(
    {
        "svg.fonttype": "none",  # text stays text, in the reader's font and the page's colour
        "svg.hashsalt": "grpo",
        "font.size": 9,
        "font.sans-serif": ["DejaVu Sans"],  # part of matplotlib, so that text has the same size on every machine
        **dict.fromkeys(("axes.edgecolor", "axes.labelcolor", "text.color", "xtick.color", "ytick.color", "grid.color"), INK),
        "axes.grid": True,
        "axes.grid.axis": "y",
        "grid.alpha": 0.25,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.titlelocation": "left",
        "axes.titlesize": 9,
        "axes.titlecolor": INK,
        "legend.frameon": False,
        "legend.fontsize": 8.5,
    }
)


@dataclass(frozen=True)
class Curve:
    """A line of a panel."""

    arm: str  # determines its style
    seed: int | None  # None for the mean over runs
    x: tuple[float, ...]
    y: tuple[float, ...]
    ended: bool = False  # whether the run diverged at its end


@dataclass(frozen=True)
class Dot:
    """An estimate with its interval, and the values of its runs."""

    arm: str
    x: float
    y: float
    low: float
    high: float
    seeds: tuple[float, ...] = ()


def panels(count: int, rows: int = 1, height: float = HEIGHT) -> tuple[Figure, list[Axes]]:
    """Make a figure with so many panels in rows; surplus panels are removed."""
    columns = -(-count // rows)
    figure = Figure(figsize=(WIDTH * columns, height * rows), layout="constrained")
    axes: list[Axes] = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axis in axes[count:]:
        axis.remove()
    return figure, axes[:count]


def draw_curves(axes: Axes, curves: Sequence[Curve], looks: Mapping[str, Style]) -> None:
    """Draw runs as thin lines and means over runs as thick ones, with a cross where a run diverged."""
    for curve in curves:
        look = looks[curve.arm]
        width, alpha = (1.8, 1.0) if curve.seed is None else (0.7, 0.55)
        few = "." if curve.seed is None and len(curve.x) <= FEW else ""
        axes.plot(curve.x, curve.y, color=look.color, linewidth=width, alpha=alpha, linestyle=look.line, marker=few)
        if curve.ended:
            axes.plot(curve.x[-1], curve.y[-1], "x", color=look.color, markersize=8)


def draw_dots(axes: Axes, dots: Sequence[Dot], looks: Mapping[str, Style], shape: str) -> None:
    """Draw estimates, joined by a line, with their intervals, and each run as a small dot."""
    axes.plot([dot.x for dot in dots], [dot.y for dot in dots], color=INK, linewidth=0.8, zorder=1)
    for dot in dots:
        color = looks[dot.arm].color
        axes.vlines(dot.x, dot.low, dot.high, color=color, linewidth=1.8)
        axes.plot(dot.x, dot.y, shape, color=color)
        axes.plot([dot.x] * len(dot.seeds), dot.seeds, ".", color=color, alpha=0.6, markersize=4)


def draw_row(axes: Axes, y: float, estimate: Interval, runs: Sequence[float], color: str) -> None:
    """Draw an estimate as a dot on the horizontal bar of its interval, and each run as a ring."""
    axes.hlines(y, estimate.low, estimate.high, color=color, linewidth=2)
    axes.plot(estimate.value, y, "o", color=color)
    axes.plot(runs, [y] * len(runs), "o", color=color, markersize=5, fillstyle="none")


def frame(axes: Axes, title: str, x: str, share: bool = False) -> None:
    """Title, axis label and scale of a panel: 0 to 1 for a share, logarithmic where values differ many times.

    Zeros, such as the gradient norm of a batch without signal, stay visible: the scale is linear near them (symlog).
    """
    axes.set_title(title)
    axes.set_xlabel(x)
    if "step" in x:
        axes.xaxis.set_major_locator(mpl.ticker.MaxNLocator(6, integer=True))
    heights = np.array([y for line in axes.lines for y in np.asarray(line.get_ydata())], dtype=float)
    known = heights[~np.isnan(heights)]
    if share:
        axes.set_ylim(-0.02, 1.02)
    elif known.size and known.min() >= 0 and known.max() > 0:
        usual = float(np.median(known[known > 0]))
        if known.min() > 0 and known.max() > LOG_FROM * known.min():
            axes.set_yscale("log")
        elif known.max() > LOG_FROM * usual:
            axes.set_yscale("symlog", linthresh=usual)


def legend(figure: Figure, looks: Mapping[str, Style]) -> None:
    """Draw a legend of the arms above all panels, in as many columns as fit; nothing with one arm."""
    if len(looks) < 2:
        return
    keys = [mpl.lines.Line2D([], [], color=look.color, linewidth=2, linestyle=look.line) for look in looks.values()]
    for columns in range(len(looks), 0, -1):
        drawn = figure.legend(keys, list(looks), loc="outside upper left", ncols=columns)
        if columns == 1 or drawn.get_window_extent().width < 0.98 * figure.bbox.width:
            return
        drawn.remove()


def powers_of_two(axes: Axes, values: Iterable[float]) -> None:
    """Make the x axis logarithmic, with ticks at these values only, aslant if some are near each other."""
    marked = sorted(set(values))
    axes.set_xscale("log", base=2)
    near = any(b < NEAR * a for a, b in itertools.pairwise(marked))
    axes.set_xticks(marked, [f"{value:g}" for value in marked], rotation=45 if near else 0)
    axes.minorticks_off()


def bars(widths: pd.DataFrame, colours: Mapping[str, str], height: float) -> tuple[Figure, Axes]:
    """Draw a figure of horizontal bars, the first on top, of parts laid end to end.

    Args:
        widths: a row for each bar, a column for each part.
        colours: part -> colour; parts without width have no entry in the legend.
        height: inches beside the bars.
    """
    figure, (axes,) = panels(1, height=height)
    starts = widths.cumsum(axis=1).shift(axis=1, fill_value=0.0)
    for part, color in colours.items():
        axes.barh(widths.index, widths[part], left=starts[part], color=color, height=0.75, label=part)
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    shown = [part for part in colours if widths[part].any()]
    keys = [mpl.patches.Patch(color=colours[part]) for part in shown]
    figure.legend(keys, shown, loc="outside upper left", ncols=2)
    return figure, axes


def save_figures(figures: Mapping[str, Figure], folder: Path) -> None:
    """Write each figure as NAME.svg, and as png/NAME.png for programs that cannot show SVG."""
    (folder / "png").mkdir(exist_ok=True)
    for name, figure in figures.items():
        save_figure(figure, folder / f"{name}.svg")
        save_figure(figure, folder / "png" / f"{name}.png")


def save_figure(figure: Figure, path: Path) -> None:
    """Write an SVG with a transparent background, or a PNG with a white one, by the file's ending."""
    if path.suffix == ".png":
        figure.savefig(path, dpi=90, facecolor="white", metadata={"Software": None})
        return
    drawn = io.StringIO()
    figure.savefig(drawn, format="svg", transparent=True, metadata=SVG)
    # Remove ids, which would clash in one page, and shorten: two decimals of a point, a curve on one line.
    text = re.sub(
        r' id="[a-zA-Z0-9]+(_|\.axis_)\d+"|<metadata>.*?</metadata>|^ +|\n(?=[LCQz"])', "", drawn.getvalue(), flags=re.S | re.M
    )
    text = re.sub(r"<[^>]*>", lambda tag: re.sub(r"(\d\.\d\d)\d+", r"\1", tag[0]), text)
    write_text(path, text.replace("'DejaVu Sans'", "system-ui"))


@dataclass(frozen=True)
class Style:
    """Colour and line style of a curve, as matplotlib takes them."""

    color: str
    line: Any = "solid"


def style(place: int) -> Style:
    """The style of an experiment's arm by its place in params.yaml, from 0; no two places have the same style.

    The first eight have solid lines, the next eight dashes, then dashes with one dot, with two dots, and so on.
    """
    turn, colour = divmod(place, len(COLOURS))
    return Style(COLOURS[colour], (0, (6, 2, *(1, 2) * (turn - 1))) if turn else "solid")


def styles(names: Iterable[str]) -> dict[str, Style]:
    """The style of each arm (or other series of a figure), in the given order."""
    return {name: style(place) for place, name in enumerate(names)}


def averaged(last_k: int) -> str:
    """Say which evaluations a final answer reward averages."""
    return f"mean of the last {last_k} evaluations" if last_k > 1 else "last evaluation"


def readable(arm: str) -> str:
    """A readable name: ``epochs_4-batch_16`` becomes ``4 epochs × batch 16``, ``rank_1-high`` becomes ``rank 1, high``."""
    parts = re.split(r"-(?=[a-z])", arm)
    counted = [re.fullmatch(r"(.*?)_(\d+)", part) for part in parts]
    words = []
    for part, count in zip(parts, counted, strict=True):
        if count is None:
            words.append(part if part[:1].isdigit() else part.replace("_", " "))  # 4_epochs is another arm than epochs_4
            continue
        name, number = count[1].replace("_", " "), count[2]
        several = name.endswith("s") and not name.endswith("ss")
        words.append(f"{number} {name[:-1] if number == '1' else name}" if several else f"{name} {number}")
    return (" × " if all(counted) else ", ").join(words)


def with_readable_names(text: str, arms: Iterable[str]) -> str:
    """Replace names of arms in a text by readable ones, except in names of runs (``EXPERIMENT/ARM/SEED``)."""
    for arm in sorted(arms, key=len, reverse=True):
        text = re.sub(rf"(?<![\w/-]){re.escape(arm)}(?![\w/-])", readable(arm), text)
    return text

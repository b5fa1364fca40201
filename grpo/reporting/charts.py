"""Drawing with matplotlib: panels of curves, of intervals and of bars; equal results give equal bytes."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from grpo.common.files import write_text
from grpo.reporting.style import Style

INK = "#767676"  # axes and text: reads on light and on dark ground
WIDTH, HEIGHT = 4.2, 2.35  # inches of a panel
LETTERS = 66  # of a legend's line above one panel
FEW = 20  # points of a mean that are marked each
LOG_FROM = 50.0  # an axis counts in powers where the largest value is so many times the smallest
SVG = {"Date": None, "Creator": None, "Format": None, "Type": None}

# Figures are all that this process draws, so matplotlib's own settings hold the report's style.
mpl.rcParams.update(
    {
        "svg.fonttype": "none",  # text stays text: the reader's own letters, and the page's colour
        "svg.hashsalt": "grpo",
        "font.size": 9,
        "font.sans-serif": ["DejaVu Sans"],  # matplotlib's own, so that every machine measures the same letters
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
    """One line of a panel.

    Attributes:
        arm: whose look it has.
        seed: of the run; None for the mean over runs.
        ended: whether it ends where the run diverged.
    """

    arm: str
    seed: int | None
    x: tuple[float, ...]
    y: tuple[float, ...]
    ended: bool = False


@dataclass(frozen=True)
class Dot:
    """An estimate with its interval, and beside it the values of its runs."""

    arm: str
    x: float
    y: float
    low: float
    high: float
    seeds: tuple[float, ...] = ()


def panels(count: int, rows: int = 1, height: float = HEIGHT) -> tuple[Figure, list[Axes]]:
    """A figure with so many panels, side by side or in so many rows; those left over are taken away."""
    columns = -(-count // rows)
    figure = Figure(figsize=(WIDTH * columns, height * rows), layout="constrained")
    axes: list[Axes] = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axis in axes[count:]:
        axis.remove()
    return figure, axes[:count]


def draw_curves(axes: Axes, curves: Sequence[Curve], looks: Mapping[str, Style]) -> None:
    """Runs as thin lines, means over runs as thick ones; a cross where a run diverged."""
    for curve in curves:
        look = looks[curve.arm]
        width, alpha = (1.8, 1.0) if curve.seed is None else (0.7, 0.55)
        few = "." if curve.seed is None and len(curve.x) <= FEW else ""
        line = (0, look.dashes) if look.dashes else "solid"
        axes.plot(curve.x, curve.y, color=look.color, linewidth=width, alpha=alpha, linestyle=line, marker=few)
        if curve.ended:
            axes.plot(curve.x[-1], curve.y[-1], "x", color=look.color, markersize=8)


def draw_dots(axes: Axes, dots: Sequence[Dot], looks: Mapping[str, Style], shape: str = "o", joined: bool = False) -> None:
    """Estimates with their intervals over numbers, each run as a small dot, and the arms' names."""
    if joined:
        axes.plot([dot.x for dot in dots], [dot.y for dot in dots], color=INK, linewidth=0.8, zorder=1)
    for dot in dots:
        color = looks[dot.arm].color
        axes.vlines(dot.x, dot.low, dot.high, color=color, linewidth=1.8)
        axes.plot(dot.x, dot.y, shape, color=color)
        axes.plot([dot.x] * len(dot.seeds), dot.seeds, ".", color=color, alpha=0.6, markersize=4)


def frame(axes: Axes, title: str, x: str, share: bool = False) -> None:
    """Title, axis label and scale of a panel: 0 to 1 for a share, logarithmic where values differ many times.

    Zeros, such as the gradient norm of a batch without signal, stay visible: the scale is linear near them (symlog).
    """
    axes.set_title(title)
    axes.set_xlabel(x)
    heights = [float(y) for line in axes.lines for y in np.asarray(line.get_ydata())]
    if "step" in x:
        axes.xaxis.set_major_locator(mpl.ticker.MaxNLocator(6, integer=True))
    known = [y for y in heights if y == y]
    if share:
        axes.set_ylim(-0.02, 1.02)
    elif known and min(known) >= 0 and max(known) > 0:
        usual = float(np.median([y for y in known if y > 0]))
        if min(known) > 0 and max(known) > LOG_FROM * min(known):
            axes.set_yscale("log")
        elif max(known) > LOG_FROM * usual:
            axes.set_yscale("symlog", linthresh=usual)


def legend(figure: Figure, looks: Mapping[str, Style]) -> None:
    """The arms' names and colours, above all panels; nothing where there is one arm."""
    if len(looks) < 2:
        return
    keys = [
        mpl.lines.Line2D([], [], color=look.color, linewidth=2, linestyle=(0, look.dashes) if look.dashes else "solid")
        for look in looks.values()
    ]
    longest = max(map(len, looks)) + 7
    columns = max(1, min(len(looks), int(LETTERS * figure.get_figwidth() / WIDTH) // longest))
    figure.legend(keys, list(looks), loc="outside upper left", ncols=columns)


def level(axes: Axes, y: float, text: str) -> None:
    """A dashed line across a panel, with what it stands for."""
    axes.axhline(y, color=INK, linestyle=(0, (4, 3)), linewidth=1)
    axes.annotate(text, (0.01, y), (0, 2), xycoords=("axes fraction", "data"), textcoords="offset points", fontsize=7)


def powers_of_two(axes: Axes, values: Iterable[float]) -> None:
    """A logarithmic axis that is marked at these values alone."""
    marked = sorted(set(values))
    axes.set_xscale("log", base=2)
    axes.set_xticks(marked, [f"{value:g}" for value in marked])
    axes.minorticks_off()


def bars(axes: Axes, parts: Sequence[Mapping[str, Any]], colours: Mapping[str, str]) -> None:
    """Bars laid end to end, a line each.

    Args:
        parts: ``name`` (of the line), ``kind``, ``start`` and ``end``, and perhaps ``text``; the first line is the topmost.
        colours: of the kinds.
    """
    for part in parts:
        width = part["end"] - part["start"]
        drawn = axes.barh(part["name"], width, left=part["start"], color=colours[part["kind"]], height=0.75)
        if part.get("text"):
            axes.bar_label(drawn, [part["text"]], label_type="center", color="black", fontsize=8)
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    shown = [kind for kind in colours if any(part["kind"] == kind for part in parts)]
    keys = [mpl.patches.Patch(color=colours[kind]) for kind in shown]
    axes.figure.legend(keys, shown, loc="outside upper left", ncols=2)  # type: ignore[call-arg]


def save_figures(figures: Mapping[str, Figure], folder: Path) -> None:
    """Write each figure as NAME.svg, and as png/NAME.png for where SVG cannot be shown."""
    (folder / "png").mkdir(exist_ok=True)
    for name, figure in figures.items():
        save_figure(figure, folder / f"{name}.svg")
        save_figure(figure, folder / "png" / f"{name}.png")


def save_figure(figure: Figure, path: Path) -> None:
    """Write an SVG on transparent ground, or a PNG on white by the file's ending."""
    if path.suffix == ".png":
        figure.savefig(path, dpi=90, facecolor="white", metadata={"Software": None})
        return
    drawn = io.StringIO()
    figure.savefig(drawn, format="svg", transparent=True, metadata=SVG)
    # Two figures in one page share no id; a hundredth of a point is enough, and so is one line for a curve.
    text = re.sub(
        r' id="[a-zA-Z0-9]+(_|\.axis_)\d+"|<metadata>.*?</metadata>|^ +|\n(?=[LCQz"])', "", drawn.getvalue(), flags=re.S | re.M
    )
    text = re.sub(r"<[^>]*>", lambda tag: re.sub(r"(\d\.\d\d)\d+", r"\1", tag[0]), text)
    write_text(path, text.replace("'DejaVu Sans'", "system-ui"))

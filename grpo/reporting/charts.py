"""Panels of curves with bands over runs, intervals and bars, drawn with matplotlib; equal results give equal bytes."""

from __future__ import annotations

import io
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.style
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from grpo.common.files import write_bytes, write_text
from grpo.common.metrics import METRICS, UNITS
from grpo.common.safe_text import in_figure
from grpo.results.runs import Run

INK = "#767676"  # of axes and text
FULL = 13.0  # inches of a whole row of panels; shown at 96 px an inch, so that 8.5 points are 11 px
PANEL, HEIGHT = 3.25, 1.5  # inches of a panel that stands alone
LEGEND_ROW = 0.2  # inches
ENTRY = 12  # points of an entry of a panel's own legend
FEW = 20  # a mean curve with at most so many points has markers; more runs of an arm are a band
MOST_WITH_LINES = 2  # the most arms whose runs are thin lines
NEAR = 1.5  # labels of values on a logarithmic axis would touch where one is less than so many times another
LOG_FROM = 50.0  # an axis counts in powers where the largest value is so many times the smallest
SVG = {"Date": None, "Creator": None, "Format": None, "Type": None}
# Colours that colour-blind readers can distinguish (Okabe and Ito 2008); violet replaces their black, so that all can be read
# on light and dark backgrounds. From the ninth arm on, colours repeat with other dashes.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8A63C4", "#999999")

ANSWER, FORM, GIVEN_FORM, LENGTH = "val/answer_reward", "val/format_reward", "val/answer_given_form", "val/response_length"
ENTROPY, NORM, KL = "token_entropy", "gradient_norm", "kl/per_token"
STEP = {"grpo": "GRPO step", "sft": "optimizer step", "expert_iteration": "expert iteration step"}
TITLES = {metric.name: metric.label for metric in METRICS} | {GIVEN_FORM: "accuracy, given the form"}
SHARES = {name for name, unit in UNITS.items() if unit == "share"} - {"clip_fraction"} | {GIVEN_FORM}
OF_A_RUN = (ANSWER, FORM, GIVEN_FORM, LENGTH, ENTROPY, NORM, "train/reward", "loss")  # panels in a figure of one run

Style = Mapping[str, Any]  # ``color`` and ``linestyle`` of a curve, as matplotlib takes them


def as_text(text: object) -> str:
    """A text for a figure, where backquotes of code would be shown."""
    return in_figure(text).replace("`", "")


# This process draws only the report's figures, so matplotlib's global settings hold the report's style.
mpl.style.use(Path(__file__).with_name("report.mplstyle"))


def style(place: int) -> Style:
    """The style of an experiment's arm by its place in params.yaml, from 0; no two places have the same style.

    The first eight have solid lines, the next eight dashes, then dashes with one dot, with two dots, and so on.
    """
    turn, colour = divmod(place, len(COLOURS))
    return {"color": COLOURS[colour], "linestyle": (0, (6, 2, *(1, 2) * (turn - 1))) if turn else "solid"}


def styles(names: Iterable[str]) -> dict[str, Style]:
    """The style of each arm (or other series of a figure), in the given order."""
    return {name: style(place) for place, name in enumerate(names)}


# -------------------------------------------------------------------------------------------------------------- values


def values_of(run: Run, column: str) -> pd.Series[float] | None:
    """A metric by step, of the step's last update; None if the run does not have it."""
    if column == GIVEN_FORM:
        answer, form = (
            run.validation.groupby("step")[name].last() if name in run.validation else None for name in (ANSWER, FORM)
        )
        return None if form is None or answer is None or (answer > form).any() else (answer / form).where(form > 0)
    table = run.validation if column.startswith("val/") else run.history
    if column not in table:
        return None
    found: pd.Series[float] = table.groupby("step")[column].last()
    if column == run.column:  # the end of a curve is what tables say
        found.iloc[-1] = run.final.mean()
    return found if found.notna().any() else None


def has(runs: Iterable[Run], column: str) -> bool:
    """Whether all runs have a metric, and not always zero."""
    found = [values_of(run, column) for run in runs]
    return all(of is not None for of in found) and any((of.fillna(0) != 0).any() for of in found if of is not None)


def over_runs(runs: Sequence[Run], column: str) -> pd.DataFrame:
    """A metric with a row for each step and a column for each run, all of which have it.

    A validation metric of a run that stopped early keeps its last value, so that the mean counts all runs to the end; a
    training metric ends with its run.
    """
    table = pd.concat({run.seed: values_of(run, column) for run in runs}, axis=1).sort_index()
    return table.ffill() if column.startswith("val/") else table


def band_of(table: pd.DataFrame) -> pd.DataFrame:
    """The mean, lowest and highest number of each row, as ``value``, ``low`` and ``high``."""
    return pd.DataFrame({"value": table.mean(axis=1), "low": table.min(axis=1), "high": table.max(axis=1)})


# ------------------------------------------------------------------------------------------------------------- drawing


def panels(count: int, width: float | None = None, height: float = HEIGHT, a_row: int = 7) -> tuple[Figure, list[Axes]]:
    """Make a figure with ``count`` panels and its axes.

    ``height``: of a row, in inches. ``a_row``: the most panels in a row; with eight, titles would touch. More are spread evenly
    over rows.
    """
    rows = -(-count // a_row)
    columns = -(-count // rows)
    figure = Figure(figsize=(width or min(FULL, PANEL * columns), height * rows))
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for spare in axes[count:]:
        spare.set_axis_off()
    return figure, axes[:count]


def draw_arm(
    axes: Axes, runs: Sequence[Run], column: str, look: Style, collapsed: Iterable[str] = (), each: bool = False
) -> None:
    """Draw the mean over an arm's runs on the band of their range; runs that collapsed or stopped also alone, with a cross.

    ``each``: draw a thin line for each run in place of the band.
    """
    table = over_runs(runs, column)
    curve = band_of(table)
    if each:
        axes.plot(table.index, table.to_numpy(), **look, linewidth=0.6, alpha=0.5)
        curve["low"] = curve["high"] = curve["value"]
    draw_band(axes, curve.index, curve, look, marker="." if len(curve) <= FEW else "")
    for run in runs:
        own = values_of(run, column)
        if own is not None and (run.name in set(collapsed) or run.metrics["diverged_step"] is not None):
            axes.plot(own.index, own, **look, linewidth=0.6, alpha=0.6)
            axes.plot(own.index[-1], own.iloc[-1], "x", color=look["color"], markersize=6)


def draw_band(axes: Axes, x: Sequence[float] | pd.Index[Any], curve: pd.DataFrame, look: Style, **line: Any) -> None:
    """Draw a curve's ``value`` on the band from ``low`` to ``high``, if it has any width."""
    axes.plot(x, curve["value"], **look, **line)
    if (curve["low"] < curve["high"]).any():
        axes.fill_between(x, curve["low"], curve["high"], color=look["color"], alpha=0.13, linewidth=0)


def curves_figure(
    arms: Mapping[str, Sequence[Run]],
    columns: Sequence[str],
    method: str,
    collapsed: Iterable[str] = (),
    more: int = 0,
    looks: Mapping[str, Style] | None = None,
) -> tuple[Figure, list[Axes]]:
    """Draw a row of panels, one for each metric, with all arms.

    Returns the figure and its further panels.

    Args:
        arms: runs by the shown label.
        collapsed: names of runs that collapsed.
        more: further panels, which the caller draws.
        looks: the arms' styles; by default those of their order.
    """
    looks = looks or styles(arms)
    figure, axes = panels(len(columns) + more)
    for place, column in zip(axes, columns, strict=False):
        for label, runs in arms.items():
            draw_arm(place, runs, column, looks[label], collapsed, each=len(arms) <= MOST_WITH_LINES and 1 < len(runs) <= FEW)
        frame(place, TITLES[column], STEP[method], column in SHARES)
    legend(figure, looks)
    return figure, axes[len(columns) :]


def run_figure(run: Run) -> Figure:
    """Draw a GRPO run's curves over its steps, a panel for each metric of :data:`OF_A_RUN` that it has."""
    columns = dict.fromkeys((run.column, *OF_A_RUN))
    return curves_figure({run.arm: [run]}, [column for column in columns if has([run], column)], "grpo")[0]


def frame(axes: Axes, title: str, x: str, share: bool = False) -> None:
    """Title, axis label and scale of a panel: 0 to 1 for a share, logarithmic where values differ many times.

    Zeros, such as the gradient norm of a batch without signal, stay visible: the scale is linear near them (symlog).
    """
    axes.set_title(as_text(title))
    axes.set_xlabel(as_text(x))
    if "step" in x:
        axes.xaxis.set_major_locator(mpl.ticker.MaxNLocator(5, integer=True))
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
        else:  # a band may be cut off: one run's spike must not press all means flat
            axes.set_ylim(top=known.max() + 0.08 * (known.max() - known.min() or 1.0))


def legend(figure: Figure, looks: Mapping[str, Style]) -> None:
    """Draw a legend above all panels in as many columns as fit, and make the figure higher for it; nothing with one arm."""
    if len(looks) < 2:
        return
    keys = [mpl.lines.Line2D([], [], linewidth=2, **look) for look in looks.values()]
    for columns in range(len(looks), 0, -1):
        drawn = figure.legend(keys, [*map(as_text, looks)], loc="outside upper left", ncols=columns)
        if columns == 1 or drawn.get_window_extent().width < 0.98 * figure.bbox.width:
            figure.set_figheight(figure.get_figheight() + LEGEND_ROW * -(-len(looks) // columns))
            return
        drawn.remove()


def own_legend(axes: Axes) -> None:
    """Draw a panel's own legend between its title and its curves, so that it lies on none."""
    drawn = axes.legend(loc="lower left", bbox_to_anchor=(-0.03, 0.97), handlelength=1.2, borderaxespad=0, labelspacing=0.2)
    axes.set_title(axes.get_title(loc="left"), pad=6 + ENTRY * len(drawn.get_texts()))


def powers(axes: Axes, values: Iterable[float], labels: Mapping[float, str] | None = None) -> None:
    """Make the x axis logarithmic, with ticks at these values only, aslant if some are near each other."""
    marked = sorted(set(values))
    axes.set_xscale("log", base=2)
    near = any(b < NEAR * a for a, b in itertools.pairwise(marked))
    axes.set_xticks(marked, [labels[one] if labels else f"{one:g}" for one in marked], rotation=45 if near else 0)
    axes.minorticks_off()


def bars(axes: Axes, widths: pd.DataFrame, colours: Mapping[str, str]) -> None:
    """Draw horizontal bars, the first on top, of parts laid end to end; the figure's first one has a legend of the parts.

    ``widths``: a row for each bar, a column for each part that any bar of the figure has. ``colours``: part -> colour.
    """
    starts = widths.cumsum(axis=1).shift(axis=1, fill_value=0.0)
    shown = [part for part in colours if part in widths]
    for part in shown:
        axes.barh([*map(as_text, widths.index)], widths[part], left=starts[part], color=colours[part], height=0.75, label=part)
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    if not axes.figure.legends:
        axes.figure.legend(loc="outside upper left", ncols=len(shown), handlelength=1.2)


def save_figure(figure: Figure, path: Path) -> None:
    """Write an SVG with a transparent background, or a PNG with a white one, by the file's ending."""
    if path.suffix == ".png":
        image = io.BytesIO()
        figure.savefig(image, facecolor="white", metadata={"Software": None})
        write_bytes(path, image.getvalue())
        return
    drawn = io.StringIO()
    figure.savefig(drawn, format="svg", transparent=True, metadata=SVG)
    # Remove ids, which would clash in one page, and shorten: two decimals of a point, a curve on one line.
    text = re.sub(
        r' id="[a-zA-Z0-9]+(_|\.axis_)\d+"|<metadata>.*?</metadata>|^ +|\n(?=[LCQz"])', "", drawn.getvalue(), flags=re.S | re.M
    )
    text = re.sub(r"<[^>]*>", lambda tag: re.sub(r"(\d\.\d\d)\d+", r"\1", tag[0]), text)
    write_text(path, text.replace("'DejaVu Sans'", "system-ui"))

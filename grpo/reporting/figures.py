"""Figures of every experiment and of the claims (SVG and PNG), and validation rewards as CSV for `dvc plots`."""

from __future__ import annotations

import textwrap
from typing import Any, get_args

import matplotlib as mpl
import pandas as pd
from matplotlib.figure import Figure

from grpo.common.files import whole_folder
from grpo.reporting import charts
from grpo.reporting.answer import best
from grpo.reporting.charts import INK, METHODS, WIDTH, Curve, Style, readable, styles
from grpo.reporting.curves import FORM, GIVEN_FORM, LENGTH, curves_figure, experiment_figure, metrics_figure, panels_of
from grpo.reporting.kissing_number import draw_search, read_report, read_scores
from grpo.reporting.pieces import extra_figures
from grpo.reporting.record import Record
from grpo.reporting.tables import KINDS
from grpo.results.findings import PROBLEMS, Contrast, ExperimentResult, Verdict, VerdictName
from grpo.results.runs import REWARD, Run
from grpo.study import paths
from grpo.study.settings import MAIN

READABLE = 0.04  # smallest share of a bar with a number in it
BARE = "question_only"  # the prompt whose zero-shot accuracy is what the base model can do without a form
LABELS = (*get_args(VerdictName), "by construction")  # of verdicts
VERDICT_COLOURS = dict(zip(LABELS, ("#009E73", "#D55E00", "#0072B2", "#E69F00", "#999999", "#8A63C4"), strict=True))
START = "start"  # the rise above it decides only a part of its claim
LINE = 58  # characters
# Metrics of the best configuration, on the first screen.
OVERVIEW = (REWARD, FORM, GIVEN_FORM, LENGTH)


def draw_figures(record: Record) -> None:
    """Write reports/figures/*.svg, the same as PNG, and reports/curves/*.csv."""
    with whole_folder(paths.FIGURES) as folder, whole_folder(paths.REPORTS / "curves") as curves:
        charts.save_figures(other_figures(record), folder)
        for experiment, runs in record.runs.items():
            drawn = {
                experiment: experiment_figure(record.study, experiment, runs),
                f"{experiment}-ends": draw_ends(record.results[experiment]),
                f"{experiment}-metrics": metrics_figure(record.study, experiment, runs),
            }
            charts.save_figures(drawn, folder)
            curve_table(runs).to_csv(curves / f"{experiment}.csv", index=False, lineterminator="\n")


def other_figures(record: Record) -> dict[str, Figure]:
    """Draw the figures beside each experiment's own ones: file name -> figure."""
    figures = {"overview": draw_overview(record), "math_baseline": draw_zero_shot(record.baseline)}
    if deciding(record):
        figures["forest"] = draw_forest(record)
    if record.sampled:
        figures["best_of_n"] = draw_best_of_n(record.sampled)
    if record.study.kissing_number is not None:
        figures["kissing_number"] = draw_search(read_report(), read_scores())
    for experiment in record.runs:
        figures |= {figure.name: figure.draw(record, experiment) for figure in extra_figures(record.study, experiment)}
    return figures


def curve_table(runs: list[Run]) -> pd.DataFrame:
    """Table for `dvc plots`: columns ``arm``, ``seed``, ``step`` and ``answer_reward`` (validation)."""
    curves = [run.validation.groupby("step", as_index=False)[REWARD].last().assign(arm=run.arm, seed=run.seed) for run in runs]
    table: pd.DataFrame = pd.concat(curves).rename(columns={REWARD: "answer_reward"})[["arm", "seed", "step", "answer_reward"]]
    return table


def draw_overview(record: Record) -> Figure:
    """Draw reward, form, accuracy given the form and length of the best configuration, with the bare prompt's accuracy."""
    top = best(record)
    experiment, runs = record.study.experiments[top["numbers"]["experiment"]], top["arm"]["all"]
    name, shown = readable(top["arm"]["arm"]), panels_of(runs, OVERVIEW, experiment.method)
    figure = curves_figure({name: runs}, shown, {name: Style(METHODS[experiment.method])})
    if experiment.task == MAIN and BARE in record.baseline:
        accuracy, reward = record.baseline[BARE]["accuracy"]["value"], figure.axes[0]
        text = f"base model, asked under {BARE}: {accuracy:.3f}"
        reward.axhline(accuracy, color=INK, linestyle=(0, (4, 3)), linewidth=1, label=text)
        reward.legend(loc="lower right", fontsize=8)
    return figure


def draw_ends(result: ExperimentResult) -> Figure:
    """Draw each arm's final reward with its interval, and each run, also collapsed ones, as a ring."""
    figure, (axes,) = charts.panels(1, height=1.0 + 0.32 * len(result.arms))
    names = [readable(arm.arm) for arm in result.arms]
    for place, (arm, look) in enumerate(zip(result.arms, styles(names).values(), strict=True)):
        charts.draw_row(axes, place, arm.final, arm.by_run, look.color)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    # Titles of the figure, as the arms' names may leave the axes little width.
    figure.suptitle(f"answer reward, {charts.averaged(result.last_k)}", fontsize=8.5)
    figure.supxlabel(f"bar: 95% over {result.arms[0].final.covers}; rings: runs", fontsize=8.5)
    return figure


def draw_zero_shot(baseline: dict[str, Any]) -> Figure:
    """Draw the share of each outcome category under each prompt, before training."""
    names = max((list(values["categories"]) for values in baseline.values()), key=len)  # the fourth category is rare
    counts = pd.DataFrame({prompt: values["categories"] for prompt, values in baseline.items()}, index=names).T.fillna(0)
    shares = counts.div([values["problems"] for values in baseline.values()], axis=0)
    colours = dict(zip(names, ("#009E73", "#E69F00", "#999999", "#56B4E9")[: len(names)], strict=True))
    figure, axes = charts.bars(shares, colours, 1.2 + 0.45 * len(baseline))
    for drawn in axes.containers:
        texts = [f"{bar.get_width():.0%}" if bar.get_width() >= READABLE else "" for bar in drawn]
        axes.bar_label(drawn, texts, label_type="center", color="black", fontsize=8)  # type: ignore[arg-type]
    axes.set_xlabel("share of problems")
    return figure


def draw_best_of_n(metrics: dict[str, Any]) -> Figure:
    """Draw pass@N, Best@N and majority vote over N, one panel per prompt, with 95% intervals clustered by problem."""
    figure, axes = charts.panels(len(metrics))
    looks = styles(KINDS.values())
    for place, (prompt, values) in zip(axes, metrics.items(), strict=True):
        counts = tuple(map(int, values["n"]))
        for kind, title in KINDS.items():
            of = pd.DataFrame([kinds[kind] for kinds in values["n"].values()])
            charts.draw_curves(place, [Curve(title, None, counts, tuple(of["value"]))], looks)
            place.fill_between(counts, of["low"], of["high"], color=looks[title].color, alpha=0.15, linewidth=0)
        charts.frame(place, f"{prompt}: share answered right, 95%", f"samples N (of {values['samples']})", share=True)
        charts.powers_of_two(place, counts)
    charts.legend(figure, looks)
    return figure


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
        seeds = by_seed(record, verdict.experiment, contrast)
        charts.draw_row(axes, y, contrast.difference, seeds, VERDICT_COLOURS[verdict.label])
        if verdict.published:  # the sources stand side by side, as their values may be near each other
            values, at = sorted(verdict.published.values()), y + 0.7
            axes.plot(values, [at] * len(values), "D", color=INK, markersize=4, linestyle="none")
            sources = ", ".join(sorted(verdict.published, key=verdict.published.__getitem__))
            axes.annotate(sources, (values[-1], at), (5, 0), textcoords="offset points", va="center", fontsize=7)
    axes.set_yticks(heights, names, fontsize=8)
    axes.set_ylim(top, -0.5)
    axes.set_xlabel(
        "difference of answer rewards: 95% interval;\nrings: seeds; diamonds: published, with sources from left to right"
    )
    axes.grid(axis="y", visible=False)
    shown = [name for name in VERDICT_COLOURS if any(verdict.label == name for verdict, _ in rows)]
    keys = [mpl.lines.Line2D([], [], color=VERDICT_COLOURS[name], marker="o") for name in shown]
    figure.legend(keys, shown, loc="outside upper left", ncols=len(shown))
    return figure

"""Figures (SVG) of every experiment, each of one question, and the same curves as CSV for `dvc plots`."""

from __future__ import annotations

from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from grpo.common.files import read_json, whole_folder
from grpo.reporting.baseline import KINDS
from grpo.reporting.charts import Spec, filled_curve, forest, forest_rows, save_svg
from grpo.reporting.curves import METRICS, STEP, points_of, reward_curve
from grpo.reporting.kissing_number import draw_search, read_report, read_scores
from grpo.reporting.pieces import pieces_of
from grpo.reporting.style import COLOURS, save_figure
from grpo.results.claims import about_this_study
from grpo.results.runs import (
    REWARD,
    Run,
    by_arm,
    experiments,
    read_baseline,
    read_best_of_n,
    read_runs,
    read_selection,
)
from grpo.study import paths
from grpo.study.schema import Study

CURVE = ["arm", "seed", "step", "answer_reward"]  # columns of a table for `dvc plots`
SEARCH_CURVE = ["attempt", "best"]


def draw_figures(study: Study) -> None:
    """Write reports/figures/*.svg and reports/curves/*.csv."""
    with whole_folder(paths.FIGURES) as folder, whole_folder(paths.REPORTS / "curves") as curves:
        claims = read_json(paths.CLAIMS, made_by="claims", keys=("claims",))
        if rows := forest_rows(about_this_study(claims["claims"], study.left_out)):
            save_svg(forest(rows), folder / "forest.svg")
        save_figure(draw_zero_shot(read_baseline(study)), folder / "math_baseline.svg")
        if sampled := read_best_of_n(study):
            save_figure(draw_best_of_n(sampled), folder / "best_of_n.svg")
        if study.kissing_number is not None:
            save_figure(draw_search(read_report(), read_scores()), folder / "kissing_number.svg")
        for experiment in experiments(study):
            runs = read_runs(study, experiment)
            selection = read_selection(experiment)
            save_svg(experiment_figure(study, experiment, runs), folder / f"{experiment}.svg")
            for figure in filter(None, (piece.figure for piece in pieces_of(study, experiment))):
                save_figure(figure.draw(study, runs, selection), folder / f"{figure.name}.svg")
            curve_table(runs).to_csv(curves / f"{experiment}.csv", index=False, lineterminator="\n")


def write_search_curve(study: Study) -> None:
    """The best valid set so far by attempt; without rows where there is no search, as DVC draws no plot of such a table."""
    found = read_scores()[SEARCH_CURVE] if study.kissing_number is not None else pd.DataFrame(columns=SEARCH_CURVE)
    found.to_csv(paths.REPORTS / "search.csv", index=False, lineterminator="\n")


def curve_table(runs: list[Run]) -> pd.DataFrame:
    """Columns ``arm``, ``seed``, ``step`` and ``answer_reward`` (validation), for `dvc plots`, which draws mean and range."""
    curves = [run.validation.groupby("step", as_index=False)[REWARD].last().assign(arm=run.arm, seed=run.seed) for run in runs]
    table: pd.DataFrame = pd.concat(curves).rename(columns={REWARD: "answer_reward"})[CURVE]
    return table


def experiment_figure(study: Study, experiment: str, runs: list[Run]) -> Spec:
    """The reward of each arm over steps, mean and range of the seeds; what explains it is in the page."""
    table, column = reward_curve(runs)
    points, step = points_of(runs, table, column), STEP[study.experiments[experiment].method]
    return filled_curve(points, list(by_arm(runs)), step, METRICS[table][column], share=True)


def draw_zero_shot(baseline: dict[str, Any]) -> Figure:
    """Share of each outcome category under each prompt, before any training."""
    figure = Figure(figsize=(8, 0.9 + 0.7 * len(baseline)), layout="constrained")
    axis = figure.add_subplot()
    prompts = list(baseline)[::-1]
    left = [0.0] * len(prompts)
    names = max((list(values["categories"]) for values in baseline.values()), key=len)  # the fourth only where it occurs
    for colour, name in zip(("#009E73", "#E69F00", "#999999", "#56B4E9")[: len(names)], names, strict=True):
        shares = [baseline[p]["categories"].get(name, 0) / baseline[p]["problems"] for p in prompts]
        axis.barh(prompts, shares, left=left, color=colour, label=name)
        for y, (start, share) in enumerate(zip(left, shares, strict=True)):
            if share >= 0.04:
                axis.text(start + share / 2, y, f"{share:.0%}", ha="center", va="center", fontsize=9)
        left = [start + share for start, share in zip(left, shares, strict=True)]
    axis.set_xlim(0, 1)
    axis.set_xlabel("share of problems")
    axis.legend(ncols=3, fontsize=9, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)
    return figure


def draw_best_of_n(metrics: dict[str, Any]) -> Figure:
    """pass@N, Best@N and majority vote over N, one panel a prompt, with 95% intervals clustered by problem."""
    figure = Figure(figsize=(4.8 * len(metrics), 3.8), layout="constrained")
    for i, (prompt, values) in enumerate(metrics.items()):
        axis = figure.add_subplot(1, len(metrics), i + 1)
        ns = [int(n) for n in values["n"]]
        for shift, colour, (kind, label) in zip((-0.06, 0.0, 0.06), COLOURS[:3], KINDS.items(), strict=True):
            points = [values["n"][str(n)][kind] for n in ns]
            means = [point["value"] for point in points]
            errors = [[p["value"] - p["low"] for p in points], [p["high"] - p["value"] for p in points]]
            # Set apart a little, so that equal values can be seen.
            x = [n * 2**shift for n in ns]
            axis.errorbar(x, means, yerr=errors, color=colour, label=label, marker="o", markersize=4, capsize=3, linewidth=1.5)
        axis.set_xscale("log", base=2)
        axis.set_xticks(ns, labels=[str(n) for n in ns])
        axis.minorticks_off()
        axis.set_ylim(-0.02, 1.02)
        axis.set_xlabel("samples N")
        axis.set_ylabel("share of problems answered right")
        axis.set_title(f"{prompt}: {values['problems']} problems, {values['samples']} samples of each", fontsize=10)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=9)
    return figure

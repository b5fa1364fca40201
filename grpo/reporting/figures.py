"""Figures (SVG) of every experiment, each of one question, and the same curves as CSV for `dvc plots`."""

from __future__ import annotations

from typing import Any

import pandas as pd

from grpo.common.files import read_json, whole_folder
from grpo.reporting.baseline import KINDS
from grpo.reporting.charts import Spec, bars, below_one_another, filled_curve, save_figure
from grpo.reporting.curves import METRICS, STEP, points_of, reward_curve
from grpo.reporting.forest import forest, forest_rows
from grpo.reporting.kissing_number import draw_search, read_report, read_scores
from grpo.reporting.pieces import pieces_of
from grpo.reporting.style import styles
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
READABLE = 0.04  # share of a bar that a number fits into


def draw_figures(study: Study) -> None:
    """Write reports/figures/*.svg and reports/curves/*.csv."""
    with whole_folder(paths.FIGURES) as folder, whole_folder(paths.REPORTS / "curves") as curves:
        claims = read_json(paths.CLAIMS, made_by="report", keys=("claims",))
        if rows := forest_rows(about_this_study(claims["claims"], study.left_out)):
            save_figure(forest(rows), folder / "forest.svg")
        for name, spec in other_figures(study).items():
            save_figure(spec, folder / f"{name}.svg")
        for experiment in experiments(study):
            runs = read_runs(study, experiment)
            save_figure(experiment_figure(study, experiment, runs), folder / f"{experiment}.svg")
            curve_table(runs).to_csv(curves / f"{experiment}.csv", index=False, lineterminator="\n")


def other_figures(study: Study) -> dict[str, Spec]:
    """What is drawn beside the experiments' curves and the forest, by file name: the page draws it too."""
    found = {"math_baseline": draw_zero_shot(read_baseline(study))}
    if sampled := read_best_of_n(study):
        found["best_of_n"] = draw_best_of_n(sampled)
    if study.kissing_number is not None:
        found["kissing_number"] = draw_search(read_report(), read_scores())
    for experiment in experiments(study):
        for figure in filter(None, (piece.figure for piece in pieces_of(study, experiment))):
            found[figure.name] = figure.draw(study, read_runs(study, experiment), read_selection(experiment))
    return found


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
    return filled_curve(points, styles(by_arm(runs)), step, METRICS[table][column], share=True)


def draw_zero_shot(baseline: dict[str, Any]) -> Spec:
    """Share of each outcome category under each prompt, before any training."""
    names = max((list(values["categories"]) for values in baseline.values()), key=len)  # the fourth only where it occurs
    rows = []
    for prompt, values in baseline.items():
        start = 0.0
        for name in names:
            share = values["categories"].get(name, 0) / values["problems"]
            text = f"{share:.0%}" if share >= READABLE else ""
            at = start + share / 2 if share > 0.2 else start
            rows.append({"name": prompt, "kind": name, "start": start, "end": start + share, "text": text, "at": at})
            start += share
    kinds = dict(zip(names, ("#009E73", "#E69F00", "#999999", "#56B4E9")[: len(names)], strict=True))
    return bars(rows, kinds, "share of problems", row_height=44)


def draw_best_of_n(metrics: dict[str, Any]) -> Spec:
    """pass@N, Best@N and majority vote over N, one panel a prompt, with 95% intervals clustered by problem."""
    panels = {}
    for prompt, values in metrics.items():
        points = [
            {"arm": title, "series": title, "x": int(n), "y": of["value"], "low": of["low"], "high": of["high"], "ended": False}
            for kind, title in KINDS.items()
            for n, of in ((n, kinds[kind]) for n, kinds in values["n"].items())
        ]
        title = f"{prompt}: {values['problems']} problems, {values['samples']} samples of each, 95% intervals"
        curves = filled_curve(points, styles(KINDS.values()), "samples N", "share answered right", share=True, log=True)
        panels[title] = curves | {"height": 220}
    return below_one_another(panels)

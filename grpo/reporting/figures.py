"""Figures of every experiment (SVG and PNG), and validation rewards as CSV for `dvc plots`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from grpo.common.files import whole_folder
from grpo.reporting.answer import Found, best
from grpo.reporting.baseline import KINDS
from grpo.reporting.charts import (
    INK,
    Curve,
    bars,
    draw_curves,
    frame,
    legend,
    panels,
    powers_of_two,
    save_figures,
)
from grpo.reporting.curves import (
    GIVEN_FORM,
    SHARES,
    STEP,
    TITLES,
    UPDATE,
    Axis,
    curves_of,
    has,
    named,
    over_drift,
    over_steps,
    over_updates,
    updates_differ,
    values_of,
)
from grpo.reporting.discussion import Numbers
from grpo.reporting.forest import draw_forest, forest_rows
from grpo.reporting.form_and_answer import FORM
from grpo.reporting.kissing_number import draw_search, read_report, read_scores
from grpo.reporting.pieces import extra_figures
from grpo.reporting.style import METHODS, Style, readable, styles
from grpo.results.claims import read_verdicts, shown
from grpo.results.findings import ExperimentResult
from grpo.results.runs import REWARD, Run, read_baseline, read_best_of_n, read_selection
from grpo.results.verdicts import KL
from grpo.study import paths
from grpo.study.schema import Study
from grpo.study.settings import MAIN

CURVE = ["arm", "seed", "step", "answer_reward"]  # columns of a CSV file for `dvc plots`
SEARCH_CURVE = ["attempt", "best"]
READABLE = 0.04  # smallest share of a bar with a number in it
BARE = "question_only"  # the prompt whose zero-shot accuracy is what the base model can do without a form
LENGTH, ENTROPY, NORM = "val/response_length", "token_entropy", "gradient_norm"
# Metric beside the validation reward: the one that claims about the experiment use; for others, the length.
SECOND = {
    "sft_experiment": "val/token_entropy",
    "expert_iteration_experiment": "val/token_entropy",
    "grpo_learning_rate": NORM,
    "grpo_baselines": LENGTH,
    "grpo_length_normalization": NORM,
    "grpo_group_standard_deviation": NORM,
    "grpo_off_policy_sweep_broad": NORM,
    "grpo_off_policy_sweep_focused": ENTROPY,
    "grpo_off_policy_clip_ablation": NORM,
    "grpo_prompt_ablation": ENTROPY,
    "grpo_sft_initialization": ENTROPY,
    "grpo_kl_divergence": KL,
    "grpo_lora": NORM,
    "grpo_colocate": NORM,
    "grpo_async_offpolicy": "clip_fraction",
    "grpo_keyword_inclusion": "val/is_sentence",
}
# The reward and metrics that explain it, in one figure.
EXPLAINS = (REWARD, ENTROPY, NORM, LENGTH, FORM, GIVEN_FORM, "clip_fraction", "train/zero_signal_fraction", KL)
# Metrics of the best configuration, on the first screen.
OVERVIEW = (REWARD, FORM, GIVEN_FORM, LENGTH)


def draw_figures(study: Study, found: Found, numbers: Mapping[str, Numbers]) -> None:
    """Write reports/figures/*.svg, the same as PNG, and reports/curves/*.csv."""
    with whole_folder(paths.FIGURES) as folder, whole_folder(paths.REPORTS / "curves") as curves:
        save_figures(other_figures(study, found, numbers), folder)
        for experiment, (runs, result) in found.items():
            drawn = {
                experiment: experiment_figure(study, experiment, runs),
                f"{experiment}-ends": draw_ends(result),
                f"{experiment}-metrics": draw_metrics(study, experiment, runs),
            }
            save_figures(drawn, folder)
            curve_table(runs).to_csv(curves / f"{experiment}.csv", index=False, lineterminator="\n")


def other_figures(study: Study, found: Found, numbers: Mapping[str, Numbers]) -> dict[str, Figure]:
    """Draw the figures beside each experiment's own ones: file name -> figure."""
    figures = {"overview": draw_overview(study, numbers), "math_baseline": draw_zero_shot(read_baseline(study))}
    if rows := forest_rows(shown(read_verdicts(), study), found):
        figures["forest"] = draw_forest(rows)
    if sampled := read_best_of_n(study):
        figures["best_of_n"] = draw_best_of_n(sampled)
    if study.kissing_number is not None:
        figures["kissing_number"] = draw_search(read_report(), read_scores())
    for experiment, (runs, _) in found.items():
        for figure in extra_figures(study, experiment):
            figures[figure.name] = figure.draw(study, runs, read_selection(experiment))
    return figures


def write_search_curve(study: Study) -> None:
    """Write reports/search.csv, the best score so far by attempt; without rows if the study has no search."""
    found = read_scores()[SEARCH_CURVE] if study.kissing_number is not None else pd.DataFrame(columns=SEARCH_CURVE)
    found.to_csv(paths.REPORTS / "search.csv", index=False, lineterminator="\n")


def curve_table(runs: list[Run]) -> pd.DataFrame:
    """Table for `dvc plots`: columns ``arm``, ``seed``, ``step`` and ``answer_reward`` (validation)."""
    curves = [run.validation.groupby("step", as_index=False)[REWARD].last().assign(arm=run.arm, seed=run.seed) for run in runs]
    table: pd.DataFrame = pd.concat(curves).rename(columns={REWARD: "answer_reward"})[CURVE]
    return table


def second_metric(experiment: str, runs: list[Run]) -> str:
    """The metric beside the validation reward; a substitute if not all runs have it."""
    return next(column for column in (SECOND.get(experiment, LENGTH), LENGTH, NORM) if has(runs, column))


def panels_of(study: Study, experiment: str, runs: list[Run]) -> list[tuple[str, Axis, str]]:
    """Metric, axis and axis title of each panel of an experiment's figure."""
    method = study.experiments[experiment].method
    step, off_policy = STEP[method], method == "grpo" and updates_differ(runs)
    second = second_metric(experiment, runs)
    others: list[tuple[str, Axis, str]] = [(REWARD, over_updates, UPDATE)] if off_policy else []
    others += [(REWARD, over_drift, TITLES[KL])] if second == KL else []
    return [(REWARD, over_steps, step), *others, (second, over_steps, step)]


def experiment_figure(study: Study, experiment: str, runs: list[Run]) -> Figure:
    """Draw the validation reward over steps (also over updates if arms differ in them, or over KL), and a second metric."""
    return _curves_figure(named(runs, readable), panels_of(study, experiment, runs))


def draw_metrics(study: Study, experiment: str, runs: list[Run]) -> Figure:
    """Draw means of the reward and of explaining metrics that all runs have and that are not always zero."""
    shown: list[tuple[str, Axis, str]] = [
        (column, over_steps, STEP[study.experiments[experiment].method])
        for column in dict.fromkeys((REWARD, second_metric(experiment, runs), *EXPLAINS))
        if has(runs, column) and any((values_of(run, column).fillna(0) != 0).any() for run in runs)  # type: ignore[union-attr]
    ]
    return _curves_figure(named(runs, readable), shown, columns=4, height=2.2, means=True)


def _curves_figure(
    arms: dict[str, list[Run]],
    shown: list[tuple[str, Axis, str]],
    columns: int = 4,
    means: bool = False,
    **size: float,
) -> Figure:
    figure, axes = panels(len(shown), rows=-(-len(shown) // columns), **size)
    looks = styles(arms)
    for place, (column, axis, title) in zip(axes, shown, strict=True):
        curves = curves_of(arms, column, axis)
        draw_curves(place, [curve for curve in curves if curve.seed is None] if means else curves, looks)
        frame(place, TITLES[column], title, column in SHARES)
    legend(figure, looks)
    return figure


def draw_overview(study: Study, numbers: Mapping[str, Numbers]) -> Figure:
    """Draw reward, form, accuracy given the form and length of the best configuration, with the bare prompt's accuracy."""
    top = best(study, numbers)
    runs, method = top["arm"]["all"], study.experiments[top["experiment"]].method
    shown = [column for column in OVERVIEW if has(runs, column)]
    figure, axes = panels(len(shown))
    bare = read_baseline(study).get(BARE) if study.experiments[top["experiment"]].task == MAIN else None
    for place, column in zip(axes, shown, strict=True):
        name = readable(top["arm"]["arm"])
        draw_curves(place, curves_of({name: runs}, column), {name: Style(METHODS[method])})
        frame(place, TITLES[column], STEP[method], column in SHARES)
        if bare and column == REWARD:
            bare_level = bare["accuracy"]["value"]
            text = f"base model, asked under {BARE}: {bare_level:.3f}"
            place.axhline(bare_level, color=INK, linestyle=(0, (4, 3)), linewidth=1, label=text)
            place.legend(loc="lower right", fontsize=8)
    return figure


def draw_ends(result: ExperimentResult) -> Figure:
    """Draw each arm's final reward with its interval, and each run, also collapsed ones, as a ring."""
    figure, (axes,) = panels(1, height=0.9 + 0.32 * len(result.arms))
    for place, arm in enumerate(result.arms):
        color = styles(each.arm for each in result.arms)[arm.arm].color
        axes.hlines(place, arm.final.low, arm.final.high, color=color, linewidth=2)
        axes.plot(arm.final.value, place, "o", color=color)
        axes.plot(arm.by_run, [place] * len(arm.by_run), "o", color=color, markersize=5, fillstyle="none")
    axes.set_yticks(range(len(result.arms)), [readable(arm.arm) for arm in result.arms])
    axes.invert_yaxis()
    covers = result.arms[0].final.covers
    axes.set_title(f"answer reward, mean of the last {result.last_k}", fontsize=8.5)
    axes.set_xlabel(f"bar: 95% over {covers}; rings: runs", fontsize=8.5)
    return figure


def draw_zero_shot(baseline: dict[str, Any]) -> Figure:
    """Draw the share of each outcome category under each prompt, before training."""
    names = max((list(values["categories"]) for values in baseline.values()), key=len)  # the fourth category is rare
    parts = []
    for prompt, values in baseline.items():
        start = 0.0
        for name in names:
            share = values["categories"].get(name, 0) / values["problems"]
            text = f"{share:.0%}" if share >= READABLE else ""
            parts.append({"name": prompt, "kind": name, "start": start, "end": start + share, "text": text})
            start += share
    figure, (axes,) = panels(1, height=1.2 + 0.45 * len(baseline))
    bars(axes, parts, dict(zip(names, ("#009E73", "#E69F00", "#999999", "#56B4E9")[: len(names)], strict=True)))
    axes.set_xlabel("share of problems")
    return figure


def draw_best_of_n(metrics: dict[str, Any]) -> Figure:
    """Draw pass@N, Best@N and majority vote over N, one panel per prompt, with 95% intervals clustered by problem."""
    figure, axes = panels(len(metrics))
    looks = styles(KINDS.values())
    for place, (prompt, values) in zip(axes, metrics.items(), strict=True):
        counts = tuple(map(int, values["n"]))
        for kind, title in KINDS.items():
            estimates = [kinds[kind] for kinds in values["n"].values()]
            draw_curves(place, [Curve(title, None, counts, tuple(of["value"] for of in estimates))], looks)
            low, high = ([of[end] for of in estimates] for end in ("low", "high"))
            place.fill_between(counts, low, high, color=looks[title].color, alpha=0.15, linewidth=0)
        frame(place, f"{prompt}: share answered right, 95%", f"samples N (of {values['samples']})", share=True)
        powers_of_two(place, counts)
    legend(figure, looks)
    return figure

"""Figures (PNG) of every experiment, and the same curves as CSV for `dvc plots`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from grpo.common.files import whole_folder
from grpo.reporting.baseline import KINDS
from grpo.reporting.kissing_number import draw_search, read_report, read_scores
from grpo.reporting.pieces import ENTROPY, GRADIENT_NORM, Curve, pieces_of
from grpo.reporting.style import COLOURS, Style, styles
from grpo.results.runs import (
    REWARD,
    Run,
    by_arm,
    experiments,
    mean_curve,
    read_baseline,
    read_best_of_n,
    read_runs,
    read_selection,
)
from grpo.study import paths
from grpo.study.schema import Study

PANELS = (
    ("history", "train/format_reward", "format reward (training rollouts)"),
    ("history", "token_entropy", "token entropy (nats)"),
    ("validation", "val/response_length", "validation response length (tokens)"),
    ("history", "gradient_norm", "gradient norm, before clipping"),
    ("history", "loss", "loss"),
    ("history", "clip_fraction", "share of clipped tokens"),
)
# Where no ratio moved there is nothing to clip; a group of equal rewards trains nothing either.
WITHOUT_CLIPPING = (*PANELS[:-1], ("history", "train/zero_signal_fraction", "share of groups without signal"))
LIKELIHOOD = ("history", "mean_nll", "negative log-likelihood per token")
SFT_PANELS = (
    ENTROPY,
    ("validation", "val/response_length_correct", "length of correct responses (tokens)"),
    ("validation", "val/response_length_incorrect", "length of incorrect responses (tokens)"),
    LIKELIHOOD,
    GRADIENT_NORM,
    ("validation", "val/format_reward", "validation format reward"),
)
EXPERT_ITERATION_PANELS = (
    ENTROPY,
    ("history", "train/correct", "correct rollouts, trained on"),
    ("history", "train/solved", "share of questions solved"),
    ("history", "mean_nll", "likelihood loss per token, last update"),
    ("history", "gradient_norm", "gradient norm, last update of a step"),
    ("validation", "val/response_length", "validation response length (tokens)"),
)
CURVE = ["arm", "step", "answer_reward"]  # columns of a table for `dvc plots`
SEARCH_CURVE = ["attempt", "best"]
SHARE_OF_RESPONSES = "share of responses"
LEGEND_INSIDE = 8  # arms; the names of more stand below the panels
STEP = {"grpo": "GRPO step", "sft": "optimizer step", "expert_iteration": "expert iteration step"}
KL_PANELS = (
    ("history", "kl/per_token", "KL per token, sampled estimate (nats)"),
    ("history", "kl/per_token_low_variance", "KL per token, low-variance estimate"),
    ("history", "token_entropy", "token entropy (nats)"),
    ("history", "kl/per_sequence", "KL per response, sampled estimate"),
    ("history", "kl/per_sequence_low_variance", "KL per response, low-variance estimate"),
    ("history", "gradient_norm", "gradient norm, before clipping"),
)


def draw_figures(study: Study) -> None:
    """Write reports/figures/*.png and reports/curves/*.csv."""
    with whole_folder(paths.FIGURES) as folder, whole_folder(paths.REPORTS / "curves") as curves:
        save_figure(draw_zero_shot(read_baseline(study)), folder / "math_baseline.png")
        if sampled := read_best_of_n(study):
            save_figure(draw_best_of_n(sampled), folder / "best_of_n.png")
        if study.kissing_number is not None:
            save_figure(draw_search(read_report(), read_scores()), folder / "kissing_number.png")
        for experiment in experiments(study):
            runs = read_runs(study, experiment)
            selection = read_selection(experiment)
            save_figure(draw_experiment(study, experiment, runs, selection), folder / f"{experiment}.png")
            for figure in filter(None, (piece.figure for piece in pieces_of(study, experiment))):
                save_figure(figure.draw(study, runs, selection), folder / f"{figure.name}.png")
            curve_table(runs).to_csv(curves / f"{experiment}.csv", index=False, lineterminator="\n")


def write_search_curve(study: Study) -> None:
    """The best valid set so far by attempt; without rows where there is no search, as DVC draws no plot of such a table."""
    found = read_scores()[SEARCH_CURVE] if study.kissing_number is not None else pd.DataFrame(columns=SEARCH_CURVE)
    found.to_csv(paths.REPORTS / "search.csv", index=False, lineterminator="\n")


def curve_table(runs: list[Run]) -> pd.DataFrame:
    """Columns ``arm``, ``step`` and ``answer_reward`` (validation, mean over seeds), for `dvc plots`."""
    curves = [mean_curve(of_arm, "validation", REWARD)["mean"].rename("answer_reward") for of_arm in by_arm(runs).values()]
    tables = [curve.reset_index().assign(arm=arm) for arm, curve in zip(by_arm(runs), curves, strict=True)]
    return pd.concat(tables)[CURVE]


def draw_experiment(study: Study, experiment: str, runs: list[Run], selection: dict[str, Any]) -> Figure:
    """Validation answer reward of each arm, large, beside what explains it."""
    figure = Figure(figsize=(14, 5), layout="constrained")
    grid = figure.add_gridspec(2, 5)
    main = figure.add_subplot(grid[:, :2])
    axes = [main, *(figure.add_subplot(grid[i // 3, 2 + i % 3]) for i in range(6))]
    panels = (("validation", REWARD, "validation answer reward"), *panels_of(study, experiment, runs))
    looks = styles(by_arm(runs))
    for axis, (table, column, title) in zip(axes, panels, strict=True):
        for arm, of_arm in by_arm(runs).items():
            label = f"{arm} (winner)" if arm == selection["winner"] else arm
            _draw_curve(axis, mean_curve(of_arm, table, column), looks[arm], label, marked=table == "validation")
            for run in of_arm if axis is main else []:
                mark_divergence(axis, run, looks[arm].color)
        axis.set_title(title, fontsize=11 if axis is main else 9)
        if title.startswith(SHARE_OF_RESPONSES):
            axis.set_ylim(-0.02, 1.02)
        axis.set_xlabel(STEP[study.experiments[experiment].method], fontsize=9)
        axis.xaxis.set_major_locator(MaxNLocator("auto", integer=True, steps=[1, 2, 5, 10]))
        axis.grid(alpha=0.3)
        axis.tick_params(labelsize=8)
    main.set_ylim(-0.02, 1.02)
    # The arms' names stand in the legend once; where there are many it would hide curves.
    if len(looks) <= LEGEND_INSIDE:
        main.legend(fontsize=9, loc="best")
    else:
        figure.legend(*main.get_legend_handles_labels(), fontsize=9, ncols=5, handlelength=4, loc="outside lower center")
    seeds = sorted({run.seed for run in runs})
    spread = f", mean and range of seeds {seeds}" if len(seeds) > 1 else f", seed {seeds[0]}"
    n = runs[0].metrics["validation_problems"]
    cross = "; a cross: diverged and stopped" if any(run.metrics["diverged_step"] is not None for run in runs) else ""
    title = study.title(experiment)
    figure.suptitle(f"{title} ({experiment}), {n} fixed validation problems{spread}{cross}", fontsize=12)

    return figure


def panels_of(study: Study, experiment: str, runs: list[Run]) -> tuple[Curve, ...]:
    """What explains an experiment's rewards, six curves: those of a piece of its report, or its method's."""
    own = [piece.curves for piece in pieces_of(study, experiment) if piece.curves]
    if own:
        return own[0]
    if study.experiments[experiment].method != "grpo":
        return SFT_PANELS if study.experiments[experiment].method == "sft" else EXPERT_ITERATION_PANELS
    if "kl/per_token" in runs[0].history:
        return KL_PANELS
    return PANELS if any(run.history["clip_fraction"].any() for run in runs) else WITHOUT_CLIPPING


def mark_divergence(axis: Axes, run: Run, colour: str, x: float | None = None) -> None:
    """A cross where a run diverged and was stopped.

    Args:
        x: where on the axis, if it does not show steps.
    """
    if run.metrics["diverged_step"] is not None:
        at = run.metrics["diverged_step"] if x is None else x
        axis.plot([at], [run.validation[REWARD].iloc[-1]], marker="X", color=colour, markersize=9, linestyle="none")


def _draw_curve(axis: Axes, curve: pd.DataFrame, look: Style, label: str, marked: bool) -> None:
    axis.plot(
        curve.index,
        curve["mean"],
        color=look.color,
        linestyle=look.linestyle,
        label=label,
        linewidth=1.5,
        marker=look.marker if marked else None,
        markersize=3,
    )
    if (curve["max"] > curve["min"]).any():
        axis.fill_between(curve.index, curve["min"], curve["max"], color=look.color, alpha=0.15, linewidth=0)


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


def save_figure(figure: Figure, path: Path) -> None:
    """Write a PNG."""
    # No date or version in the file, so that equal results give equal bytes.
    figure.savefig(path, dpi=110, metadata={"Software": None})

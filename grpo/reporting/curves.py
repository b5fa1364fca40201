"""What can be drawn of a run: its metrics over steps, updates, tokens and seconds; and as points of a chart."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import pandas as pd

from grpo.common.metrics import METRICS as TABLE
from grpo.common.metrics import UNITS
from grpo.results.runs import REWARD, Run, by_arm, mean_curve

# What the page offers, in this order, where an experiment's runs have it: column -> what it is, with its unit.
METRICS = {
    "validation": {metric.name: metric.label for metric in TABLE if metric.charted and metric.name.startswith("val/")},
    "history": {metric.name: metric.label for metric in TABLE if metric.charted and not metric.name.startswith("val/")},
}
STEP = {"grpo": "GRPO step", "sft": "optimizer step", "expert_iteration": "expert iteration step"}
AXES = {
    "step": "step",
    "update": "optimizer steps",
    "tokens": "response tokens sampled",
    "seconds": "seconds without evaluation",
}
ENOUGH_POINTS = 8  # for a curve: a figure shows the training rollouts' reward where there are fewer evaluations


def number(value: Any) -> float | int | None:
    """Six digits of a number, as the page holds it; None where there is none."""
    if value is None or not math.isfinite(value):
        return None
    shorter = float(f"{value:.6g}")
    return int(shorter) if shorter.is_integer() and abs(shorter) < 1e15 else shorter


def tables_of(run: Run, seconds: pd.Series[float]) -> dict[str, dict[str, list[Any]]]:
    """A run's two tables, a row for each step (the last update of a step counts), with the axes as columns.

    Args:
        seconds: since the run's start, by step.
    """
    tables = {}
    spent = {"seconds": seconds, **_tokens(run)}
    for name, metrics in METRICS.items():
        rows = getattr(run, name).groupby("step").last().reset_index()
        columns = {column: rows[column] for column in (*metrics, *AXES) if column in rows}
        columns |= {axis: rows["step"].map(by_step).where(rows["step"] > 0, 0) for axis, by_step in spent.items()}
        tables[name] = {column: [number(value) for value in values] for column, values in columns.items()}
    return tables


def _tokens(run: Run) -> dict[str, pd.Series[float]]:
    """Response tokens that had been sampled when a step ended, by step; nothing where they were not counted."""
    size = run.config["config"].get("rollout_batch_size", {}).get("value")
    if size is None or "train/response_length" not in run.history:
        return {}
    return {"tokens": (run.history.groupby("step")["train/response_length"].last() * size).cumsum()}


def metrics_of(tables: Iterable[dict[str, dict[str, list[Any]]]]) -> list[dict[str, Any]]:
    """The metrics that all runs of an experiment have and that are not zero throughout, with their tables and titles."""
    runs = list(tables)
    return [
        {"table": name, "column": column, "title": title, "share": UNITS[column] == "share"}
        for name, metrics in METRICS.items()
        for column, title in metrics.items()
        if all(column in run[name] for run in runs) and any(any(run[name][column]) for run in runs)
    ]


def reward_curve(runs: list[Run]) -> tuple[str, str]:
    """Table and column of the reward that a figure shows: of evaluations, or of rollouts where evaluations are few."""
    few = max(len(run.validation) for run in runs) < ENOUGH_POINTS
    in_training = all("train/answer_reward" in run.history for run in runs)
    return ("history", "train/answer_reward") if few and in_training else ("validation", REWARD)


def points_of(runs: list[Run], table: str, column: str) -> list[dict[str, Any]]:
    """Mean, smallest and largest value over an arm's seeds at each step, as rows of :func:`grpo.reporting.charts.curve`."""
    rows = []
    for arm, of_arm in by_arm(runs).items():
        ends = {run.metrics["diverged_step"] for run in of_arm}
        for step, each in zip(*_by_step(mean_curve(of_arm, table, column)), strict=True):
            y, low, high = map(number, each)
            ended = step in ends
            rows.append({"arm": arm, "series": arm, "x": number(step), "y": y, "low": low, "high": high, "ended": ended})
    return rows


def _by_step(curve: pd.DataFrame) -> tuple[list[Any], list[Any]]:
    return curve.index.tolist(), curve[["mean", "min", "max"]].to_numpy().tolist()

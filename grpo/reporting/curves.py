"""Curves of a run's metrics over steps, updates and KL."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pandas as pd

from grpo.common.metrics import METRICS, UNITS
from grpo.reporting.charts import Curve
from grpo.reporting.form_and_answer import FORM
from grpo.results.runs import REWARD, Run, by_arm
from grpo.results.verdicts import KL

GIVEN_FORM = "val/answer_given_form"  # not a column: answer reward divided by format reward
TITLES = {metric.name: metric.label for metric in METRICS} | {GIVEN_FORM: "accuracy, given the form"}
SHARES = {name for name, unit in UNITS.items() if unit == "share"} | {GIVEN_FORM}
STEP = {"grpo": "GRPO step", "sft": "optimizer step", "expert_iteration": "expert iteration step"}
UPDATE, SECONDS = "optimizer steps (updates)", "seconds without evaluation"

Axis = Callable[[Run, list[int]], Sequence[float]]  # a run and some of its steps -> their x values


def number(value: Any) -> float | int | None:
    """Round to six digits, for the page; None if not finite."""
    if value is None or not math.isfinite(value):
        return None
    shorter = float(f"{value:.6g}")
    return int(shorter) if shorter.is_integer() and abs(shorter) < 1e15 else shorter


def values_of(run: Run, column: str) -> pd.Series[float] | None:
    """A metric by step, of the step's last update; None if the run does not have it."""
    if column == GIVEN_FORM:
        form, answer = values_of(run, FORM), values_of(run, REWARD)
        return None if form is None or answer is None or (answer > form).any() else (answer / form).where(form > 0)
    table = run.validation if column.startswith("val/") else run.history
    if column not in table:
        return None
    found: pd.Series[float] = table.groupby("step")[column].last()
    return found if found.notna().any() else None


def has(runs: list[Run], column: str) -> bool:
    """Whether all runs have a metric."""
    return all(values_of(run, column) is not None for run in runs)


def over_steps(_: Run, steps: list[int]) -> Sequence[float]:
    """Axis of steps."""
    return [float(step) for step in steps]


def over_updates(run: Run, steps: list[int]) -> Sequence[float]:
    """Axis of optimizer steps."""
    updates = run.validation.groupby("step")["update"].last()
    return [float(updates[step]) for step in steps]


def over_drift(run: Run, steps: list[int]) -> Sequence[float]:
    """Axis of the KL to the starting policy, in nats per token.

    A step's KL is that of the policy before its updates, which was evaluated after the previous step. It is NaN after the last
    step, as no rollouts of that policy exist.
    """
    drift = run.history.groupby("step")[KL].first()
    return [float(drift.get(step + 1, math.nan)) for step in steps]


def curves_of(arms: dict[str, list[Run]], column: str, axis: Axis = over_steps) -> list[Curve]:
    """The curve of each run and, for arms with several, the mean over runs that did not diverge.

    Args:
        arms: runs by the shown name.
    """
    found: list[Curve] = []
    for arm, runs in arms.items():
        own = {run.seed: _curve(arm, run, column, axis, None if len(runs) == 1 else run.seed) for run in runs}
        found += own.values()
        if len(runs) > 1:
            went_on = [run for run in runs if run.metrics["diverged_step"] is None] or runs
            held = [own[run.seed] for run in went_on]
            n = min(len(curve.x) for curve in held)
            x, y = (tuple(np.mean([getattr(curve, of)[:n] for curve in held], axis=0).tolist()) for of in ("x", "y"))
            found.append(Curve(arm, None, x, y))
    return found


def _curve(arm: str, run: Run, column: str, axis: Axis, seed: int | None) -> Curve:
    values = values_of(run, column)
    assert values is not None, f"{run.name} has no {column}"
    ended = run.metrics["diverged_step"] is not None
    return Curve(arm, seed, tuple(axis(run, values.index.tolist())), tuple(values.tolist()), ended)


def updates_differ(runs: list[Run]) -> bool:
    """Whether runs take different numbers of updates per step, so that steps and updates are different axes."""
    if any("update" not in run.validation for run in runs):
        return False
    return len({run.validation["update"].iloc[-1] / run.validation["step"].iloc[-1] for run in runs}) > 1


def named(runs: list[Run], names: Callable[[str], str]) -> dict[str, list[Run]]:
    """Group runs by the readable name of their arm."""
    return {names(arm): of for arm, of in by_arm(runs).items()}

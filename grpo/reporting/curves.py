"""Curves of a run's metrics over steps, updates, seconds and KL, and figures of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from grpo.common.metrics import METRICS, UNITS
from grpo.reporting.charts import Curve, Style, draw_curves, frame, legend, panels, readable, styles
from grpo.reporting.timing import elapsed
from grpo.results.runs import REWARD, Run, by_arm
from grpo.results.verdicts import KL
from grpo.study.schema import Study

FORM = "val/format_reward"
GIVEN_FORM = "val/answer_given_form"  # not a column: answer reward divided by format reward
LENGTH, ENTROPY, NORM = "val/response_length", "token_entropy", "gradient_norm"
TITLES = {metric.name: metric.label for metric in METRICS} | {GIVEN_FORM: "accuracy, given the form"}
SHARES = {name for name, unit in UNITS.items() if unit == "share"} | {GIVEN_FORM}
STEP = {"grpo": "GRPO step", "sft": "optimizer step", "expert_iteration": "expert iteration step"}
COLUMNS = 4  # panels side by side
OF_A_RUN = (REWARD, FORM, GIVEN_FORM, LENGTH, ENTROPY, NORM, "train/reward", "loss")  # panels in a figure of one run

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
IN_TRAINING = ("loss", "train/reward", "train/format_reward", "train/answer_reward")
EXPLAINS = (REWARD, ENTROPY, NORM, LENGTH, FORM, GIVEN_FORM, *IN_TRAINING, "clip_fraction", "train/zero_signal_fraction", KL)

Axis = Callable[[Run, list[int]], Sequence[float]]  # a run and some of its steps -> their x values


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


def over_seconds(run: Run, steps: list[int]) -> Sequence[float]:
    """Axis of seconds since a run's start, without evaluation."""
    spent = elapsed(run)
    return [float(spent[step]) if step else 0.0 for step in steps]


def over_drift(run: Run, steps: list[int]) -> Sequence[float]:
    """Axis of the KL to the starting policy, in nats per token.

    A step's KL is that of the policy before its updates, which was evaluated after the previous step. It is NaN after the last
    step, as no rollouts of that policy exist.
    """
    drift = run.history.groupby("step")[KL].first()
    return [float(drift.get(step + 1, math.nan)) for step in steps]


def curves_of(arms: Mapping[str, list[Run]], column: str, axis: Axis = over_steps) -> list[Curve]:
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


def named(runs: list[Run]) -> dict[str, list[Run]]:
    """Group runs by the readable name of their arm."""
    return {readable(arm): of for arm, of in by_arm(runs).items()}


@dataclass(frozen=True)
class Panel:
    """A panel of curves: a metric over an axis with its title."""

    column: str
    x: str
    axis: Axis = over_steps


def curves_figure(
    arms: Mapping[str, list[Run]],
    shown: Sequence[Panel],
    looks: Mapping[str, Style] | None = None,
    means: bool = False,
    **size: float,
) -> Figure:
    """Draw a panel for each metric, with the curves of all arms.

    Args:
        arms: runs by the shown name.
        looks: style by name; by default in the arms' order.
        means: only the means over runs.
    """
    figure, axes = panels(len(shown), rows=-(-len(shown) // COLUMNS), **size)
    looks = looks or styles(arms)
    for place, panel in zip(axes, shown, strict=True):
        curves = curves_of(arms, panel.column, panel.axis)
        draw_curves(place, [curve for curve in curves if curve.seed is None or not means], looks)
        frame(place, TITLES[panel.column], panel.x, panel.column in SHARES)
    legend(figure, looks)
    return figure


def panels_of(runs: list[Run], columns: Iterable[str], method: str) -> list[Panel]:
    """A panel over the method's steps for each of some metrics that all runs have."""
    return [Panel(column, STEP[method]) for column in columns if has(runs, column)]


def second_metric(experiment: str, runs: list[Run]) -> str:
    """The metric beside the validation reward; a substitute if not all runs have it."""
    return next(column for column in (SECOND.get(experiment, LENGTH), LENGTH, NORM) if has(runs, column))


def experiment_figure(study: Study, experiment: str, runs: list[Run]) -> Figure:
    """Draw the validation reward over steps (also over updates if arms differ in them, or over KL), and a second metric."""
    method, second = study.experiments[experiment].method, second_metric(experiment, runs)
    shown = [Panel(REWARD, STEP[method])]
    if method == "grpo" and updates_differ(runs):
        shown.append(Panel(REWARD, "optimizer steps (updates)", over_updates))
    if second == KL:
        shown.append(Panel(REWARD, TITLES[KL], over_drift))
    return curves_figure(named(runs), [*shown, Panel(second, STEP[method])])


def updates_differ(runs: list[Run]) -> bool:
    """Whether runs take different numbers of updates per step, so that steps and updates are different axes."""
    if any("update" not in run.validation for run in runs):
        return False
    return len({run.validation["update"].iloc[-1] / run.validation["step"].iloc[-1] for run in runs}) > 1


def metrics_figure(study: Study, experiment: str, runs: list[Run]) -> Figure:
    """Draw means of the reward and of explaining metrics that all runs have and that are not always zero."""
    columns = dict.fromkeys((REWARD, second_metric(experiment, runs), *EXPLAINS))
    shown = [
        panel
        for panel in panels_of(runs, columns, study.experiments[experiment].method)
        if any((values_of(run, panel.column).fillna(0) != 0).any() for run in runs)  # type: ignore[union-attr]
    ]
    return curves_figure(named(runs), shown, means=True, height=2.2)


def run_figure(run: Run) -> Figure:
    """Draw a GRPO run's curves over its steps, a panel for each metric of :data:`OF_A_RUN` that it has."""
    return curves_figure({run.arm: [run]}, panels_of([run], OF_A_RUN, "grpo"))

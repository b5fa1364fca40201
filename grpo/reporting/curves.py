"""reports/curves/: each experiment's curves as a table, and its reward over core-seconds, which differ between machines."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from grpo.common.files import atomic_folder, write_csv
from grpo.reporting import charts
from grpo.reporting.charts import ANSWER, ENTROPY, FORM, LENGTH, NORM, Style, over_runs, panels, values_of
from grpo.reporting.figures import chosen, looks_of
from grpo.reporting.record import Values
from grpo.reporting.timing import core_seconds, is_alone
from grpo.results.runs import Run, by_arm, read_runs
from grpo.study import paths
from grpo.study.schema import Study

CURVES = paths.REPORTS / "curves"
REACH = "reach.csv"  # a row for each chosen arm
REACH_COLUMNS = ["experiment", "arm", "level", "steps", "core_seconds"]
DIGITS = 5  # significant ones, of curves
DECIMALS = 4  # of REACH
WORK = {  # settings with which steps differ in work, so that rewards are compared over seconds too
    *("asynchronous", "epochs_per_rollout_batch", "train_batch_size", "rollout_batch_size", "group_size", "ei_batch_size"),
    *("epochs_per_ei_step", "wall_clock_limit_s"),
}


def write_curves(study: Study, record: Values) -> None:
    """Write EXPERIMENT.csv for each experiment, EXPERIMENT.svg where arms differ in the work of a step, and :data:`REACH`.

    Raises UserError: a result file is missing or damaged.
    """
    looks, rows = looks_of(record), []
    with atomic_folder(CURVES) as folder:
        for name, entry in record["experiments"].items():
            runs = read_runs(study, name)
            curves, alone = curves_table(runs), {(run.arm, run.seed) for run in runs if is_alone(run)}
            write_csv(folder / f"{name}.csv", curves)
            rows += [{"experiment": name} | row for row in reach(curves, [arm["arm"] for arm in chosen(entry)], alone)]
            if any(WORK & {*arm["overrides"]} for arm in chosen(entry)):
                charts.save_figure(draw_over_seconds(entry, by_arm(runs), looks[name]), folder / f"{name}.svg")
        write_csv(folder / REACH, pd.DataFrame(rows, columns=REACH_COLUMNS))


def curves_table(runs: Sequence[Run]) -> pd.DataFrame:
    """A row for each evaluation of each run: the rewards there, and the step's training metrics and cumulative core-seconds."""
    tables = []
    for run in runs:
        columns = {name.rpartition("/")[2]: values_of(run, name) for name in (run.column, ANSWER, FORM, LENGTH, ENTROPY, NORM)}
        table = pd.DataFrame(columns | {"core_seconds": core_seconds(run)}, index=run.validation["step"].unique())
        table = table.astype(float).map(lambda value: float(f"{value:.{DIGITS}g}")).rename_axis("step").reset_index()
        tables.append(pd.DataFrame({"arm": run.arm, "seed": run.seed}, index=table.index).join(table))
    return pd.concat(tables, ignore_index=True)


def reach(curves: pd.DataFrame, arms: Sequence[str], alone: Collection[tuple[str, int]]) -> list[Values]:
    """When the mean reward of each arm first gets half-way from the lowest start to the highest end of these arms.

    Between two evaluations it is linear. A run that stopped early keeps its last values.

    ``curves``: as :func:`curves_table` gives them. ``alone``: arms and seeds that had the machine for themselves; of an arm
    with such a run only their seconds count. Returns for each arm its ``arm``, the ``level``, and the ``steps`` and
    ``core_seconds`` to it, None if it is never reached; nothing if no arm ends above the lowest start.
    """
    metric = curves.columns[3]  # by which the study compares runs
    tables = {
        arm: curves[curves["arm"] == arm].pivot(index="step", columns="seed", values=[metric, "core_seconds"]) for arm in arms
    }
    tables = {arm: table.ffill() for arm, table in tables.items()}
    rewards = {arm: pd.DataFrame(table[metric]).mean(axis=1) for arm, table in tables.items()}
    start, end = min(curve.iloc[0] for curve in rewards.values()), max(curve.iloc[-1] for curve in rewards.values())
    found: list[Values] = []
    for arm, reward in rewards.items() if end > start else ():
        level, seconds = (start + end) / 2, pd.DataFrame(tables[arm]["core_seconds"])
        counted = [seed for seed in seconds if (arm, seed) in alone] or [*seconds]
        row: Values = {"arm": arm, "level": round(level, DECIMALS), "steps": None, "core_seconds": None}
        if (reached := reward >= level).any():
            last = int(reached.argmax())
            around = reward.iloc[max(0, last - 1) : last + 1]
            steps = np.interp(level, around, around.index)
            spent = np.interp(steps, seconds.index, seconds[counted].mean(axis=1))
            row |= {"steps": round(float(steps), DECIMALS), "core_seconds": round(float(spent), DECIMALS)}
        found.append(row)
    return found


def draw_over_seconds(entry: Values, runs: Mapping[str, list[Run]], looks: Mapping[str, Style]) -> Figure:
    """Draw the mean reward of each chosen arm over its mean core-seconds, on the band of its runs.

    Of an arm with a run that had the machine for itself only such runs count.
    """
    figure, (axes,) = panels(1, 2 * charts.PANEL)
    shown = {arm["label"]: runs[arm["arm"]] for arm in chosen(entry)}
    for label, own in shown.items():
        counted = [run for run in own if is_alone(run)] or own
        rewards = over_runs(counted, own[0].column)
        spent = pd.concat([core_seconds(run) for run in counted], axis=1).mean(axis=1).reindex(rewards.index)
        charts.draw_band(axes, spent.tolist(), charts.band_of(rewards), looks[label], marker=".")
    metric = own[0].metric
    charts.frame(
        axes, f"{metric.replace('_', ' ')}, validation", "core-seconds, without evaluations", metric == "answer_reward"
    )
    charts.legend(figure, {label: looks[label] for label in shown})
    return figure

"""reports/curves/: each experiment's curves as a table, and its reward over core-seconds, which differ between machines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

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
DIGITS = 5  # significant ones
WORK = {  # settings with which steps differ in work, so that rewards are compared over seconds too
    *("asynchronous", "epochs_per_rollout_batch", "train_batch_size", "rollout_batch_size", "group_size", "ei_batch_size"),
    *("epochs_per_ei_step", "wall_clock_limit_s"),
}


def write_curves(study: Study, record: Values) -> None:
    """Write EXPERIMENT.csv for each experiment, and EXPERIMENT.svg where arms differ in the work of a step.

    Raises:
        UserError: a result file is missing or damaged.
    """
    looks = looks_of(record)
    with atomic_folder(CURVES) as folder:
        for name, entry in record["experiments"].items():
            runs = read_runs(study, name)
            write_csv(folder / f"{name}.csv", curves_table(runs))
            if any(WORK & {*arm["overrides"]} for arm in chosen(entry)):
                charts.save_figure(draw_over_seconds(entry, by_arm(runs), looks[name]), folder / f"{name}.svg")


def curves_table(runs: Sequence[Run]) -> pd.DataFrame:
    """A row for each evaluation of each run: the rewards there, and the step's training metrics and cumulative core-seconds."""
    tables = []
    for run in runs:
        columns = {name.rpartition("/")[2]: values_of(run, name) for name in (run.column, ANSWER, FORM, LENGTH, ENTROPY, NORM)}
        table = pd.DataFrame(columns | {"core_seconds": core_seconds(run)}, index=run.validation["step"].unique())
        table = table.astype(float).map(lambda value: float(f"{value:.{DIGITS}g}")).rename_axis("step").reset_index()
        tables.append(pd.DataFrame({"arm": run.arm, "seed": run.seed}, index=table.index).join(table))
    return pd.concat(tables, ignore_index=True)


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
        curve = pd.DataFrame({"value": rewards.mean(axis=1), "low": rewards.min(axis=1), "high": rewards.max(axis=1)})
        charts.draw_band(axes, spent.tolist(), curve, looks[label], marker=".")
    metric = own[0].metric
    charts.frame(
        axes, f"{metric.replace('_', ' ')}, validation", "core-seconds, without evaluations", metric == "answer_reward"
    )
    charts.legend(figure, {label: looks[label] for label in shown})
    return figure

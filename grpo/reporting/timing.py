"""reports/timing.csv and reports/timing.svg: seconds, memory, ids and machines, which differ between equal runs.

Seconds are compared only between runs that had the machine for themselves (``alone``).
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from textwrap import shorten
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from grpo.common.files import read_json, write_csv
from grpo.reporting import charts
from grpo.reporting.charts import FULL, HEIGHT, INK, panels
from grpo.reporting.labels import decimals, table
from grpo.reporting.record import Values, label_arms
from grpo.results.runs import Run, by_arm, read_runs, value
from grpo.study import paths
from grpo.study.kept import stages_in_lock
from grpo.study.paths import stage_of_run
from grpo.study.schema import Study

PEAKS = ("rollout_peak_mb", "training_peak_mb", "evaluation_peak_mb")
# The parts of a step in a timing file, with their columns and their titles in the table of seconds.
PARTS = {
    "step": ("step_s", "step (s)"),
    "rollout": ("step_rollout_s", "rollout"),
    "scoring": ("step_scoring_s", "scoring"),
    "training": ("step_training_s", "training"),
    "synchronization": ("step_synchronization_s", "weights sent"),
    "generator_synchronization": ("step_loading_s", "weights loaded"),
    "waiting": ("step_waiting_s", "learner waits"),
    "generator_waiting": ("step_generator_waiting_s", "generator waits"),
}
COLUMNS = [column for column, _ in PARTS.values()]
WEIGHTS, WAITING = "weights sent or loaded", "waiting for the other side"
COLOURS = {"rollout": "#0072B2", "scoring": "#E69F00", "training": "#009E73", WEIGHTS: "#CC79A7", WAITING: "#999999"}
# The parts of each bar, with their entries in the legend.
TURNS = {"rollout": "rollout", "scoring": "scoring", "training": "training", WEIGHTS: "synchronization"}
SIDES = {  # of an asynchronous run
    ": generator": {"rollout": "rollout", WEIGHTS: "generator_synchronization", WAITING: "generator_waiting"},
    ": learner": {"training": "training", WEIGHTS: "synchronization", WAITING: "waiting"},
}
BAR = 0.155  # inches
WIDE = 44  # characters of a panel's title

Steps = Sequence[Mapping[str, float]]  # as in a timing file; times in seconds


def read_timing(run: Run, own: bool = False) -> dict[str, Any]:
    """Read a run's times. A run that reuses an identical run has that run's times, unless ``own`` is set.

    Raises UserError: the file is missing or damaged.
    """
    name = run.name if own else run.config["same_as"] or run.name
    keys = "total_s phases steps mlflow_run_id same_as git_commit git_changed hardware"
    return read_json(paths.run_timing(name), made_by=stage_of_run(name), keys=keys.split())


# -------------------------------------------------------------------------------------------------------------- timing.csv


def write_timing(study: Study) -> None:
    """Write reports/timing.csv: a row for each run, in the study's order."""
    hashes = {out["path"]: out["md5"] for stage in stages_in_lock().values() for out in stage.get("outs", [])}
    rows = []
    for name in study.active_experiments:
        runs = read_runs(study, name)
        labels = label_arms(study, by_arm(runs))
        rows += [
            {"run": run.name, "experiment": name, "arm": run.arm, "label": labels[run.arm]} | _row(study, run, hashes)
            for run in runs
        ]
    found = pd.DataFrame(rows).round({column: 4 for column in rows[0] if column.endswith(("_s", "_hours"))})
    write_csv(paths.TIMING_TABLE, found)


def _row(study: Study, run: Run, hashes: Mapping[str, str]) -> Values:
    """A run's row. A run that reuses an identical run has that run's seconds."""
    own, timing = read_timing(run, own=True), read_timing(run)
    folder, alone = paths.RUNS / run.name, is_alone(run)  # an output of DVC itself, or a part of the arm's or experiment's
    samples = value(run, "rollout_batch_size") or 0  # responses of a step
    if questions := value(run, "ei_batch_size"):
        samples = questions * value(run, "group_size")
    return {
        "seed": run.seed,
        "same_as": run.config["same_as"] or "",
        "alone": alone,
        "steps": run.metrics["steps"],
        "samples": samples * run.metrics["steps"],
        "total_s": timing["total_s"],
        **{f"{phase}_s": timing["phases"].get(f"{phase}_s", 0.0) for phase in ("evaluation", *[*PARTS][1:])},
        **(step_seconds(run, samples) if alone else dict.fromkeys((*COLUMNS, "samples_per_s"))),
        "gpu_hours": timing["total_s"] / 3600 * study.resources[study.experiments[run.experiment].resources].gpus,
        **{key: round(max((step.get(key, 0.0) for step in timing["steps"]), default=0.0)) for key in PEAKS},
        "restarts": sum(timing.get("restarts", {}).values()),
        "mlflow_run_id": own["mlflow_run_id"] or "",
        "commit": own["git_commit"][:10] + (" + changes" if own["git_changed"] == "true" else ""),
        "lock": next((hashes[str(place)] for place in (folder, *folder.parents[:2]) if str(place) in hashes), ""),
        "started": timing.get("started", ""),
        "finished": timing.get("finished", ""),
        "software": json.dumps(run.config["software"]),
        "hardware": json.dumps(timing["hardware"]),
    }


def is_alone(run: Run) -> bool:
    """Whether a run had the machine for itself, so that its seconds can be compared."""
    return bool(read_timing(run).get("alone", False))


def core_seconds(run: Run) -> pd.Series[float]:
    """The cumulative core-seconds of a run by step, from 0 at step 0, without evaluations; on a GPU its seconds.

    An asynchronous run has two processes, each of which has its cores for all of the time.
    """
    timing = read_timing(run)
    cores = (2 if value(run, "asynchronous") else 1) * (timing["threads"] if timing["device"] == "cpu" else 1)
    spent = pd.Series({0: 0.0} | {int(step["step"]): cores * float(step["step_s"]) for step in timing["steps"]})
    return spent.cumsum()


def step_seconds(run: Run, samples: int) -> dict[str, float | None]:
    """Mean seconds of the parts of a step, over steps that no evaluation affects, and samples per second.

    None without such a step, and for parts that the run does not have.
    """
    apart = value(run, "asynchronous")
    lag = None if apart is None else int(apart["max_policy_lag"])
    steps = steady_steps(read_timing(run)["steps"], run.validation["step"].tolist(), lag)
    means = pd.DataFrame(steps).mean() if steps else pd.Series(dtype=float)
    parts = {column: float(means[f"{part}_s"]) if f"{part}_s" in means else None for part, (column, _) in PARTS.items()}
    return parts | {"samples_per_s": samples / parts["step_s"] if samples and parts["step_s"] else None}


def steady_steps(steps: Steps, evaluated: Collection[int], lag: int | None) -> list[Mapping[str, float]]:
    """The steps that no evaluation affects.

    The rollouts of the 1 + ``lag`` steps after an evaluation were requested before it. The generator finishes them during the
    evaluation, so the learner does not wait for them, and the generator is idle before those of the next step. These 2 +
    ``lag`` steps are left out; in one process (None), the first one. ``evaluated``: the steps after which the policy was
    evaluated, including 0 (the untrained model).
    """
    left_out = 1 if lag is None else 2 + lag
    affected = {step + i for step in evaluated for i in range(1, left_out + 1)}
    return [step for step in steps if step["step"] not in affected]


def timing_table(timing: pd.DataFrame) -> str:
    """Table (Markdown) of the seconds of a step, samples per second and speedup over the first arm in one process.

    ``timing``: reports/timing.csv; only runs that had the machine for themselves count. Returns the table; empty without such
    runs.
    """
    alone = timing[timing["alone"] & timing["step_s"].notna()]
    columns = [*COLUMNS, "samples_per_s", "gpu_hours"]
    means = alone.groupby(["experiment", "label"], sort=False)[columns].mean().reset_index()
    single = means[means["step_waiting_s"].isna() & (means["samples_per_s"] > 0)]  # fine-tuning samples nothing
    heads = {column: (title, 3) for column, title in (*[*PARTS.values()][1:], PARTS["step"])}  # each with its decimals
    heads["samples_per_s"] = ("samples per second", 0)
    if len(single):
        means["speedup"] = means["samples_per_s"] / single["samples_per_s"].iloc[0]
        heads["speedup"] = (f"speedup over {single['label'].iloc[0]}", 2)
    if alone["gpu_hours"].any():
        heads["gpu_hours"] = ("GPU-hours", 2)
    return table(
        {"experiment": row["experiment"], "arm": row["label"]}
        | {title: "" if pd.isna(row[column]) else decimals(row[column], digits) for column, (title, digits) in heads.items()}
        for row in means.to_dict("records")
    )


# -------------------------------------------------------------------------------------------------------------- timing.svg


def draw_timing(study: Study) -> Figure:
    """Draw the components of a step, of runs that had the machine for themselves."""
    found = {name: [run for run in read_runs(study, name) if is_alone(run)] for name in study.active_experiments}
    compared = {name: runs for name, runs in found.items() if runs}
    if not compared:
        figure, (alone,) = panels(1, height=0.6)
        alone.set_axis_off()
        alone.text(0, 0.5, "no run had the machine for itself, so seconds are not compared", color=INK)
        return figure
    labels = {name: label_arms(study, by_arm(read_runs(study, name))) for name in compared}
    bars = pd.concat({name: _bars(runs, labels[name]) for name, runs in compared.items()})
    bars = bars.drop(columns=[part for part in bars if not bars[part].any()])
    figure, axes = panels(len(compared), FULL, max(HEIGHT, 0.8 + BAR * bars.groupby(level=0).size().max()), a_row=2)
    for place, name in zip(axes, compared, strict=True):
        charts.bars(place, bars.loc[[name]].droplevel(0), COLOURS)
        place.set(title=shorten(study.title(name), WIDE, placeholder=" …"), xlabel="seconds of a step, mean")
    return figure


def _bars(runs: Sequence[Run], labels: Mapping[str, str]) -> pd.DataFrame:
    """The bars of an experiment, each the mean over an arm's runs: seconds of a step by part."""
    rows = []
    for run in runs:  # one bar for one process, two for generator and learner
        parts, sides = step_seconds(run, 0), SIDES if value(run, "asynchronous") else {"": TURNS}
        for side, bar in sides.items():
            rows.append({"bar": labels[run.arm] + side, **{kind: parts[PARTS[part][0]] or 0.0 for kind, part in bar.items()}})
    return pd.DataFrame(rows).groupby("bar", sort=False).mean().reindex(columns=list(COLOURS)).fillna(0.0)

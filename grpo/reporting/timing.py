"""Wall-clock results: seconds and GPU-hours of each run, and reward over time (reports/timing)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from grpo.common.files import read_json, whole_folder, write_text
from grpo.reporting.charts import draw_curves, frame, legend, panels, save_figures
from grpo.reporting.curves import SECONDS, curves_of, named
from grpo.reporting.pieces import one_process
from grpo.reporting.sentences import interval
from grpo.reporting.style import METHODS, Style, readable, styles_of_places
from grpo.reporting.time_breakdown import (
    breakdown_table,
    discuss_overlap,
    draw_time_breakdown,
    variants,
)
from grpo.results.intervals import difference_of
from grpo.results.markdown import markdown_table
from grpo.results.runs import REWARD, Run, by_arm, final_scores, first_scores, read_runs, read_selection, value
from grpo.study import paths
from grpo.study.runs_table import stage_of_run
from grpo.study.schema import Study

PEAKS = ("rollout_peak_mb", "training_peak_mb", "evaluation_peak_mb")


def write_timing(study: Study) -> None:
    """Write reports/timing: times.csv, figures over wall-clock time (SVG and PNG), methods.md and time_breakdown.md."""
    figures: dict[str, Figure] = {}
    with whole_folder(paths.TIMING_REPORT) as folder:
        rows = [time_row(study, run) for experiment in study.made for run in read_runs(study, experiment)]
        pd.DataFrame(rows).to_csv(folder / "times.csv", index=False, lineterminator="\n")
        for experiment in study.with_report("wall_clock"):
            arms = arms_over_time(study, experiment)
            figures[experiment] = draw_over_wall_clock(arms, looks_of(study, arms))
        if study.with_report("methods"):
            figures["methods"] = draw_methods(study)
            write_text(folder / "methods.md", methods_table(study))
        compared = [name for piece in ("colocated", "staleness") for name in study.with_report(piece)]
        if compared:
            found = variants([run for name in compared for run in read_runs(study, name)], read_timing)
            figures["time_breakdown"] = draw_time_breakdown(found)
            write_text(folder / "time_breakdown.md", f"{breakdown_table(found)}\n{discuss_overlap(found)}\n")
        save_figures(figures, folder)


def read_timing(run: Run) -> dict[str, Any]:
    """Read the times of a run; for a run that was taken over from an identical one, those of that run."""
    return read_timing_file(run.config["same_as"] or run.name)


def read_timing_file(name: str) -> dict[str, Any]:
    """Read the times of the run ``EXPERIMENT/ARM/SEED`` from data/timing.

    Raises:
        UserError: it is missing or damaged.
    """
    keys = ("total_s", "phases", "steps", "mlflow_run_id", "same_as", "git_commit", "git_changed", "hardware")
    timing: dict[str, Any] = read_json(paths.run_timing(name), made_by=stage_of_run(name), keys=keys)
    return timing


def time_row(study: Study, run: Run) -> dict[str, Any]:
    """A run's row of times.csv; ``seconds`` include evaluation, ``training_seconds`` do not."""
    timing = read_timing(run)
    seconds, reserved = timing["total_s"], study.resources[study.experiments[run.experiment].resources]
    return {
        "run": run.name,
        "same_as": run.config["same_as"] or "",
        "seconds": round(seconds, 2),
        "training_seconds": round(sum(step["step_s"] for step in timing["steps"]), 2),
        **{name: round(value, 2) for name, value in timing["phases"].items()},
        "gpu_hours": round(seconds / 3600 * reserved.gpus, 4),
        **{key: round(max((step.get(key, 0.0) for step in timing["steps"]), default=0.0)) for key in PEAKS},
    }


def elapsed(run: Run) -> pd.Series[float]:
    """Seconds since the run's start by step, without evaluation.

    They sum the steps' own seconds, not those of their phases, which overlap in asynchronous runs.
    """
    return pd.DataFrame(read_timing(run)["steps"]).set_index("step")["step_s"].cumsum()


def seconds_of_arms(study: Study) -> dict[str, float]:
    """Mean seconds of a run of each arm, ``EXPERIMENT/ARM``; 0 for a run that was taken over from an identical one."""
    arms = [(name, arm) for name in study.made for arm in study.experiments[name].arms]
    timings = {arm: [read_timing_file(paths.run_name(*arm, seed)) for seed in study.seeds] for arm in arms}
    return {"/".join(arm): float(np.mean([0.0 if t["same_as"] else t["total_s"] for t in of])) for arm, of in timings.items()}


def times_of_arms(study: Study, runs: list[Run]) -> dict[str, tuple[float, float]]:
    """Total seconds and GPU-hours of each arm."""
    rows = {arm: [time_row(study, run) for run in of_arm] for arm, of_arm in by_arm(runs).items()}
    return {arm: (sum(r["seconds"] for r in of), sum(r["gpu_hours"] for r in of)) for arm, of in rows.items()}


def arms_over_time(study: Study, experiment: str) -> dict[str, list[Run]]:
    """The arms in an experiment's figure over wall-clock time; with asynchronous ones also the one-process arm."""
    arms = named(read_runs(study, experiment), readable)
    compared = one_process(study) if experiment in study.with_report("staleness") else []
    return arms | ({f"{readable(compared[0].arm)}, one process": compared} if compared else {})


def looks_of(study: Study, arms: dict[str, list[Run]]) -> dict[str, Style]:
    """The style of each line: that of the arm in its own experiment's figures, unless another line has it."""
    first = {name: runs[0] for name, runs in arms.items()}
    return styles_of_places({name: list(study.experiments[run.experiment].arms).index(run.arm) for name, run in first.items()})


def draw_over_wall_clock(arms: dict[str, list[Run]], looks: dict[str, Style]) -> Figure:
    """Draw the validation answer reward over seconds, without evaluation."""
    figure, (axes,) = panels(1)
    draw_curves(axes, curves_of(arms, REWARD, over_seconds), looks)
    frame(axes, "validation answer reward", SECONDS, share=True)
    legend(figure, looks)
    return figure


def over_seconds(run: Run, steps: list[int]) -> list[float]:
    """Axis of seconds since a run's start, without evaluation."""
    spent = elapsed(run)
    return [float(spent[step]) if step else 0.0 for step in steps]


def methods(study: Study) -> dict[str, list[Run]]:
    """The runs that represent each method: the winners of SFT and expert iteration, and GRPO's best configuration."""
    found = {}
    others = {"sft": "supervised fine-tuning", "expert_iteration": "expert iteration"}
    for experiment in (name for method in others for name in study.made if study.experiments[name].method == method):
        winner = read_selection(experiment)["winner"]
        title = others[study.experiments[experiment].method]
        found[f"{title} ({readable(winner)})"] = by_arm(read_runs(study, experiment))[winner]
    best = [run for experiment in study.with_report("methods") for run in read_runs(study, experiment)]
    for arm, runs in by_arm(best).items():
        if value(runs[0], "start_from") is None:
            found[f"GRPO, best configuration ({readable(arm)})"] = runs
    return found


def methods_table(study: Study) -> str:
    """Table of methods: answer reward, difference from GRPO, and seconds."""
    found = methods(study)
    scores = {title: final_scores(runs, study.last_k(runs[0].experiment)) for title, runs in found.items()}
    *_, grpo = scores
    columns = ["method", "answer reward", "above GRPO (95% interval)", "best (step)", "seconds per run", "of these training"]
    rows = [["the base model, untrained", f"{first_scores(found[grpo]).mean():.3f}", "", "", "", ""]]
    for title, runs in found.items():
        times = [time_row(study, run) for run in runs]
        best = max(runs, key=lambda run: run.metrics["best/answer_reward"]).metrics
        above = "" if title == grpo else interval(difference_of(scores[grpo], scores[title]))
        row = [
            title,
            f"{scores[title].mean():.3f}",
            above,
            f"{best['best/answer_reward']:.3f} ({best['best/step']})",
            f"{np.mean([row['seconds'] for row in times]):.0f}",
            f"{np.mean([row['training_seconds'] for row in times]):.0f}",
        ]
        rows.append(row)
    return markdown_table(columns, rows)


def draw_methods(study: Study) -> Figure:
    """Draw the methods' validation answer reward over wall-clock time."""
    found = methods(study)
    looks = {title: Style(METHODS[study.experiments[runs[0].experiment].method]) for title, runs in found.items()}
    return draw_over_wall_clock(found, looks)

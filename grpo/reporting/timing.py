"""What depends on the clock: seconds and GPU-hours of each run, and reward over wall-clock time."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from grpo.common.files import read_json, whole_folder, write_text
from grpo.reporting.charts import draw_curves, frame, legend, panels, save_figures
from grpo.reporting.curves import SECONDS, curves_of, named
from grpo.reporting.pieces import in_turns
from grpo.reporting.style import METHODS, Style, readable, styles_of_places
from grpo.reporting.time_breakdown import (
    breakdown_table,
    discuss_overlap,
    draw_time_breakdown,
    variants,
)
from grpo.results.intervals import difference_of
from grpo.results.runs import (
    REWARD,
    Run,
    by_arm,
    experiments,
    final_scores,
    first_scores,
    read_runs,
    read_selection,
    value,
)
from grpo.results.statistics import format_interval
from grpo.study import paths
from grpo.study.runs_table import stage_of_run
from grpo.study.schema import Study

PEAKS = ("rollout_peak_mb", "training_peak_mb", "evaluation_peak_mb")


def write_timing(study: Study) -> None:
    """Write reports/timing/times.csv, the curves over wall-clock time (SVG and PNG), and where the time of a step goes.

    Of experiments that the study leaves out there is nothing.
    """
    made = experiments(study)
    with whole_folder(paths.TIMING_REPORT) as folder:
        rows = [time_row(study, run) for experiment in made for run in read_runs(study, experiment)]
        pd.DataFrame(rows).to_csv(folder / "times.csv", index=False, lineterminator="\n")
        save_figures(timing_figures(study), folder)
        if study.with_report("methods"):
            write_text(folder / "methods.md", methods_table(study))
        if runs := _in_turns_or_apart(study):
            write_text(folder / "time_breakdown.md", time_breakdown_page(runs))


def timing_figures(study: Study) -> dict[str, Figure]:
    """What is drawn over the clock, by file name."""
    found = {}
    for experiment in study.with_report("wall_clock"):
        arms = arms_over_time(study, experiment)
        found[experiment] = draw_over_wall_clock(arms, looks_of(study, arms))
    if study.with_report("methods"):
        found["methods"] = draw_methods(study)
    if runs := _in_turns_or_apart(study):
        found["time_breakdown"] = draw_time_breakdown(variants(runs, read_timing))
    return found


def _in_turns_or_apart(study: Study) -> list[Run]:
    """The runs of the colocated and of the asynchronous experiment."""
    return [run for piece in ("colocated", "staleness") for name in study.with_report(piece) for run in read_runs(study, name)]


def read_timing(run: Run) -> dict[str, Any]:
    """Wall-clock figures of a run; those of the run it is the same as, where it was taken over."""
    name = run.config["same_as"] or run.name
    return read_timing_file(name)


def read_timing_file(name: str) -> dict[str, Any]:
    """What data/timing has of the run ``EXPERIMENT/ARM/SEED``.

    Raises:
        UserError: it is missing or damaged.
    """
    keys = ("total_s", "phases", "steps", "mlflow_run_id", "same_as", "git_commit", "git_changed", "hardware")
    timing: dict[str, Any] = read_json(paths.run_timing(name), made_by=stage_of_run(name), keys=keys)
    return timing


def time_row(study: Study, run: Run) -> dict[str, Any]:
    """One run as a row of times.csv; ``seconds`` with evaluation, ``training_seconds`` without."""
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
    """Seconds since the run's start by step, evaluation left out.

    They are those that the steps took, and not the sum of their phases, which overlap where generator and learner are apart.
    """
    return pd.DataFrame(read_timing(run)["steps"]).set_index("step")["step_s"].cumsum()


def seconds_of_arms(study: Study) -> dict[str, float]:
    """Mean seconds that a run of each arm, ``EXPERIMENT/ARM``, took to make; 0 where it was taken over from an equal one."""
    arms = [(name, arm) for name in experiments(study) for arm in study.experiments[name].arms]
    timings = {arm: [read_timing_file(paths.run_name(*arm, seed)) for seed in study.seeds] for arm in arms}
    return {"/".join(arm): float(np.mean([0.0 if t["same_as"] else t["total_s"] for t in of])) for arm, of in timings.items()}


def times_of_arms(study: Study, runs: list[Run]) -> dict[str, tuple[float, float]]:
    """Seconds and GPU-hours of each arm, over its seeds together."""
    rows = {arm: [time_row(study, run) for run in of_arm] for arm, of_arm in by_arm(runs).items()}
    return {arm: (sum(r["seconds"] for r in of), sum(r["gpu_hours"] for r in of)) for arm, of in rows.items()}


def arms_over_time(study: Study, experiment: str) -> dict[str, list[Run]]:
    """What an experiment's figure over wall-clock time shows: its arms, and beside asynchronous ones the run they rival."""
    arms = named(read_runs(study, experiment), readable)
    rival = in_turns(study) if experiment in study.with_report("staleness") else []
    return arms | ({f"{readable(rival[0].arm)}, one process": rival} if rival else {})


def looks_of(study: Study, arms: dict[str, list[Run]]) -> dict[str, Style]:
    """The look of each line of a figure: its arm's in the figures of the arm's own experiment, as far as that is free."""
    first = {name: runs[0] for name, runs in arms.items()}
    return styles_of_places({name: list(study.experiments[run.experiment].arms).index(run.arm) for name, run in first.items()})


def draw_over_wall_clock(arms: dict[str, list[Run]], looks: dict[str, Style]) -> Figure:
    """Validation answer reward over the seconds spent on rollouts and training, evaluation left out."""
    figure, (axes,) = panels(1)
    draw_curves(axes, curves_of(arms, REWARD, over_seconds), looks)
    frame(axes, "validation answer reward", SECONDS, share=True)
    legend(figure, looks)
    return figure


def over_seconds(run: Run, steps: list[int]) -> list[float]:
    """The axis of seconds since a run's start, evaluation left out."""
    spent = elapsed(run)
    return [float(spent[step]) if step else 0.0 for step in steps]


def methods(study: Study) -> dict[str, list[Run]]:
    """The runs that stand for each method: the winners of SFT and of expert iteration, and GRPO's best configuration.

    The study makes the experiment that holds the latter, and so SFT too; it may leave expert iteration out.
    """
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
    """Accuracy and wall-clock of each method, and how far each is from GRPO."""
    found = methods(study)
    scores = {title: final_scores(runs, study.last_k(runs[0].experiment)) for title, runs in found.items()}
    *_, grpo = scores
    lines = [
        "| method | answer reward | above GRPO (95% interval) | best (step) | seconds a run | of these training |",
        "|---|---|---|---|---|---|",
        f"| the base model, untrained | {first_scores(found[grpo]).mean():.3f} | | | | |",
    ]
    for title, runs in found.items():
        times = [time_row(study, run) for run in runs]
        best = max(runs, key=lambda run: run.metrics["best/answer_reward"]).metrics
        above = "" if title == grpo else format_interval(difference_of(scores[grpo], scores[title]))
        cells = [
            title,
            f"{scores[title].mean():.3f}",
            above,
            f"{best['best/answer_reward']:.3f} ({best['best/step']})",
            f"{np.mean([row['seconds'] for row in times]):.0f}",
            f"{np.mean([row['training_seconds'] for row in times]):.0f}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def draw_methods(study: Study) -> Figure:
    """The methods' validation answer reward over wall-clock time, each in its colour."""
    found = methods(study)
    looks = {title: Style(METHODS[study.experiments[runs[0].experiment].method]) for title, runs in found.items()}
    return draw_over_wall_clock(found, looks)


def time_breakdown_page(runs: list[Run]) -> str:
    """Where the time of a step goes (Markdown): a table, and how far generation and training overlap.

    Args:
        runs: those of the colocated and of the asynchronous experiment.
    """
    found = variants(runs, read_timing)
    return f"{breakdown_table(found)}\n{discuss_overlap(found)}\n"

"""Seconds and GPU-hours of runs, from data/timing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from grpo.common.files import read_json
from grpo.reporting.sentences import paragraph
from grpo.results.intervals import difference_of
from grpo.results.runs import Run, by_arm
from grpo.study import paths
from grpo.study.runs_table import stage_of_run
from grpo.study.schema import Study

PEAKS = ("rollout_peak_mb", "training_peak_mb", "evaluation_peak_mb")


def read_timing(run: Run) -> dict[str, Any]:
    """Read the times of a run; for a run that was taken over from an identical one, those of that run."""
    return read_timing_file(run.config["same_as"] or run.name)


def read_timing_file(name: str) -> dict[str, Any]:
    """Read the times of the run ``EXPERIMENT/ARM/SEED`` from data/timing; a missing or damaged file is a UserError."""
    keys = ("total_s", "phases", "steps", "mlflow_run_id", "same_as", "git_commit", "git_changed", "hardware")
    return read_json(paths.run_timing(name), made_by=stage_of_run(name), keys=keys)


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


def times_of_arms(study: Study, runs: list[Run]) -> dict[str, tuple[float, float]]:
    """Total seconds and GPU-hours of each arm."""
    rows = {arm: [time_row(study, run) for run in of_arm] for arm, of_arm in by_arm(runs).items()}
    return {arm: (sum(r["seconds"] for r in of), sum(r["gpu_hours"] for r in of)) for arm, of in rows.items()}


def seconds_of_arms(study: Study) -> dict[str, float]:
    """Mean seconds of a run of each arm, ``EXPERIMENT/ARM``; 0 for a run that was taken over from an identical one."""
    arms = [(name, arm) for name in study.made for arm in study.experiments[name].arms]
    timings = {arm: [read_timing_file(paths.run_name(*arm, seed)) for seed in study.seeds] for arm in arms}
    return {"/".join(arm): float(np.mean([0.0 if t["same_as"] else t["total_s"] for t in of])) for arm, of in timings.items()}


def elapsed(run: Run) -> pd.Series[float]:
    """Seconds since the run's start by step, without evaluation.

    They sum the steps' own seconds, not those of their phases, which overlap in asynchronous runs.
    """
    return pd.DataFrame(read_timing(run)["steps"]).set_index("step")["step_s"].cumsum()


def seconds_of_a_step(runs: list[Run]) -> float:
    """Mean seconds of a step, without evaluation."""
    return float(np.mean([elapsed(run).iloc[-1] / len(elapsed(run)) for run in runs]))


def outcome_at(run: Run, seconds: float) -> NDArray[np.float64]:
    """Rewards in a run's last evaluation within so many seconds, (problems,)."""
    spent = elapsed(run)
    done = [i for i, step in enumerate(run.validation["step"]) if step == 0 or spent[step] <= seconds]
    return np.asarray(run.outcomes[done[-1]])


def end_of_first(runs: list[Run]) -> float:
    """Seconds without evaluation after which the first of some runs ends."""
    return min(float(elapsed(run).iloc[-1]) for run in runs)


def at_equal_time(first: list[Run], second: list[Run]) -> str:
    """Compare two arms at the time at which the first of their runs ends."""
    end = end_of_first([*first, *second])
    scores = [np.stack([outcome_at(run, end) for run in arm]) for arm in (first, second)]
    means = [(arm[0].arm, of.mean()) for arm, of in zip((first, second), scores, strict=True)]
    return paragraph("equal_time_sentences.md.j2", end=end, means=means, difference=difference_of(scores[0], scores[1]))

"""Reading the result files of a study's runs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from grpo.common.errors import UserError, reason
from grpo.common.files import damaged, read_csv, read_json, read_jsonl, require_keys
from grpo.results.findings import Interval
from grpo.results.intervals import change_of
from grpo.study import paths
from grpo.study.runs_table import stage_of_run
from grpo.study.schema import Study, read_yaml

REWARD = "val/answer_reward"


@dataclass(frozen=True)
class Run:
    """One finished run.

    Attributes:
        config: config.yaml, each value with its source.
        metrics: metrics.json, where ``diverged_step`` is None unless the run diverged.
        history, validation: one row for each optimizer step, and for each evaluation.
        outcomes: answer reward of each problem in each evaluation, the untrained one first: (evaluations, problems).
    """

    experiment: str
    arm: str
    seed: int
    config: dict[str, Any]
    metrics: dict[str, Any]
    history: pd.DataFrame
    validation: pd.DataFrame
    outcomes: NDArray[np.float64]

    @property
    def name(self) -> str:
        """The run's name, as :func:`grpo.study.paths.run_name` gives it."""
        return paths.run_name(self.experiment, self.arm, self.seed)


def experiments(study: Study) -> list[str]:
    """The experiments that the study makes, in the order in which they build on one another."""
    return study.made


def read_outcomes(experiment: str, arm: str, seed: int) -> NDArray[np.float64]:
    """Answer reward of each problem in each evaluation of a run, the untrained one first: (evaluations, problems).

    Raises:
        UserError: the run is missing; the message names the stage that makes it.
    """
    folder = paths.RUNS / paths.run_name(experiment, arm, seed)
    path, made_by = folder / "outcomes.jsonl", stage_of_run(paths.run_name(experiment, arm, seed))
    if not path.exists():
        raise UserError(f"{folder}: holds no finished run. Run `dvc repro {made_by}` to make it.")
    evaluations = read_jsonl(path, made_by, lambda record: np.array(record["answer_reward"], dtype=float))
    if any(evaluation.shape != evaluations[0].shape or evaluation.ndim != 1 for evaluation in evaluations):
        raise damaged(path, "not as many problems in each evaluation", made_by)
    if len(evaluations) < 2:
        raise damaged(path, "no evaluation after the untrained one", made_by)
    return np.stack(evaluations)


def read_config(experiment: str, arm: str, seed: int) -> dict[str, Any]:
    """A run's config.yaml.

    Raises:
        UserError: it is missing or damaged.
    """
    name = paths.run_name(experiment, arm, seed)
    path, made_by = paths.RUNS / name / "config.yaml", stage_of_run(name)
    if not path.exists():
        raise UserError(f"{path}: no such file. Run `dvc repro {made_by}` to make it.")
    try:
        config: dict[str, Any] = read_yaml(path)
    except UserError as error:
        raise damaged(path, reason(error), made_by) from error
    require_keys(path, config, ("identity", "overrides", "before"), made_by)
    return config


def read_metrics(experiment: str, arm: str, seed: int) -> dict[str, Any]:
    """A run's metrics.json.

    Raises:
        UserError: it is missing or damaged.
    """
    name = paths.run_name(experiment, arm, seed)
    metrics: dict[str, Any] = read_json(
        paths.RUNS / name / "metrics.json", stage_of_run(name), keys=("diverged_step", "diverged_reason")
    )
    return metrics


def mean_of_last(outcomes: NDArray[np.float64], last_k: int) -> NDArray[np.float64]:
    """The number that counts, by problem: mean answer reward over a run's last ``last_k`` evaluations, (problems,).

    The first, untrained evaluation never counts. A run that ended early, because it diverged or its time was up, may have
    fewer than ``last_k``, and then counts by those it has; the report's tables say so.

    Args:
        outcomes: (evaluations, problems), as :func:`read_outcomes` gives them.
    """
    return np.asarray(outcomes[1:][-last_k:].mean(axis=0))


def evaluations_counted(outcomes: NDArray[np.float64], last_k: int) -> int:
    """Of how many evaluations :func:`mean_of_last` is the mean."""
    return min(last_k, len(outcomes) - 1)


def read_run(experiment: str, arm: str, seed: int) -> Run:
    """One run's results. They are read once in a process, unless they change: tables and claims ask for the same runs.

    Raises:
        UserError: they are missing or damaged; the message names the stage that makes them.
    """
    files = sorted((paths.RUNS / paths.run_name(experiment, arm, seed)).glob("*"))
    return _read_run(experiment, arm, seed, Path.cwd(), tuple(file.stat().st_mtime_ns for file in files))


@cache
def _read_run(experiment: str, arm: str, seed: int, _folder: Path, _changed: tuple[int, ...]) -> Run:
    name = paths.run_name(experiment, arm, seed)
    outcomes = read_outcomes(experiment, arm, seed)  # the first to say that there is no finished run
    folder, made_by, config = paths.RUNS / name, stage_of_run(name), read_config(experiment, arm, seed)
    require_keys(folder / "config.yaml", config, ("config", "same_as", "software"), made_by)
    return Run(
        experiment,
        arm,
        seed,
        metrics=read_metrics(experiment, arm, seed),
        config=config,
        history=read_csv(folder / "history.csv", made_by, columns=("step", "gradient_norm")),
        validation=read_csv(folder / "validation.csv", made_by, columns=("step", REWARD)),
        outcomes=outcomes,
    )


def read_runs(study: Study, experiment: str) -> list[Run]:
    """All runs of an experiment, arms in the order of params.yaml, seeds within."""
    return [read_run(experiment, arm, seed) for arm in study.experiments[experiment].arms for seed in study.seeds]


def read_selection(experiment: str) -> dict[str, Any]:
    """The experiment's winner and candidates, as :func:`grpo.results.selection.select` wrote them."""
    path, keys = paths.CANDIDATES / f"{experiment}.json", ("winner", "leader", "reason", "candidates")
    selection: dict[str, Any] = read_json(path, made_by=f"select@{experiment}", keys=keys)
    return selection


def read_baseline(study: Study) -> dict[str, Any]:
    """The zero-shot metrics of each prompt."""
    prompts = study.evaluation.zero_shot_prompts
    baseline: dict[str, Any] = read_json(paths.BASELINE_METRICS, made_by="math_baseline", keys=prompts)
    return baseline


def read_best_of_n(study: Study) -> dict[str, Any]:
    """The estimates from several samples, of each prompt; empty where the study leaves them out."""
    prompts = study.evaluation.best_of_n.prompts
    if not prompts:
        return {}
    estimates: dict[str, Any] = read_json(paths.BEST_OF_N_METRICS, made_by="best_of_n", keys=prompts)
    return estimates


def read_zero_shot(prompt: str) -> dict[str, float]:
    """problem -> 1.0 where the zero-shot answer is right.

    Raises:
        UserError: the file is missing or damaged.
    """

    def line(value: dict[str, Any]) -> tuple[str, float]:
        return value["problem"], float(value["answer_reward"] == 1.0)

    return dict(read_jsonl(paths.BASELINE / f"{prompt}.jsonl", "math_baseline", line))


def by_arm(runs: list[Run]) -> dict[str, list[Run]]:
    """The runs of each arm, arms in their order."""
    arms: dict[str, list[Run]] = {}
    for run in runs:
        arms.setdefault(run.arm, []).append(run)
    return arms


def value(run: Run, key: str) -> Any:
    """A value of a run's configuration."""
    return run.config["config"][key]["value"]


def final_scores(runs: list[Run], last_k: int) -> NDArray[np.float64]:
    """The number that counts, by run and problem, of the runs of one arm: (runs, problems).

    See :func:`mean_of_last`.
    """
    return np.stack([mean_of_last(run.outcomes, last_k) for run in runs])


def first_scores(runs: list[Run]) -> NDArray[np.float64]:
    """Answer reward before the first step, by run and problem: (runs, problems)."""
    return np.stack([run.outcomes[0] for run in runs])


def gain(runs: list[Run], last_k: int) -> Interval:
    """How far the runs of one arm end above their start."""
    return change_of(first_scores(runs), final_scores(runs, last_k))


def steps_taken(runs: list[Run]) -> int:
    """The fewest steps that a run took, of those that were not stopped because they diverged; 0 where all were."""
    return min((int(run.validation["step"].iloc[-1]) for run in runs if run.metrics["diverged_step"] is None), default=0)


def identical(first: list[Run], second: list[Run]) -> bool:
    """Whether two arms trained alike to the last number, seed by seed: what they differ in played no part.

    So it is with the standard deviation of a group where the loss takes raw rewards, whose advantages nobody reads.
    """
    return len(first) == len(second) and all(
        a.history.equals(b.history) and np.array_equal(a.outcomes, b.outcomes) for a, b in zip(first, second, strict=True)
    )


def mean_curve(runs: list[Run], table: str, column: str) -> pd.DataFrame:
    """Mean, smallest and largest value over seeds.

    Args:
        runs: those of one arm.
        table: ``history`` or ``validation``.

    Returns:
        columns ``mean``, ``min``, ``max``, indexed by step; the last update of a step counts.
    """
    series = [getattr(run, table).groupby("step")[column].last() for run in runs]
    frame = pd.concat(series, axis=1)
    return pd.DataFrame({"mean": frame.mean(axis=1), "min": frame.min(axis=1), "max": frame.max(axis=1)})

"""Reading the result files of a study's runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pandas as pd

from grpo import paths
from grpo.files import read_json
from grpo.study import BUILDS_ON, Study, read_yaml

TITLES = {
    "grpo_learning_rate": "Learning rate",
    "grpo_baselines": "Baselines",
}
REWARD = "val/answer_reward"


@dataclass(frozen=True)
class Run:
    """One finished run: ``config`` with sources, ``metrics``, and its history and validation, one row for each step."""

    experiment: str
    arm: str
    seed: int
    config: dict[str, Any]
    metrics: dict[str, float]
    history: pd.DataFrame
    validation: pd.DataFrame

    @property
    def name(self) -> str:
        """``EXPERIMENT/ARM-SEED``"""
        return f"{self.experiment}/{self.arm}-{self.seed}"


def experiments(study: Study) -> list[str]:
    """The study's experiments in the order in which they build on one another."""
    return [name for name in BUILDS_ON if name in study.experiments]


def read_run(experiment: str, arm: str, seed: int) -> Run:
    """Read one run's results.

    Raises:
        UserError: they are missing; the message names the stage that makes them.
    """
    folder = paths.RUNS / experiment / f"{arm}-{seed}"
    return Run(
        experiment,
        arm,
        seed,
        metrics=read_json(folder / "metrics.json", made_by=f"{experiment}@{arm}-{seed}"),
        config=read_yaml(folder / "config.yaml"),
        history=pd.read_csv(folder / "history.csv"),
        validation=pd.read_csv(folder / "validation.csv"),
    )


def read_runs(study: Study, experiment: str) -> list[Run]:
    """All runs of an experiment, arms in the order of params.yaml, seeds within."""
    return [read_run(experiment, arm, seed) for arm in study.experiments[experiment].arms for seed in study.seeds]


def read_selection(experiment: str) -> dict[str, Any]:
    """The experiment's winner and candidates, as :func:`grpo.selection.select` wrote them."""
    selection: dict[str, Any] = read_json(paths.CANDIDATES / f"{experiment}.json", made_by=f"select@{experiment}")
    return selection


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

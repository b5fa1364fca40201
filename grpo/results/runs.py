"""Readers of the result files of a study's runs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from grpo.common.errors import UserError
from grpo.common.files import damaged, read_csv, read_json, read_jsonl, require_keys
from grpo.common.metrics import name_of_kept
from grpo.study import paths
from grpo.study.config import RewardName
from grpo.study.effective import read_run_config
from grpo.study.paths import stage_of_run
from grpo.study.schema import Study


@dataclass(frozen=True)
class Run:
    """One finished run."""

    experiment: str
    arm: str
    seed: int
    config: dict[str, Any]  # config.yaml, each value with its source
    metrics: dict[str, Any]  # metrics.json; ``diverged_step`` is None unless the run diverged
    history: pd.DataFrame  # one row per optimizer step
    validation: pd.DataFrame  # one row per evaluation
    # The rewards that :attr:`metric` names, (evaluations, problems), on the problems of all evaluations; the first are those of
    # the untrained model.
    outcomes: NDArray[np.float64]
    last: NDArray[np.float64]  # those of the last evaluation on all its problems, (problems,)
    selection_problems: int  # how many of those choose winners and rates; 0: all choose and judge
    metric: RewardName = "answer_reward"  # the reward by which the study compares runs

    @property
    def column(self) -> str:
        """The column of :attr:`validation` with this reward."""
        return f"val/{self.metric}"

    @property
    def final(self) -> NDArray[np.float64]:
        """The run's result: the last rewards on the problems that judge, (problems,)."""
        return self.last[self.selection_problems :]

    @property
    def end(self) -> float:
        """The mean of :attr:`final`."""
        return float(self.final.mean())

    @property
    def selection(self) -> NDArray[np.float64]:
        """The last rewards on the problems that choose winners and learning rates, (problems,)."""
        return self.last[: self.selection_problems or None]

    @property
    def name(self) -> str:
        """The run's name, as :func:`grpo.study.paths.run_name` gives it."""
        return paths.run_name(self.experiment, self.arm, self.seed)


def _read_outcomes(path: Path, made_by: str) -> tuple[RewardName, NDArray[np.float64], NDArray[np.float64]]:
    """The reward's name, rewards of all evaluations on their common problems, and of the last one on all its problems."""
    found = read_jsonl(path, made_by, _outcomes)
    evaluations, metrics = [values for _, values in found], {metric for metric, _ in found}
    if len(metrics) > 1:
        raise damaged(path, f"evaluations of different rewards ({', '.join(sorted(metrics))})", made_by)
    if len(evaluations) < 2:
        raise damaged(path, "no evaluation after that of the untrained model", made_by)
    sizes = [len(evaluation) for evaluation in evaluations]
    if len(set(sizes[:-1])) > 1 or sizes[-1] < sizes[0]:
        raise damaged(path, "evaluations have different numbers of problems", made_by)
    return found[0][0], np.stack([evaluation[: sizes[0]] for evaluation in evaluations]), evaluations[-1]


def _outcomes(record: dict[str, Any]) -> tuple[RewardName, NDArray[np.float64]]:
    metric: RewardName = "reward" if "reward" in record else "answer_reward"
    return metric, np.array(record[metric], dtype=float)


def read_run(experiment: str, arm: str, seed: int) -> Run:
    """Read a run's results; cached in the process until a file of the run changes.

    Raises UserError: a file is missing or damaged; the message names the stage that makes it.
    """
    files = sorted((paths.RUNS / paths.run_name(experiment, arm, seed)).glob("*"))
    return _read_run(experiment, arm, seed, Path.cwd(), tuple(file.stat().st_mtime_ns for file in files))


@cache
def _read_run(experiment: str, arm: str, seed: int, _folder: Path, _changed: tuple[int, ...]) -> Run:
    name = paths.run_name(experiment, arm, seed)
    folder, made_by = paths.RUNS / name, stage_of_run(name)
    if not (folder / "outcomes.jsonl").exists():
        raise UserError(f"{folder}: no finished run. Run `dvc repro {made_by}` to make it.")
    config = read_run_config(name)
    require_keys(folder / "config.yaml", config, ("config", "same_as", "software", "evaluation"), made_by)
    metric, outcomes, last = _read_outcomes(folder / "outcomes.jsonl", made_by)
    evaluation = config["evaluation"]
    return Run(
        experiment,
        arm,
        seed,
        config=config,
        metrics=read_json(folder / "metrics.json", made_by, keys=("diverged_step", "diverged_reason")),
        history=read_csv(folder / "history.csv", made_by, columns=("step", "gradient_norm")),
        validation=read_csv(folder / "validation.csv", made_by, columns=("step", f"val/{metric}")),
        outcomes=outcomes,
        last=last,
        # The same share of a validation set that is smaller.
        selection_problems=evaluation["selection_problems"] * len(last) // evaluation["last_problems"],
        metric=metric,
    )


def read_runs(study: Study, experiment: str) -> list[Run]:
    """Read all runs of an experiment, ordered by arm (as in params.yaml), then by seed."""
    return [
        read_run(experiment, arm, seed) for arm in study.experiments[experiment].arms for seed in study.seeds_of(experiment)
    ]


def read_baseline(study: Study) -> dict[str, Any]:
    """Read the zero-shot metrics of each prompt."""
    return read_json(paths.BASELINE_METRICS, made_by="math_baseline", keys=study.evaluation.zero_shot_prompts)


def read_best_of_n(study: Study) -> dict[str, Any]:
    """Read the estimates from several samples, by prompt; empty if the study leaves them out."""
    prompts = study.evaluation.best_of_n.prompts
    return read_json(paths.BEST_OF_N_METRICS, made_by="best_of_n", keys=prompts) if prompts else {}


def read_pass_at_k(study: Study) -> dict[str, Any]:
    """Read pass@k of sampled checkpoints, by EXPERIMENT/ARM (:func:`grpo.evaluation.best_of_n.pass_at_k_of`)."""
    by_experiment = {
        name: read_json(paths.PASS_AT_K_REPORTS / f"{name}.json", f"pass_at_k@{name}", keys=("arms",))["arms"]
        for name in study.pass_at_k_in
    }
    return {f"{name}/{arm}": found for name, arms in by_experiment.items() for arm, found in arms.items()}


def read_kept(run: Run) -> pd.DataFrame:
    """Read what the ``kl`` stage measured of a run's kept checkpoints, by ``step``; empty if it measured none."""
    if not (path := paths.KL_REPORTS / f"{run.experiment}.json").exists():
        return pd.DataFrame()
    steps = read_json(path, f"kl@{run.experiment}", keys=("arms",))["arms"].get(run.arm, [])
    of_run = [(measured["step"], measured["by_run"][run.name]) for measured in steps if run.name in measured["by_run"]]
    return pd.DataFrame(
        [{"step": step} | {name_of_kept(key): value for key, value in measured.items()} for step, measured in of_run]
    )


def by_arm(runs: list[Run]) -> dict[str, list[Run]]:
    """Group runs by arm, in their order."""
    arms: dict[str, list[Run]] = {}
    for run in runs:
        arms.setdefault(run.arm, []).append(run)
    return arms


def value(run: Run, key: str) -> Any:
    """A value of a run's configuration; None if its method has no such setting."""
    return run.config["config"].get(key, {}).get("value")


def final_scores(runs: list[Run]) -> NDArray[np.float64]:
    """Final rewards of an arm on the problems that judge, (runs, problems)."""
    return np.stack([run.final for run in runs])


def first_scores(runs: list[Run]) -> NDArray[np.float64]:
    """Answer rewards before training, (runs, problems)."""
    return np.stack([run.outcomes[0] for run in runs])


def identical(first: list[Run], second: list[Run]) -> bool:
    """Whether two arms have identical results, seed by seed, so that their different settings had no effect.

    An example is division by the group's standard deviation, where the loss uses raw rewards instead of advantages.
    """
    return len(first) == len(second) and all(
        a.history.equals(b.history) and np.array_equal(a.last, b.last) for a, b in zip(first, second, strict=True)
    )

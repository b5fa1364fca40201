"""The runs of a study: readers of their result files, and the runs by which an experiment and claims are judged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from grpo.common.errors import UserError
from grpo.common.files import damaged, read_csv, read_json, read_jsonl, require_keys
from grpo.common.metrics import name_of_kept
from grpo.results.intervals import LEVEL, Scores, difference_of, simultaneous, wilson_interval
from grpo.study import paths
from grpo.study.config import RewardName, setting_of
from grpo.study.effective import read_run_config
from grpo.study.paths import stage_of_run
from grpo.study.schema import Study

BELOW = 0.5  # a run that ends below this share of its best reward has collapsed


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
    outcomes: Scores
    last: Scores  # those of the last evaluation on all its problems, (problems,)
    selection_problems: int  # how many of those choose winners and rates; 0: all choose and judge
    metric: RewardName = "answer_reward"  # the reward by which the study compares runs

    @property
    def column(self) -> str:
        """The column of :attr:`validation` with this reward."""
        return f"val/{self.metric}"

    @property
    def final(self) -> Scores:
        """The run's result: the last rewards on the problems that judge, (problems,)."""
        return self.last[self.selection_problems :]

    @property
    def end(self) -> float:
        """The mean of :attr:`final`."""
        return float(self.final.mean())

    @property
    def selection(self) -> Scores:
        """The last rewards on the problems that choose winners and learning rates, (problems,)."""
        return self.last[: self.selection_problems or None]

    @property
    def name(self) -> str:
        """The run's name, as :func:`grpo.study.paths.run_name` gives it."""
        return paths.run_name(self.experiment, self.arm, self.seed)


def _read_outcomes(path: Path, made_by: str) -> tuple[RewardName, Scores, Scores]:
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


def _outcomes(record: dict[str, Any]) -> tuple[RewardName, Scores]:
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


def final_scores(runs: list[Run]) -> Scores:
    """Final rewards of an arm on the problems that judge, (runs, problems)."""
    return np.stack([run.final for run in runs])


def first_scores(runs: list[Run]) -> Scores:
    """Answer rewards before training, (runs, problems)."""
    return np.stack([run.outcomes[0] for run in runs])


def identical(first: list[Run], second: list[Run]) -> bool:
    """Whether two arms have identical results, seed by seed, so that their different settings had no effect.

    An example is division by the group's standard deviation, where the loss uses raw rewards instead of advantages.
    """
    return len(first) == len(second) and all(
        a.history.equals(b.history) and np.array_equal(a.last, b.last) for a, b in zip(first, second, strict=True)
    )


# ---------------------------------------------------------------------------------------------------- the runs of an experiment


class NotMeasured(Exception):
    """A test's requirement that the study does not meet; the message names it."""


@dataclass(frozen=True)
class Arm:
    """An arm's runs, as a claim is judged by them."""

    experiment: str
    name: str
    runs: list[Run]
    collapsed: list[str]  # names of the runs that collapsed


@dataclass(frozen=True)
class ExperimentRuns:
    """The runs of an experiment.

    Arms whose names differ in ``-rate_X`` only are one setting. Methods take the name of an arm, or that of a setting for its
    chosen arm.
    """

    experiment: str
    arms: dict[str, list[Run]]  # runs by arm, in the order of params.yaml

    @cached_property
    def _collapsed(self) -> dict[str, list[str]]:
        return {arm: [run.name for run in runs if has_collapsed(run)] for arm, runs in self.arms.items()}

    @cached_property
    def chosen(self) -> dict[str, str]:
        """Each setting's arm: that of its best learning rate (:meth:`first_within_one_error`)."""
        settings: dict[str, list[str]] = {}
        for arm in self.arms:
            settings.setdefault(setting_of(arm), []).append(arm)
        return {setting: self.first_within_one_error(arms) for setting, arms in settings.items()}

    def name_of(self, arm: str) -> str:
        """The arm of this name, or a setting's chosen one. Raises NotMeasured: the study has no such arm."""
        if arm not in self.arms and arm not in self.chosen:
            raise NotMeasured(f"the study has no arm {arm}")
        return arm if arm in self.arms else self.chosen[arm]

    def runs(self, arm: str) -> list[Run]:
        """The runs of an arm, also :class:`NotMeasured` as :meth:`name_of`."""
        return self.arms[self.name_of(arm)]

    def collapsed(self, arm: str) -> list[str]:
        """The names of the arm's runs that collapsed; they count in its mean and interval."""
        return self._collapsed[self.name_of(arm)]

    def arm(self, name: str) -> Arm:
        """An arm for a claim, also :class:`NotMeasured` as :meth:`name_of`."""
        arm = self.name_of(name)
        return Arm(self.experiment, arm, self.arms[arm], self.collapsed(arm))

    def final(self, arm: str) -> Scores:
        """Final scores of the arm's runs on the problems that judge, (runs, problems)."""
        return final_scores(self.runs(arm))

    def selection(self, arm: str) -> Scores:
        """Final scores of the arm's runs on the problems that select, (runs, problems)."""
        return np.stack([run.selection for run in self.runs(arm)])

    def eligible(self, arms: Sequence[str]) -> list[str]:
        """Those of these arms that may win: without a collapsed run; if there are none, with a run that held, or all."""
        collapses = {arm: len(self.collapsed(arm)) for arm in arms}
        whole = [arm for arm in arms if not collapses[arm]]
        return whole or [arm for arm in arms if collapses[arm] < len(self.runs(arm))] or list(arms)

    def best(self, arms: Sequence[str]) -> str:
        """The eligible arm with the highest mean on the problems that select, the first of equals."""
        return max(self.eligible(arms), key=lambda arm: float(self.selection(arm).mean()))

    @cached_property
    def leader(self) -> str:
        """The best of the settings' chosen arms (:meth:`best`)."""
        return self.best([*self.chosen.values()])

    def first_within_one_error(self, arms: Sequence[str]) -> str:
        """The first eligible arm that is not more than one standard error below the best one, on the problems that select.

        Arms stand in the order of preference, so a small difference does not decide (the one-standard-error rule of Breiman et
        al. 1984, Classification and Regression Trees, Section 3.4.3; here the error is that of the difference, paired by seed).
        """
        best = self.best(arms)

        def is_near(arm: str) -> bool:
            behind = difference_of(self.selection(arm), self.selection(best))
            return arm == best or behind.value <= behind.se

        return next(arm for arm in self.eligible(arms) if is_near(arm))


def evidence_of(study: Study, experiment: str) -> ExperimentRuns:
    """Read the runs of an experiment; UserError if one is missing."""
    return ExperimentRuns(experiment, by_arm(read_runs(study, experiment)))


# ------------------------------------------------------------------------------------------------------ collapsed runs


def has_collapsed(run: Run) -> bool:
    """Whether a run was stopped because it diverged, or ends below half of its best reward.

    The best reward is that of an evaluation (also the untrained one) or the training reward of a step, which shows a fall
    between two evaluations. The fall must exceed chance, corrected for the number of evaluations or steps (Bonferroni), because
    the best of several is partly luck. A run that stays where it started has not collapsed.
    """
    return run.metrics["diverged_step"] is not None or _fell_in_evaluations(run) or _fell_in_training(run)


def _fell_in_evaluations(run: Run) -> bool:
    means = run.outcomes.mean(axis=1)
    best = int(means.argmax())
    if run.end >= BELOW * means[best] or means[best] <= 0:
        return False
    return difference_of(run.outcomes[-1], run.outcomes[best], simultaneous(len(means)), fixed=True).low > 0


def _fell_in_training(run: Run) -> bool:
    """The number of observations is the number of groups, because rollouts of one problem depend on one another.

    An own reward may have any size, and its interval would need each rollout's.
    """
    column = f"train/{run.metric}"
    if run.metric == "reward" or column not in run.history or value(run, "rollout_batch_size") is None:
        return False
    rewards = run.history.groupby("step")[column].first().dropna()
    if not len(rewards):
        return False
    groups, reached = value(run, "rollout_batch_size") // value(run, "group_size"), float(rewards.max())
    return run.end < BELOW * wilson_interval(reached * groups, groups, 1 - (1 - LEVEL) / len(rewards))[0]

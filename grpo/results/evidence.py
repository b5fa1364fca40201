"""The runs by which an experiment and the claims about it are judged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from grpo.results.intervals import Scores, difference_of, simultaneous
from grpo.results.runs import Run, by_arm, final_scores, read_runs, value
from grpo.results.statistics import LEVEL, wilson_interval
from grpo.study.config import setting_of
from grpo.study.schema import Study

BELOW = 0.5  # a run that ends below this share of its best reward has collapsed


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

"""Runs that fell from what they had reached.

A collapsed run is counted apart: an arm's interval is about its runs that held, and stands beside the number of those that
collapsed. One collapsed run of three would otherwise make an arm's interval as wide as the scale, and say little of either.
"""

from __future__ import annotations

from collections.abc import Sequence

from grpo.results.findings import Collapse
from grpo.results.intervals import difference_of, simultaneous
from grpo.results.runs import Run, mean_of_last, value
from grpo.results.statistics import LEVEL, wilson_interval

BELOW = 0.5  # share of the best reward under which a run has collapsed
TRAINING_REWARD = "train/answer_reward"


def collapse_of(run: Run, last_k: int) -> Collapse | None:
    """The collapse of a run, or None.

    A run collapsed if it was stopped because it diverged, or if it ends below half of its best reward: the best evaluation, the
    untrained one included, or the best training reward of a step, which shows a fall between two evaluations. The fall must be
    more than chance explains, as the best of several is chosen by its luck too; Bonferroni over the evaluations or steps. A
    run that stays where it started has not collapsed.
    """
    found = max((one for one in (_in_evaluations(run, last_k), _in_training(run, last_k)) if one), key=_reached, default=None)
    stopped = run.metrics["diverged_step"]
    if stopped is None:
        return found
    reached = found.reached if found else float(run.outcomes.mean(axis=1).max())
    return Collapse(run.name, "divergence", int(stopped), reached, _ended(run, last_k))


def _reached(collapse: Collapse) -> float:
    return collapse.reached


def _ended(run: Run, last_k: int) -> float:
    return float(mean_of_last(run.outcomes, last_k).mean())


def _in_evaluations(run: Run, last_k: int) -> Collapse | None:
    means = run.outcomes.mean(axis=1)
    best, final = int(means.argmax()), mean_of_last(run.outcomes, last_k)
    if final.mean() >= BELOW * means[best]:
        return None
    if difference_of(final, run.outcomes[best], simultaneous(len(means)), fixed=True).low <= 0:
        return None
    return Collapse(run.name, "evaluations", int(run.validation["step"].iloc[best]), float(means[best]), _ended(run, last_k))


def _in_training(run: Run, last_k: int) -> Collapse | None:
    """The groups of a step count, not its rollouts, as those of one problem depend on one another."""
    if TRAINING_REWARD not in run.history or "rollout_batch_size" not in run.config["config"]:
        return None
    rewards = run.history.groupby("step")[TRAINING_REWARD].first().dropna()
    if not len(rewards):
        return None
    groups, reached = value(run, "rollout_batch_size") // value(run, "group_size"), float(rewards.max())
    surely = wilson_interval(reached * groups, groups, 1 - (1 - LEVEL) / len(rewards))[0]
    if _ended(run, last_k) >= BELOW * surely:
        return None
    step = int(rewards.index[int(rewards.argmax())])
    return Collapse(run.name, "training rewards", step, reached, _ended(run, last_k))


def collapses_of(runs: Sequence[Run], last_k: int) -> tuple[Collapse, ...]:
    """The collapses of an arm's runs."""
    found = (collapse_of(run, last_k) for run in runs)
    return tuple(collapse for collapse in found if collapse is not None)


def held(runs: list[Run], last_k: int) -> list[Run]:
    """The runs that an arm counts by: those that did not collapse, or all where all did."""
    return [run for run in runs if collapse_of(run, last_k) is None] or runs

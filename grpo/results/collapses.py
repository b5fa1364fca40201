"""Detection of collapsed runs. They count in an arm's mean and interval; tables give their number beside it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from grpo.results.intervals import difference_of, simultaneous
from grpo.results.runs import Run, value
from grpo.results.statistics import LEVEL, wilson_interval

BELOW = 0.5  # a run that ends below this share of its best reward has collapsed


@dataclass(frozen=True)
class Collapse:
    """The collapse of a run."""

    run: str  # EXPERIMENT/ARM/SEED
    # ``divergence``: the run was stopped; ``training rewards``: between two evaluations.
    seen_in: Literal["divergence", "evaluations", "training rewards"]
    step: int  # of the best reward; of a run that was stopped, the step at which it was
    reached: float  # best reward, of what ``seen_in`` names
    ended: float  # final reward


def collapse_of(run: Run) -> Collapse | None:
    """Return the collapse of a run, or None.

    A run has collapsed if it was stopped because it diverged, or if it ends below half of its best reward. The best reward is
    that of an evaluation (also the untrained one) or the training reward of a step, which shows a fall between two evaluations.
    The fall must exceed chance, corrected for the number of evaluations or steps (Bonferroni), because the best of several is
    partly luck. A run that stays where it started has not collapsed.
    """
    seen = (one for one in (_in_evaluations(run), _in_training(run)) if one)
    found = max(seen, key=lambda one: one.reached, default=None)
    stopped = run.metrics["diverged_step"]
    if stopped is None:
        return found
    reached = found.reached if found else float(run.outcomes.mean(axis=1).max())
    return Collapse(run.name, "divergence", int(stopped), reached, run.end)


def _in_evaluations(run: Run) -> Collapse | None:
    means = run.outcomes.mean(axis=1)
    best = int(means.argmax())
    if run.end >= BELOW * means[best] or means[best] <= 0:
        return None
    if difference_of(run.outcomes[-1], run.outcomes[best], simultaneous(len(means)), fixed=True).low <= 0:
        return None
    return Collapse(run.name, "evaluations", int(run.validation["step"].iloc[best]), float(means[best]), run.end)


def _in_training(run: Run) -> Collapse | None:
    """The number of observations is the number of groups, because rollouts of one problem depend on one another.

    An own reward may have any size, and its interval would need each rollout's.
    """
    column = f"train/{run.metric}"
    if run.metric == "reward" or column not in run.history or "rollout_batch_size" not in run.config["config"]:
        return None
    rewards = run.history.groupby("step")[column].first().dropna()
    if not len(rewards):
        return None
    groups, reached = value(run, "rollout_batch_size") // value(run, "group_size"), float(rewards.max())
    lower_end = wilson_interval(reached * groups, groups, 1 - (1 - LEVEL) / len(rewards))[0]
    if run.end >= BELOW * lower_end:
        return None
    step = int(rewards.index[int(rewards.argmax())])
    return Collapse(run.name, "training rewards", step, reached, run.end)

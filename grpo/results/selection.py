"""An experiment's leader, and the winner on which later experiments build."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from grpo.results.intervals import Interval, difference_of, mean_of
from grpo.results.runs import ExperimentRuns, evidence_of
from grpo.study.config import OFF_POLICY_RANK, setting_of
from grpo.study.schema import Study


@dataclass(frozen=True)
class Choice:
    """An experiment's leader, runner-up and winner: arms with the rate that is chosen for their setting."""

    leader: str  # the arm with the highest reward on the problems that select, of those without a collapsed run
    runner_up: str | None  # the next one; None if no other arm may win
    margin: Interval | None  # the leader minus the runner-up, on the problems that select
    winner: str  # the first in params.yaml that is within one standard error of the leader, unless pinned
    pinned: bool
    reason: str  # why it won, in words


def choose(study: Study, found: ExperimentRuns) -> Choice:
    """Choose an experiment's winner.

    An arm's result is its mean answer reward at the last evaluation over all its seeds. Of the evaluation's problems, the first
    ``evaluation.selection_problems`` choose the learning rate of each setting, the leader and the winner
    (:meth:`ExperimentRuns.first_within_one_error`), and the others give the results. So the best of several arms is not judged
    on the problems that chose it. ``selection.pinned`` may name another winner.
    """
    arms, leader, pinned = [*found.chosen.values()], found.leader, study.selection.pinned_arms(found.experiment)
    eligible, near, margin = found.eligible(arms), found.first_within_one_error(arms), None
    others = [arm for arm in eligible if arm != leader]
    runner_up = max(others, key=lambda arm: float(found.selection(arm).mean()), default=None)
    reason = "the only arm that may win"
    if runner_up is not None:
        margin = difference_of(found.selection(runner_up), found.selection(leader))
        reason = (
            f"leads by {margin.value:.3f}, standard error {margin.se:.3f}, and no arm before it is within one standard error"
        )
    if near != leader:
        reason = f"within one standard error of {leader}, which leads, and before it in params.yaml"
    if pinned:
        reason = f"pinned by hand in params.yaml (selection.pinned); without that, {near} would win"
    if out := [arm for arm in arms if arm not in eligible]:
        reason += f"; left out because a run collapsed: {', '.join(out)}"
    return Choice(leader, runner_up, margin, pinned[0] if pinned else near, bool(pinned), reason)


def select(study: Study, experiment: str) -> dict[str, Any]:
    """Select the winner of an experiment, by :func:`choose`.

    Raises UserError: a run of the experiment is missing.

    Returns:
        ``experiment``, ``winner``, ``leader``, ``runner_up``, ``margin`` (leader minus runner-up, 95%), ``pinned``, ``reason``,
        ``value`` with ``low`` and ``high`` (95%), ``overrides`` (hyperparameters that it sets), ``before`` (the winners on
        which the runs build, first to last) and ``candidates``: all arms, each with its ``setting``, if its rate is ``chosen``,
        and its runs that ``collapsed``. A sweep whose ranking another experiment uses also has ``off_policy_ranking``, its best
        few off-policy settings: the pinned arms, the winner if it is one of them, then by mean on the problems that select,
        those with a collapsed run last.
    """
    found = evidence_of(study, experiment)
    choice = choose(study, found)
    candidates = [_candidate(found, arm) for arm in found.arms]
    winner = next(candidate for candidate in candidates if candidate["arm"] == choice.winner)
    selection = {
        "experiment": experiment,
        "winner": choice.winner,
        "leader": choice.leader,
        "runner_up": choice.runner_up,
        "margin": choice.margin and choice.margin.ends(),
        "pinned": choice.pinned,
        "reason": choice.reason,
        **{key: winner[key] for key in ("value", "low", "high", "overrides")},
        "before": found.arms[choice.winner][0].config["before"],
        "candidates": candidates,
    }
    after = (entry for entry in study.experiments.values() if entry.builds_on == experiment)
    if any(OFF_POLICY_RANK in arm for entry in after for arm in entry.arms.values()):  # they take arms by their rank
        pinned = study.selection.pinned_arms(experiment)
        off_policy = [
            c for c in candidates if c["updates_per_rollout_batch"] > 1 and (c["chosen"] or c["arm"] in pinned)
        ]  # a sweep is of GRPO runs
        place = {arm: number for number, arm in enumerate(dict.fromkeys([*pinned, winner["arm"]]))}
        ranking = sorted(off_policy, key=lambda c: (place.get(c["arm"], len(place)), bool(c["collapsed"]), -c["selection"]))
        selection["off_policy_ranking"] = [{k: c[k] for k in ("arm", "overrides")} for c in ranking[: study.selection.best_few]]
    return selection


def winner_file(result: dict[str, Any]) -> dict[str, Any]:
    """The part of a selection on which later runs depend; they are trained again only if it changes.

    It includes the earlier winners, so that a run depends on one such file.
    """
    return {key: result[key] for key in ("experiment", "winner", "overrides", "off_policy_ranking", "before") if key in result}


def _candidate(found: ExperimentRuns, arm: str) -> dict[str, Any]:
    config = found.runs(arm)[0].config
    return {
        "arm": arm,
        "setting": setting_of(arm),
        "chosen": arm in found.chosen.values(),
        "selection": float(found.selection(arm).mean()),
        "overrides": config["overrides"],
        "updates_per_rollout_batch": config.get("updates_per_rollout_batch"),
        **mean_of(found.final(arm)).ends(),
        "collapsed": found.collapsed(arm),
    }

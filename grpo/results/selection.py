"""An experiment's result: its arms, the leader, and the winner on which later experiments build."""

from __future__ import annotations

from typing import Any

from grpo.results.evidence import Evidence, evidence_of
from grpo.results.findings import ArmResult, ExperimentResult, Interval
from grpo.results.intervals import against_the_best, difference_of, mean_of
from grpo.results.runs import Run, first_scores
from grpo.study.methods import OFF_POLICY_RANK
from grpo.study.schema import Study
from grpo.study.settings import setting_of

ENDS = ("value", "low", "high", "level")


def read_result(study: Study, experiment: str) -> ExperimentResult:
    """Read an experiment's runs and compute its result.

    Raises:
        UserError: a run of the experiment is missing.
    """
    return result_of(study, evidence_of(study, experiment))


def result_of(study: Study, found: Evidence) -> ExperimentResult:
    """Compute an experiment's result.

    An arm's result is its mean answer reward at the last evaluation over all its seeds. Of the evaluation's problems, the first
    ``evaluation.selection_problems`` choose the learning rate of each setting, the leader and the winner
    (:meth:`Evidence.first_within_one_error`), and the others give the results. So the best of several arms is not judged on the
    problems that chose it. ``selection.pinned`` may name another winner.
    """
    arms = list(found.chosen.values())
    leader, pinned = found.best(arms), study.selection.pinned.get(found.experiment)
    others = [arm for arm in found.eligible(arms) if arm != leader]
    runner_up = max(others, key=lambda arm: float(found.selection(arm).mean()), default=None)
    margin = difference_of(found.selection(runner_up), found.selection(leader)) if runner_up else None
    near = found.first_within_one_error(arms)
    contrasts = {arm: found.contrast(arm, leader, len(arms) - 1, against_the_best) for arm in found.arms if arm != leader}
    results = [
        ArmResult(
            arm,
            setting_of(arm),
            arm in arms,
            runs[0].config["overrides"],
            tuple(run.name for run in runs),
            tuple(float(run.final.mean()) for run in runs),
            mean_of(found.final(arm)),
            float(found.selection(arm).mean()),
            mean_of(first_scores(runs), fixed=True),
            found.collapses(arm),
            contrasts.get(arm),
        )
        for arm, runs in found.arms.items()
    ]
    reason = _reason(leader, near, margin)
    if pinned:
        reason = f"pinned by hand in params.yaml (selection.pinned); without that, {near} would win"
    if out := [arm for arm in arms if arm not in found.eligible(arms)]:
        reason += f"; left out because a run collapsed: {', '.join(out)}"
    return ExperimentResult(
        found.experiment, tuple(results), leader, runner_up, margin, pinned or near, pinned is not None, reason
    )


def _reason(leader: str, near: str, margin: Interval | None) -> str:
    if margin is None:
        return "the only arm that may win"
    if near != leader:
        return f"within one standard error of {leader}, which leads, and before it in params.yaml"
    return f"leads by {margin.value:.3f}, standard error {margin.se:.3f}, and no arm before it is within one standard error"


def select(study: Study, experiment: str) -> dict[str, Any]:
    """Select the winner of an experiment, by :func:`result_of`.

    Returns:
        ``experiment``, ``winner``, ``leader``, ``runner_up``, ``margin`` (leader minus runner-up, 95%), ``pinned``, ``reason``,
        ``metric``, ``value`` with ``low`` and ``high`` (95%), ``overrides`` (hyperparameters that it sets), ``before`` (the
        winners on which the runs build, first to last) and ``candidates``: all arms, each with its ``setting``, if its rate is
        ``chosen``, its runs, those that ``collapsed``, and the distance ``behind`` the leader (adjusted for their number). A
        sweep whose ranking another experiment uses also has ``off_policy_ranking``, its best few off-policy
        settings: the winner if it is one of them, then by mean on the problems that select, those with a collapsed run last.

    Raises:
        UserError: a run of the experiment is missing.
    """
    found = evidence_of(study, experiment)
    result = result_of(study, found)
    candidates = [_candidate(arm, found.arms[arm.arm]) for arm in result.arms]
    winner = next(candidate for candidate in candidates if candidate["arm"] == result.winner)
    selection = {
        "experiment": experiment,
        "winner": result.winner,
        "leader": result.leader,
        "runner_up": result.runner_up,
        "margin": result.margin and {key: getattr(result.margin, key) for key in ENDS},
        "pinned": result.pinned,
        "reason": result.reason,
        "metric": f"val/{study.metric}",
        **{key: winner[key] for key in ("value", "low", "high", "overrides")},
        "before": found.arms[result.winner][0].config["before"],
        "candidates": candidates,
    }
    if _is_ranked(study, experiment):
        off_policy = [c for c in candidates if c["chosen"] and c["updates_per_rollout_batch"] > 1]  # a sweep is of GRPO runs
        ranking = sorted(off_policy, key=lambda c: (c is not winner, bool(c["collapsed"]), -c["selection"]))
        selection["off_policy_ranking"] = [{k: c[k] for k in ("arm", "overrides")} for c in ranking[: study.selection.best_few]]
    return selection


def winner_file(result: dict[str, Any]) -> dict[str, Any]:
    """The part of a selection on which later runs depend; they are trained again only if it changes.

    It includes the earlier winners, so that a run depends on one such file.
    """
    return {key: result[key] for key in ("experiment", "winner", "overrides", "off_policy_ranking", "before") if key in result}


def _is_ranked(study: Study, experiment: str) -> bool:
    """Whether another experiment of the study takes arms of this one by their rank."""
    after = (entry for entry in study.experiments.values() if entry.builds_on == experiment)
    return any(OFF_POLICY_RANK in arm for entry in after for arm in entry.arms.values())


def _candidate(arm: ArmResult, runs: list[Run]) -> dict[str, Any]:
    behind = arm.contrast.negated().adjusted if arm.contrast else None
    return {
        "arm": arm.arm,
        "setting": arm.setting,
        "chosen": arm.chosen,
        "selection": arm.selection,
        "overrides": arm.overrides,
        "updates_per_rollout_batch": runs[0].config.get("updates_per_rollout_batch"),
        **{key: getattr(arm.final, key) for key in ("value", "low", "high", "covers")},
        "diverged": [run.name for run in runs if run.metrics["diverged_step"] is not None],
        "collapsed": [collapse.run for collapse in arm.collapses],
        "runs": [
            {
                "run": run.name,
                "seed": run.seed,
                "identity": run.config["identity"],
                "value": value,
                **{key: run.metrics[key] for key in ("diverged_step", "diverged_reason")},
            }
            for run, value in zip(runs, arm.by_run, strict=True)
        ],
        "behind": behind and {key: getattr(behind, key) for key in ENDS},
    }

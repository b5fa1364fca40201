"""The result of an experiment: its arms, the leader, and the winner on which later experiments build."""

from __future__ import annotations

from grpo.results.evidence import Evidence, evidence_of
from grpo.results.findings import ArmResult, ExperimentResult
from grpo.results.intervals import against_the_best, mean_of, run_sd
from grpo.results.runs import final_scores, first_scores
from grpo.study.schema import Study


def read_result(study: Study, experiment: str) -> ExperimentResult:
    """Read an experiment's runs and compute its result.

    Raises:
        UserError: a run of the experiment is missing.
    """
    return result_of(study, evidence_of(study, experiment))


def result_of(study: Study, found: Evidence) -> ExperimentResult:
    """Compute an experiment's result.

    An arm's result is its mean validation answer reward over its seeds and its last evaluations; collapsed runs are counted
    separately. The arm with the highest mean leads, among the arms without a collapsed run if there are any. Arms whose
    difference from the leader may be zero, adjusted for the number of arms, are tied with it. The truly best arm is the leader
    or tied with it in at least 95% of studies. Of the leader and the tied arms the first in params.yaml wins, or the leader
    (``tie``), unless ``selection.pinned`` names another winner.
    """
    arms, leader, eligible = found.arms, found.leader, found.eligible
    pinned, tie = study.selection.pinned.get(found.experiment), study.experiments[found.experiment].tie
    contrasts = {arm: found.contrast(arm, leader, len(arms) - 1, against_the_best) for arm in arms if arm != leader}
    tied = [arm for arm in eligible if arm != leader and not contrasts[arm].excludes_zero]
    best = leader if tie == "leader" else next(arm for arm in eligible if arm == leader or arm in tied)
    value, out = found.mean(leader), [arm for arm in arms if arm not in eligible]
    reason = _pinned(leader, value, pinned) if pinned else _reason(leader, value, tied, best, len(eligible), tie)
    reason += f"; left out because a run collapsed: {', '.join(out)}" if out else ""
    results = [
        ArmResult(
            arm,
            runs[0].config["overrides"],
            tuple(run.name for run in runs),
            tuple(float(row.mean()) for row in final_scores(runs, found.last_k)),
            mean_of(found.final(arm)),
            mean_of(first_scores(runs), fixed=True),
            found.collapses(arm),
            contrasts.get(arm),
            run_sd(found.final(arm)),
        )
        for arm, runs in arms.items()
    ]
    winner = pinned or best
    return ExperimentResult(
        found.experiment, found.last_k, tuple(results), leader, tuple(tied), winner, pinned is not None, reason
    )


def _pinned(leader: str, value: float, pinned: str) -> str:
    agrees = "which also leads" if leader == pinned else f"although {leader} leads ({value:.3f})"
    return f"pinned by hand in params.yaml (selection.pinned), {agrees}"


def _reason(leader: str, value: float, tied: list[str], best: str, eligible: int, tie: str) -> str:
    simpler = "of arms that are tied the simpler one, which stands earlier in params.yaml, wins"
    simpler = "no arm is simpler than another, so the leader wins" if tie == "leader" else simpler
    if best != leader:
        also = [arm for arm in tied if arm != best]
        nor = f" (nor can {', '.join(also)})" if also else ""
        return f"cannot be told from {leader}, which leads with {value:.3f}{nor}; {simpler}"
    if tied:
        return f"leads, but cannot be told from {', '.join(tied)}; {simpler}"
    return "leads; each other arm can be told from it" if eligible > 1 else "the only arm that counts"

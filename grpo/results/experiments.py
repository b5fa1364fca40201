"""The result of an experiment: its arms, the leader, and the winner on which later experiments build."""

from __future__ import annotations

from grpo.results.collapses import collapses_of, held
from grpo.results.findings import ArmResult, Contrast, ExperimentResult
from grpo.results.intervals import against_the_best, difference_of, mean_of, run_sd
from grpo.results.runs import Run, by_arm, final_scores, first_scores, read_runs
from grpo.study.schema import Study


def read_result(study: Study, experiment: str) -> ExperimentResult:
    """Read an experiment's runs and compute its result.

    Raises:
        UserError: a run of the experiment is missing.
    """
    arms, tie = by_arm(read_runs(study, experiment)), study.experiments[experiment].tie
    return result_of(experiment, arms, study.last_k(experiment), study.selection.pinned.get(experiment), tie)


def result_of(
    experiment: str, arms: dict[str, list[Run]], last_k: int, pinned: str | None = None, tie: str = "first"
) -> ExperimentResult:
    """Compute an experiment's result.

    An arm's result is its mean validation answer reward over its seeds and its last evaluations; collapsed runs are counted
    separately. The arm with the highest mean leads, among the arms without a collapsed run if there are any. Arms whose
    difference from the leader may be zero, adjusted for the number of arms, are tied with it. The truly best arm is the leader
    or tied with it in at least 95% of studies.

    Args:
        arms: each arm's runs, in the order of params.yaml.
        pinned: the winner that ``selection.pinned`` names.
        tie: which of the leader and the tied arms wins: the ``first`` in params.yaml, or the ``leader``.
    """
    scores = {arm: final_scores(held(runs, last_k), last_k) for arm, runs in arms.items()}
    collapses = {arm: collapses_of(runs, last_k) for arm, runs in arms.items()}
    eligible = [arm for arm in arms if not collapses[arm]] or [arm for arm in arms if len(collapses[arm]) < len(arms[arm])]
    eligible = eligible or list(arms)
    leader = max(eligible, key=lambda arm: float(scores[arm].mean()))  # max keeps the first of equals
    level = against_the_best(max(1, len(arms) - 1))
    contrasts = {
        arm: Contrast(
            arm,
            leader,
            difference_of(scores[leader], scores[arm]),
            difference_of(scores[leader], scores[arm], level),
            len(arms) - 1,
        )
        for arm in arms
        if arm != leader
    }
    tied = [arm for arm in eligible if arm != leader and not contrasts[arm].excludes_zero]
    best = leader if tie == "leader" else next(arm for arm in eligible if arm == leader or arm in tied)
    value, out = float(scores[leader].mean()), [arm for arm in arms if arm not in eligible]
    reason = _pinned(leader, value, pinned) if pinned else _reason(leader, value, tied, best, len(eligible), tie)
    reason += f"; left out because a run collapsed: {', '.join(out)}" if out else ""
    return ExperimentResult(
        experiment,
        last_k,
        tuple(
            ArmResult(
                arm,
                runs[0].config["overrides"],
                tuple(run.name for run in runs),
                tuple(float(row.mean()) for row in final_scores(runs, last_k)),
                mean_of(scores[arm]),
                mean_of(first_scores(runs), fixed=True),
                collapses[arm],
                contrasts.get(arm),
                run_sd(scores[arm]),
            )
            for arm, runs in arms.items()
        ),
        leader,
        tuple(tied),
        pinned or best,
        pinned is not None,
        reason,
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

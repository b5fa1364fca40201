"""The off-policy sweep as an experiment log, over steps and over wall-clock, and its entropy beside expert iteration's."""

from __future__ import annotations

import numpy as np
import pandas as pd

from grpo.reporting.time_breakdown import discuss_at_equal_time, outcome_at
from grpo.reporting.timing import elapsed
from grpo.results.collapses import collapse_of
from grpo.results.intervals import two_level_difference
from grpo.results.runs import REWARD, Run, by_arm, final_scores, mean_curve, read_runs, read_selection, value
from grpo.results.statistics import format_interval
from grpo.study.methods import OFF_POLICY_RANK
from grpo.study.schema import Study

ENTROPY = "val/token_entropy"
LENGTH = "val/response_length"


def sweeps(study: Study) -> tuple[str | None, str | None]:
    """The experiments that the study makes of the broad sweep, and of the one that takes its best arms at full length."""
    broad = next((name for name in study.made if study.experiments[name].passes_on == "ranking"), None)
    after = [name for name in study.made if broad and study.experiments[name].builds_on == broad]
    ranked = (name for name in after if any(OFF_POLICY_RANK in arm for arm in study.experiments[name].arms.values()))
    return broad, next(ranked, None)


def log_of_broad(study: Study, experiment: str) -> str:
    """What each arm of the broad sweep was, and what came of it: the experiment log (Markdown)."""
    runs, selection = read_runs(study, experiment), read_selection(experiment)
    arms, last_k = by_arm(runs), study.last_k(experiment)
    seconds = {run.name: elapsed(run) for run in runs}
    end = min(float(of_run.iloc[-1]) for of_run in seconds.values())
    ranking = [one["arm"] for one in selection.get("off_policy_ranking", [])]
    lines = [
        "| arm | updates per rollout batch | steps | answer reward (95% interval) | "
        f"after {end:.1f} s without evaluation | ratios | clipped | went on |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for candidate in selection["candidates"]:
        of_arm = arms[candidate["arm"]]
        history = pd.concat([run.history for run in of_arm])
        early = np.mean([outcome_at(run, seconds[run.name], end).mean() for run in of_arm])
        cells = [
            candidate["arm"],
            str(candidate["updates_per_rollout_batch"]),
            str(value(of_arm[0], "n_grpo_steps")),
            format_interval(candidate) + _fate(of_arm, last_k),
            f"{early:.3f}",
            f"{history['ratio_min'].min():.2g} to {history['ratio_max'].max():.2g}",
            f"{history['clip_fraction'].mean():.2%}",
            f"as rank {ranking.index(candidate['arm']) + 1}" if candidate["arm"] in ranking else "",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", _range(arms, last_k)])


def _fate(runs: list[Run], last_k: int) -> str:
    fallen = sum((collapse_of(run, last_k) is not None) for run in runs)
    return f"; {fallen} of {len(runs)} collapsed" if fallen else ""


def _range(arms: dict[str, list[Run]], last_k: int) -> str:
    """Whether the range reaches from too few updates to too many."""
    by_updates = sorted(arms.values(), key=lambda runs: runs[0].config["updates_per_rollout_batch"])
    few, many = by_updates[0], by_updates[-1]
    best = max(by_updates, key=lambda runs: float(final_scores(runs, last_k).mean()))
    counts = [runs[0].config["updates_per_rollout_batch"] for runs in (few, many, best)]
    text = (
        f"The range goes from {counts[0]} to {counts[1]} updates a rollout batch; the best, {best[0].arm}, makes {counts[2]}."
    )
    if counts[0] == counts[2] or counts[1] == counts[2]:
        return f"{text} It is an end of the range, so these runs do not show that the range holds the optimum."
    behind = [two_level_difference(final_scores(runs, last_k), final_scores(best, last_k)) for runs in (few, many)]
    apart = [runs for runs, difference in zip((few, many), behind, strict=True) if difference["low"] > 0]
    both = "both ends are" if len(apart) == 2 else f"of the ends only {apart[0][0].arm} is" if apart else "neither end is"
    return f"{text} It lies inside the range, and {both} behind it by more than chance explains."


def over_steps_and_wall_clock(study: Study, experiment: str) -> str:
    """The on-policy arm against each off-policy arm of the focused sweep: after as many steps, and after as many seconds."""
    arms, last_k = by_arm(read_runs(study, experiment)), study.last_k(experiment)
    on_policy = [arm for arm, runs in arms.items() if runs[0].config["updates_per_rollout_batch"] == 1]
    if not on_policy or len(arms) < 2:
        return "The study has no on-policy arm beside off-policy ones."
    first = arms[on_policy[0]]
    sentences = []
    for arm, runs in arms.items():
        if arm in on_policy:
            continue
        difference = two_level_difference(final_scores(first, last_k), final_scores(runs, last_k))
        steps = [float(np.mean([elapsed(run).iloc[-1] / len(elapsed(run)) for run in of])) for of in (first, runs)]
        sentences.append(
            f"**{arm}** ({runs[0].config['updates_per_rollout_batch']} updates per rollout batch) against {on_policy[0]}, over "
            f"steps: {format_interval(difference)} more answer reward at the end. A step takes {steps[1]:.3f} s against "
            f"{steps[0]:.3f} s. Over wall-clock: {discuss_at_equal_time(first, runs, elapsed)}"
        )
    return "\n\n".join(sentences)


def entropy_beside_expert_iteration(study: Study, experiment: str) -> str:
    """Token entropy and length of off-policy GRPO beside the winner of expert iteration: at start, at end, at equal reward."""
    arms = by_arm(read_runs(study, experiment))
    for name in study.made:
        if study.experiments[name].method == "expert_iteration":
            winner = read_selection(name)["winner"]
            arms[f"expert iteration, {winner}"] = by_arm(read_runs(study, name))[winner]
    rewards = {arm: mean_curve(runs, "validation", REWARD)["mean"] for arm, runs in arms.items()}
    common = min(float(curve.max()) for curve in rewards.values())
    lines = [
        f"| arm | entropy at start | entropy at end | entropy where the reward first reached {common:.3f} | reward at end | "
        "length at start | length at end |",
        "|---|---|---|---|---|---|---|",
    ]
    reached = {}
    for arm, runs in arms.items():
        entropy, length = (mean_curve(runs, "validation", column)["mean"] for column in (ENTROPY, LENGTH))
        step = int(rewards[arm].index.to_numpy()[(rewards[arm] >= common - 1e-12).to_numpy().argmax()])
        reached[arm] = float(entropy[step])
        lines.append(
            f"| {arm} | {entropy.iloc[0]:.3f} | {entropy.iloc[-1]:.3f} | {entropy[step]:.3f} (step {step}) | "
            f"{rewards[arm].iloc[-1]:.3f} | {length.iloc[0]:.1f} | {length.iloc[-1]:.1f} |"
        )
    lowest, highest = min(reached, key=lambda arm: reached[arm]), max(reached, key=lambda arm: reached[arm])
    text = (
        f"At equal reward ({common:.3f}, the highest that all reach) {lowest} has the lowest entropy, {reached[lowest]:.3f} "
        f"nats a token, and {highest} the highest, {reached[highest]:.3f}."
    )
    alone = (
        "" if any(arm.startswith("expert iteration") for arm in arms) else " The study makes no expert iteration to compare."
    )
    return "\n".join([*lines, "", text + alone])

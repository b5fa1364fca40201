"""Off-policy sweep: experiment log, comparison over steps and wall-clock time, entropy beside expert iteration's."""

from __future__ import annotations

import numpy as np
import pandas as pd

from grpo.reporting.curves import LENGTH
from grpo.reporting.discussion import Numbers, updates_of
from grpo.reporting.sentences import interval, paragraph, paragraphs, table
from grpo.reporting.timing import at_equal_time, end_of_first, outcome_at, seconds_of_a_step
from grpo.results.intervals import difference_of
from grpo.results.runs import REWARD, Run, final_scores, mean_curve, read_selection, value
from grpo.study.methods import OFF_POLICY_RANK
from grpo.study.schema import Study


def sweeps(study: Study) -> tuple[str | None, str | None]:
    """Names of the broad sweep and of the sweep that runs its best arms at full length; None for one that is left out."""
    broad = next((name for name in study.made if study.experiments[name].passes_on == "ranking"), None)
    after = [name for name in study.made if broad and study.experiments[name].builds_on == broad]
    ranked = (name for name in after if any(OFF_POLICY_RANK in arm for arm in study.experiments[name].arms.values()))
    return broad, next(ranked, None)


def log_of_broad(numbers: Numbers, runs: list[Run]) -> str:
    """Experiment log of the broad sweep: settings and results of each arm (Markdown)."""
    ranking = [one["arm"] for one in read_selection(numbers["experiment"]).get("off_policy_ranking", [])]
    end = end_of_first(runs)
    rows = []
    for arm in numbers["arms"]:
        of_arm = arm["all"]
        history = pd.concat([run.history for run in of_arm])
        collapsed = f"; {len(arm['collapses'])} of {len(of_arm)} collapsed" if arm["collapses"] else ""
        rows.append(
            {
                "arm": arm["arm"],
                "updates per rollout batch": updates_of(arm),
                "steps": value(of_arm[0], "n_grpo_steps"),
                "answer reward (95% interval)": interval(arm["final"]) + collapsed,
                f"after {end:.1f} s without evaluation": f"{np.mean([outcome_at(run, end).mean() for run in of_arm]):.3f}",
                "ratios": f"{history['ratio_min'].min():.2g} to {history['ratio_max'].max():.2g}",
                "clipped": f"{history['clip_fraction'].mean():.2%}",
                "run at full length": f"as rank {ranking.index(arm['arm']) + 1}" if arm["arm"] in ranking else "",
            }
        )
    return f"{table(rows)}\n{_range(numbers)}"


def _range(numbers: Numbers) -> str:
    """State whether the optimum lies inside the range of updates."""
    by_updates = sorted(numbers["arms"], key=updates_of)
    ends = by_updates[0], by_updates[-1]
    behind = [arm["arm"] for arm in ends if arm["apart"] or arm["collapses"]]
    few, many, best = (updates_of(arm) for arm in (*ends, numbers["leader"]))
    return paragraph("range_sentences.md.j2", n=numbers, ends=[few, many], best=best, behind=behind)


def over_steps_and_wall_clock(numbers: Numbers) -> list[str]:
    """Compare each off-policy arm with the on-policy arm, after the same steps and after the same seconds; a paragraph each."""
    arms = sorted(numbers["arms"], key=updates_of)
    others = [arm for arm in arms if updates_of(arm) > 1]
    if not others or updates_of(arms[0]) > 1:
        return ["The study has no on-policy arm to compare with off-policy ones."]
    first, scores = arms[0], {arm["arm"]: final_scores(arm["held"], numbers["last_k"]) for arm in arms}
    return paragraphs(
        "off_policy_sentences.md.j2",
        first=first,
        n=numbers,
        pairs=[
            {
                "arm": arm,
                "updates": updates_of(arm),
                "difference": difference_of(scores[first["arm"]], scores[arm["arm"]]),
                "seconds": [seconds_of_a_step(of["all"]) for of in (first, arm)],
                "at_equal_time": at_equal_time(first["all"], arm["all"]),
            }
            for arm in others
        ],
    )


def entropy_beside_expert_iteration(sweep: Numbers, others: list[Numbers]) -> str:
    """Compare token entropy and length of off-policy GRPO with expert iteration, at the start, the end and at equal reward.

    Args:
        others: the experiments of expert iteration, of which the winner is taken.
    """
    arms = {arm["arm"]: arm["held"] for arm in sweep["arms"]}
    arms |= {f"expert iteration, {n['winner']['arm']}": n["winner"]["held"] for n in others}
    rewards = {arm: mean_curve(runs, REWARD) for arm, runs in arms.items()}
    common = min(float(curve.max()) for curve in rewards.values())
    reached, rows = {}, []
    for arm, runs in arms.items():
        entropy, length, reward = mean_curve(runs, "val/token_entropy"), mean_curve(runs, LENGTH), rewards[arm]
        step = int(reward.index[int((reward >= common - 1e-12).argmax())])
        reached[arm] = float(entropy[step])
        rows.append(
            {
                "arm": arm,
                "entropy at start": f"{entropy.iloc[0]:.3f}",
                "entropy at end": f"{entropy.iloc[-1]:.3f}",
                f"entropy where the reward first reached {common:.3f}": f"{entropy[step]:.3f} (step {step})",
                "reward at end": f"{reward.iloc[-1]:.3f}",
                "length at start": f"{length.iloc[0]:.1f}",
                "length at end": f"{length.iloc[-1]:.1f}",
            }
        )
    text = paragraph("entropy_sentences.md.j2", common=common, reached=reached, others=others)
    return f"{table(rows)}\n{text}"

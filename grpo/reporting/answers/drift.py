"""Whether the KL to the starting policy goes with reward or with instability."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd

from grpo.reporting.sentences import said
from grpo.reporting.trends import MEASURES, trend_of
from grpo.results.runs import REWARD, Run
from grpo.results.verdicts import KL

WITH = {"train/answer_reward": "reward", "gradient_norm": "gradient norm", "token_entropy": "token entropy"}
FEWEST_RUNS = 4
SPIKE = 5.0  # times the median: a step whose KL estimate stands out


def growth(runs: list[Run]) -> str:
    """How fast the KL of one arm grows, by both estimates."""
    measure = next(measure for measure in MEASURES if measure.key == "kl")
    low_variance = pd.concat([run.history[KL] for run in runs])
    (text,) = said(
        "drift_said.md.j2",
        arm=runs[0].arm,
        course=(measure, trend_of(runs, measure)),
        per_token=[_mean(runs, "kl/per_token"), _mean(runs, KL)],
        per_response=[_mean(runs, "kl/per_sequence"), _mean(runs, "kl/per_sequence_low_variance")],
        largest=low_variance.max(),
        times_median=low_variance.max() / low_variance.median() if low_variance.median() else 0.0,
        spike=SPIKE,
    )
    return text


def _mean(runs: list[Run], column: str) -> float:
    """At the last step, over runs."""
    return float(np.mean([run.history[column].iloc[-1] for run in runs]))


def rank_correlation(first: pd.Series[float], second: pd.Series[float]) -> float:
    """Spearman's; NaN where one of them does not vary."""
    ranks = first.rank(), second.rank()
    return float("nan") if any(rank.nunique() < 2 for rank in ranks) else float(np.corrcoef(*ranks)[0, 1])


def goes_with(runs: list[Run]) -> str:
    """Correlations over the steps of each run, of levels and of changes, and over runs (Markdown)."""
    lines = [
        "| run | steps | " + " | ".join(f"KL and {name}" for name in WITH.values()) + " | "
        + " | ".join(f"changes of KL and of {name}" for name in WITH.values()) + " |",
        "|---|---|" + "---|" * (2 * len(WITH)),
    ]  # fmt: skip
    found: list[list[float]] = []
    steps = 0
    for run in runs:
        table = run.history.groupby("step")[[KL, *WITH]].mean().iloc[1:]  # at step 1 it is zero by definition
        steps = len(table)
        numbers = [rank_correlation(of[KL], of[c]) for of in (table, table.diff().iloc[1:]) for c in WITH]
        found.append(numbers)
        lines.append(f"| {run.name} | {steps} | " + " | ".join(_number(number) for number in numbers) + " |")
    return "\n".join([*lines, "", _verdict(np.array(found), steps), "", _over_runs(runs)])


def _verdict(found: np.ndarray, steps: int) -> str:  # type: ignore[type-arg]
    """Which correlations are more than chance, in words."""
    if steps < 4:
        return "The runs are too short for correlations over their steps."
    bar = 1.96 / math.sqrt(steps - 2)  # of the changes, one fewer than the levels
    means = dict(zip(WITH.values(), found[:, len(WITH) :].mean(axis=0), strict=True))
    beyond = [f"{name} ({_number(mean)})" for name, mean in means.items() if abs(mean) > bar]
    levels = dict(zip(WITH.values(), found[:, : len(WITH)].mean(axis=0), strict=True))
    return (
        f"Over the steps the level of the KL goes with the reward's at a rank correlation of {_number(levels['reward'])} "
        f"and with the gradient norm's at {_number(levels['gradient norm'])} (means over runs); where both have a trend, that "
        "says little of cause. From one step to the next "
        + (f"the KL moves with the {' and the '.join(beyond)}." if beyond else "the KL moves with none of the three.")
        + f" Of steps without any relation, a correlation of changes beyond {bar:.2f} comes up in about 1 of 20."
    )


def _over_runs(runs: list[Run]) -> str:
    ends = pd.DataFrame(
        [
            {
                "KL": float(run.history[KL].iloc[-1]),
                "reward": float(run.validation[REWARD].iloc[-1]),
                "norm": float(run.history["gradient_norm"].median()),
            }
            for run in runs
        ]
    )
    shown = "; ".join(
        f"{run.name} KL {end['KL']:.4f}, reward {end['reward']:.3f}, median gradient norm {end['norm']:.2f}"
        for run, (_, end) in zip(runs, ends.iterrows(), strict=True)
    )
    if len(runs) < FEWEST_RUNS:
        return f"Over runs: {len(runs)} measured it ({shown}), too few for a correlation ({FEWEST_RUNS} are the fewest tried)."
    reward, norm = (rank_correlation(ends["KL"], ends[other]) for other in ("reward", "norm"))
    return (
        f"Over the {len(runs)} runs that measured it: rank correlation of the last KL with the last reward {_number(reward)}, "
        f"with the median gradient norm {_number(norm)} ({shown})."
    )


def _number(value: float) -> str:
    return "not defined" if math.isnan(value) else f"{value:+.2f}"

"""KL to the starting policy: its growth, and its correlation with reward and with instability."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd

from grpo.reporting.sentences import paragraphs
from grpo.reporting.trends import MEASURES, trend_of
from grpo.results.markdown import markdown_table
from grpo.results.runs import REWARD, Run
from grpo.results.verdicts import KL

WITH = {"train/answer_reward": "reward", "gradient_norm": "gradient norm", "token_entropy": "token entropy"}
FEWEST_RUNS = 4
SPIKE = 5.0  # a KL estimate of so many times the median stands out


def growth(runs: list[Run]) -> str:
    """Describe the growth of one arm's KL, by both estimates."""
    measure = next(measure for measure in MEASURES if measure.key == "kl")
    low_variance = pd.concat([run.history[KL] for run in runs])
    (text,) = paragraphs(
        "drift_sentences.md.j2",
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
    """Mean over runs at the last step."""
    return float(np.mean([run.history[column].iloc[-1] for run in runs]))


def rank_correlation(first: pd.Series[float], second: pd.Series[float]) -> float:
    """Spearman's rank correlation; NaN if one series is constant."""
    ranks = first.rank(), second.rank()
    return float("nan") if any(rank.nunique() < 2 for rank in ranks) else float(np.corrcoef(*ranks)[0, 1])


def goes_with(runs: list[Run]) -> str:
    """Correlations of levels and of changes over each run's steps, and over runs (Markdown)."""
    levels, changes = ([f"{of} {name}" for name in WITH.values()] for of in ("KL and", "changes of KL and of"))
    found: list[list[float]] = []
    rows = []
    steps = 0
    for run in runs:
        table = run.history.groupby("step")[[KL, *WITH]].mean().iloc[1:]  # at step 1 it is zero by definition
        steps = len(table)
        numbers = [rank_correlation(of[KL], of[c]) for of in (table, table.diff().iloc[1:]) for c in WITH]
        found.append(numbers)
        rows.append([run.name, str(steps), *map(_number, numbers)])
    return "\n".join(
        [markdown_table(["run", "steps", *levels, *changes], rows), _verdict(np.array(found), steps), "", _over_runs(runs)]
    )


def _verdict(found: np.ndarray, steps: int) -> str:  # type: ignore[type-arg]
    """State which correlations exceed chance."""
    if steps < 4:
        return "The runs are too short for correlations over their steps."
    bar = 1.96 / math.sqrt(steps - 2)  # of the changes, one fewer than the levels
    means = dict(zip(WITH.values(), found[:, len(WITH) :].mean(axis=0), strict=True))
    beyond = [f"{name} ({_number(mean)})" for name, mean in means.items() if abs(mean) > bar]
    levels = dict(zip(WITH.values(), found[:, : len(WITH)].mean(axis=0), strict=True))
    return (
        f"Over the steps, the KL's rank correlation is {_number(levels['reward'])} with the reward and "
        f"{_number(levels['gradient norm'])} with the gradient norm (means over runs). Series with a trend are correlated "
        "even without a causal link. The changes of the KL from one step to the next are correlated with "
        f"{'those of the ' + ' and the '.join(beyond) if beyond else 'none of the three'}."
        f" In series without any relation, a correlation of changes beyond {bar:.2f} occurs in about 1 of 20."
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
        return f"Over runs: {len(runs)} measured it ({shown}), too few for a correlation (it takes {FEWEST_RUNS})."
    reward, norm = (rank_correlation(ends["KL"], ends[other]) for other in ("reward", "norm"))
    return (
        f"Over the {len(runs)} runs that measured it: rank correlation of the last KL with the last reward {_number(reward)}, "
        f"with the median gradient norm {_number(norm)} ({shown})."
    )


def _number(value: float) -> str:
    return "not defined" if math.isnan(value) else f"{value:+.2f}"

"""KL to the starting policy: its growth, and its correlation with reward and with instability."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
import pandas as pd

from grpo.reporting.sentences import paragraphs, render, table
from grpo.reporting.trends import MEASURES, trend_of
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


def rank_correlations(table: pd.DataFrame, columns: Iterable[str]) -> list[float]:
    """Spearman's rank correlation of the KL with each of some columns; NaN if one is constant."""
    correlations = table.corr(method="spearman")[KL]
    return [float(correlations[column]) for column in columns]


def goes_with(runs: list[Run]) -> str:
    """Correlations of levels and of changes over each run's steps, and over runs (Markdown)."""
    found, rows = [], []
    for run in runs:
        steps = run.history.groupby("step")[[KL, *WITH]].mean().iloc[1:]  # at step 1 it is zero by definition
        numbers: dict[str, float] = {}
        for what, of in (("KL and", steps), ("changes of KL and of", steps.diff().iloc[1:])):
            numbers |= zip((f"{what} {name}" for name in WITH.values()), rank_correlations(of, WITH), strict=True)
        found.append(numbers)
        rows.append({"run": run.name, "steps": len(steps)} | {key: _number(value) for key, value in numbers.items()})
    means = pd.DataFrame(found).mean(skipna=False)
    bar = 1.96 / math.sqrt(max(1, len(steps) - 2))  # of the changes, one fewer than the levels
    changes = {name: means[f"changes of KL and of {name}"] for name in WITH.values()}
    ends = pd.DataFrame(
        {
            "run": run.name,
            KL: run.history[KL].iloc[-1],
            "reward": run.validation[REWARD].iloc[-1],
            "norm": run.history["gradient_norm"].median(),
        }
        for run in runs
    )
    return render(
        "goes_with.md.j2",
        table=table(rows),
        steps=len(steps),
        bar=bar,
        levels={name: _number(means[f"KL and {name}"]) for name in WITH.values()},
        beyond={name: _number(mean) for name, mean in changes.items() if abs(mean) > bar},
        ends=ends.to_numpy().tolist(),
        fewest=FEWEST_RUNS,
        over_runs=[_number(of) for of in rank_correlations(ends.drop(columns="run"), ("reward", "norm"))],
    )


def _number(value: float) -> str:
    return "not defined" if math.isnan(value) else f"{value:+.2f}"

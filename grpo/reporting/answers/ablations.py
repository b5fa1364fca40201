"""The handouts' questions about other metrics: who answers them, response lengths, prompts, and the KL to the start."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import pandas as pd

from grpo.reporting.curves import LENGTH
from grpo.reporting.discussion import Numbers, Split
from grpo.reporting.sentences import decimals, markdown_table, paragraph, paragraphs, render, table
from grpo.reporting.trends import MEASURES, trend_of
from grpo.results.runs import REWARD, Run, by_arm
from grpo.results.verdicts import KL
from grpo.study.methods import LOSSES_OF_THE_HANDOUTS
from grpo.study.schema import Study
from grpo.study.settings import MAIN

CLIPPED = {"grpo_clip", "grpo_no_clip"}
WITH = {"train/answer_reward": "reward", "gradient_norm": "gradient norm", "token_entropy": "token entropy"}
FEWEST_RUNS = 4
SPIKE = 5.0  # a KL estimate of so many times the median stands out


def asked_of_courses(study: Study) -> dict[str, str]:
    """Map experiments to the handout questions that their arms answer; the first of several for one question counts."""
    found: dict[str, str] = {}
    for name in study.made:
        entry = study.experiments[name]
        question = _question(list(entry.arms.values())) if entry.method == "grpo" and entry.task == MAIN else None
        if question and question not in found.values():
            found[name] = question
    return found


def _question(arms: list[dict[str, Any]]) -> str | None:
    names = [arm.get("loss_type", "") for arm in arms]
    losses = {LOSSES_OF_THE_HANDOUTS.get(name, name) for name in names}
    varied = {key for arm in arms for key in arm if any(of.get(key) != arm[key] for of in arms)}
    if "no_baseline" in losses and len(losses) > 1:
        return "grpo_baselines"
    if losses == CLIPPED:
        return "grpo_off_policy_clip_ablation"
    if varied == {"learning_rate"}:
        return "grpo_learning_rate"
    if "length_normalization" in varied:
        return "grpo_length_normalization"
    if "use_std_normalization" in varied:
        return "grpo_group_standard_deviation"
    return "grpo_prompt_ablation" if varied == {"prompt"} else None


def lengths_table(runs: list[Run]) -> str:
    """Lengths of all, right and wrong responses of each arm, before training and at the last evaluation (Markdown)."""

    def mean(of_arm: list[Run], column: str, row: int) -> str:
        values = pd.Series([run.validation[column].iloc[row] for run in of_arm if column in run.validation], dtype=float)
        return decimals(values.mean(), 1) if values.notna().any() else ""

    return table(
        {
            "arm": arm,
            "length at start": mean(of_arm, LENGTH, 0),
            "length at end": mean(of_arm, LENGTH, -1),
            "of right responses": mean(of_arm, f"{LENGTH}_correct", -1),
            "of wrong responses": mean(of_arm, f"{LENGTH}_incorrect", -1),
        }
        for arm, of_arm in by_arm(runs).items()
    )


def explain_prompts(numbers: Numbers) -> list[str]:
    """Table of form and accuracy given the form before and after training, and a split of the gaps between prompts."""
    arms = {arm["arm"]: {"before": arm["before"], "after": arm["after"]} for arm in numbers["arms"] if arm["before"]}
    if len(arms) < 2:
        return []
    columns = ["prompt", "form, at start", "answer given the form", "answer reward", "form, at end", "answer given the form"]
    columns += ["answer reward", "gain by form", "gain given the form"]
    rows = [
        [
            arm,
            *(decimals(share) for point in points.values() for share in (point.form, point.within, point.answer)),
            *(f"{share:+.3f}" for share in shares(*points.values())),
        ]
        for arm, points in arms.items()
    ]
    first, *others = arms
    gaps = [
        (other, when, arms[other][when].answer - arms[first][when].answer, *shares(arms[first][when], arms[other][when]))
        for other in others
        for when in ("before", "after")
    ]
    return [markdown_table(columns, rows), *paragraphs("prompts_sentences.md.j2", first=first, gaps=gaps)]


def shares(first: Split, second: Split) -> tuple[float, float]:
    """Parts of second - first in answer reward due to the form and to the accuracy given the form; they sum to it.

    Average over both orders of changing the two factors (Shapley value). If the accuracy given the form is unknown, all is due
    to the form.
    """
    if first.within is None or second.within is None:
        return second.answer - first.answer, 0.0
    form = (second.form - first.form) * (first.within + second.within) / 2
    return form, (second.within - first.within) * (first.form + second.form) / 2


def growth(runs: list[Run]) -> str:
    """Describe the growth of one arm's KL, by both estimates."""
    measure = next(measure for measure in MEASURES if measure.key == "kl")
    low_variance = pd.concat([run.history[KL] for run in runs])
    return paragraph(
        "drift_sentences.md.j2",
        arm=runs[0].arm,
        course=(measure, trend_of(runs, measure)),
        per_token=[_mean(runs, "kl/per_token"), _mean(runs, KL)],
        per_response=[_mean(runs, "kl/per_sequence"), _mean(runs, "kl/per_sequence_low_variance")],
        largest=low_variance.max(),
        times_median=low_variance.max() / low_variance.median() if low_variance.median() else 0.0,
        spike=SPIKE,
    )


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

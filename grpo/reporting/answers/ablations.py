"""The handouts' questions about other metrics: which experiments answer them, response lengths, and the prompts compared."""

from __future__ import annotations

from typing import Any

import pandas as pd

from grpo.reporting.curves import LENGTH
from grpo.reporting.discussion import Numbers, Split
from grpo.reporting.sentences import decimals, paragraphs, table
from grpo.results.markdown import markdown_table
from grpo.results.runs import Run, by_arm
from grpo.study.methods import LOSSES_OF_THE_HANDOUTS
from grpo.study.schema import Study
from grpo.study.settings import MAIN

CLIPPED = {"grpo_clip", "grpo_no_clip"}


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

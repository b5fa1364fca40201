"""Match the handouts' questions about other metrics with the experiments that answer them."""

from __future__ import annotations

from typing import Any

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

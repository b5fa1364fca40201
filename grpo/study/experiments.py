"""The experiments of the handouts: names, methods, and whose winners each builds on. dvc.yaml states the same as deps."""

from __future__ import annotations

from typing import Literal

Method = Literal["grpo", "sft", "expert_iteration"]

SFT = "sft_experiment"
EXPERT_ITERATION = "expert_iteration_experiment"
SFT_INITIALIZATION = "grpo_sft_initialization"
KEYWORD = "grpo_keyword_inclusion"
COLOCATE = "grpo_colocate"
ASYNCHRONOUS = "grpo_async_offpolicy"

EXPERIMENTS: dict[str, str] = {
    SFT: "Supervised fine-tuning",
    EXPERT_ITERATION: "Expert iteration",
    "grpo_learning_rate": "Learning rate",
    "grpo_baselines": "Baselines",
    "grpo_length_normalization": "Length normalization",
    "grpo_group_standard_deviation": "Group standard deviation",
    "grpo_off_policy_sweep_broad": "Off-policy sweep, broad",
    "grpo_off_policy_sweep_focused": "Off-policy sweep, focused",
    "grpo_off_policy_clip_ablation": "Off-policy clip ablation",
    "grpo_prompt_ablation": "Prompt ablation",
    SFT_INITIALIZATION: "SFT initialization",
    "grpo_kl_divergence": "KL divergence from the starting policy",
    COLOCATE: "Colocated: one or several updates per rollout batch",
    ASYNCHRONOUS: "Asynchronous: generator and learner apart",
    "leaderboard": "Leaderboard",
    KEYWORD: "Keyword inclusion, on the project's own language model",
}

_ON_POLICY = ["grpo_learning_rate", "grpo_baselines", "grpo_length_normalization", "grpo_group_standard_deviation"]
CLIP_ABLATION = "grpo_off_policy_clip_ablation"
_BEST = [*_ON_POLICY, "grpo_off_policy_sweep_focused", CLIP_ABLATION]

# The experiments whose winners' values an experiment's runs start from, first to last.
BUILDS_ON: dict[str, list[str]] = {
    SFT: [],
    EXPERT_ITERATION: [],
    "grpo_learning_rate": [],
    "grpo_baselines": _ON_POLICY[:1],
    "grpo_length_normalization": _ON_POLICY[:2],
    "grpo_group_standard_deviation": _ON_POLICY[:3],
    "grpo_off_policy_sweep_broad": _ON_POLICY,
    "grpo_off_policy_sweep_focused": _ON_POLICY,
    CLIP_ABLATION: _ON_POLICY,
    "grpo_prompt_ablation": _BEST,
    SFT_INITIALIZATION: _BEST,
    "grpo_kl_divergence": _BEST,
    COLOCATE: _ON_POLICY,
    ASYNCHRONOUS: _ON_POLICY,
    "leaderboard": [*_BEST, "grpo_prompt_ablation"],
    KEYWORD: [],
}

# What a scheduler reserves for a run, as dvc.yaml has it under `meta`, where it is not `train`.
RESERVED: dict[str, Literal["colocate", "asynchronous", "train_on_cpu"]] = {
    COLOCATE: "colocate",
    ASYNCHRONOUS: "asynchronous",
    KEYWORD: "train_on_cpu",
}

# The sweep from which an experiment's arms with `off_policy_rank: K` take their values.
RANKED_BY: dict[str, str] = {
    "grpo_off_policy_sweep_focused": "grpo_off_policy_sweep_broad",
    CLIP_ABLATION: "grpo_off_policy_sweep_focused",
}


def method_of(experiment: str) -> Method:
    """How an experiment's runs are trained; also the section of params.yaml that its arms change."""
    if experiment == SFT:
        return "sft"
    return "expert_iteration" if experiment == EXPERT_ITERATION else "grpo"


def needed_selections(experiment: str) -> list[str]:
    """The experiments whose selection must be known before a run of ``experiment`` can start, first to last.

    A run depends on the file of the last one, which holds the others too.
    """
    ranked = [RANKED_BY[experiment]] if experiment in RANKED_BY else []
    return BUILDS_ON[experiment] + ranked


def needed_experiments(experiment: str) -> list[str]:
    """The experiments that a study cannot leave out if it makes ``experiment``: what its runs build on or start from."""
    return needed_selections(experiment) + ([SFT] if experiment == SFT_INITIALIZATION else [])

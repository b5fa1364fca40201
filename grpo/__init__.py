"""GRPO with verified rewards as a reproducible study.

The functions below carry the names and signatures of the course handouts (CS336 assignment 5, CSE599-O assignment 3). They
are imported on first use, because most of them need torch, which the command line should not wait for.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__all__ = [
    "compute_entropy",
    "compute_group_normalized_rewards",
    "compute_grpo_clip_loss",
    "compute_naive_policy_gradient_loss",
    "compute_policy_gradient_loss",
    "evaluate_vllm",
    "get_response_log_probs",
    "grpo_microbatch_train_step",
    "keyword_inclusion_reward_fn",
    "log_generations",
    "masked_mean",
    "masked_normalize",
    "question_only_reward_fn",
    "r1_zero_reward_fn",
    "sft_microbatch_train_step",
    "tokenize_prompt_and_output",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'grpo' has no attribute {name!r}")
    return getattr(import_module("grpo.handouts"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])

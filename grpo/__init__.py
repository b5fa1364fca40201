"""GRPO with verified rewards as a reproducible study.

The functions below carry the names and signatures of the course handouts (CS336 assignment 5, CSE599-O assignment 3). They
are imported on first use, because most of them need torch, which the command line should not wait for.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_HOME = {
    "tokenize_prompt_and_output": "grpo.learner.log_probs",
    "compute_entropy": "grpo.learner.log_probs",
    "get_response_log_probs": "grpo.learner.log_probs",
    "masked_normalize": "grpo.learner.masking",
    "masked_mean": "grpo.learner.masking",
    "compute_group_normalized_rewards": "grpo.learner.advantages",
    "compute_naive_policy_gradient_loss": "grpo.learner.losses",
    "compute_grpo_clip_loss": "grpo.learner.losses",
    "compute_policy_gradient_loss": "grpo.learner.losses",
    "grpo_microbatch_train_step": "grpo.learner.losses",
    "sft_microbatch_train_step": "grpo.learner.losses",
    "log_generations": "grpo.evaluation.evaluate",
    "evaluate_vllm": "grpo.evaluation.evaluate",
    "r1_zero_reward_fn": "grpo.tasks.rewards",
    "question_only_reward_fn": "grpo.tasks.rewards",
    "keyword_inclusion_reward_fn": "grpo.tasks.keyword",
}
__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'grpo' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])

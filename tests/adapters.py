"""This package under the names that the courses' own unit tests call: CS336 assignment 5 and CSE599-O assignment 3.

`make test-course DIR=...` puts this file beside a course's tests and runs them. What this package does not have (the optional
part of CS336's assignment: packed data, MMLU, DPO) is skipped.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import grpo
from grpo import compute_entropy as run_compute_entropy
from grpo import compute_group_normalized_rewards as run_compute_group_normalized_rewards
from grpo import compute_grpo_clip_loss as run_compute_grpo_clip_loss
from grpo import compute_naive_policy_gradient_loss as run_compute_naive_policy_gradient_loss
from grpo import compute_policy_gradient_loss as run_compute_policy_gradient_loss
from grpo import get_response_log_probs as run_get_response_log_probs
from grpo import grpo_microbatch_train_step as run_grpo_microbatch_train_step
from grpo import masked_mean as run_masked_mean
from grpo import sft_microbatch_train_step as run_sft_microbatch_train_step
from grpo import tokenize_prompt_and_output as run_tokenize_prompt_and_output

__all__ = [
    "run_compute_entropy",
    "run_compute_group_normalized_rewards",
    "run_compute_grpo_clip_loss",
    "run_compute_naive_policy_gradient_loss",
    "run_compute_policy_gradient_loss",
    "run_get_response_log_probs",
    "run_grpo_microbatch_train_step",
    "run_masked_mean",
    "run_masked_normalize",
    "run_sft_microbatch_train_step",
    "run_tokenize_prompt_and_output",
]


def run_masked_normalize(
    tensor: torch.Tensor, mask: torch.Tensor, dim: int | None = None, normalize_constant: float = 1.0
) -> torch.Tensor:
    return grpo.masked_normalize(tensor, mask, dim, normalize_constant)


def __getattr__(name: str) -> Callable[..., Any]:
    """What a course's test imports and this package does not have: a function that skips the test."""
    if not name.startswith(("run_", "get_")):
        raise AttributeError(name)

    def missing(*arguments: Any, **keywords: Any) -> Any:
        pytest.skip(f"this package has nothing behind the adapter {name}")

    return missing

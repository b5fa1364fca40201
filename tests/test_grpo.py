"""The tests that the handouts name for GRPO (CS336 assignment 5, CSE599-O assignment 3), through tests/adapters.py.

The courses' own tests compare with stored arrays (`make test-course` runs them); these compare with numbers worked out by hand
and with loops over plain numbers.
"""

from __future__ import annotations

import math
import statistics
from typing import Any

import pytest
import torch
from adapters import (
    run_compute_group_normalized_rewards,
    run_compute_grpo_clip_loss,
    run_compute_naive_policy_gradient_loss,
    run_compute_policy_gradient_loss,
    run_grpo_microbatch_train_step,
    run_masked_mean,
)
from torch import Tensor
from torch.testing import assert_close

RESPONSES, TRUTHS = ["3", "5", "?", "4", "9", "4", "1", "6"], ["3", "3", "3", "4", "4", "4", "5", "6"]


def graded(response: str, truth: str) -> dict[str, float]:
    return {"reward": float(response) / float(truth) if response != "?" else 0.0, "format_reward": 1.0, "answer_reward": 0.0}


@pytest.mark.parametrize("eps", [1e-6, 0.5])
@pytest.mark.parametrize("size", [2, 4, 8])
def test_compute_group_normalized_rewards_normalize_by_std(size: int, eps: float) -> None:
    advantages, raw, _ = run_compute_group_normalized_rewards(graded, RESPONSES, TRUTHS, size, eps, True)
    rewards = [graded(*pair)["reward"] for pair in zip(RESPONSES, TRUTHS, strict=True)]
    expected = []
    for start in range(0, len(rewards), size):
        group = rewards[start : start + size]
        mean, std = statistics.mean(group), statistics.stdev(group)  # by n - 1, as torch's
        expected += [(reward - mean) / (std + eps) for reward in group]
    assert_close(raw, torch.tensor(rewards))
    assert_close(advantages, torch.tensor(expected))


def test_compute_group_normalized_rewards_no_normalize_by_std() -> None:
    def right(response: str, truth: str) -> dict[str, float]:
        return dict.fromkeys(("reward", "format_reward", "answer_reward"), float(response == truth))

    advantages, raw, _ = run_compute_group_normalized_rewards(right, RESPONSES, TRUTHS, 4, 1e-6, False)
    assert raw.tolist() == [1, 0, 0, 1, 0, 1, 0, 1]
    assert advantages.tolist() == [0.5, -0.5, -0.5, 0.5, -0.5, 0.5, -0.5, 0.5]


# Ratios 2, 1, 1/2 for a good response and for a bad one.
OLD = torch.tensor([[-3.0, -1.0, -2.0], [-3.0, -1.0, -2.0]])
RATIOS = [[2.0, 1.0, 0.5], [2.0, 1.0, 0.5]]
POLICY = OLD + torch.tensor(RATIOS).log()
ADVANTAGES = torch.tensor([[3.0], [-1.0]])
REWARDS = torch.tensor([[1.0], [0.5]])


def clipped_loss(policy: float, old: float, advantage: float, cliprange: float) -> float:
    ratio = math.exp(policy - old)
    return -min(ratio * advantage, min(max(ratio, 1 - cliprange), 1 + cliprange) * advantage)


def test_compute_naive_policy_gradient_loss() -> None:
    loss = run_compute_naive_policy_gradient_loss(torch.tensor([[2.0], [-1.0]]), torch.tensor([[-0.5, -1.0], [-2.0, 0.0]]))
    assert loss.tolist() == [[1.0, 2.0], [-2.0, 0.0]]


def test_compute_grpo_clip_loss_large_cliprange() -> None:
    """A range of 10 clips no ratio of 2 or 1/2."""
    loss, metadata = run_compute_grpo_clip_loss(ADVANTAGES, POLICY, OLD, 10.0)
    assert_close(loss, torch.tensor([[-6.0, -3.0, -1.5], [2.0, 1.0, 0.5]]))
    assert not metadata["clipped"].any()


def test_compute_grpo_clip_loss_small_cliprange() -> None:
    loss, metadata = run_compute_grpo_clip_loss(ADVANTAGES, POLICY, OLD, 0.25)
    # good: min(2, 1.25) * 3, 1 * 3, min(.5, .75) * 3;  bad: -max(2, 1.25), -1, -max(.5, .75)
    assert_close(loss, torch.tensor([[-3.75, -3.0, -1.5], [2.0, 1.0, 0.75]]))
    assert_close(metadata["ratio"], torch.tensor(RATIOS))
    # A good response is clipped where its ratio has already risen, a bad one where its ratio has already fallen.
    assert metadata["clipped"].tolist() == [[True, False, False], [False, False, True]]


def policy_gradient_loss(loss_type: str) -> Tensor:
    loss: Tensor = run_compute_policy_gradient_loss(
        policy_log_probs=POLICY,
        loss_type=loss_type,
        raw_rewards=REWARDS,
        advantages=ADVANTAGES,
        old_log_probs=OLD,
        cliprange=0.25,
    )[0]
    return loss


def test_compute_policy_gradient_loss_no_baseline() -> None:
    assert_close(policy_gradient_loss("no_baseline"), -REWARDS * POLICY)


def test_compute_policy_gradient_loss_reinforce_with_baseline() -> None:
    assert_close(policy_gradient_loss("reinforce_with_baseline"), -ADVANTAGES * POLICY)


@pytest.mark.parametrize("loss_type", ["grpo_clip", "GRPO-Clip"])
def test_compute_policy_gradient_loss_grpo_clip(loss_type: str) -> None:
    assert_close(policy_gradient_loss(loss_type), torch.tensor([[-3.75, -3.0, -1.5], [2.0, 1.0, 0.75]]))


@pytest.mark.parametrize("loss_type", ["grpo_no_clip", "GRPO-No-Clip"])
def test_compute_policy_gradient_loss_grpo_no_clip(loss_type: str) -> None:
    assert_close(policy_gradient_loss(loss_type), torch.tensor([[-6.0, -3.0, -1.5], [2.0, 1.0, 0.5]]))


VALUES = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
MASKS = [torch.tensor([[1, 0, 1], [0, 0, 1]], dtype=kind) for kind in (torch.float32, torch.bool, torch.int64)]


@pytest.mark.parametrize("mask", MASKS, ids=["float", "bool", "int"])
@pytest.mark.parametrize(
    ("dim", "mean"), [(None, 10 / 3), (0, [1.0, math.nan, 4.5]), (1, [2.0, 6.0]), (-1, [2.0, 6.0])], ids=str
)
def test_masked_mean(mask: Tensor, dim: int | None, mean: Any) -> None:
    assert_close(run_masked_mean(VALUES, mask, dim), torch.tensor(mean), equal_nan=True)


def clip_step(policy: Tensor, mask: Tensor, steps: int) -> tuple[Tensor, dict[str, Tensor]]:
    found: tuple[Tensor, dict[str, Tensor]] = run_grpo_microbatch_train_step(
        policy_log_probs=policy,
        response_mask=mask,
        gradient_accumulation_steps=steps,
        loss_type="grpo_clip",
        raw_rewards=REWARDS,
        advantages=ADVANTAGES,
        old_log_probs=OLD,
        cliprange=0.25,
    )
    return found


def test_grpo_microbatch_train_step_grpo_clip() -> None:
    policy = POLICY.clone().requires_grad_()
    loss, metadata = clip_step(policy, torch.tensor([[1, 1, 0], [0, 0, 1]]), 1)
    # Means over the tokens of each response, then over the two. Only the second token of the first is not clipped: its
    # gradient is -3 of a mean over 2 tokens and 2 responses.
    assert_close(loss, torch.tensor((-(3.75 + 3.0) / 2 + 0.75) / 2))
    assert not loss.requires_grad
    assert_close(policy.grad, torch.tensor([[0.0, -0.75, 0.0], [0.0, 0.0, 0.0]]))
    assert_close(metadata["ratio"], torch.tensor(RATIOS))


def test_grpo_microbatch_train_step_grpo_clip_10_steps() -> None:
    """Ten microbatches of an optimizer step, by loops over plain numbers."""
    generator = torch.Generator().manual_seed(0)
    policy = (OLD + torch.rand(10, 2, 3, generator=generator) - 0.5).requires_grad_()
    masks = torch.rand(10, 2, 3, generator=generator) < 0.7
    masks[..., 0] = True  # no response is empty
    gradient = torch.zeros(10, 2, 3)
    for number, of_batch in enumerate(policy.tolist()):
        loss, _ = clip_step(policy[number], masks[number], 10)
        in_plain = 0.0
        for row, log_probs in enumerate(of_batch):
            kept = [place for place in range(3) if masks[number, row, place]]
            advantage, weight = ADVANTAGES[row].item(), 1 / len(kept) / 2 / 10
            for place in kept:
                old = OLD[row, place].item()
                in_plain += weight * clipped_loss(log_probs[place], old, advantage, 0.25)
                step = 1e-6
                up, down = (clipped_loss(log_probs[place] + s, old, advantage, 0.25) for s in (step, -step))
                gradient[number, row, place] = weight * (up - down) / (2 * step)
        assert loss.item() == pytest.approx(in_plain, abs=1e-6)
    assert_close(policy.grad, gradient, atol=1e-5, rtol=1e-4)

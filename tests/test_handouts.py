"""The tests that the handouts name for GRPO and fine-tuning (CS336 assignment 5, CSE599-O assignment 3), by tests/adapters.py.

The courses' own tests compare with stored arrays (`make test-course` runs them); these compare with numbers worked out by hand,
with loops over plain numbers and with torch's distributions.
"""

from __future__ import annotations

import math
import statistics
from typing import Any

import pytest
import torch
from adapters import (
    run_compute_entropy,
    run_compute_group_normalized_rewards,
    run_compute_grpo_clip_loss,
    run_compute_naive_policy_gradient_loss,
    run_compute_policy_gradient_loss,
    run_get_response_log_probs,
    run_grpo_microbatch_train_step,
    run_masked_mean,
    run_masked_normalize,
    run_sft_microbatch_train_step,
    run_tokenize_prompt_and_output,
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
    """Each of ten microbatches of an optimizer step has a tenth of the loss and of the gradient that it has alone."""
    generator = torch.Generator().manual_seed(0)
    policy = (OLD + torch.rand(10, 2, 3, generator=generator) - 0.5).requires_grad_()
    masks = torch.rand(10, 2, 3, generator=generator) < 0.7
    masks[..., 0] = True  # no response is empty
    for number in range(10):
        alone = policy[number].detach().requires_grad_()
        (loss, _), (expected, _) = clip_step(policy[number], masks[number], 10), clip_step(alone, masks[number], 1)
        assert_close(loss, expected / 10)
        assert policy.grad is not None and alone.grad is not None
        assert_close(policy.grad[number], alone.grad / 10)


class LetterTokenizer:
    """One token a character, a = 1, b = 2 and so on; a beginning-of-text token where special tokens are asked for."""

    pad_token_id: int | None = 0
    eos_token_id = 99

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {"input_ids": ([77] if add_special_tokens else []) + [ord(c) - ord("a") + 1 for c in text]}


def test_tokenize_prompt_and_output() -> None:
    result = run_tokenize_prompt_and_output(["ab", "c"], ["cde", "a"], LetterTokenizer())
    # rows: 1 2 | 3 4 5   and   3 | 1, padded to 3 1 0 0 0
    assert result["input_ids"].tolist() == [[1, 2, 3, 4], [3, 1, 0, 0]]
    assert result["labels"].tolist() == [[2, 3, 4, 5], [1, 0, 0, 0]]
    assert result["response_mask"].int().tolist() == [[0, 1, 1, 1], [1, 0, 0, 0]]
    assert result["input_ids"].dtype == result["labels"].dtype == torch.int64


def test_where_there_is_no_padding_token_the_end_of_text_pads() -> None:
    tokenizer = LetterTokenizer()
    tokenizer.pad_token_id = None
    result = run_tokenize_prompt_and_output(["ab", "c"], ["cde", ""], tokenizer)
    assert result["labels"].tolist()[1] == [99, 99, 99, 99]
    assert result["response_mask"].sum(dim=1).tolist() == [3, 0]


def test_compute_entropy() -> None:
    logits = torch.randn(3, 5, 11, generator=torch.Generator().manual_seed(0)) * 4
    expected = torch.distributions.Categorical(logits=logits).entropy()
    assert_close(run_compute_entropy(logits), expected, atol=1e-5, rtol=1e-5)
    assert_close(run_compute_entropy(torch.zeros(1, 8)), torch.tensor([math.log(8)]))


@pytest.mark.parametrize(("dtype", "temperature"), [(torch.float32, 1.0), (torch.bfloat16, 0.7)], ids=str)
@pytest.mark.parametrize("with_entropy", [True, False])
def test_get_response_log_probs(model: Any, with_entropy: bool, dtype: torch.dtype, temperature: float) -> None:
    """In float32, whatever the model computes in."""
    ids = torch.randint(0, 512, (3, 9), generator=torch.Generator().manual_seed(2))
    inputs, labels, model = ids[:, :-1], ids[:, 1:], model.to(dtype)
    result = run_get_response_log_probs(model, inputs, labels, with_entropy, temperature=temperature)
    distribution = torch.distributions.Categorical(logits=model(inputs).logits.double() / temperature)
    expected = {"log_probs": distribution.log_prob(labels)} | (
        {"token_entropy": distribution.entropy()} if with_entropy else {}
    )
    assert {name: (x.dtype, x.requires_grad) for name, x in result.items()} == {
        name: (torch.float32, name == "log_probs") for name in expected
    }
    assert_close({name: values.double() for name, values in result.items()}, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("mask", MASKS, ids=["float", "bool", "int"])
@pytest.mark.parametrize(("dim", "result"), [(None, 2.5), (0, [0.25, 0.0, 2.25]), (1, [1.0, 1.5]), (-1, [1.0, 1.5])], ids=str)
def test_masked_normalize(mask: Tensor, dim: int | None, result: Any) -> None:
    assert_close(run_masked_normalize(VALUES, mask, dim, 4.0), torch.tensor(result))


SFT_POLICY = torch.tensor([[-1.0, -2.0, -9.0], [-4.0, -6.0, -8.0]])
SFT_MASK = torch.tensor([[1, 1, 0], [1, 1, 1]])


@pytest.mark.parametrize(("constant", "loss"), [(1.0, 5.25), (3.0, 1.75)])
def test_sft_microbatch_train_step(constant: float, loss: float) -> None:
    """Sums 1 + 2 = 3 and 4 + 6 + 8 = 18, mean 10.5, over 2 steps 5.25."""
    policy = SFT_POLICY.clone().requires_grad_()
    expected = -SFT_MASK.float() / 2 / 2 / constant
    for times in (1, 2):  # gradients add up
        got, metadata = run_sft_microbatch_train_step(policy, SFT_MASK, 2, constant)
        assert_close(got, torch.tensor(loss))
        assert not got.requires_grad
        assert_close(policy.grad, times * expected)
    assert_close(metadata["mean_nll"], torch.tensor(21 / 5))

"""The objective's pure functions against numbers worked out by hand and against torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from grpo.common.errors import UserError
from grpo.handouts import (
    compute_entropy,
    compute_group_normalized_rewards,
    compute_policy_gradient_loss,
    get_response_log_probs,
    grpo_microbatch_train_step,
    masked_mean,
    sft_microbatch_train_step,
)
from grpo.learner.advantages import normalize_within_groups, reward_statistics
from grpo.learner.masking import masked_normalize, response_weights
from grpo.learner.microbatches import pad_and_shift

LOSS_TYPES = ["no_baseline", "reinforce_with_baseline", "grpo_no_clip", "grpo_clip"]


def normalized(rewards: Sequence[float], *how: Any) -> tuple[Tensor, dict[str, float]]:
    """Advantages of these rewards, in groups of ``how``'s first, and the statistics."""
    advantages = normalize_within_groups(torch.tensor(rewards, dtype=torch.float64), *how)
    scores = [{"reward": reward, "format_reward": 1.0, "answer_reward": 0.0} for reward in rewards]
    return advantages, reward_statistics(scores, advantages, how[0])


def tensor(*rows: Any) -> Tensor:
    return torch.tensor(rows, dtype=torch.float32)


# --------------------------------------------------------------------------------------------------- masked aggregation


@pytest.mark.parametrize("function", [masked_normalize, masked_mean])
def test_masked_out_elements_leak_neither_value_nor_gradient(function: Any) -> None:
    values = tensor([1.0, float("nan"), 3.0, float("inf")]).requires_grad_()
    result = function(values, tensor([1, 0, 1, 0]))
    result.backward()
    assert_close(result.detach(), torch.tensor(4.0 if function is masked_normalize else 2.0))
    kept = 1.0 if function is masked_normalize else 0.5
    assert_close(values.grad, tensor([kept, 0.0, kept, 0.0]))


def test_length_normalization_example_of_the_handout() -> None:
    """CS336 assignment 5, "Thinking about length normalization": two responses of 4 and 7 tokens, both of advantage 2."""
    mask = tensor([1] * 4 + [0] * 3, [1] * 7)
    advantages = tensor([2.0], [2.0])

    ratio = torch.ones(2, 7, requires_grad=True)
    per_response = masked_mean(ratio * advantages, mask, dim=1)
    assert_close(per_response.detach(), tensor(2.0, 2.0))
    per_response.mean().backward()
    assert_close(ratio.grad, tensor([0.25] * 4 + [0.0] * 3, [0.1429] * 7), atol=5e-5, rtol=0)

    ratio = torch.ones(2, 7, requires_grad=True)
    per_response = masked_normalize(ratio * advantages, mask, dim=1, constant_normalizer=7)
    assert_close(per_response.detach(), tensor(1.1429, 2.0), atol=5e-5, rtol=0)
    per_response.mean().backward()
    assert_close(ratio.grad, tensor([0.1429] * 4 + [0.0] * 3, [0.1429] * 7), atol=5e-5, rtol=0)


# -------------------------------------------------------------------------------------------- tokens, log-probs, entropy


def test_an_end_of_text_token_that_was_sampled_counts_although_it_is_also_the_padding() -> None:
    result = pad_and_shift([[5], [5, 6]], [[7, 0], [7, 8, 9]], pad_token_id=0)
    assert result["labels"].tolist() == [[7, 0, 0, 0], [6, 7, 8, 9]]
    assert result["response_mask"].int().tolist() == [[1, 1, 0, 0], [0, 1, 1, 1]]


@pytest.mark.parametrize("offset", [1e4, -1e4])
def test_entropy_of_huge_logits(offset: float) -> None:
    assert_close(compute_entropy(tensor([0.0, 0.0]) + offset), tensor(math.log(2)), atol=2e-3, rtol=0)
    one_apart = 0.0 if offset > 0 else math.log(3)
    assert_close(compute_entropy(tensor([offset, 0.0, 0.0, 0.0])), tensor(one_apart), atol=2e-3, rtol=0)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_response_log_probs_of_a_bfloat16_model_are_float32(temperature: float) -> None:
    logits = (torch.randn(1, 4, 3000, generator=torch.Generator().manual_seed(3)) * 3).bfloat16().requires_grad_()
    labels, model = torch.tensor([[0, 1, 2, 3]]), lambda _: SimpleNamespace(logits=logits)
    result = get_response_log_probs(model, labels, labels, return_token_entropy=True, temperature=temperature)
    assert result["log_probs"].dtype == result["token_entropy"].dtype == torch.float32
    distribution = torch.distributions.Categorical(logits=logits.double() / temperature)
    assert_close(result["log_probs"].double(), distribution.log_prob(labels), atol=1e-5, rtol=1e-5)
    assert_close(result["token_entropy"].double(), distribution.entropy(), atol=1e-5, rtol=1e-5)
    assert result["log_probs"].requires_grad and not result["token_entropy"].requires_grad
    assert set(get_response_log_probs(model, labels, labels)) == {"log_probs"}


# ------------------------------------------------------------------------------------------------------------ advantages


@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, 0.3, 0.7])
@pytest.mark.parametrize("size", [2, 6, 7, 8])
def test_a_group_of_equal_rewards_has_no_advantage(reward: float, size: int) -> None:
    """Exactly zero: AdamW turns any gradient, however small, into a step of full size."""
    advantages = normalize_within_groups(torch.full((size,), reward), size, 1e-6, True)
    assert advantages.tolist() == [0.0] * size


# Sums of equal numbers in another order; and 1e6, whose neighbours are 1e-10 apart.
ROUNDED = [[0.1 + 0.2, 0.3, 0.3], [0.7 + 0.1, 0.8, 0.1 + 0.7], [sum([0.1] * 10), 1.0, 1.0], [0.1 + 0.2 - 0.3, 0.0, 0.0]]
ROUNDED += [[1e6 * x for x in ROUNDED[0]], [-x for x in ROUNDED[1]]]


@pytest.mark.parametrize("rewards", ROUNDED)
@pytest.mark.parametrize("by_std", [True, False])
def test_rewards_that_differ_by_rounding_are_equal(rewards: list[float], by_std: bool) -> None:
    assert len(set(rewards)) > 1
    advantages, metadata = normalized(rewards, 3, 0.0, by_std, "leave_one_out")
    assert advantages.tolist() == [0.0] * 3 and metadata["zero_signal_fraction"] == 1.0


@pytest.mark.parametrize("apart", [1e-3, 1e-6, 1e-8])
def test_rewards_that_differ_by_little_are_not_equal(apart: float) -> None:
    advantages = normalize_within_groups(torch.tensor([0.3, 0.3 + apart], dtype=torch.float64), 2, 0.0, True)
    assert advantages.tolist() == pytest.approx([-(0.5**0.5), 0.5**0.5], rel=1e-5)


def test_ragged_rewards_are_refused() -> None:
    with pytest.raises(UserError, match=r"7 rewards.*groups of 4"):
        normalize_within_groups(torch.zeros(7), 4, 1e-6, True)


def _score(response: str, truth: str) -> dict[str, float]:
    answer = float(response == truth)
    return {"reward": answer, "format_reward": float(response != "?"), "answer_reward": answer}


@pytest.mark.parametrize("offset", [0.0, 0.1, 2.0**24, 1e9, -1e12])
def test_advantages_do_not_depend_on_what_all_rewards_have_in_common(offset: float) -> None:
    """By hand: 0, 1, 2 and 3 are -1.5, -.5, .5 and 1.5 from their mean, and their standard deviation is sqrt(5 / 3)."""
    advantages, metadata = normalized([offset + k for k in range(4)], 4, 0.0, True)
    assert_close(advantages, tensor(-1.5, -0.5, 0.5, 1.5) / math.sqrt(5 / 3), atol=1e-4, rtol=0)
    assert advantages.dtype == torch.float32
    assert metadata["reward"] == pytest.approx(offset + 1.5, rel=1e-15) and metadata["zero_signal_fraction"] == 0.0
    assert metadata["reward_std"] == pytest.approx(math.sqrt(5 / 4), rel=1e-4)


@pytest.mark.parametrize("wrong", [1e39, -1e39, math.inf])
@pytest.mark.parametrize("others", [[0.0, 0.0, 1.0], "equal"])
def test_rewards_that_float32_does_not_represent_are_refused(wrong: float, others: Any) -> None:
    values = [wrong] * 4 if others == "equal" else [wrong, *others]
    with pytest.raises(UserError, match=r"reward: rewards from .* do not fit float32, in which losses are computed"):
        normalized(values, 4, 1e-6, True)


NAN = math.nan


@pytest.mark.parametrize(
    ("std", "baseline", "expected"),
    [
        (False, "group_mean", [0.5, 0.0, -1.0, 0.5, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]),
        (False, "leave_one_out", [0.75, 0.0, -1.5, 0.75, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]),
        # The unbiased variance of 1.5, 0 and 1.5 is 3/4.
        (True, "group_mean", [0.5 / 0.75**0.5, 0.0, -1 / 0.75**0.5, 0.5 / 0.75**0.5, *[0.0] * 8]),
    ],
)
def test_a_response_without_a_reward_counts_in_no_mean(std: bool, baseline: str, expected: list[float]) -> None:
    """In groups with three, one, two equal and no rewards."""
    rewards = [1.5, NAN, 0.0, 1.5, NAN, NAN, NAN, 2.0, *[NAN] * 4]
    rewards[8:10] = [0.5, 0.5]
    advantages, metadata = normalized(rewards, 4, 0.0, std, baseline)
    assert advantages.tolist() == pytest.approx(expected, rel=1e-6)
    assert metadata["reward"] == 1.0 and (metadata["reward_min"], metadata["reward_max"]) == (0.0, 2.0)
    assert metadata["zero_signal_fraction"] == pytest.approx(2 / 3) and metadata["reward_std"] == pytest.approx(0.5**0.5)


def test_without_any_reward_there_is_no_advantage() -> None:
    advantages, metadata = normalized([NAN] * 4, 2, 1e-6, True)
    assert advantages.tolist() == [0.0] * 4 and math.isnan(metadata["reward"]) and metadata["zero_signal_fraction"] == 1.0


def test_group_normalized_rewards_and_their_metadata() -> None:
    responses, truths = ["3", "3", "?", "4", "7", "8"], ["3", "4", "3", "3", "7", "8"]
    advantages, raw, metadata = compute_group_normalized_rewards(_score, responses, truths, 2, 1e-6, False)
    assert raw.tolist() == [1, 0, 0, 0, 1, 1]
    assert advantages.tolist() == [0.5, -0.5, 0, 0, 0, 0]
    scores = metadata.pop("scores")
    assert [s["format_reward"] for s in scores] == [1, 1, 0, 1, 1, 1]
    assert metadata == pytest.approx(
        {
            "reward": 0.5,
            "reward_std": 0.5,
            "reward_min": 0.0,
            "reward_max": 1.0,
            "format_reward": 5 / 6,
            "answer_reward": 0.5,
            "zero_signal_fraction": 2 / 3,
        }
    )


# ---------------------------------------------------------------------------------------------------------------- losses


@pytest.mark.parametrize(
    ("loss_type", "missing"),
    [
        ("no_baseline", "raw_rewards"),
        ("reinforce_with_baseline", "advantages"),
        ("grpo_no_clip", "advantages"),
        ("grpo_no_clip", "old_log_probs"),
        ("grpo_clip", "advantages"),
        ("grpo_clip", "old_log_probs"),
        ("grpo_clip", "cliprange"),
        ("GRPO-Clip", "cliprange"),
    ],
)
def test_a_missing_argument_is_named(loss_type: str, missing: str) -> None:
    column, policy = torch.ones(2, 1), torch.full((2, 3), -1.0)
    arguments: dict[str, Any] = {"raw_rewards": column, "advantages": column, "old_log_probs": policy, "cliprange": 0.2}
    compute_policy_gradient_loss(policy, loss_type, **arguments)
    with pytest.raises(ValueError, match=missing):
        compute_policy_gradient_loss(policy, loss_type, **{**arguments, missing: None})


# ------------------------------------------------------------------------------------------------------- token weights


def test_response_weights_refuse_what_they_cannot_compute() -> None:
    with pytest.raises(ValueError, match="constant_normalizer"):
        response_weights(torch.ones(3), "masked_normalize", 3, 3)
    with pytest.raises(ValueError, match="median"):
        response_weights(torch.ones(3), "median", 3, 3)


# ----------------------------------------------------------------------------------------------------- microbatch steps

STEP_POLICY = tensor([-1.0, -2.0, -9.0], [-4.0, -6.0, -8.0])
STEP_MASK = tensor([1, 1, 0], [1, 1, 1])
STEP_ADVANTAGES = tensor([2.0], [-1.0])


@pytest.mark.parametrize(
    ("normalization", "loss", "gradient"),
    [
        # Responses: 2 * (1 + 2) / 2 = 3 and -(4 + 6 + 8) / 3 = -6, their mean -1.5, over 2 steps -.75
        ("masked_mean", -0.75, [[-0.25, -0.25, 0.0], [1 / 12, 1 / 12, 1 / 12]]),
        # 6 / 6 = 1 and -18 / 6 = -3, mean -1, over 2 steps -.5
        ("masked_normalize", -0.5, [[-1 / 12, -1 / 12, 0.0], [1 / 24, 1 / 24, 1 / 24]]),
        # 6 / 3 = 2 and -18 / 3 = -6, mean -2, over 2 steps -1
        ("microbatch_longest", -1.0, [[-1 / 6, -1 / 6, 0.0], [1 / 12, 1 / 12, 1 / 12]]),
    ],
)
def test_grpo_microbatch_step_by_hand(normalization: str, loss: float, gradient: Sequence[Sequence[float]]) -> None:
    policy = STEP_POLICY.clone().requires_grad_()
    how = {"length_normalization": normalization, "constant_normalizer": 6.0}
    arguments: dict[str, Any] = {"advantages": STEP_ADVANTAGES, **how}
    got, metadata = grpo_microbatch_train_step(policy, STEP_MASK, 2, "reinforce_with_baseline", **arguments)
    assert_close(got, torch.tensor(loss))
    assert not got.requires_grad
    assert_close(policy.grad, tensor(*gradient))
    assert metadata == {}
    grpo_microbatch_train_step(policy, STEP_MASK, 2, "reinforce_with_baseline", **arguments)
    assert_close(policy.grad, 2 * tensor(*gradient))  # gradients add up


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize("normalization", ["masked_mean", "masked_normalize", "microbatch_longest"])
def test_a_response_without_tokens_adds_nothing_but_counts(loss_type: str, normalization: str) -> None:
    def step(mask: Tensor) -> tuple[Tensor, Tensor]:
        policy = torch.full((2, 4), -2.0, requires_grad=True)
        loss, _ = grpo_microbatch_train_step(
            policy, mask, 1, loss_type, torch.ones(2, 1), torch.ones(2, 1), torch.full((2, 4), -2.0), 0.2, normalization, 4.0
        )
        assert policy.grad is not None
        return loss, policy.grad

    loss, gradient = step(tensor([1, 1, 1, 1], [0, 0, 0, 0]))
    per_token = 2.0 if loss_type in {"no_baseline", "reinforce_with_baseline"} else -1.0
    assert_close(loss, torch.tensor(per_token / 2))  # the mean over two responses, one of them 0
    assert_close(gradient, tensor([-1 / 8] * 4, [0.0] * 4))

    loss, gradient = step(torch.zeros(2, 4))
    assert loss == 0.0
    assert torch.equal(gradient, torch.zeros(2, 4))


@pytest.mark.parametrize("masked", [-1e30, float("-inf"), float("nan")])
def test_masked_positions_have_no_gradient_in_fine_tuning(masked: float) -> None:
    """Exactly zero, for any values there."""
    policy = tensor([masked, -1.0, masked], [masked, masked, masked]).requires_grad_()
    loss, metadata = sft_microbatch_train_step(policy, tensor([0, 1, 0], [0, 0, 0]), 1, normalize_constant=4.0)
    assert (loss.item(), metadata["mean_nll"].item()) == (0.125, 1.0)
    assert policy.grad is not None
    assert policy.grad.tolist() == [[0.0, -0.125, 0.0], [0.0, 0.0, 0.0]]

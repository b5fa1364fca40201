"""Mismatch of engine and learner by hand, and truncated importance sampling in the gradient."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from learner_parts import PROBLEM, flat, last_gradients, learner_of
from pydantic import ValidationError
from training_parts import scored

from grpo.common.records import Completion, Rollout
from grpo.learner.mismatch import importance_weights, mismatch
from grpo.study.methods import GrpoConfig


def test_mismatch_by_hand() -> None:
    found = mismatch(torch.tensor([-1.0, -2.0, -3.0, -0.5]), torch.tensor([-1.05, -1.5, -3.2, -0.5]))
    assert found["mismatch_mean"].tolist() == pytest.approx([0.05, 0.5, 0.2, 0.0], abs=1e-6)
    assert found["mismatch_above"].tolist() == [False, True, True, False]
    assert found["mismatch_kl"].tolist() == pytest.approx([-0.05, 0.5, -0.2, 0.0], abs=1e-6)


RATIOS = torch.tensor([[2.0, 0.5, 4.0], [0.25, 0.5, 8.0], [1.5, 2.0, 8.0]])
# Ratios of responses: 4, and the products 1/8 and 3 of two tokens; their third is none.
TRUNCATED = {
    "token_truncate": ([[2.0, 0.5, 3.0], [0.25, 0.5, 3.0], [1.5, 2.0, 3.0]], 3),
    "sequence_truncate": ([[3.0] * 3, [0.125] * 3, [3.0] * 3], 3),  # a product of 3 is just within
}


@pytest.mark.parametrize("mode", TRUNCATED)
def test_weights_of_tokens_and_of_responses_by_hand(mode: str) -> None:
    mask, engine = torch.tensor([[True, True, True], [True, True, False], [True, True, False]]), torch.zeros(3, 3)
    weights, capped = importance_weights(RATIOS.log(), engine, mask, 3.00001, mode)
    expected, at_cap = TRUNCATED[mode]
    assert weights.tolist() == [pytest.approx(row, rel=1e-4) for row in expected] and capped.sum() == at_cap


def test_a_mode_without_weights_is_refused() -> None:
    with pytest.raises(ValidationError, match="importance_mode: without importance_cap"):
        GrpoConfig(importance_mode="sequence_truncate")


LENGTHS = [3, 1, 5, 2]
ADVANTAGES = torch.tensor([1.0, -0.5, 0.25, -1.0])


def make_rollouts(shifts: list[float], log_probs: list[torch.Tensor] | None = None) -> list[Rollout]:
    """Two prompts with two responses each; the engine reported each response's log-probabilities lower by its shift."""
    made = []
    for i, (n, shift) in enumerate(zip(LENGTHS, shifts, strict=True)):
        reported = (0.0,) * n if log_probs is None else tuple((log_probs[i] - shift).tolist())
        completion = Completion(tuple(range(7 * i + 1, 7 * i + 1 + n)), "", reported, "stop")
        made.append(Rollout(PROBLEM, (3, 4 + i // 2), completion, {}))
    return made


def gradient(
    model: Any,
    shifts: list[float],
    budget: int | None,
    advantages: torch.Tensor = ADVANTAGES,
    moved: float = 0.0,
    **settings: Any,
) -> tuple[torch.Tensor, dict[str, float]]:
    """The gradient of an update, before which the policy has moved: its log-probs were lower by ``moved`` when it sampled."""
    sizes = {"rollout_batch_size": 4, "train_batch_size": 4, "gradient_accumulation_steps": 2}
    learner = learner_of(model, budget, **sizes, **settings)
    current = learner.log_probs(make_rollouts(shifts))
    sampling = [log_probs - moved for log_probs in current]
    rollouts = make_rollouts(shifts, sampling)
    found = last_gradients(learner)
    batch = scored(rollouts, torch.zeros(4), advantages, sampling if moved else None)
    for rollout, log_probs in zip(batch, current, strict=True):
        rollout.reference_log_probs = log_probs + 0.5
    metrics = learner.update(batch)
    return flat(found), metrics


@pytest.mark.parametrize("budget", [None, 8, 1000])
def test_each_token_counts_by_its_truncated_ratio(model: Any, budget: int | None) -> None:
    """Ratios e^shift of 1, 2, 1/2 and 8, truncated at 3: as if advantages had been multiplied by 1, 2, 1/2 and 3."""
    shifts = [0.0, math.log(2), -math.log(2), math.log(8)]
    found, metrics = gradient(model, shifts, budget, importance_cap=3.0)
    expected, _ = gradient(model, shifts, budget, advantages=ADVANTAGES * torch.tensor([1, 2, 0.5, 3]))
    assert (found - expected).norm() / expected.norm() < 1e-5
    assert metrics["importance_mean"] == pytest.approx((3 * 1 + 1 * 2 + 5 * 0.5 + 2 * 3) / 11, rel=1e-5)
    assert metrics["importance_capped"] == pytest.approx(2 / 11)
    plain, _ = gradient(model, shifts, budget)
    assert (plain - expected).norm() / expected.norm() > 0.1


def test_weights_are_those_of_the_policy_that_sampled_and_not_of_the_moved_one(model: Any) -> None:
    """Several updates on a batch move the policy; engine and sampling policy stay as far apart as they were."""
    shifts = [0.0, math.log(2), -math.log(2), math.log(8)]
    found, metrics = gradient(model, shifts, 1000, moved=0.4, importance_cap=3.0)
    expected_metrics = [(1 + 5 + 2 * 3) * math.log(2) / 11, (-1 + 5 - 2 * 3) * math.log(2) / 11, math.log(8)]
    assert [metrics[f"mismatch_{name}"] for name in ("mean", "kl", "max")] == pytest.approx(expected_metrics, rel=1e-4)
    expected, _ = gradient(model, shifts, 1000, advantages=ADVANTAGES * torch.tensor([1, 2, 0.5, 3]))
    assert (found - expected).norm() / expected.norm() < 1e-5
    assert metrics["importance_mean"] == pytest.approx((3 * 1 + 1 * 2 + 5 * 0.5 + 2 * 3) / 11, rel=1e-5)


def test_the_kl_term_has_no_importance_weights(model: Any) -> None:
    """It is about the policy as it is, not about the engine that sampled."""
    shifts, settings = [0.0, math.log(2), -math.log(2), math.log(8)], {"kl_coefficient": 0.3}
    found, _ = gradient(model, shifts, 1000, advantages=torch.zeros(4), importance_cap=3.0, **settings)
    expected, _ = gradient(model, shifts, 1000, advantages=torch.zeros(4), **settings)
    assert expected.norm() > 0 and torch.equal(found, expected)


def test_off_by_default_and_then_only_measured(model: Any) -> None:
    shifts = [0.0, 0.5, -0.05, 2.0]
    found, metrics = gradient(model, shifts, 1000)
    expected, agreeing = gradient(model, [0.0] * 4, 1000)
    assert torch.equal(found, expected)
    assert not {"importance_mean", "importance_capped"} & set(metrics)
    assert metrics["mismatch_mean"] == pytest.approx((0.5 + 5 * 0.05 + 2 * 2) / 11, rel=1e-4)
    assert metrics["mismatch_max"] == pytest.approx(2.0, rel=1e-4)
    assert metrics["mismatch_above"] == pytest.approx(3 / 11)
    assert metrics["mismatch_kl"] == pytest.approx(-(0.5 - 5 * 0.05 + 2 * 2) / 11, rel=1e-4)
    assert agreeing["mismatch_max"] < 1e-5
    _, below = gradient(model, [0.5, -2.5, 0.05, -0.1], 1000)
    assert below["mismatch_max"] == pytest.approx(2.5, rel=1e-4)
    _, above = gradient(model, [-0.5, 2.5, -0.05, 0.1], 1000)
    assert above["mismatch_max"] == pytest.approx(2.5, rel=1e-4)

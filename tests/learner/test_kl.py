"""KL estimates, KL terms of the loss, and the mismatch of engine and learner: by hand, and in expectation."""

from __future__ import annotations

import math

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from grpo.learner.kl import estimate_kl, kl_term
from grpo.learner.mismatch import importance_weights, mismatch
from grpo.study.methods import GrpoConfig

NAMES = ["per_token", "per_token_low_variance", "per_sequence", "per_sequence_low_variance"]


def tensors(*rows: list[float]) -> list[Tensor]:
    return [torch.tensor(row) for row in rows]


# ---------------------------------------------------------------------------------------------------------- estimates


def test_responses_count_by_their_tokens_and_empty_ones_as_responses() -> None:
    found = estimate_kl(tensors([-1.0, -1.0, -1.0], [-2.0], []), tensors([-2.0, -2.0, -2.0], [-1.0], []))
    assert found["per_token"] == pytest.approx((3 - 1) / 4)
    assert found["per_token_low_variance"] == pytest.approx((3 / math.e + math.e - 2) / 4)
    assert found["per_sequence"] == pytest.approx((3 - 1) / 3)
    assert found["per_sequence_low_variance"] == pytest.approx((3 / math.e + math.e - 2) / 3)
    assert estimate_kl(tensors([], []), tensors([], [])) == dict.fromkeys(NAMES, 0.0)


def test_a_policy_that_is_the_reference_has_no_drift() -> None:
    log_probs = list(torch.randn(4, 7, generator=torch.Generator().manual_seed(0)) * 5 - 10)
    found = estimate_kl(log_probs, [row.clone() for row in log_probs])
    assert {name: repr(value) for name, value in found.items()} == dict.fromkeys(NAMES, "0.0")  # and not -0.0


def test_the_low_variance_estimate_of_two_policies_that_are_close() -> None:
    """r^2 / 2, of which exp(r) - r - 1 would leave no digit."""
    policy = torch.tensor([-3.0], dtype=torch.float64)
    for r in (1e-6, -1e-6):
        assert estimate_kl([policy], [policy + r])["per_token_low_variance"] == pytest.approx(5e-13, rel=1e-3, abs=0)


@pytest.mark.parametrize(
    ("policy", "reference"),
    [
        ([0.5, 0.5], [0.25, 0.75]),
        ([0.25] * 4, [0.97, 0.01, 0.01, 0.01]),
    ],
)
def test_both_estimates_are_the_exact_kl_in_expectation(policy: list[float], reference: list[float]) -> None:
    """The mean over all tokens, each with the policy's probability; nothing is sampled."""
    exact = sum(p * math.log(p / q) for p, q in zip(policy, reference, strict=True))
    by_token = [
        estimate_kl([torch.tensor([p], dtype=torch.float64).log()], [torch.tensor([q], dtype=torch.float64).log()])
        for p, q in zip(policy, reference, strict=True)
    ]
    for name in NAMES:
        assert sum(p * found[name] for p, found in zip(policy, by_token, strict=True)) == pytest.approx(exact, abs=1e-12)


def test_a_kl_term_beyond_float32_points_the_right_way() -> None:
    """The reference finds a token exp(200) times as likely: its log-probability is to rise."""
    log_probs = torch.tensor([-201.0, -1.0], requires_grad=True)
    term = kl_term(log_probs, torch.tensor([-1.0, -1.0]))
    term.sum().backward()
    assert term.isfinite().all() and log_probs.grad is not None and log_probs.grad.isfinite().all()
    assert log_probs.grad[0] <= -200.0 and log_probs.grad[1] == 0.0


# ----------------------------------------------------------------------------------------------------------- mismatch


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

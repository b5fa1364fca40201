"""KL estimates of the drift from the starting policy: by hand, in expectation, and in the real loop."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from learner_parts import config, learner_of, log_probs_alone, rollouts
from torch import Tensor
from training_parts import read_csv, same_weights, scored, train

from grpo.learner.kl import ESTIMATORS, estimate_kl
from grpo.learner.learner import Learner
from grpo.rollout.transformers_engine import TransformersEngine
from grpo.training.grpo import train_grpo

NAMES = ["per_token", "per_token_low_variance", "per_sequence", "per_sequence_low_variance"]


def tensors(*rows: list[float]) -> list[Tensor]:
    return [torch.tensor(row) for row in rows]


# ---------------------------------------------------------------------------------------------------------- estimates


def test_estimates_by_hand() -> None:
    """Three tokens in two responses; the reference finds them half, twice and four times as likely."""
    policy = tensors([math.log(0.5), math.log(0.25)], [math.log(0.125)])
    reference = tensors([math.log(0.25), math.log(0.5)], [math.log(0.5)])
    log_2 = math.log(2)
    # -r is log 2, -log 2, -2 log 2; exp(r) - r - 1 is 1/2 + log 2 - 1, 2 - log 2 - 1, 4 - 2 log 2 - 1.
    sampled, low_variance = -2 * log_2, 3.5 - 2 * log_2
    assert estimate_kl(policy, reference) == pytest.approx(
        {
            "per_token": sampled / 3,
            "per_token_low_variance": low_variance / 3,
            "per_sequence": sampled / 2,
            "per_sequence_low_variance": low_variance / 2,
        },
        abs=1e-6,
    )


def test_responses_count_by_their_tokens_and_empty_ones_as_responses() -> None:
    found = estimate_kl(tensors([-1.0, -1.0, -1.0], [-2.0], []), tensors([-2.0, -2.0, -2.0], [-1.0], []))
    assert found["per_token"] == pytest.approx((3 - 1) / 4)
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


@pytest.mark.parametrize("name", ESTIMATORS)
def test_a_kl_term_beyond_float32_points_the_right_way(name: str) -> None:
    """The reference finds a token exp(200) times as likely: its log-probability is to rise."""
    log_probs = torch.tensor([-201.0, -1.0], requires_grad=True)
    term = ESTIMATORS[name](log_probs, torch.tensor([-1.0, -1.0]))
    term.sum().backward()
    assert term.isfinite().all() and log_probs.grad is not None and log_probs.grad.isfinite().all()
    assert log_probs.grad[0] <= -200.0 and log_probs.grad[1] == 0.0


# -------------------------------------------------------------------------------------------------------- the learner


def test_drift_is_that_of_the_current_weights_from_the_first_ones(model: Any) -> None:
    batch, learner = rollouts(), learner_of(model, sampling_temperature=0.8, measure_kl=True)
    assert learner.drift(batch) == {f"kl/{name}": 0.0 for name in NAMES}
    with torch.no_grad():
        for parameter in learner.model.parameters():
            parameter.mul_(1.05)
        r = [(log_probs_alone(model, x, 0.8) - log_probs_alone(learner.model, x, 0.8)).double() for x in batch]
    tokens = sum(len(x) for x in r)
    sampled, low_variance = -sum(x.sum().item() for x in r), sum((x.exp() - x - 1).sum().item() for x in r)
    assert low_variance > 0.01
    expected = [sampled / tokens, low_variance / tokens, sampled / 8, low_variance / 8]
    found = learner.drift(batch)
    assert found == pytest.approx({f"kl/{name}": value for name, value in zip(NAMES, expected, strict=True)}, rel=1e-3)
    known = scored(batch, torch.zeros(8), torch.zeros(8), learner.log_probs(batch))
    assert learner.drift(known) == found  # where they are known they need not be computed


def test_without_measure_kl_there_is_no_second_model(model: Any) -> None:
    learner = learner_of(model)
    assert learner.reference is None
    assert learner.drift(rollouts()) == {}


# ------------------------------------------------------------------------------------------------------ in the real loop

LOOP = {
    "n_grpo_steps": 4,
    "learning_rate": 1e-2,
    "rollout_batch_size": 32,
    "train_batch_size": 32,
    "group_size": 8,
    "gradient_accumulation_steps": 2,
    "max_grad_norm": 1.0,
    "sampling_max_tokens": 6,
    "sampling_min_tokens": 0,
    "prompt": "question_only",
}


def in_the_loop(model: Any, tokenizer: Any, folder: Path, **changes: Any) -> tuple[Learner, list[dict[str, float]]]:
    """The learner at the end of a run, and the rows of history.csv."""
    policy, settings = copy.deepcopy(model), config(**LOOP | changes)
    learner = Learner(policy, settings, tokenizer.pad_token_id)
    parts = {"learner": learner, "engine": TransformersEngine(policy, tokenizer)}
    train(train_grpo, settings, None, tokenizer, folder, **parts)
    return learner, read_csv(folder / "history.csv")


UPDATES = [{}, {"epochs_per_rollout_batch": 2, "train_batch_size": 16, "loss_type": "grpo_clip"}]


@pytest.mark.parametrize("changes", UPDATES, ids=["one update", "four updates"])
def test_drift_starts_at_zero_and_grows_and_measuring_it_changes_no_weight(
    model: Any, tokenizer: Any, tmp_path: Path, changes: dict[str, Any]
) -> None:
    learner, history = in_the_loop(model, tokenizer, tmp_path / "run", **changes, measure_kl=True)
    for name in NAMES:
        first = [row[f"kl/{name}"] for row in history if row["step"] == 1]
        later = [row[f"kl/{name}"] for row in history if row["step"] > 1]
        assert first == [0.0] * len(first)  # exactly: it is the same policy, measured in the same way
        assert later and all(math.isfinite(value) and value > 0 for value in later)
        assert later[-1] > later[0]
    for row in history:
        tokens = row["train/response_length"]
        assert row["kl/per_sequence"] == pytest.approx(row["kl/per_token"] * tokens)
        assert row["kl/per_sequence_low_variance"] == pytest.approx(row["kl/per_token_low_variance"] * tokens)
    assert same_weights(learner.reference, model)
    assert not any(torch.equal(p, q) for p, q in zip(learner.model.parameters(), model.parameters(), strict=True))
    assert learner.reference is not None and not any(parameter.requires_grad for parameter in learner.reference.parameters())
    plain, without = in_the_loop(model, tokenizer, tmp_path / "without", **changes)
    assert same_weights(learner.model, plain.model)
    columns = {f"kl/{name}" for name in NAMES}
    assert [{key: value for key, value in row.items() if key not in columns} for row in history] == without

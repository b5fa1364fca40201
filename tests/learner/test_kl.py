"""KL estimates of the drift from the starting policy: by hand, in expectation, and in the real loop."""

from __future__ import annotations

import copy
import csv
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from training_parts import context, never_saved, scored

from grpo.common.records import Completion, Problem, Rollout
from grpo.learner.kl import estimate_kl
from grpo.learner.learner import Learner
from grpo.rollout.transformers_engine import TransformersEngine
from grpo.study.methods import GrpoConfig
from grpo.tracking.run_log import RunLog
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


# -------------------------------------------------------------------------------------------------------- the learner


def config(**changes: Any) -> GrpoConfig:
    values: dict[str, Any] = {
        "n_grpo_steps": 4,
        "learning_rate": 1e-2,
        "rollout_batch_size": 32,
        "train_batch_size": 32,
        "group_size": 8,
        "gradient_accumulation_steps": 2,
        "sampling_max_tokens": 6,
        "sampling_min_tokens": 0,
        "prompt": "question_only",
        "measure_kl": True,
    }
    return GrpoConfig(**values | changes)


def some_rollouts(n: int = 4) -> list[Rollout]:
    problem = Problem("p", "?", "1")
    responses = [tuple(range(10 * i + 1, 10 * i + 3 + i)) for i in range(n)]
    return [Rollout(problem, (5, 6, 7), Completion(r, "", (0.0,) * len(r), "length"), {}) for r in responses]


def test_drift_is_that_of_the_current_weights_from_the_first_ones(model: Any) -> None:
    start, rollouts = copy.deepcopy(model), some_rollouts()
    learner = Learner(model, config(sampling_temperature=0.8), 0)
    assert learner.drift(rollouts) == {f"kl/{name}": 0.0 for name in NAMES}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.05)

    def log_prob(of: Any, r: Rollout) -> Tensor:
        ids = torch.tensor([r.prompt_ids + r.completion.token_ids])
        logits = of(ids).logits[0, len(r.prompt_ids) - 1 : -1] / 0.8
        return logits.log_softmax(-1).gather(-1, torch.tensor(r.completion.token_ids)[:, None])[:, 0].detach().double()

    r = [log_prob(start, x) - log_prob(model, x) for x in rollouts]
    tokens = sum(len(x) for x in r)
    sampled, low_variance = -sum(x.sum().item() for x in r), sum((x.exp() - x - 1).sum().item() for x in r)
    assert low_variance > 0.01
    expected = [sampled / tokens, low_variance / tokens, sampled / 4, low_variance / 4]
    found = learner.drift(rollouts)
    assert found == pytest.approx({f"kl/{name}": value for name, value in zip(NAMES, expected, strict=True)}, rel=1e-3)
    known = scored(rollouts, torch.zeros(4), torch.zeros(4), learner.log_probs(rollouts))
    assert learner.drift(known) == found  # where they are known they need not be computed


def test_without_measure_kl_there_is_no_second_model(model: Any) -> None:
    learner = Learner(model, config(measure_kl=False), 0)
    assert learner.reference is None
    assert learner.drift(some_rollouts()) == {}


# ------------------------------------------------------------------------------------------------------ in the real loop


class NoMlflow:
    """A stand-in for MlflowRun."""

    def log(self, metrics: dict[str, float], step: int) -> None: ...


def contains_a_t(text: str, _: str) -> dict[str, float]:
    found = float("T" in text)
    return {"reward": found, "format_reward": 1.0, "answer_reward": found}


def train(model: Any, tokenizer: Any, folder: Path, settings: GrpoConfig) -> tuple[Learner, list[dict[str, float]]]:
    """A trained copy of ``model`` in its learner, and the rows of history.csv."""
    folder.mkdir()
    policy = copy.deepcopy(model)
    log = RunLog(folder, NoMlflow())  # type: ignore[arg-type]
    engine, learner = TransformersEngine(policy, tokenizer), Learner(policy, settings, tokenizer.pad_token_id)
    problems = [Problem(f"p/{i}", f"Mia has {i} apples.", str(i)) for i in range(20)]
    parts = {"data": problems, "engine": engine, "learner": learner, "tokenizer": tokenizer}
    train_grpo(context(settings, log, never_saved(folder), **parts, reward=contains_a_t))
    log.close()
    with (folder / "history.csv").open(newline="") as file:
        return learner, [{key: float(value) for key, value in row.items()} for row in csv.DictReader(file)]


UPDATES = [{}, {"epochs_per_rollout_batch": 2, "train_batch_size": 16, "loss_type": "grpo_clip"}]


@pytest.mark.parametrize("changes", UPDATES, ids=["one update", "four updates"])
def test_drift_starts_at_zero_and_grows_and_measuring_it_changes_no_weight(
    model: Any, tokenizer: Any, tmp_path: Path, changes: dict[str, Any]
) -> None:
    learner, history = train(model, tokenizer, tmp_path / "run", config(**changes))
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
    assert learner.reference is not None
    assert all(torch.equal(p, q) for p, q in zip(learner.reference.parameters(), model.parameters(), strict=True))
    assert not any(torch.equal(p, q) for p, q in zip(learner.model.parameters(), model.parameters(), strict=True))
    assert not any(parameter.requires_grad for parameter in learner.reference.parameters())
    plain, without = train(model, tokenizer, tmp_path / "without", config(**changes, measure_kl=False))
    assert all(torch.equal(p, q) for p, q in zip(learner.model.parameters(), plain.model.parameters(), strict=True))
    columns = {f"kl/{name}" for name in NAMES}
    assert [{key: value for key, value in row.items() if key not in columns} for row in history] == without

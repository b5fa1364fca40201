"""The learner reads what an environment wrote, and learns what the policy sampled."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
from learner_parts import ADVANTAGES, PROBLEM, REWARDS, config, flat, last_gradients, log_softmax_alone
from torch import Tensor
from training_parts import scored

from grpo.common.records import Completion, Rollout
from grpo.learner.learner import Learner
from grpo.learner.microbatches import texts_of
from grpo.study.settings import LearnerSettings

# Of each episode the lengths of the policy's and of the environment's pieces, in turn; in the last the policy wrote one piece.
PIECES = [(3, 4, 2), (1, 1, 1, 5, 6), (5, 2, 1), (2, 7, 3), (4, 1, 4), (1, 3, 1), (2, 2, 2, 2, 2), (6,)]


def episodes() -> list[Rollout]:
    rng, found = random.Random(5), []
    for i, pieces in enumerate(PIECES):
        prompt = tuple(random.Random(i // 4).randrange(1, 512) for _ in range(4))
        ends = [sum(pieces[: n + 1]) for n in range(len(pieces))]
        observations = tuple((ends[n - 1], ends[n]) for n in range(1, len(pieces), 2))
        ids = tuple(rng.randrange(1, 512) for _ in range(sum(pieces)))
        log_probs = (-1.0,) * sum(pieces[::2])
        found.append(Rollout(PROBLEM, prompt, Completion(ids, "", log_probs, "stop", 0, observations), {}))
    return found


def by_hand(model: Any, episode: Rollout) -> Tensor:
    """Log-probs of the sampled tokens from one forward pass over the text alone, chosen by a mask."""
    completion = episode.completion
    mask = torch.tensor([not any(a <= i < b for a, b in completion.observations) for i in range(len(completion.token_ids))])
    every = log_softmax_alone(model, episode).gather(-1, torch.tensor(completion.token_ids)[:, None])[:, 0]
    return every[mask]


WAYS = {
    "packed": LearnerSettings(max_tokens_per_microbatch=40),
    "padded by budget": LearnerSettings(max_tokens_per_microbatch=40, packing=False),
    "padded": LearnerSettings(),
}


@pytest.mark.parametrize("way", WAYS)
def test_log_probs_are_those_of_the_sampled_tokens(fresh_model: Any, way: str) -> None:
    batch = episodes()
    learner = Learner(copy.deepcopy(fresh_model), config(), 0, WAYS[way])
    for found, episode in zip(learner.log_probs(batch), batch, strict=True):
        assert len(found) == episode.length == len(episode.completion.log_probs)
        assert torch.allclose(found, by_hand(fresh_model, episode), atol=1e-5)


@pytest.mark.parametrize("normalization", ["masked_mean", "masked_normalize", "token_mean"])
@pytest.mark.parametrize("loss", ["grpo_clip", "grpo_no_clip", "gspo", "cispo", "reinforce_with_baseline"])
@pytest.mark.parametrize("way", WAYS)
def test_the_gradient_is_that_of_a_mask_by_hand(fresh_model: Any, way: str, loss: str, normalization: str) -> None:
    """On-policy the gradient of every loss is that of -A log p; its weight divides by sampled tokens."""
    batch = scored(episodes(), REWARDS, ADVANTAGES)
    reference = copy.deepcopy(fresh_model)
    tokens = sum(each.length for each in batch)
    total = torch.zeros(())
    for episode in batch:
        weight = {
            "masked_mean": 1 / episode.length / len(batch),
            "masked_normalize": 1 / 16 / len(batch),
            "token_mean": 1 / tokens,
        }[normalization]
        total = total - episode.advantage * weight * by_hand(reference, episode).sum()
    total.backward()
    expected = torch.cat([p.grad.flatten() for p in reference.parameters()])
    settings = {"loss_type": loss, "length_normalization": normalization}
    learner = Learner(copy.deepcopy(fresh_model), config(**settings), 0, WAYS[way])
    gradients = last_gradients(learner)
    metrics = learner.update(batch)
    assert (flat(gradients) - expected).norm() / expected.norm() < 1e-5
    mismatch = torch.cat([by_hand(fresh_model, each) + 1.0 for each in batch]).abs().mean().item()
    assert metrics["mismatch_mean"] == pytest.approx(mismatch, rel=1e-4)  # a mean over sampled tokens


@pytest.mark.parametrize("way", WAYS)
def test_fine_tuning_learns_the_sampled_tokens(fresh_model: Any, way: str) -> None:
    batch, reference = episodes(), copy.deepcopy(fresh_model)
    (-sum(by_hand(reference, each).sum() for each in batch) / len(batch)).backward()  # type: ignore[union-attr]
    expected = torch.cat([p.grad.flatten() for p in reference.parameters()])
    learner = Learner(copy.deepcopy(fresh_model), config(), 0, WAYS[way])
    gradients = last_gradients(learner)
    learner.sft_update(texts_of(batch))
    assert (flat(gradients) - expected).norm() / expected.norm() < 1e-5

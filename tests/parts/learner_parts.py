"""What tests of the learner give to it: rollouts of random tokens, their rewards, and the gradients of its steps."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor

from grpo.common.records import Completion, Problem, Rollout
from grpo.learner.learner import Learner
from grpo.study.methods import GrpoConfig

PROBLEM = Problem("p", "?", "1")
LOSS_TYPES = ["no_baseline", "reinforce_with_baseline", "grpo_no_clip", "grpo_clip"]
LENGTHS = (5, 1, 9, 3, 12, 7, 2, 4)


def rollout(prompt_length: int, response_length: int, seed: int) -> Rollout:
    rng = random.Random(seed)
    prompt = tuple(rng.randrange(1, 512) for _ in range(prompt_length))
    response = tuple(rng.randrange(1, 512) for _ in range(response_length))
    return Rollout(PROBLEM, prompt, Completion(response, "", (0.0,) * response_length, "length"), {})


def rollouts(lengths: tuple[int, ...] = LENGTHS) -> list[Rollout]:
    return [rollout(3 + i % 4, n, seed=i) for i, n in enumerate(lengths)]


def rollouts_of(lengths: list[list[int]], prompts: list[int], vocabulary: int, seed: int = 0) -> list[Rollout]:
    """Random rollouts: for each group the lengths of its responses, and the length of its prompt."""
    rng = random.Random(seed)
    made = []
    for g, (group, p) in enumerate(zip(lengths, prompts, strict=True)):
        prompt = tuple(rng.randrange(1, vocabulary) for _ in range(p))
        for n in group:
            completion = Completion(tuple(rng.randrange(1, vocabulary) for _ in range(n)), "", (0.0,) * n, "stop")
            made.append(Rollout(Problem(f"p/{g}", "", ""), prompt, completion, {}))
    return made


def config(**changes: Any) -> GrpoConfig:
    values: dict[str, Any] = {
        "rollout_batch_size": 8,
        "train_batch_size": 8,
        "group_size": 4,
        "gradient_accumulation_steps": 1,
        "sampling_max_tokens": 16,
        "learning_rate": 1e-3,
        "max_grad_norm": 1e9,
    }
    return GrpoConfig(**values | changes)


REWARDS = torch.tensor([1.0, 0, 0, 1, 0, 1, 1, 1])
ADVANTAGES = torch.tensor([1.5, -0.5, -0.25, 1.0, -2.0, 0.75, 0.5, -1.0])


def off_policy(learner: Learner, batch: list[Rollout]) -> list[Tensor]:
    """Old log-probabilities away from the current ones by up to .5, so that some tokens are clipped."""
    generator = torch.Generator().manual_seed(7)
    return [lp + torch.rand(lp.shape, generator=generator) - 0.5 for lp in learner.log_probs(batch)]


def last_gradients(learner: Learner) -> dict[str, Tensor]:
    """By parameter the gradients, clipped, of the next step, and of each after it, of a learner in float32."""
    seen: dict[str, Tensor] = {}
    take_step = learner.optimizer.adamw.step

    def keep_and_take_step() -> None:
        seen.update({name: p.grad.clone() for name, p in learner.model.named_parameters() if p.grad is not None})
        take_step()

    learner.optimizer.adamw.step = keep_and_take_step
    return seen


def flat(gradients: dict[str, Tensor]) -> Tensor:
    """All of them in one vector."""
    return torch.cat([gradient.flatten() for gradient in gradients.values()])

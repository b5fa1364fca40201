"""What tests of the learner give to it: rollouts of random tokens, their rewards, and the gradients of its steps."""

import copy
import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from training_parts import scored

from grpo.common.records import Completion, Problem, Rollout
from grpo.learner.learner import Learner
from grpo.study.config import GrpoConfig, LearnerSettings

PROBLEM = Problem("p", "?", "1")
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


def learner_of(model: Any, budget: int | None = None, packing: bool = True, **changes: Any) -> Learner:
    """A learner of a copy of the model."""
    settings = LearnerSettings(max_tokens_per_microbatch=budget, packing=packing)
    return Learner(copy.deepcopy(model), config(**changes), 0, settings)


def off_policy(learner: Learner, batch: list[Rollout]) -> list[Tensor]:
    """Old log-probabilities away from the current ones by up to .5, so that some tokens are clipped."""
    generator = torch.Generator().manual_seed(7)
    return [lp + torch.rand(lp.shape, generator=generator) - 0.5 for lp in learner.log_probs(batch)]


def updated(learner: Learner, advantages: Tensor = ADVANTAGES) -> tuple[dict[str, float], dict[str, Tensor]]:
    """Metrics and gradients of one off-policy update."""
    batch, gradients = rollouts(), last_gradients(learner)
    metrics = learner.update(scored(batch, REWARDS, advantages, off_policy(learner, batch)))
    return metrics, gradients


def log_softmax_alone(model: Any, rollout: Rollout, temperature: float = 1.0) -> Tensor:
    """Log-softmax (response length, vocabulary) at a response's tokens, from a forward pass over prompt and response alone."""
    logits = model(torch.tensor([rollout.prompt_ids + rollout.completion.token_ids])).logits
    return torch.log_softmax(logits[0, len(rollout.prompt_ids) - 1 : -1].float() / temperature, dim=-1)


def log_probs_alone(model: Any, rollout: Rollout, temperature: float = 1.0) -> Tensor:
    """Log-probabilities (response length,) of a response from a forward pass over it alone."""
    chosen = torch.tensor(rollout.completion.token_ids, dtype=torch.long)[:, None]
    return log_softmax_alone(model, rollout, temperature).gather(-1, chosen)[:, 0]


def as_rollouts(prompts: Sequence[Sequence[int]], groups: Sequence[Sequence[Completion]]) -> list[Rollout]:
    """The completions that an engine gave of the prompts."""
    return [Rollout(PROBLEM, tuple(p), c, {}) for p, group in zip(prompts, groups, strict=True) for c in group]


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

"""The gradients of a learner's steps, which it frees itself."""

from __future__ import annotations

import torch
from torch import Tensor

from grpo.learner.learner import Learner


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

"""The learner: turns a batch of scored rollouts into optimizer steps."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from grpo.config import GrpoConfig
from grpo.objective.kl import estimate_kl
from grpo.objective.log_probs import get_response_log_probs, pad_and_shift
from grpo.objective.losses import grpo_microbatch_train_step
from grpo.records import Rollout


@dataclass(frozen=True)
class Batch:
    """Scored rollouts, those of a group side by side.

    Attributes:
        raw_rewards, advantages: (len(rollouts),).
        old_log_probs: for each rollout the log-probabilities (response length,) of its tokens under the policy that
            sampled them; None where the first update is still to come, so that the old policy is the current one.
    """

    rollouts: list[Rollout]
    raw_rewards: Tensor
    advantages: Tensor
    old_log_probs: list[Tensor] | None = None

    def slice(self, start: int, stop: int) -> Batch:
        """The rollouts from ``start`` up to but without ``stop``."""
        old = None if self.old_log_probs is None else self.old_log_probs[start:stop]
        return Batch(self.rollouts[start:stop], self.raw_rewards[start:stop], self.advantages[start:stop], old)


class Learner:
    """A policy with its optimizer (AdamW, betas 0.9 and 0.95, no weight decay, as in the handout).

    Where ``config.measure_kl`` is set it also holds the weights it started from, frozen.
    """

    def __init__(self, model: Any, config: GrpoConfig, pad_token_id: int):
        # Training mode, because gradient checkpointing does nothing without it; the models trained here have no dropout.
        self.model = model.train()
        self.config = config
        self.pad_token_id = pad_token_id
        self.reference = copy.deepcopy(model).requires_grad_(False) if config.measure_kl else None
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=config.learning_rate, betas=(0.9, 0.95), weight_decay=0.0)

    def log_probs(self, rollouts: list[Rollout], model: Any = None) -> list[Tensor]:
        """Log-probabilities (response length,) of each rollout's tokens, without gradient.

        Args:
            model: whose; the policy's, with its current weights, if not given.
        """
        result = []
        for start in range(0, len(rollouts), self.config.micro_train_batch_size):
            micro = rollouts[start : start + self.config.micro_train_batch_size]
            with torch.inference_mode():
                log_probs, mask, _ = self._forward(micro, model)
            # Cloned outside inference mode, because autograd refuses tensors made inside it.
            result += [row[keep].clone() for row, keep in zip(log_probs, mask, strict=True)]
        return result

    def drift(self, rollouts: list[Rollout], policy_log_probs: list[Tensor] | None) -> dict[str, float]:
        """KL(policy || starting weights) by :func:`grpo.objective.kl.estimate_kl`; empty where it is not measured.

        Args:
            rollouts: sampled by the policy as it is now.
            policy_log_probs: its log-probabilities of them, where they are known.
        """
        if self.reference is None:
            return {}
        estimates = estimate_kl(policy_log_probs or self.log_probs(rollouts), self.log_probs(rollouts, self.reference))
        return {f"kl/{name}": value for name, value in estimates.items()}

    def token_entropies(self, rollouts: list[Rollout]) -> list[float]:
        """Mean entropy in nats over each rollout's response tokens, under the current weights."""
        with torch.inference_mode():
            _, mask, entropy = self._forward(rollouts)
        return [row[keep].mean().item() for row, keep in zip(entropy, mask, strict=True)]

    def update(self, batch: Batch) -> dict[str, float]:
        """One optimizer step on one train batch, in ``gradient_accumulation_steps`` microbatches.

        A step whose gradient is not finite would ruin the weights for good, so it is skipped.

        Returns:
            loss; gradient norm before clipping; and over the batch's response tokens mean entropy (nats), share of
            clipped tokens, and mean, smallest and largest ratio pi / pi_old; ``skipped_update`` (1 or 0).
        """
        config, size = self.config, self.config.micro_train_batch_size
        totals = {"loss": 0.0, "tokens": 0.0, "entropy": 0.0, "ratio": 0.0, "clipped": 0.0}
        smallest, largest = float("inf"), float("-inf")
        self.optimizer.zero_grad(set_to_none=True)
        for start in range(0, len(batch.rollouts), size):
            micro = batch.slice(start, start + size)
            policy_log_probs, mask, entropy = self._forward(micro.rollouts)
            loss, metadata = grpo_microbatch_train_step(
                policy_log_probs,
                mask,
                config.gradient_accumulation_steps,
                config.loss_type,
                raw_rewards=micro.raw_rewards[:, None].to(mask.device),
                advantages=micro.advantages[:, None].to(mask.device),
                old_log_probs=_place(micro.old_log_probs, policy_log_probs, mask),
                cliprange=config.cliprange,
                length_normalization=config.length_normalization,
                constant_normalizer=config.sampling_max_tokens,
            )
            ratio = metadata["ratio"][mask]
            totals["loss"] += loss.item()
            totals["tokens"] += mask.sum().item()
            totals["entropy"] += entropy[mask].sum().item()
            totals["ratio"] += ratio.sum().item()
            totals["clipped"] += metadata["clipped"][mask].sum().item()
            if len(ratio):
                smallest, largest = min(smallest, ratio.min().item()), max(largest, ratio.max().item())
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), config.max_grad_norm)
        finite = bool(torch.isfinite(norm))
        if finite:
            self.optimizer.step()
        tokens = max(1.0, totals["tokens"])
        return {
            "loss": totals["loss"],
            "gradient_norm": norm.item(),
            "token_entropy": totals["entropy"] / tokens,
            "clip_fraction": totals["clipped"] / tokens,
            "ratio_mean": totals["ratio"] / tokens,
            "ratio_min": smallest,
            "ratio_max": largest,
            "skipped_update": 0.0 if finite else 1.0,
            "learning_rate": self.optimizer.param_groups[0]["lr"],
        }

    def _forward(self, rollouts: list[Rollout], model: Any = None) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probabilities, response mask and entropy, each (rollouts, length)."""
        tensors = pad_and_shift([r.prompt_ids for r in rollouts], [r.completion.token_ids for r in rollouts], self.pad_token_id)
        tensors = {key: value.to(self.model.device) for key, value in tensors.items()}
        output = get_response_log_probs(
            model or self.model,
            tensors["input_ids"],
            tensors["labels"],
            return_token_entropy=True,
            temperature=self.config.sampling_temperature,
        )
        return output["log_probs"], tensors["response_mask"], output["token_entropy"]


def _place(old_log_probs: list[Tensor] | None, policy_log_probs: Tensor, mask: Tensor) -> Tensor:
    """Old log-probabilities in the layout of the current ones; those themselves where no update has happened yet."""
    placed = policy_log_probs.detach().clone()
    if old_log_probs is not None:
        placed[mask] = torch.cat(old_log_probs)
    return placed

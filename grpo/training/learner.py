"""The learner: turns a batch of scored rollouts into optimizer steps.

A batch is computed in microbatches, either packed (:mod:`grpo.training.packing`) or padded. Both give the same gradient, as
each token's weight is worked out over the whole batch before it is cut; the padded path is the reference.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from grpo.config import GrpoConfig
from grpo.models.shared_prompt import NO_MASK
from grpo.objective.chunked import chunked_log_probs
from grpo.objective.kl import estimate_kl
from grpo.objective.log_probs import get_response_log_probs, pad_and_shift
from grpo.objective.losses import grpo_microbatch_train_step
from grpo.objective.masking import response_weights
from grpo.records import Rollout
from grpo.training.packing import PackedRow, fill_rows, pack


@dataclass(frozen=True)
class Microbatch:
    """Some responses of a batch, computed.

    Attributes:
        members: their positions in the batch.
        log_probs, entropy: (members, length), of the response tokens where ``mask`` is true.
    """

    members: list[int]
    log_probs: Tensor
    mask: Tensor
    entropy: Tensor


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

    Args:
        max_tokens_per_microbatch: budget of a packed row, for which the model must have been loaded with shared-prompt
            attention; None computes padded microbatches of ``config.micro_train_batch_size`` responses.
    """

    def __init__(self, model: Any, config: GrpoConfig, pad_token_id: int, max_tokens_per_microbatch: int | None = None):
        # Training mode, because gradient checkpointing does nothing without it; the models trained here have no dropout.
        self.model = model.train()
        self.config = config
        self.pad_token_id = pad_token_id
        self.max_tokens = max_tokens_per_microbatch
        self.reference = copy.deepcopy(model).requires_grad_(False) if config.measure_kl else None
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=config.learning_rate, betas=(0.9, 0.95), weight_decay=0.0)

    def log_probs(self, rollouts: list[Rollout], model: Any = None) -> list[Tensor]:
        """Log-probabilities (response length,) of each rollout's tokens, without gradient.

        Args:
            model: whose; the policy's, with its current weights, if not given.
        """
        result = [torch.empty(0, device=self.model.device) for _ in rollouts]
        with torch.no_grad():
            for micro in self._microbatches(rollouts, model):
                for i, row, keep in zip(micro.members, micro.log_probs, micro.mask, strict=True):
                    result[i] = row[keep]
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
        """Mean entropy in nats over each rollout's response tokens, under the current weights; NaN where it has none."""
        result = [float("nan") for _ in rollouts]
        with torch.no_grad():
            for micro in self._microbatches(rollouts):
                for i, row, keep in zip(micro.members, micro.entropy, micro.mask, strict=True):
                    result[i] = row[keep].mean().item()
        return result

    def update(self, batch: Batch) -> dict[str, float]:
        """One optimizer step on one train batch.

        A step whose gradient is not finite would ruin the weights for good, so it is skipped.

        Returns:
            loss; gradient norm before clipping; and over the batch's response tokens mean entropy (nats), share of
            clipped tokens, and mean, smallest and largest ratio pi / pi_old; ``skipped_update`` (1 or 0).
        """
        config = self.config
        lengths = torch.tensor([len(r.completion.token_ids) for r in batch.rollouts])
        weights = response_weights(
            lengths, config.length_normalization, len(lengths), config.micro_train_batch_size, config.sampling_max_tokens
        )
        totals = {"loss": 0.0, "tokens": 0.0, "entropy": 0.0, "ratio": 0.0, "clipped": 0.0}
        smallest, largest = float("inf"), float("-inf")
        self.optimizer.zero_grad(set_to_none=True)
        for micro in self._microbatches(batch.rollouts):
            mask = micro.mask
            loss, metadata = grpo_microbatch_train_step(
                micro.log_probs,
                mask,
                config.gradient_accumulation_steps,
                config.loss_type,
                raw_rewards=batch.raw_rewards[micro.members, None].to(mask.device),
                advantages=batch.advantages[micro.members, None].to(mask.device),
                old_log_probs=_place(batch.old_log_probs, micro),
                cliprange=config.cliprange,
                weights=weights[micro.members].to(mask.device),
            )
            ratio = metadata["ratio"][mask]
            totals["loss"] += loss.item()
            totals["tokens"] += mask.sum().item()
            totals["entropy"] += micro.entropy[mask].sum().item()
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

    def _microbatches(self, rollouts: list[Rollout], model: Any = None) -> Iterator[Microbatch]:
        """The batch, computed piece by piece, so that one piece's activations are freed before the next."""
        model = self.model if model is None else model
        prompts, responses = [r.prompt_ids for r in rollouts], [r.completion.token_ids for r in rollouts]
        temperature = self.config.sampling_temperature
        if self.max_tokens is not None:
            for segments in fill_rows(prompts, responses, self.max_tokens):
                yield _packed(model, pack(segments, prompts, responses), temperature)
            return
        size = self.config.micro_train_batch_size
        for start in range(0, len(rollouts), size):
            members = list(range(start, min(start + size, len(rollouts))))
            tensors = pad_and_shift([prompts[i] for i in members], [responses[i] for i in members], self.pad_token_id)
            tensors = {key: value.to(model.device) for key, value in tensors.items()}
            output = get_response_log_probs(model, tensors["input_ids"], tensors["labels"], True, temperature)
            yield Microbatch(members, output["log_probs"], tensors["response_mask"], output["token_entropy"])


def _packed(model: Any, row: PackedRow, temperature: float) -> Microbatch:
    """One packed row through the model; logits are computed for response tokens only, a few at a time."""
    device = model.device
    hidden = model.base_model(
        input_ids=row.input_ids.to(device),
        position_ids=row.position_ids.to(device),
        attention_mask=NO_MASK,
        use_cache=False,
        shared=row.layout.block_mask(device) if device.type == "cuda" else row.layout,
    ).last_hidden_state[0]
    weight = model.get_output_embeddings().weight
    computed = chunked_log_probs(hidden.index_select(0, row.source.to(device)), weight, row.labels.to(device), temperature)
    log_probs, entropy = (pad_sequence(list(torch.split(flat, row.lengths)), batch_first=True) for flat in computed)
    mask = torch.arange(log_probs.shape[1], device=device) < torch.tensor(row.lengths, device=device)[:, None]
    return Microbatch(row.members, log_probs, mask, entropy)


def _place(old_log_probs: list[Tensor] | None, micro: Microbatch) -> Tensor:
    """Old log-probabilities in the layout of the current ones; those themselves where no update has happened yet."""
    placed = micro.log_probs.detach().clone()
    if old_log_probs is not None:
        placed[micro.mask] = torch.cat([old_log_probs[i] for i in micro.members])
    return placed

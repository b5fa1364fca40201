"""Tensors of a train batch that the loss needs besides the tokens; built once per update."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from grpo.common.records import Rollout, response_tokens
from grpo.learner.microbatches import Microbatch


@dataclass(frozen=True)
class TrainBatch:
    """The scored responses of a train batch, or of one of its microbatches.

    Attributes:
        old_log_probs: (responses, longest) log-probs in the ratio's denominator (:func:`grpo.training.step.train_on`), padded
            with 0; None if the current policy is the denominator.
        reference_log_probs: (responses, longest) under the starting weights; None without a KL term.
        engine_log_probs: (responses, longest) as the engine reported them when it drew the tokens.
        advantages, raw_rewards, groups: (responses, 1).
        weights: (responses, 1), weight of each token of a response.
        n_tokens, n_responses: of the whole optimizer batch.
    """

    old_log_probs: Tensor | None
    reference_log_probs: Tensor | None
    engine_log_probs: Tensor
    advantages: Tensor
    raw_rewards: Tensor
    groups: Tensor
    weights: Tensor
    n_tokens: int
    n_responses: int

    @classmethod
    def of(cls, rollouts: Sequence[Rollout], weights: Tensor, device: Any) -> TrainBatch:
        """Build the batch of all rollouts, with ``weights`` (responses,), on a device."""
        old = given_log_probs(rollouts, "old_log_probs")
        reference = given_log_probs(rollouts, "reference_log_probs")

        def padded(log_probs: list[Tensor]) -> Tensor:
            return pad_sequence(log_probs, batch_first=True).to(device, non_blocking=True)

        def column(values: Sequence[float], dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.tensor(values, dtype=dtype)[:, None].to(device, non_blocking=True)

        return cls(
            None if old is None else padded(old),
            None if reference is None else padded(reference),
            padded([torch.tensor(rollout.completion.log_probs) for rollout in rollouts]),
            column([rollout.advantage for rollout in rollouts]),
            column([rollout.rewards["reward"] for rollout in rollouts]),
            column([rollout.group for rollout in rollouts], torch.int64),
            weights[:, None].to(device, non_blocking=True),
            response_tokens(rollouts),
            len(rollouts),
        )

    def part(self, micro: Microbatch) -> TrainBatch:
        """Select a microbatch's members, cut to the longest of them."""
        members = torch.tensor(micro.members).to(micro.mask.device, non_blocking=True)
        selected: dict[str, Any] = {
            name: value.index_select(0, members)[:, : micro.mask.shape[1]].contiguous()
            for name, value in vars(self).items()
            if isinstance(value, Tensor)
        }
        return replace(self, **selected)


def given_log_probs(rollouts: Sequence[Rollout], which: Literal["old_log_probs", "reference_log_probs"]) -> list[Tensor] | None:
    """The old or reference log-probs of rollouts; None if they have none. Either all have them or none."""
    return [found for rollout in rollouts if (found := getattr(rollout, which)) is not None] or None

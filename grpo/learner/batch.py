"""What the loss needs of a train batch besides its tokens, as tensors that are made once an update."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from grpo.common.records import Rollout
from grpo.learner.microbatches import Microbatch
from grpo.models.to_device import send


@dataclass(frozen=True)
class TrainBatch:
    """Scored responses, or some of them.

    Attributes:
        old_log_probs: (responses, longest) of the ratio's denominator (:func:`grpo.training.step.train_on`), behind the tokens
            0; None where that is the current policy.
        engine_log_probs: as the engine reported them when it drew the tokens.
        advantages, raw_rewards: (responses, 1).
        weights: (responses, 1) how much each token of a response counts.
    """

    old_log_probs: Tensor | None
    engine_log_probs: Tensor
    advantages: Tensor
    raw_rewards: Tensor
    weights: Tensor

    @classmethod
    def of(cls, rollouts: Sequence[Rollout], weights: Tensor, device: Any) -> TrainBatch:
        """Of rollouts and (responses,) their weights, on a device."""
        old = old_log_probs(rollouts)
        engine = [torch.tensor(rollout.completion.log_probs) for rollout in rollouts]
        return cls(
            old if old is None else send(pad_sequence(old, batch_first=True), device),
            send(pad_sequence(engine, batch_first=True), device),
            send(_column(rollout.advantage for rollout in rollouts), device),
            send(_column(rollout.rewards["reward"] for rollout in rollouts), device),
            send(weights[:, None], device),
        )

    def part(self, micro: Microbatch) -> TrainBatch:
        """A microbatch's members, as long as its longest."""
        members, longest = send(torch.tensor(micro.members), micro.mask.device), micro.mask.shape[1]

        def rows(x: Tensor) -> Tensor:
            return x.index_select(0, members)[:, :longest].contiguous()

        return TrainBatch(
            None if self.old_log_probs is None else rows(self.old_log_probs),
            rows(self.engine_log_probs),
            *(x.index_select(0, members) for x in (self.advantages, self.raw_rewards, self.weights)),
        )


def old_log_probs(rollouts: Sequence[Rollout]) -> list[Tensor] | None:
    """Those of the policy that sampled them; None where it is still the current one, which is so for all or for none."""
    found = [rollout.old_log_probs for rollout in rollouts if rollout.old_log_probs is not None]
    return found or None


def _column(values: Iterable[float]) -> Tensor:
    """(len(values), 1) in float32."""
    return torch.tensor(list(values), dtype=torch.float32)[:, None]

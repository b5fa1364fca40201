"""Tensors of a train batch that the loss needs besides the tokens; built once per update."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from grpo.common.records import Rollout
from grpo.learner.microbatches import Microbatch


def batch_tensors(rollouts: Sequence[Rollout], weights: Tensor, device: Any) -> dict[str, Tensor]:
    """Build the tensors of all rollouts on a device.

    Args:
        weights: (responses,), weight of each token of a response.

    Returns:
        ``advantages``, ``raw_rewards`` (0 for NaN), ``groups`` and ``weights``, each (responses, 1); ``engine_log_probs``, as
        the engine reported them when it drew the tokens, and, if the rollouts have them, ``old_log_probs`` in the ratio's
        denominator (:func:`grpo.training.step.train_on`) and ``reference_log_probs`` under the starting weights, each
        (responses, longest), padded with 0.
    """
    columns = {
        "advantages": torch.tensor([rollout.advantage for rollout in rollouts], dtype=torch.float32),
        "raw_rewards": torch.tensor([rollout.rewards["reward"] for rollout in rollouts], dtype=torch.float32).nan_to_num(
            nan=0.0
        ),
        "groups": torch.tensor([rollout.group for rollout in rollouts]),
        "weights": weights,
    }
    log_probs = {
        "engine_log_probs": [torch.tensor(rollout.completion.log_probs) for rollout in rollouts],
        "old_log_probs": given_log_probs(rollouts, "old_log_probs"),
        "reference_log_probs": given_log_probs(rollouts, "reference_log_probs"),
    }
    found = {name: column[:, None] for name, column in columns.items()}
    found |= {name: pad_sequence(rows, batch_first=True) for name, rows in log_probs.items() if rows is not None}
    return {name: tensor.to(device, non_blocking=True) for name, tensor in found.items()}


def of_members(tensors: Mapping[str, Tensor], micro: Microbatch) -> dict[str, Tensor]:
    """Select a microbatch's members, cut to the longest of them."""
    members = torch.tensor(micro.members).to(micro.mask.device, non_blocking=True)
    longest = micro.mask.shape[1]
    return {name: tensor.index_select(0, members)[:, :longest].contiguous() for name, tensor in tensors.items()}


def given_log_probs(rollouts: Sequence[Rollout], which: Literal["old_log_probs", "reference_log_probs"]) -> list[Tensor] | None:
    """The old or reference log-probs of rollouts; None if they have none. Either all have them or none."""
    return [found for rollout in rollouts if (found := getattr(rollout, which)) is not None] or None

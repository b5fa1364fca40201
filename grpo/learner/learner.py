"""The learner: turns a batch of scored rollouts into optimizer steps.

A batch is a list of rollouts, computed in microbatches, packed or padded (:mod:`grpo.learner.microbatches`). Both give the same
gradient, as each token's weight is worked out over the whole batch before it is cut; the padded path is the reference. Several
processes may share the work (:mod:`grpo.common.world`); the gradient is then still the same.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from grpo.common.errors import UserError
from grpo.common.records import Rollout
from grpo.common.world import ALONE, World
from grpo.learner.kl import estimate_kl
from grpo.learner.losses import LossInputs, bind_loss, negative_log_likelihood
from grpo.learner.masking import masked_normalize, response_weights
from grpo.learner.microbatches import Ids, Microbatch, packed_microbatches, padded_microbatches
from grpo.learner.mismatch import importance_weights, mismatch_sums
from grpo.learner.optimizer import Optimizer
from grpo.models.lora import adapter_weights, without_adapters
from grpo.study.methods import GrpoConfig, RunConfig

_MEANS = (  # over a train batch's response tokens
    "token_entropy",
    "clip_fraction",
    "ratio_mean",
    "mismatch_mean",
    "mismatch_above",
    "mismatch_kl",
    "importance_mean",
    "importance_capped",
)
# What is in history.csv anyway, whatever the loss.
_COLUMNS = {
    *("step", "update", "loss", "gradient_norm", "ratio_min", "ratio_max", "mismatch_max", "skipped_update", "learning_rate"),
    *_MEANS,
}


class Learner:
    """A policy with its optimizer.

    Where ``config.measure_kl`` is set it also holds the weights it started from, frozen; with ``config.lora`` the policy holds
    them itself, below its adapters.

    Args:
        model: as :func:`grpo.models.checkpoint.load_model` gives it; with ``config.lora`` it has its adapters.
        max_tokens_per_microbatch: budget of a packed row; None computes padded microbatches of
            ``config.micro_train_batch_size`` responses.
        optimizer: see :class:`grpo.learner.optimizer.Optimizer`.
        offload_reference: keep the starting weights in the CPU's memory while they are not needed.
        world: the processes that share the work; each has a learner of the same model and arguments, and calls its methods
            with the same whole batches.
    """

    def __init__(
        self,
        model: Any,
        config: RunConfig,
        pad_token_id: int,
        max_tokens_per_microbatch: int | None = None,
        optimizer: str = "adamw",
        offload_reference: bool = False,
        world: World = ALONE,
    ):
        # Training mode, because gradient checkpointing does nothing without it; the models trained here have no dropout.
        self.model = model.train()
        self.config = config
        self.pad_token_id = pad_token_id
        self.max_tokens = max_tokens_per_microbatch
        self.measures_kl = isinstance(config, GrpoConfig) and config.measure_kl
        wanted = self.measures_kl and config.lora is None
        self.reference = copy.deepcopy(model).requires_grad_(False) if wanted else None
        self.reference_home = "cpu" if offload_reference else model.device
        if self.reference is not None:
            self.reference.to(self.reference_home)
        if isinstance(config, GrpoConfig):
            self.loss, self.own_metrics = bind_loss(config.loss_type, config.loss_options)
            if taken := [name for name in self.own_metrics if name in _COLUMNS]:
                raise UserError(f"loss_type: {config.loss_type} measures {', '.join(taken)}, as the learner does: rename it.")
        self.optimizer = Optimizer(model, config.learning_rate, optimizer)
        self.world = world

    # ------------------------------------------------------------------------------------------- what the loops call

    def log_probs(self, rollouts: Sequence[Rollout]) -> list[Tensor]:
        """Log-probabilities (response length,) of each rollout's tokens under the current weights, without gradient."""
        return [log_probs for log_probs, _ in self._compute(rollouts)]

    def token_entropies(self, rollouts: Sequence[Rollout]) -> list[float]:
        """Mean entropy in nats over each rollout's response tokens, under the current weights; NaN where it has none."""
        return [entropy.mean().item() for _, entropy in self._compute(rollouts)]

    def drift(self, rollouts: Sequence[Rollout]) -> dict[str, float]:
        """KL(policy || starting weights) by :func:`grpo.learner.kl.estimate_kl`; empty where it is not measured.

        Args:
            rollouts: sampled by the policy as it is now; where they have ``old_log_probs``, these are its own.
        """
        if not self.measures_kl:
            return {}
        reference = [log_probs for log_probs, _ in self._compute(rollouts, of_reference=True)]
        estimates = estimate_kl(_old_log_probs(rollouts) or self.log_probs(rollouts), reference)
        return {f"kl/{name}": value for name, value in estimates.items()}

    def update(self, rollouts: Sequence[Rollout]) -> dict[str, float]:
        """One optimizer step on one train batch of scored rollouts; a step whose gradient is not finite is skipped.

        Returns:
            loss; gradient norm before clipping; and over the batch's response tokens mean entropy (nats), share of
            clipped tokens, and mean, smallest and largest ratio pi / pi_old; between the engine's and the learner's
            log-probabilities under the sampling weights mean and largest absolute difference, share of tokens above
            :data:`grpo.learner.mismatch.NOTICEABLE`, and the sampled KL; with ``importance_cap`` the mean weight and the
            share of tokens at the cap; ``skipped_update`` (1 or 0); means of what the loss measures itself.
        """
        config = self._grpo
        prompts, responses = token_ids(rollouts)
        weights = response_weights(
            torch.tensor([len(ids) for ids in responses]),
            config.length_normalization,
            len(responses),
            config.micro_train_batch_size,
            config.sampling_max_tokens,
        )
        sums = dict.fromkeys(("loss", "tokens", *_MEANS, *self.own_metrics), 0.0)
        extremes = {"ratio_min": float("inf"), "ratio_max": float("-inf"), "mismatch_max": 0.0}
        for micro in self._microbatches(self.model, prompts, responses):
            self._backward(
                [rollouts[i] for i in micro.members], micro, weights[micro.members, None].to(micro.mask.device), sums, extremes
            )
        norm, taken = self._step(sums)
        of_ranks = self.world.all_gather(extremes)
        over_all = {name: (min if name == "ratio_min" else max)(each[name] for each in of_ranks) for name in extremes}
        without = () if config.importance_cap is not None else ("importance_mean", "importance_capped")
        return {
            "loss": sums["loss"],
            "gradient_norm": norm,
            **{name: sums[name] / max(1.0, sums["tokens"]) for name in _MEANS if name not in without},
            **over_all,
            "skipped_update": 0.0 if taken else 1.0,
            "learning_rate": self.optimizer.learning_rate,
            **{name: sums[name] / max(1.0, sums["tokens"]) for name in self.own_metrics},
        }

    def sft_update(self, prompts: Ids, responses: Ids, normalize_constant: float = 1.0) -> dict[str, float]:
        """One optimizer step of supervised fine-tuning: negative log-likelihood, summed over each response's tokens and
        averaged over responses.

        Args:
            prompts, responses: token ids of one optimizer batch.
            normalize_constant: divides each response's sum.

        Returns:
            loss, gradient norm before clipping, mean entropy (nats) and mean negative log-likelihood of a response token.
        """
        sums = dict.fromkeys(("loss", "tokens", "token_entropy", "mean_nll"), 0.0)
        for micro in self._microbatches(self.model, prompts, responses, temperature=1.0):
            mask = micro.mask
            weights = torch.full((len(mask),), 1.0 / len(responses), device=mask.device)
            loss = negative_log_likelihood(micro.log_probs, mask, weights, normalize_constant)
            loss.backward()  # type: ignore[no-untyped-call]
            sums["loss"] += loss.item()
            sums["tokens"] += mask.sum().item()
            sums["token_entropy"] += micro.entropy[mask].sum().item()
            sums["mean_nll"] -= micro.log_probs.detach()[mask].sum().item()
        norm, taken = self._step(sums)
        tokens = max(1.0, sums["tokens"])
        return {
            "loss": sums["loss"],
            "gradient_norm": norm,
            "token_entropy": sums["token_entropy"] / tokens,
            "mean_nll": sums["mean_nll"] / tokens,
            "skipped_update": 0.0 if taken else 1.0,
            "learning_rate": self.optimizer.learning_rate,
        }

    def state(self) -> dict[str, Any]:
        """Everything that training changes: the weights, or the adapters, and the optimizer's state."""
        weights = self.model.state_dict() if self.config.lora is None else adapter_weights(self.model)
        return {"model": weights, "optimizer": self.optimizer.state()}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from a :meth:`state`."""
        self.model.load_state_dict(state["model"], strict=self.config.lora is None)
        self.optimizer.restore(state["optimizer"])

    @property
    def _grpo(self) -> GrpoConfig:
        assert isinstance(self.config, GrpoConfig), "only a GRPO run has rewards to learn from"
        return self.config

    # ------------------------------------------------------------------------------------------- in microbatches

    def _compute(self, rollouts: Sequence[Rollout], of_reference: bool = False) -> list[tuple[Tensor, Tensor]]:
        """Log-probabilities and entropies (response length,) of each response's tokens, without gradient."""
        mine = {}
        with torch.no_grad(), self._starting_model() if of_reference else nullcontext(self.model) as model:
            for micro in self._microbatches(model, *token_ids(rollouts)):
                for i, row, entropy, keep in zip(micro.members, micro.log_probs, micro.entropy, micro.mask, strict=True):
                    mine[i] = row[keep].cpu(), entropy[keep].cpu()
        found = {i: pair for part in self.world.all_gather(mine) for i, pair in part.items()}
        nothing = torch.empty(0), torch.empty(0)
        return [found.get(i, nothing) for i in range(len(rollouts))]

    @contextmanager
    def _starting_model(self) -> Iterator[Any]:
        """The model as it was before training."""
        if self.reference is None:
            with without_adapters(self.model, merge=False) as model:
                yield model
        else:
            yield self.reference.to(self.model.device)
            self.reference.to(self.reference_home)

    def _backward(
        self, rollouts: list[Rollout], micro: Microbatch, weights: Tensor, sums: dict[str, float], extremes: dict[str, float]
    ) -> None:
        """Add a microbatch's gradient to the others', and its tokens to ``sums`` and ``extremes``.

        Args:
            rollouts: the microbatch's members.
            weights: (members, 1) how much each token of a response counts.
        """
        config, mask = self._grpo, micro.mask
        # The learner's and the engine's log-probabilities under the weights that sampled the tokens.
        old = _place(_old_log_probs(rollouts), micro)
        engine = _place([torch.tensor(rollout.completion.log_probs) for rollout in rollouts], micro)
        importance = torch.ones_like(old)
        if config.importance_cap is not None:
            importance = importance_weights(old, engine, config.importance_cap)
        inputs = LossInputs(
            micro.log_probs,
            old,
            advantages=_column(rollout.advantage for rollout in rollouts).to(mask.device),
            raw_rewards=_column(rollout.rewards["reward"] for rollout in rollouts).to(mask.device),
            mask=mask,
            cliprange=config.cliprange,
        )
        per_token, metrics = self.loss(inputs)
        loss = masked_normalize(per_token * (mask * (weights * importance)), mask)
        loss.backward()  # type: ignore[no-untyped-call]
        ratio = inputs.ratio.detach()
        sums["loss"] += loss.item()
        sums["tokens"] += mask.sum().item()
        sums["token_entropy"] += micro.entropy[mask].sum().item()
        if "clipped" in metrics:
            sums["clip_fraction"] += metrics["clipped"][mask].sum().item()
        sums["ratio_mean"] += ratio[mask].sum().item()
        for name in self.own_metrics:
            sums[name] += metrics[name][mask].sum().item()
        sums["importance_mean"] += importance[mask].sum().item()
        sums["importance_capped"] += (importance[mask] >= (config.importance_cap or math.inf)).sum().item()
        for name, value in mismatch_sums(old[mask], engine[mask]).items():
            sums[f"mismatch_{name}"] += value
        if mask.any():
            extremes["ratio_min"] = min(extremes["ratio_min"], ratio[mask].min().item())
            extremes["ratio_max"] = max(extremes["ratio_max"], ratio[mask].max().item())
            extremes["mismatch_max"] = max(extremes["mismatch_max"], (old - engine)[mask].abs().max().item())

    def _step(self, sums: dict[str, float]) -> tuple[float, bool]:
        """All-reduce gradients and sums, and take the step; see :meth:`Optimizer.step`."""
        totals = torch.tensor(list(sums.values()), dtype=torch.float64)
        self.world.all_reduce([*self.optimizer.gradients(), totals])
        sums.update(zip(sums, totals.tolist(), strict=True))
        return self.optimizer.step(self.config.max_grad_norm, sums["loss"])

    def _microbatches(self, model: Any, prompts: Ids, responses: Ids, temperature: float | None = None) -> Iterator[Microbatch]:
        """This process's share of the batch."""
        temperature = self.config.sampling_temperature if temperature is None else temperature
        if self.max_tokens is not None:
            return packed_microbatches(model, prompts, responses, self.max_tokens, temperature, self.world.share)
        size = self.config.micro_train_batch_size
        return padded_microbatches(model, prompts, responses, size, self.pad_token_id, temperature, self.world.share)


def token_ids(rollouts: Sequence[Rollout]) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """The ids of their prompts and those of their responses."""
    return [r.prompt_ids for r in rollouts], [r.completion.token_ids for r in rollouts]


def _column(values: Iterable[float]) -> Tensor:
    """(len(values), 1) in float32."""
    return torch.tensor(list(values), dtype=torch.float32)[:, None]


def _old_log_probs(rollouts: Sequence[Rollout]) -> list[Tensor] | None:
    """Those of the policy that sampled them; None where it is still the current one, which is so for all or for none."""
    found = [rollout.old_log_probs for rollout in rollouts if rollout.old_log_probs is not None]
    return found or None


def _place(log_probs: list[Tensor] | None, micro: Microbatch) -> Tensor:
    """Log-probabilities of a microbatch in the layout of the current ones; those themselves where there are no others yet."""
    placed = micro.log_probs.detach().clone()
    if log_probs is not None:
        placed[micro.mask] = torch.cat(log_probs).to(placed.device)
    return placed

"""The learner: takes optimizer steps on batches of scored rollouts.

A batch is cut into microbatches, packed or padded (:mod:`grpo.learner.microbatches`). Both give the same gradient, because the
weight of each token is computed over the whole batch before the cut; the padded path is the reference. Several processes may
share the work (:mod:`grpo.common.world`) without changing the gradient.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from grpo.common.errors import UserError
from grpo.common.metrics import METRICS
from grpo.common.records import Rollout
from grpo.common.world import ALONE, World
from grpo.learner.batch import TrainBatch, given_log_probs
from grpo.learner.kl import ESTIMATORS, estimate_kl
from grpo.learner.losses import LossInputs, bind_loss, negative_log_likelihood
from grpo.learner.masking import masked_normalize, response_weights
from grpo.learner.microbatches import (
    Ids,
    Microbatch,
    Texts,
    neighbours,
    of_like_length,
    packed_microbatches,
    padded_microbatches,
)
from grpo.learner.mismatch import importance_weights, mismatch_sums
from grpo.learner.optimizer import Optimizer
from grpo.learner.schedule import learning_rate
from grpo.models.lora import adapter_weights, without_adapters
from grpo.models.sharding import is_sharded, load_weights, shard
from grpo.models.traits import traits_of
from grpo.study.methods import GrpoConfig, RunConfig
from grpo.study.settings import LearnerSettings

_MEANS = (  # metrics that are means over a train batch's response tokens
    "token_entropy",
    "clip_fraction",
    "ratio_mean",
    "mismatch_mean",
    "mismatch_above",
    "mismatch_kl",
)
DEFAULTS = LearnerSettings()
_COLUMNS = {"step", "update", *(metric.name for metric in METRICS)}  # the columns of history.csv for every loss


class Learner:
    """A policy with its optimizer.

    With ``config.measure_kl`` or ``config.kl_coefficient`` it also holds a frozen copy of its starting weights; with
    ``config.lora`` these are the weights below the adapters.

    Args:
        model: from :func:`grpo.models.checkpoint.load_model`; with ``config.lora`` it already has its adapters.
        settings: size and kind of microbatches, optimizer, and placement of weights (``fully_shard``:
            :mod:`grpo.models.sharding`). A model that cannot share prompts gets padded microbatches even with ``packing``.
        world: the processes that share the work. Each has a learner with the same arguments, and calls its methods with the
            same whole batches.

    Attributes:
        updates: optimizer steps so far, including skipped ones.
    """

    def __init__(
        self,
        model: Any,
        config: RunConfig,
        pad_token_id: int,
        settings: LearnerSettings = DEFAULTS,
        world: World = ALONE,
    ):
        self.model = model
        self.config = config
        self.pad_token_id = pad_token_id
        self.max_tokens = settings.max_tokens_per_microbatch
        self.packs = settings.packing and self.max_tokens is not None and not traits_of(model).copied_because
        self.measures_kl = isinstance(config, GrpoConfig) and config.measure_kl
        wanted = isinstance(config, GrpoConfig) and config.needs_starting_weights and config.lora is None
        self.reference = copy.deepcopy(model).requires_grad_(False) if wanted else None
        if settings.fully_shard:
            for each in filter(None, (self.reference, model)):
                shard(each, world, settings.device)
        self.offloads = settings.offload_reference
        if self.reference is not None and self.offloads:
            self.reference.to("cpu")
        if isinstance(config, GrpoConfig):
            self.loss, self.own_metrics = bind_loss(config.loss_type, config.loss_options)
            with_cap = ("importance_mean", "importance_capped") if config.importance_cap is not None else ()
            self.means = (*_MEANS, *with_cap, *(("kl_loss",) if config.kl_coefficient else ()))
            if taken := [name for name in self.own_metrics if name in _COLUMNS]:
                raise UserError(f"loss_type: {config.loss_type} measures {', '.join(taken)}, as the learner does: rename it.")
        self.optimizer = Optimizer(model, config.learning_rate, settings.optimizer)
        self.world = world
        self.updates = 0

    # ------------------------------------------------------------------------------------------- what the loops call

    def log_probs(self, rollouts: Sequence[Rollout]) -> list[Tensor]:
        """Log-probs (response length,) of each rollout's tokens under the current weights, without gradient."""
        return [log_probs for log_probs, _ in self._compute(rollouts)]

    def reference_log_probs(self, rollouts: Sequence[Rollout]) -> list[Tensor]:
        """Log-probs as :meth:`log_probs`, under the starting weights, which the configuration must require."""
        return [log_probs for log_probs, _ in self._compute(rollouts, of_reference=True)]

    def token_entropies(self, rollouts: Sequence[Rollout]) -> list[float]:
        """Mean token entropy (nats) of each rollout under the current weights; NaN for a response without tokens."""
        return [entropy.mean().item() for _, entropy in self._compute(rollouts)]

    def drift(self, rollouts: Sequence[Rollout]) -> dict[str, float]:
        """Estimate KL(policy || starting weights) with :func:`grpo.learner.kl.estimate_kl`; empty if it is not measured.

        Args:
            rollouts: sampled by the current policy; their ``old_log_probs``, if set, are its log-probs.
        """
        if not self.measures_kl:
            return {}
        reference = given_log_probs(rollouts, "reference_log_probs") or self.reference_log_probs(rollouts)
        estimates = estimate_kl(given_log_probs(rollouts, "old_log_probs") or self.log_probs(rollouts), reference)
        return {f"kl/{name}": value for name, value in estimates.items()}

    def update(self, rollouts: Sequence[Rollout]) -> dict[str, float]:
        """Take one optimizer step on one train batch of scored rollouts; skip it if its gradient is not finite.

        Returns:
            the metrics of the update:

            - the loss, and the gradient norm before clipping;
            - over response tokens: mean entropy (nats), share of clipped tokens, mean, smallest and largest ratio pi / pi_old;
            - between the engine's and the learner's log-probs under the sampling weights: mean and largest absolute difference,
              share of tokens above :data:`grpo.learner.mismatch.NOTICEABLE`, and sampled KL;
            - with ``importance_cap``, the mean importance weight and the share of tokens at the cap;
            - with ``kl_coefficient``, the mean of the KL term (``kl_loss``);
            - ``skipped_update`` (1 or 0), the learning rate, the means of the loss's own metrics, and :meth:`loss_scale`.
        """
        config, loss_scale = self._grpo, self.loss_scale()
        prompts, responses = token_ids(rollouts)
        weights = response_weights(
            torch.tensor([len(ids) for ids in responses]),
            config.length_normalization,
            len(responses),
            config.micro_train_batch_size,
            config.sampling_max_tokens,
        )
        batch = TrainBatch.of(rollouts, weights, self.model.device)
        totals = self._zeros("loss", "tokens", *self.means, *self.own_metrics)
        extremes = {"ratio_min": math.inf, "ratio_max": -math.inf, "mismatch_max": 0.0}
        extreme = {name: torch.full((), value, device=self.model.device) for name, value in extremes.items()}
        for micro in self._microbatches(self.model, prompts, responses):
            self._backward(batch.part(micro), micro, totals, extreme)
        sums, extremes, norm, taken = self._step(totals, extreme)
        of_ranks = self.world.all_gather(extremes)
        over_all = {name: (min if name == "ratio_min" else max)(each[name] for each in of_ranks) for name in extremes}
        tokens = max(1.0, sums["tokens"])
        return {
            "loss": sums["loss"],
            "gradient_norm": norm,
            **{name: sums[name] / tokens for name in self.means},
            **over_all,
            "skipped_update": 0.0 if taken else 1.0,
            "learning_rate": self.optimizer.learning_rate,
            **{name: sums[name] / tokens for name in self.own_metrics},
            **loss_scale,
        }

    def sft_update(self, prompts: Ids, responses: Ids, normalize_constant: float = 1.0) -> dict[str, float]:
        """Take one step of supervised fine-tuning on the negative log-likelihood, summed over tokens, averaged over responses.

        Args:
            prompts, responses: token ids of one optimizer batch.
            normalize_constant: divides each response's sum.

        Returns:
            loss, gradient norm before clipping, mean entropy and mean negative log-likelihood of a response token (nats),
            ``skipped_update``, the learning rate, and :meth:`loss_scale`.
        """
        loss_scale = self.loss_scale()
        totals = self._zeros("loss", "tokens", "token_entropy", "mean_nll")
        for micro in self._microbatches(self.model, prompts, responses, temperature=1.0):
            mask = micro.mask
            weights = torch.full((len(mask),), 1.0 / len(responses), device=mask.device)
            loss = negative_log_likelihood(micro.log_probs, mask, weights, normalize_constant)
            self.optimizer.backward(loss)
            totals["loss"] += loss.detach()
            totals["tokens"] += len(micro.tokens)
            totals["token_entropy"] += micro.flat(micro.entropy.detach()).sum()
            totals["mean_nll"] -= micro.flat(micro.log_probs.detach()).sum()
        sums, _, norm, taken = self._step(totals, {})
        tokens = max(1.0, sums["tokens"])
        return {
            "loss": sums["loss"],
            "gradient_norm": norm,
            "token_entropy": sums["token_entropy"] / tokens,
            "mean_nll": sums["mean_nll"] / tokens,
            "skipped_update": 0.0 if taken else 1.0,
            "learning_rate": self.optimizer.learning_rate,
            **loss_scale,
        }

    def loss_scale(self) -> dict[str, float]:
        """Loss scale of the next update, as a metric; empty unless the model computes in float16."""
        return {} if self.optimizer.scale is None else {"loss_scale": self.optimizer.scale.value}

    def state(self) -> dict[str, Any]:
        """The state that training changes: weights or adapters, and the optimizer's state."""
        weights = self.model.state_dict() if self.config.lora is None else adapter_weights(self.model)
        return {"model": weights, "optimizer": self.optimizer.state(), "updates": self.updates}

    def restore(self, state: dict[str, Any]) -> None:
        """Resume from a :meth:`state`."""
        load_weights(self.model, state["model"], strict=self.config.lora is None)
        self.optimizer.restore(state["optimizer"])
        self.updates = state["updates"]

    @property
    def _grpo(self) -> GrpoConfig:
        assert isinstance(self.config, GrpoConfig), "only a GRPO run learns from rewards"
        return self.config

    # ------------------------------------------------------------------------------------------- in microbatches

    def _compute(self, rollouts: Sequence[Rollout], of_reference: bool = False) -> list[tuple[Tensor, Tensor]]:
        """Log-probs and entropies (response length,) of each response's tokens, without gradient."""
        prompts, responses = token_ids(rollouts)
        members: list[int] = []
        parts: list[Tensor] = []
        with torch.no_grad(), self._starting_model() if of_reference else nullcontext(self.model) as model:
            for micro in self._microbatches(model, prompts, responses):
                members += micro.members
                parts.append(torch.stack([micro.flat(micro.log_probs), micro.flat(micro.entropy)]))
        computed = torch.cat(parts, dim=1).cpu() if parts else torch.empty(2, 0)
        each = (torch.split(row, [len(responses[i]) for i in members]) for row in computed)
        mine = {i: (log_probs.clone(), entropy.clone()) for i, log_probs, entropy in zip(members, *each, strict=True)}
        found = {i: pair for part in self.world.all_gather(mine) for i, pair in part.items()}
        nothing = torch.empty(0), torch.empty(0)
        return [found.get(i, nothing) for i in range(len(rollouts))]

    @contextmanager
    def _starting_model(self) -> Iterator[Any]:
        """The model with its starting weights."""
        if self.reference is None:
            with without_adapters(self.model, merge=False) as model:
                yield model
        else:
            yield self.reference.to(self.model.device) if self.offloads else self.reference
            if self.offloads:
                self.reference.to("cpu")

    def _backward(self, batch: TrainBatch, micro: Microbatch, totals: dict[str, Tensor], extreme: dict[str, Tensor]) -> None:
        """Add a microbatch's gradient to those before, and its metrics to ``totals`` and ``extreme``, which stay on the device.

        Args:
            batch: the microbatch's members.
        """
        config, mask = self._grpo, micro.mask
        # Log-probs under the sampling weights, from the learner (old) and from the engine.
        old = micro.log_probs.detach() if batch.old_log_probs is None else batch.old_log_probs
        engine = batch.engine_log_probs
        importance = torch.ones_like(old)
        if config.importance_cap is not None:
            importance = importance_weights(old, engine, config.importance_cap)
        inputs = LossInputs(
            micro.log_probs,
            old,
            advantages=batch.advantages,
            raw_rewards=batch.raw_rewards,
            mask=mask,
            cliprange=config.cliprange,
            cliprange_high=config.cliprange_high,
            engine_log_probs=engine,
            groups=batch.groups,
            batch_tokens=batch.n_tokens,
            batch_responses=batch.n_responses,
        )
        per_token, metrics = self.loss(inputs)
        loss = masked_normalize(per_token * (mask * (batch.weights * importance)), mask)
        if config.kl_coefficient:
            assert batch.reference_log_probs is not None, "a KL term needs log-probs under the starting weights"
            kl = ESTIMATORS[config.kl_estimator](micro.log_probs, batch.reference_log_probs)
            loss = loss + config.kl_coefficient * masked_normalize(kl * batch.weights, mask)
            totals["kl_loss"] += micro.flat(kl.detach()).sum()
        if config.entropy_coefficient:
            loss = loss - config.entropy_coefficient * masked_normalize(micro.entropy, mask, constant_normalizer=batch.n_tokens)
        self.optimizer.backward(loss)
        ratio, old, engine = micro.flat(inputs.ratio.detach()), micro.flat(old), micro.flat(engine)
        totals["loss"] += loss.detach()
        totals["tokens"] += len(micro.tokens)
        totals["token_entropy"] += micro.flat(micro.entropy.detach()).sum()
        if "clipped" in metrics:
            totals["clip_fraction"] += micro.flat(metrics["clipped"].detach()).sum()
        totals["ratio_mean"] += ratio.sum()
        for name in self.own_metrics:
            totals[name] += micro.flat(metrics[name].detach()).sum()
        if config.importance_cap is not None:
            weight = micro.flat(importance)
            totals["importance_mean"] += weight.sum()
            totals["importance_capped"] += (weight >= config.importance_cap).sum()
        for name, value in mismatch_sums(old, engine).items():
            totals[f"mismatch_{name}"] += value
        if len(micro.tokens):
            # fmin and fmax ignore NaN.
            extreme["ratio_min"] = torch.fmin(extreme["ratio_min"], ratio.min())
            extreme["ratio_max"] = torch.fmax(extreme["ratio_max"], ratio.max())
            extreme["mismatch_max"] = torch.fmax(extreme["mismatch_max"], (old - engine).abs().max())

    def _zeros(self, *names: str) -> dict[str, Tensor]:
        """Named float64 sums of 0 on the device."""
        return dict(zip(names, torch.zeros(len(names), dtype=torch.float64, device=self.model.device).unbind(), strict=True))

    def _step(
        self, totals: dict[str, Tensor], extreme: dict[str, Tensor]
    ) -> tuple[dict[str, float], dict[str, float], float, bool]:
        """All-reduce gradients and totals, and take the optimizer step.

        Returns:
            the totals over all ranks, the extremes of this rank, the gradient norm before clipping, and whether the step was
            taken.
        """
        over_all = torch.stack(list(totals.values()))
        gradients = [] if is_sharded(self.model) else self.optimizer.gradients()  # FSDP reduces them in the backward pass
        self.world.all_reduce([*gradients, over_all])
        norm = self.optimizer.clip(self.config.max_grad_norm)
        # The only point of an update where the host waits for the device.
        *found, norm_found = torch.cat([over_all, torch.stack([*extreme.values(), norm]).double()]).tolist()
        self.optimizer.learning_rate = learning_rate(self.config, self.updates)
        self.updates += 1
        sums = dict(zip(totals, found[: len(totals)], strict=True))
        extremes = dict(zip(extreme, found[len(totals) :], strict=True))
        return sums, extremes, norm_found, self.optimizer.finish(norm_found, sums["loss"])

    def _microbatches(self, model: Any, prompts: Ids, responses: Ids, temperature: float | None = None) -> Iterator[Microbatch]:
        """Compute this process's share of the batch, microbatch by microbatch.

        Raises:
            UserError: a text is longer than the model's context.
        """
        require_context(model, prompts, responses)
        _compute_as_sampled(model)
        texts = Texts(prompts, responses)
        temperature = self.config.sampling_temperature if temperature is None else temperature
        budget = self.max_tokens
        if budget is None:
            parts = neighbours(len(prompts), self.config.micro_train_batch_size)
        elif self.packs:
            return packed_microbatches(model, texts, budget, temperature, self.world)
        else:
            parts = of_like_length(prompts, responses, budget)
        return padded_microbatches(model, texts, parts, self.pad_token_id, temperature, self.world)


def _compute_as_sampled(model: Any) -> None:
    """Put the model in evaluation mode: with dropout, it would not be the policy that sampled.

    Gradient checkpointing needs training mode, so layers that use it get that mode, but not the modules inside them.
    """
    model.eval()
    for module in model.modules():
        if getattr(module, "gradient_checkpointing", False):
            module.training = True


def require_context(model: Any, prompts: Ids, responses: Ids) -> None:
    """Refuse texts that are longer than the model's context.

    Raises:
        UserError: a text is too long; the message has the greatest length.
    """
    longest = max((len(p) + len(r) for p, r in zip(prompts, responses, strict=True)), default=0)
    context = traits_of(model).context
    if context is not None and longest > context:
        raise UserError(
            f"a prompt and its response have {longest} tokens, and the model's context is {context} tokens. Leave long texts "
            "out, or use a model with a longer context."
        )


def token_ids(rollouts: Sequence[Rollout]) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """Token ids of the prompts and of the responses."""
    return [r.prompt_ids for r in rollouts], [r.completion.token_ids for r in rollouts]

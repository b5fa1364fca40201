"""The learner: takes optimizer steps on batches of scored rollouts.

A batch is cut into microbatches, packed or padded (:mod:`grpo.learner.microbatches`). Both give the same gradient, because the
weight of each token is computed over the whole batch before the cut; the padded path is the reference. Several processes may
share the work (:mod:`grpo.common.world`) without changing the gradient.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from grpo.common.errors import UserError
from grpo.common.metrics import METRICS
from grpo.common.records import Rollout, require_tokens, response_tokens
from grpo.common.world import ALONE, World
from grpo.learner import losses, microbatches
from grpo.learner.losses import LossInputs, bind_loss, masked_normalize
from grpo.learner.microbatches import Ids, Microbatch, Texts, compile_head, texts_of
from grpo.learner.optimizer import Optimizer, learning_rate
from grpo.models.checkpoint import compile_layers
from grpo.models.decoding import PADDING
from grpo.models.examine import packing_obstacle, traits_of
from grpo.models.lora import without_adapters
from grpo.models.sharding import is_sharded, load_weights, shard
from grpo.study.config import GrpoConfig, LearnerSettings, RunConfig

# Metrics that are means over a train batch's response tokens.
_MEANS = ("token_entropy", "clip_fraction", "ratio_mean", "mismatch_mean", "mismatch_above", "mismatch_kl")
DEFAULTS = LearnerSettings()
_COLUMNS = {"step", "update", *(metric.name for metric in METRICS)}  # the columns of history.csv for every loss


class Learner:
    """A policy with its optimizer, and with ``config.kl_coefficient`` a frozen copy of its starting weights.

    With ``config.lora`` the starting weights are those below the adapters. ``updates``: optimizer steps so far, including
    skipped ones. Raises UserError: gradient checkpointing would change this model's results, or a metric of the loss has the
    name of another.

    Args:
        model: from :func:`grpo.models.checkpoint.load_model`; with ``config.lora`` it already has its adapters.
        pad_token_id: the tokenizer's; another one is used if the model has no such token, as padding is masked.
        settings: a model that cannot share prompts gets padded microbatches even with ``packing``, and so does a GPU on which
            FlexAttention fails.
        world: the processes that share the work. Each has a learner with the same arguments, and calls its methods with the
            same whole batches.
    """

    def __init__(
        self,
        model: Any,
        config: RunConfig,
        pad_token_id: int | None,
        settings: LearnerSettings = DEFAULTS,
        world: World = ALONE,
    ):
        self.model = model
        self.config = config
        size = getattr(model.config, "vocab_size", None) or model.config.get_text_config().vocab_size
        self.pad_token_id = pad_token_id if pad_token_id is not None and 0 <= pad_token_id < size else PADDING
        traits = traits_of(model)
        self.max_tokens = settings.max_tokens_per_microbatch
        wants_rows = settings.packing and self.max_tokens is not None
        why = (traits.padded_because or packing_obstacle(model)) if wants_rows else ""
        self.packs = wants_rows and not why
        if why and world.rank == 0:
            print(f"learner: padded microbatches of {self.max_tokens} tokens, not packed rows: {why}", flush=True)
        if settings.gradient_checkpointing:
            if not traits.recomputes_exactly:
                raise UserError(
                    "params.yaml: learner.gradient_checkpointing: this model's layers give other results in training mode, "
                    "which gradient checkpointing needs. Set it to false."
                )
            model.gradient_checkpointing_enable()
        if settings.compile:
            compile_layers(model)
            if model.device.type == "cuda":
                compile_head()
        wanted = isinstance(config, GrpoConfig) and config.kl_coefficient > 0.0 and config.lora is None
        self.reference = copy.deepcopy(model).requires_grad_(False) if wanted else None
        if settings.fully_shard:
            for each in filter(None, (self.reference, model)):
                shard(each, world, settings.device)
        self.own_metrics: tuple[str, ...] = ()
        if isinstance(config, GrpoConfig):
            self.loss, self.own_metrics = bind_loss(config.loss_type, config.loss_options)
            with_cap = ("importance_mean", "importance_capped") if config.importance_cap is not None else ()
            self.means = (*_MEANS, *with_cap, *(("kl_loss",) if config.kl_coefficient else ()))
            if taken := [name for name in self.own_metrics if name in _COLUMNS]:
                raise UserError(f"loss_type: {config.loss_type} measures {', '.join(taken)}, as the learner does: rename it.")
        betas = config.adam_beta1, config.adam_beta2
        self.optimizer = Optimizer(
            model, config.learning_rate, settings.optimizer, config.weight_decay, betas, config.adam_epsilon
        )
        self.world = world
        self.updates = 0

    # ------------------------------------------------------------------------------------------- what the loops call

    def log_probs(self, rollouts: Sequence[Rollout], temperature: float | None = None) -> list[Tensor]:
        """Log-probs (length,) of each rollout's sampled tokens under the current weights, without gradient.

        They are computed train batch by train batch, in the microbatches of :meth:`update`: in others half precision rounds
        differently, by more than GSPO's clip range. ``temperature``: None for the configuration's.
        """
        return [log_probs for log_probs, _ in self._compute(rollouts, self.config.train_batch_size, temperature=temperature)]

    def reference_log_probs(self, rollouts: Sequence[Rollout]) -> list[Tensor]:
        """Log-probs as :meth:`log_probs`, under the starting weights, which the configuration must require."""
        return [log_probs for log_probs, _ in self._compute(rollouts, self.config.train_batch_size, of_reference=True)]

    def token_entropies(self, rollouts: Sequence[Rollout]) -> list[float]:
        """Mean token entropy (nats) of each rollout under the current weights; NaN for a response without tokens."""
        return [entropy.mean().item() for _, entropy in self._compute(rollouts, max(1, len(rollouts)))]

    def update(self, rollouts: Sequence[Rollout]) -> dict[str, float]:
        """Take one optimizer step on one train batch of scored rollouts; skip it if its gradient is not finite.

        Returns:
            the metrics of :meth:`_step`. Those per token are the entropy (nats), the share of clipped tokens, the ratio
            pi / pi_old, the mismatch, with ``importance_cap`` the importance weight and the share of tokens at the cap, with
            ``kl_coefficient`` the KL term, and the loss's own.
        """
        config = self._grpo
        weights = losses.response_weights(
            torch.tensor([rollout.length for rollout in rollouts]),
            config.length_normalization,
            len(rollouts),
            config.micro_train_batch_size,
            config.sampling_max_tokens,
        )
        tensors = microbatches.batch_tensors(rollouts, weights, self.model.device)
        sizes = max(1, response_tokens(rollouts)), len(rollouts)
        totals = self._zeros("loss", "tokens", *self.means, *self.own_metrics)
        extremes = {"ratio_min": math.inf, "ratio_max": -math.inf, "mismatch_max": 0.0}
        extreme = {name: torch.full((), value, device=self.model.device) for name, value in extremes.items()}
        for micro in self._microbatches(self.model, texts_of(rollouts)):
            self._backward(microbatches.select_members(tensors, micro), sizes, micro, totals, extreme)
        return self._step(totals, extreme)

    def sft_update(self, texts: Texts, normalize_constant: float = 1.0) -> dict[str, float]:
        """Take one step of supervised fine-tuning on one optimizer batch.

        The loss is the negative log-likelihood, summed over tokens, divided by ``normalize_constant``, averaged over responses.
        Returns the metrics of :meth:`_step`. Those per token are the entropy and the negative log-likelihood (nats).
        """
        totals = self._zeros("loss", "tokens", "token_entropy", "mean_nll")
        for micro in self._microbatches(self.model, texts, temperature=1.0):
            weights = torch.full((len(micro.mask),), 1.0 / len(texts.responses), device=micro.mask.device)
            loss = losses.negative_log_likelihood(micro.log_probs, micro.mask, weights, normalize_constant)
            self.optimizer.backward(loss)
            _add(totals, micro, loss, {"token_entropy": micro.entropy, "mean_nll": -micro.log_probs})
        return self._step(totals, {})

    def loss_scale(self) -> dict[str, float]:
        """Loss scale of the next update, as a metric; empty unless the model computes in float16."""
        return {} if self.optimizer.scale is None else {"loss_scale": self.optimizer.scale.value}

    def state(self) -> dict[str, Any]:
        """The state that training changes: weights or adapters, and the optimizer's state."""
        weights = self.model.state_dict()
        if self.config.lora is not None:
            weights = {name: tensor for name, tensor in weights.items() if ".lora_" in name}
        return {"model": weights, "optimizer": self.optimizer.state(), "updates": self.updates}

    def restore(self, state: dict[str, Any]) -> None:
        load_weights(self.model, state["model"], strict=self.config.lora is None)
        self.optimizer.restore(state["optimizer"])
        self.updates = state["updates"]

    @property
    def _grpo(self) -> GrpoConfig:
        assert isinstance(self.config, GrpoConfig), "only a GRPO run learns from rewards"
        return self.config

    # ------------------------------------------------------------------------------------------- in microbatches

    def _compute(
        self, rollouts: Sequence[Rollout], size: int, of_reference: bool = False, temperature: float | None = None
    ) -> list[tuple[Tensor, Tensor]]:
        """Log-probs and entropies (length,) of each response's sampled tokens, without gradient, in batches of ``size``."""
        texts = texts_of(rollouts)
        lengths, members = texts.lengths, list[int]()
        parts: list[Tensor] = []
        with torch.no_grad(), self._starting_model() if of_reference else nullcontext(self.model) as model:
            for batch in microbatches.split_in_order(len(rollouts), size):
                part = Texts(*(column[batch[0] : batch[-1] + 1] for column in texts))
                for micro in self._microbatches(model, part, temperature):
                    members += [batch[i] for i in micro.members]
                    parts.append(torch.stack([micro.flat(micro.log_probs), micro.flat(micro.entropy)]))
        computed = torch.cat(parts, dim=1).cpu() if parts else torch.empty(2, 0)
        each = (torch.split(row, [lengths[i] for i in members]) for row in computed)
        mine = {i: (log_probs.clone(), entropy.clone()) for i, log_probs, entropy in zip(members, *each, strict=True)}
        of_place = {i: pair for part in self.world.all_gather(mine) for i, pair in part.items()}
        nothing = torch.empty(0), torch.empty(0)
        return [of_place.get(i, nothing) for i in range(len(rollouts))]

    @contextmanager
    def _starting_model(self) -> Iterator[Any]:
        if self.reference is None:
            with without_adapters(self.model, merge=False) as model:
                yield model
        else:
            yield self.reference

    def _backward(
        self,
        batch: dict[str, Tensor],
        sizes: tuple[int, int],
        micro: Microbatch,
        totals: dict[str, Tensor],
        extreme: dict[str, Tensor],
    ) -> None:
        """Add a microbatch's gradient to those before, and its metrics to ``totals`` and ``extreme``, which stay on the device.

        ``batch``: from :func:`grpo.learner.microbatches.select_members`. ``sizes``: number of response tokens and of responses
        in the whole optimizer batch.
        """
        config, mask = self._grpo, micro.mask
        # Log-probs under the sampling weights, from the learner (old) and from the engine.
        old, engine = batch.pop("old_log_probs", micro.log_probs.detach()), batch["engine_log_probs"]
        of_response, reference = batch.pop("weights"), batch.pop("reference_log_probs", None)
        inputs = LossInputs(
            micro.log_probs,
            old,
            mask=mask,
            cliprange=config.cliprange,
            cliprange_high=config.cliprange_high,
            batch_tokens=sizes[0],
            batch_responses=sizes[1],
            entropies=micro.entropy.detach(),
            **batch,
        )
        per_token, metrics = self.loss(inputs)
        ratio = inputs.ratio.detach()
        if "clipped" in metrics:
            metrics = metrics | {"clip_fraction": metrics["clipped"]}
        measured = {"token_entropy": micro.entropy, "ratio_mean": ratio, **metrics, **losses.mismatch(old, engine)}
        weights = of_response
        if config.importance_cap is not None:
            importance, capped = losses.importance_weights(old, engine, mask, config.importance_cap, config.importance_mode)
            weights = weights * importance
            measured |= {"importance_mean": importance, "importance_capped": capped}
        loss = masked_normalize(per_token * weights, mask)
        if config.kl_coefficient:
            assert reference is not None, "a KL term needs log-probs under the starting weights"
            measured["kl_loss"] = losses.kl_term(micro.log_probs, reference)
            loss = loss + config.kl_coefficient * masked_normalize(measured["kl_loss"] * of_response, mask)
        if config.entropy_coefficient:
            loss = loss - config.entropy_coefficient * masked_normalize(micro.entropy, mask, constant_normalizer=sizes[0])
        self.optimizer.backward(loss)
        _add(totals, micro, loss, measured)
        if len(micro.tokens):
            ratio = micro.flat(ratio)
            # fmin and fmax ignore NaN.
            extreme["ratio_min"] = torch.fmin(extreme["ratio_min"], ratio.min())
            extreme["ratio_max"] = torch.fmax(extreme["ratio_max"], ratio.max())
            extreme["mismatch_max"] = torch.fmax(extreme["mismatch_max"], micro.flat(old - engine).abs().max())

    def _zeros(self, *names: str) -> dict[str, Tensor]:
        return dict(zip(names, torch.zeros(len(names), dtype=torch.float64, device=self.model.device).unbind(), strict=True))

    def _step(self, totals: dict[str, Tensor], extreme: dict[str, Tensor]) -> dict[str, float]:
        """Take the optimizer step, with gradients, totals and extremes over all ranks.

        Returns the metrics of the update: the loss, the gradient norm before clipping, the other totals per token, the
        extremes, ``skipped_update``, the learning rate, and :meth:`loss_scale`. NaN stands for a mean or extreme of no tokens.
        """
        over_all = torch.stack(list(totals.values()))
        gradients = [] if is_sharded(self.model) else self.optimizer.gradients()  # FSDP reduces them in the backward pass
        self.world.all_reduce([*gradients, over_all])
        norm = self.optimizer.clip(self.config.max_grad_norm)
        # The only point of an update where the host waits for the device.
        *numbers, norm_found = torch.cat([over_all, torch.stack([*extreme.values(), norm]).double()]).tolist()
        sums = dict(zip(totals, numbers[: len(totals)], strict=True))
        of_ranks = self.world.all_gather(dict(zip(extreme, numbers[len(totals) :], strict=True)))
        loss, tokens = sums.pop("loss"), sums.pop("tokens") or math.nan
        self.optimizer.learning_rate = learning_rate(self.config, self.updates)
        self.updates += 1
        loss_scale = self.loss_scale()
        taken = self.optimizer.finish(norm_found, loss)
        means = {name: total / tokens for name, total in sums.items()}
        if math.isnan(tokens):  # all responses were masked
            of_ranks = [dict.fromkeys(extreme, math.nan)]
        own = {name: means.pop(name) for name in self.own_metrics}
        return {
            "loss": loss,
            "gradient_norm": norm_found,
            **means,
            **{name: (min if name == "ratio_min" else max)(each[name] for each in of_ranks) for name in extreme},
            "skipped_update": 0.0 if taken else 1.0,
            "learning_rate": self.optimizer.learning_rate,
            **own,
            **loss_scale,
        }

    def _microbatches(self, model: Any, texts: Texts, temperature: float | None = None) -> Iterator[Microbatch]:
        """Compute this process's share of the batch, microbatch by microbatch; UserError as :func:`require_context`."""
        require_context(model, texts.prompts, texts.responses)
        _compute_as_sampled(model)
        temperature = self.config.sampling_temperature if temperature is None else temperature
        budget = self.max_tokens
        if budget is None:
            parts = microbatches.split_in_order(len(texts.prompts), self.config.micro_train_batch_size)
        elif self.packs:
            return microbatches.packed_microbatches(model, texts, budget, temperature, self.world)
        else:
            parts = microbatches.split_by_length(texts.prompts, texts.responses, budget)
        return microbatches.padded_microbatches(model, texts, parts, self.pad_token_id, temperature, self.world)


def _add(totals: dict[str, Tensor], micro: Microbatch, loss: Tensor, measured: Mapping[str, Tensor]) -> None:
    """Add a microbatch's loss, its number of tokens, and the sums of those metrics of its tokens that have a total."""
    totals["loss"] += loss.detach()
    totals["tokens"] += len(micro.tokens)
    for name in totals.keys() & measured.keys():
        totals[name] += micro.flat(measured[name].detach()).sum()


def _compute_as_sampled(model: Any) -> None:
    """Put the model in evaluation mode: with dropout, it would not be the policy that sampled.

    Gradient checkpointing needs training mode, so layers that use it get that mode, but not the modules inside them.
    """
    model.eval()
    for module in model.modules():
        if getattr(module, "gradient_checkpointing", False):
            module.training = True


def require_context(model: Any, prompts: Ids, responses: Ids) -> None:
    """Refuse texts that are longer than the model's context, and prompts without tokens, with a UserError."""
    require_tokens(prompts)
    longest = max((len(p) + len(r) for p, r in zip(prompts, responses, strict=True)), default=0)
    context = traits_of(model).context
    if context is not None and longest > context:
        raise UserError(
            f"a prompt and its response have {longest} tokens, and the model's context is {context} tokens. Leave long texts "
            "out, or use a model with a longer context."
        )

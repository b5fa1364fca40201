"""Sampling in this process, with the project's own model or a model of transformers.

The prompt of a group is computed once (:mod:`grpo.models.decoding`), and finished sequences leave the batch.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from grpo.common.errors import UserError
from grpo.common.records import Completion
from grpo.common.world import ALONE, World
from grpo.models.decoding import SharedPrompts
from grpo.models.examine import traits_of
from grpo.models.sharding import is_sharded, weights_of
from grpo.rollout.engine import CompletionSpec, SamplingParams, derive_seed, require_room_for, responses_of

COMPACT_BELOW = 0.8  # finished sequences leave the batch when less than this share of its rows is unfinished


class TransformersEngine:
    """Engine that samples from the learner's own module, without copying weights; a sharded learner needs a separate model.

    Raises UserError: only vLLM can sample this model.

    Args:
        model: from :func:`grpo.models.checkpoint.load_model`.
        max_batch_size: sequences that a process decodes at once; a group is never split, so a larger group is one batch.
        world: the processes that decode a batch together.
    """

    def __init__(self, model: Any, tokenizer: Any, max_batch_size: int = 1024, world: World = ALONE):
        if why := traits_of(model).padded_because:
            raise UserError(f"params.yaml: engine.name: transformers: cannot sample this model ({why}). Set it to vllm.")
        self.model = model
        self.tokenizer = tokenizer
        self.max_batch_size = max_batch_size
        self.world = world
        self.policy_version = 0

    def turns(self) -> AbstractContextManager[None]:
        """See :class:`grpo.rollout.engine.Engine`: nothing to keep."""
        return nullcontext()

    @property
    def context(self) -> int | None:
        return traits_of(self.model).context

    def synchronize(self, model: Any, policy_version: int) -> None:
        """Use ``model`` from now on; from a sharded model, copy the weights."""
        if is_sharded(model):
            own = self.model.state_dict()
            for name, weight in weights_of(model):
                own[name].copy_(weight)
        else:
            self.model = model
        self.policy_version = policy_version

    @torch.inference_mode()
    def generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, n: int, seed: int, draws: Sequence[CompletionSpec] = ()
    ) -> list[list[Completion]]:
        """See :class:`grpo.rollout.engine.Engine`.

        Raises UserError if a prompt and ``max_tokens`` together exceed the model's context.
        """
        require_room_for(self.context, prompts, params, n, draws)
        per_batch = max(1, self.max_batch_size // n)
        mine = range(len(prompts)) if draws else range(len(prompts))[self.world.share]
        every = draws or [
            CompletionSpec(derive_seed(seed, i, k), params.max_tokens) for i in range(len(prompts)) for k in range(n)
        ]
        groups: list[list[Completion]] = []
        was_training = self.model.training
        self.model.eval()
        try:
            # Do not run compiled layers here: shapes change with every token. The module is loaded only if layers are compiled.
            compiled = "torch._dynamo" in sys.modules
            with torch.compiler.set_stance("force_eager") if compiled else nullcontext():
                for start in range(0, len(mine), per_batch):
                    batch = mine[start : start + per_batch]
                    own = [draw for i in batch for draw in every[i * n : (i + 1) * n]]
                    groups += self._generate_batch([prompts[i] for i in batch], params, n, own)
        finally:
            self.model.train(was_training)
        return groups

    def _generate_batch(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, n: int, draws: Sequence[CompletionSpec]
    ) -> list[list[Completion]]:
        """Decode one batch of ``len(prompts) * n`` sequences, each drawn as ``draws`` says."""
        limits = [draw.max_tokens for draw in draws]
        generators = [torch.Generator(self.model.device).manual_seed(draw.seed) for draw in draws]
        longest = max(limits)
        decoding = SharedPrompts(self.model, prompts, n, longest)
        rows = list(range(len(prompts) * n))  # the sequence in each row of the batch
        token_ids: list[list[int]] = [[] for _ in rows]
        log_probs: list[list[float]] = [[] for _ in rows]
        reasons = ["length"] * len(rows)
        responses = responses_of(self.tokenizer, params.stop)
        may_end_with = torch.tensor(sorted(responses.may_end_with), device=self.model.device)
        for length in range(1, longest + 1):
            own = [generators[row] for row in rows]
            tokens, chosen = sample(decoding.logits, params, self.tokenizer.stop_token_ids, length, own)
            for row, token, log_prob in zip(rows, tokens.tolist(), chosen.tolist(), strict=True):
                if reasons[row] == "length" and length <= limits[row]:
                    token_ids[row].append(token)
                    log_probs[row].append(log_prob)
            for i in torch.isin(tokens, may_end_with).nonzero()[:, 0].tolist():
                row = rows[i]
                open_yet = reasons[row] == "length" and length <= limits[row]
                if open_yet and length > params.min_tokens and responses.has_ended(token_ids[row]):
                    reasons[row] = "stop"
            alive = [i for i, row in enumerate(rows) if reasons[row] == "length" and length < limits[row]]
            if not alive:
                break
            if len(alive) < COMPACT_BELOW * len(rows):
                keep = torch.tensor(alive, device=tokens.device)
                decoding.keep(keep)
                rows = [rows[i] for i in alive]
                tokens = tokens[keep]
            decoding.step(tokens)
        completions = [
            responses.completion(ids, lp, reason, self.policy_version)
            for ids, lp, reason in zip(token_ids, log_probs, reasons, strict=True)
        ]
        return [completions[i : i + n] for i in range(0, len(completions), n)]


def sample(
    logits: torch.Tensor,
    params: SamplingParams,
    stop_token_ids: Sequence[int],
    length: int,
    generators: Sequence[torch.Generator],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample one token for each row, by a race of exponentials: the token with the largest probability / Exp(1) wins.

    Rounding changes the winner only where two tokens are that close. A running sum of probabilities has so many edges in a
    vocabulary of 50,000 tokens that rounding would change one token in 200. Returns tokens (rows,), and their float32 log-probs
    (rows,) under the distribution that they were drawn from.

    Args:
        logits: (rows, vocabulary).
        stop_token_ids: not sampled before ``params.min_tokens``.
        length: length of the completions with this token.
        generators: one for each row, so that a row depends on no other.
    """
    logits = logits.float() / (params.temperature or 1.0)
    if length <= params.min_tokens:
        logits[:, [i for i in stop_token_ids if i < logits.shape[1]]] = -torch.inf  # a chat's may be none of the model's
    logits -= logits.amax(dim=-1, keepdim=True)
    weights = logits.exp()
    if params.temperature == 0.0:
        tokens = logits.argmax(dim=-1)
    else:
        if params.top_p < 1.0:
            ordered, order = weights.sort(dim=-1, descending=True)
            sums = ordered.cumsum(dim=-1)
            weights.scatter_(-1, order, ordered.masked_fill(sums - ordered >= params.top_p * sums[:, -1:], 0.0))
        tokens = (weights / _exponentials(weights, generators)).argmax(dim=-1)
    return tokens, logits.gather(-1, tokens[:, None])[:, 0] - weights.sum(dim=-1).log()


def _exponentials(like: torch.Tensor, generators: Sequence[torch.Generator]) -> torch.Tensor:
    """Exponential random numbers in the shape of ``like``, each row by its generator; none is 0, as a float32 draw may be."""
    noise, uniform = torch.empty_like(like), torch.empty_like(like[0], dtype=torch.float64)
    for row, generator in zip(noise, generators, strict=True):
        row.copy_(uniform.uniform_(generator=generator).log_().neg_())
    return noise

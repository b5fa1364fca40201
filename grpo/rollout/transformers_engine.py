"""Sampling in this process, with the project's own model or a model of transformers.

The prompt of a group is computed once (:mod:`grpo.models.decoding`), and finished sequences leave the batch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch

from grpo.common.errors import UserError
from grpo.common.records import Completion
from grpo.common.world import ALONE, World
from grpo.models.decoding import SharedPrompts
from grpo.models.examine import traits_of
from grpo.models.sharding import is_sharded, weights_of
from grpo.rollout.engine import Draw, SamplingParams, require_room_for
from grpo.rollout.responses import responses_of

BLOCK = 1024  # tokens of one block in the two-pass running sum
COMPACT_BELOW = 0.8  # finished sequences leave the batch when less than this share of its rows is unfinished


class TransformersEngine:
    """Engine that samples from the learner's own module, without copying weights; a sharded learner needs a separate model.

    Args:
        model: from :func:`grpo.models.checkpoint.load_model`.
        max_batch_size: number of sequences decoded at once; a group is never split, so a larger group is one batch.
        world: the processes that decode a batch together.

    Raises:
        UserError: only vLLM can sample this model.
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
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, n: int, seed: int, draws: Sequence[Draw] = ()
    ) -> list[list[Completion]]:
        """See :class:`grpo.rollout.engine.Engine`.

        Raises:
            UserError: a prompt and ``max_tokens`` together exceed the model's context.
        """
        require_room_for(self.context, prompts, params, n, draws)
        per_batch = max(1, self.max_batch_size // n)
        shared = range(len(prompts)) if draws else range(len(prompts))[self.world.share]
        generator = torch.Generator(device=self.model.device).manual_seed(seed)
        groups: list[list[Completion]] = []
        was_training = self.model.training
        self.model.eval()
        try:
            # Do not run compiled layers here: shapes change with every token. The module is loaded only if layers are compiled.
            compiled = "torch._dynamo" in sys.modules
            with torch.compiler.set_stance("force_eager") if compiled else nullcontext():
                for start in range(0, len(prompts), per_batch):
                    batch = range(start, min(start + per_batch, len(prompts)))
                    mine = [i for i in batch if i in shared]
                    if draws:
                        own = draws[batch.start * n : batch.stop * n]
                        of_each = partial(next, iter(_own_numbers(own, self.model.device)))
                        limits = [one.max_tokens for one in own]
                        groups += self._generate_batch([prompts[i] for i in mine], params, n, of_each, limits)
                        continue
                    draw = partial(_draw, generator, len(batch) * n, [(i - start) * n + k for i in mine for k in range(n)])
                    limits = [params.max_tokens] * (len(mine) * n)
                    found = self._generate_batch([prompts[i] for i in mine], params, n, draw, limits) if mine else []
                    # All processes draw as often as the longest completion of the batch needs, so that their generators agree.
                    drawn = max((len(one.token_ids) for group in found for one in group), default=0)
                    for _ in range(max(self.world.all_gather(drawn)) - drawn):
                        draw()
                    groups += found
        finally:
            self.model.train(was_training)
        return groups

    def _generate_batch(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        n: int,
        draw: Callable[[], torch.Tensor],
        limits: Sequence[int],
    ) -> list[list[Completion]]:
        """Decode one batch of ``len(prompts) * n`` sequences.

        Args:
            draw: gives a random number for the next token of each sequence.
            limits: most tokens of each sequence.
        """
        longest = max(limits)
        decoding = SharedPrompts(self.model, prompts, n, longest)
        rows = list(range(len(prompts) * n))  # the sequence in each row of the batch
        token_ids: list[list[int]] = [[] for _ in rows]
        log_probs: list[list[float]] = [[] for _ in rows]
        reasons = ["length"] * len(rows)
        responses = responses_of(self.tokenizer, params.stop)
        may_end_with = torch.tensor(sorted(responses.may_end_with), device=self.model.device)
        for length in range(1, longest + 1):
            tokens, chosen = sample(decoding.logits, params, self.tokenizer.stop_token_ids, length, draw()[rows])
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


def _draw(generator: torch.Generator, total: int, mine: list[int]) -> torch.Tensor:
    """Draw a random number from [0, 1) for the next token of each of this process's sequences: (len(mine),) float64.

    Numbers are drawn for all ``total`` sequences of the batch, including finished ones and those of other processes, so that
    the samples of a sequence depend neither on the end of another one nor on the number of processes.
    """
    return torch.rand(total, dtype=torch.float64, device=generator.device, generator=generator)[mine]


def _own_numbers(draws: Sequence[Draw], device: torch.device) -> torch.Tensor:
    """Random numbers from [0, 1) of sequences with seeds of their own: (most tokens, sequences) float64."""
    numbers = torch.zeros(max(one.max_tokens for one in draws), len(draws), dtype=torch.float64)
    for column, (seed, tokens) in enumerate(draws):
        numbers[:tokens, column] = torch.rand(tokens, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return numbers.to(device)


def sample(
    logits: torch.Tensor, params: SamplingParams, stop_token_ids: Sequence[int], length: int, uniform: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample one token for each row.

    Args:
        logits: (rows, vocabulary).
        stop_token_ids: not sampled before ``params.min_tokens``.
        length: length of the completions with this token.
        uniform: (rows,) float64, a random number from [0, 1) for each row.

    Returns:
        tokens (rows,), and their float32 log-probs (rows,) under the distribution that they were drawn from.
    """
    log_probs = torch.log_softmax(logits.float() / (params.temperature or 1.0), dim=-1)
    if length <= params.min_tokens:
        log_probs[:, [i for i in stop_token_ids if i < log_probs.shape[1]]] = -torch.inf  # a chat's may be none of the model's
        log_probs = torch.log_softmax(log_probs, dim=-1)
    if params.temperature == 0.0:
        best = log_probs.max(dim=-1)
        return best.indices, best.values
    if params.top_p < 1.0:
        ordered, order = log_probs.sort(dim=-1, descending=True)
        before = ordered.exp().cumsum(dim=-1) - ordered.exp()
        log_probs.scatter_(-1, order, ordered.masked_fill(before >= params.top_p, -torch.inf))
        log_probs = torch.log_softmax(log_probs, dim=-1)
    tokens = invert(log_probs.exp(), uniform)[:, None]
    return tokens[:, 0], log_probs.gather(-1, tokens)[:, 0]


def invert(weights: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Sample a token for each row by inversion: the first whose running sum of weights exceeds ``uniform`` times their total.

    Inversion needs one random number per row, while torch.multinomial draws one for each token of the vocabulary. Sums are
    float64, because a vocabulary has up to 150,000 tokens. A running sum takes several times as long as a sum, so for a large
    vocabulary the running sum goes over blocks first, and then within one block.

    Args:
        weights: (rows, vocabulary), nonnegative.
        uniform: (rows,) float64, from [0, 1).

    Returns:
        (rows,)
    """
    vocabulary = weights.shape[1]
    if vocabulary <= BLOCK:
        cumulative = weights.cumsum(dim=-1, dtype=torch.float64)
        return _first_above(cumulative, uniform[:, None] * cumulative[:, -1:])[:, 0]
    whole = vocabulary - vocabulary % BLOCK
    sums = weights[:, :whole].view(len(weights), -1, BLOCK).sum(dim=-1, dtype=torch.float64)
    rest = weights[:, whole:].sum(dim=-1, keepdim=True, dtype=torch.float64)
    cumulative = torch.cat([torch.zeros_like(rest), sums, rest], dim=-1).cumsum(dim=-1)
    target = uniform[:, None] * cumulative[:, -1:]
    block = _first_above(cumulative[:, 1:].contiguous(), target)
    tokens = block * BLOCK + torch.arange(BLOCK, device=block.device)
    within = weights.gather(-1, tokens.clamp(max=vocabulary - 1)) * (tokens < vocabulary)
    within_sums = within.cumsum(dim=-1, dtype=torch.float64)
    chosen = _first_above(within_sums, target - cumulative.gather(-1, block))
    return (block * BLOCK + chosen)[:, 0].clamp(max=vocabulary - 1)


def _first_above(cumulative: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """First index (rows, 1) at which each row's running sum (rows, n) exceeds its target (rows, 1).

    If rounding puts the target at or beyond the end of the sum, it is the last index that increases the sum.
    """
    below_all = cumulative[:, -1:].nextafter(torch.zeros_like(target))
    found = torch.searchsorted(cumulative, torch.minimum(target, below_all), right=True)
    return found.clamp(max=cumulative.shape[1] - 1)

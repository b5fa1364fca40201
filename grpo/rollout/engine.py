"""The engine interface of training and evaluation, for any sampling library, and the end and text of a response in all of them.

End and text are derived from the token ids with the project's tokenizer, so that in every engine the text that ends a response
is the text that is rewarded.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple, Protocol

from grpo.common.errors import UserError
from grpo.common.records import Completion, require_tokens
from grpo.models.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"  # what incomplete UTF-8 decodes to


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters."""

    temperature: float = 1.0  # divides the logits. 0: the likeliest token each time, with its log-prob at temperature 1
    top_p: float = 1.0  # sampling keeps the smallest set of tokens with this much probability
    min_tokens: int = 0  # a stop token or stop string ends a completion only after this many tokens, as in vLLM
    max_tokens: int = 1024  # a completion of this many tokens is cut off (``finish_reason == "length"``)
    stop: tuple[str, ...] = ()  # strings that end a completion; the text keeps the string


class CompletionSpec(NamedTuple):
    """How one completion is drawn, whatever other completions are sampled beside it."""

    seed: int  # decides its random numbers
    max_tokens: int  # it is cut off after so many tokens


class Engine(Protocol):
    """Engine that samples completions with the policy's current weights.

    If several processes train one run, each has its own engine, gets all prompts, and samples its share of them. The
    completions of a prompt do not depend on the number of processes.
    """

    @property
    def policy_version(self) -> int:
        """Version of the engine's weights; 0 at the start."""

    @property
    def context(self) -> int | None:
        """Longest text, prompt and response, in tokens; None without a limit."""

    def generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, n: int, seed: int, draws: Sequence[CompletionSpec] = ()
    ) -> list[list[Completion]]:
        """Sample ``n`` completions of each prompt (token ids). The same arguments and weights give the same completions.

        ``draws``: one for each completion, those of a prompt side by side, in place of ``seed`` and ``params.max_tokens``. The
        prompts are then all this process's own. Returns a list of ``n`` completions for each prompt of this process's share, in
        the order of ``prompts``.
        """

    def turns(self) -> AbstractContextManager[None]:
        """Calls of :meth:`generate` within are the turns of a batch of episodes, with the same weights: vLLM stays awake."""

    def synchronize(self, model: Any, policy_version: int) -> None:
        """Load ``model``'s weights; later completions carry ``policy_version``."""


def require_room_for(
    context: int | None, prompts: Sequence[Sequence[int]], params: SamplingParams, n: int, draws: Sequence[CompletionSpec]
) -> None:
    """Check the arguments of :meth:`Engine.generate` with :func:`require_context_length`, each text with its own limit."""
    limits = [params.max_tokens] * len(prompts) if not draws else [one.max_tokens for one in draws[::n]]
    for limit in set(limits):
        require_context_length(context, [prompt for prompt, own in zip(prompts, limits, strict=True) if own == limit], limit)


def derive_seed(*parts: int | str) -> int:
    """Derive a 63-bit seed from all parts (run seed, purpose, step, ...), the same on every machine."""
    text = "/".join(str(part) for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def require_context_length(
    context: int | None,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    key: str = "max_tokens",
    source: str = "tasks.main",
    observations: int = 0,
) -> None:
    """Refuse sampling from a prompt without tokens, or that could exceed the model's context, if that has a limit.

    Raises UserError: the context is too short, or a prompt has no tokens; the message says what to change.

    Args:
        context: longest text in tokens, or None.
        key: key of params.yaml that limits the response length.
        source: entry of params.yaml that the prompts come from.
        observations: most tokens that an environment may add to a response.
    """
    require_tokens(prompts)
    longest = max((len(prompt) for prompt in prompts), default=0) + observations
    if context is None or longest + max_tokens <= context:
        return
    too_long = sum(len(prompt) + observations + max_tokens > context for prompt in prompts)
    shorter = f"lower {key} to {context - longest} or less, " if longest < context else ""
    left = context - max_tokens - observations
    fewer = f"set {source}.max_prompt_tokens to {left} to leave longer ones out, " if left > 0 else ""
    fewer += f"lower {source}.max_turns or max_observation_tokens, " if observations else ""
    written = f" and {observations} tokens of its environment" if observations else ""
    remedy = f"{shorter}{fewer}or take a model with a longer context"
    raise UserError(
        f"params.yaml: {key}: the model's context of {context} tokens is too short for a prompt of {longest - observations} "
        f"tokens{written} and a response of up to {max_tokens}; {too_long} of {len(prompts)} prompts are too long. "
        f"{remedy[0].upper()}{remedy[1:]}."
    )


# --------------------------------------------------------------------------------------------------- end and text of a response


class Responses:
    """The rules that end a response of one model: its stop tokens and a set of stop strings. ``stop``: the stop strings."""

    def __init__(self, tokenizer: Tokenizer, stop: tuple[str, ...]):
        self.tokenizer, self.stop = tokenizer, stop
        # Where each token has bytes, a stop string lies in no more tokens than it has bytes.
        longest = max((len(string.encode()) for string in stop), default=0)
        self._newest = slice(-longest if tokenizer.is_byte_level else None, None)

    @cached_property
    def may_end_with(self) -> frozenset[int]:
        """The tokens that can end a response: stop tokens, and tokens that can complete a stop string.

        Only responses whose newest token is one of these need decoding, which keeps decoding off the hot path.
        """
        # Each token is decoded twice in a row, because some tokenizers write a space only between two tokens.
        pieces = self.tokenizer.batch_decode([[i, i] for i in range(len(self.tokenizer))]) if self.stop else []
        # A part of a character decodes to the replacement character, and may complete any stop string.
        ends = (*{string[-1] for string in self.stop}, REPLACEMENT)
        completing = (i for i, piece in enumerate(pieces) if any(end in piece for end in ends))
        return frozenset((*self.tokenizer.stop_token_ids, *completing))

    def has_ended(self, token_ids: Sequence[int]) -> bool:
        """Whether the newest token is a stop token or completes a stop string."""
        newest = token_ids[-1]
        if newest not in self.may_end_with:
            return False
        return newest in self.tokenizer.stop_token_ids or self._past_stop(token_ids) is not None

    def completion(
        self, token_ids: Sequence[int], log_probs: Sequence[float], finish_reason: str, policy_version: int
    ) -> Completion:
        """Build the completion of an engine's response, with its text. Raises ValueError if the response is not finished."""
        ids = tuple(token_ids)
        return Completion(ids, self.text(ids, finish_reason), tuple(log_probs), finish_reason, policy_version)

    def text(self, token_ids: Sequence[int], finish_reason: str) -> str:
        """Text of a response, without a stop token at its end or text after the stop string that ended it."""
        text = self.tokenizer.decode(token_ids)
        if finish_reason != "stop":
            return text
        if self._ends_with_stop_token(token_ids, text):
            return self.tokenizer.decode(token_ids[:-1])
        return text[: len(text) - (self._past_stop(token_ids) or 0)]

    def _ends_with_stop_token(self, token_ids: Sequence[int], text: str) -> bool:
        """Whether a stop token ended the response, rather than a stop string that contains this token."""
        if not token_ids or token_ids[-1] not in self.tokenizer.stop_token_ids:
            return False
        token = self.tokenizer.decode(token_ids[-1:])
        return not any(string.endswith(token) and text.endswith(string) for string in self.stop)

    def _past_stop(self, token_ids: Sequence[int]) -> int | None:
        """Number of characters after the first stop string that the newest token completes; None if it completes none.

        It decodes the whole response if a token's text may depend on the tokens before it, else the newest tokens.
        """
        if not self.stop:
            return None
        token_ids = token_ids[self._newest]
        before, text = (self.tokenizer.decode(ids) for ids in (token_ids[:-1], token_ids))
        known = len(before.rstrip(REPLACEMENT))
        # A stop string that was complete before the newest token (within min_tokens) does not count again.
        ends = [text.find(string, max(0, known - len(string) + 1)) + len(string) for string in self.stop]
        ends = [end for end, string in zip(ends, self.stop, strict=True) if end >= len(string)]
        return len(text) - min(ends) if ends else None


@lru_cache(maxsize=8)
def responses_of(tokenizer: Tokenizer, stop: tuple[str, ...]) -> Responses:
    """Make :class:`Responses` once, as finding the tokens that may end a response decodes the whole vocabulary."""
    return Responses(tokenizer, stop)

"""The engine interface of training and evaluation, for any sampling library."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from grpo.common.errors import UserError
from grpo.common.records import Completion, require_tokens


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters.

    Attributes:
        temperature: divides the logits. 0: the likeliest token each time, with its log-prob at temperature 1.
        top_p: sampling keeps the smallest set of tokens with this much probability.
        min_tokens: a stop token or stop string ends a completion only after this many tokens (as in vLLM and transformers).
        max_tokens: a completion of this many tokens is cut off (``finish_reason == "length"``).
        stop: strings that end a completion; the text keeps the string.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    min_tokens: int = 0
    max_tokens: int = 1024
    stop: tuple[str, ...] = ()


class CompletionSpec(NamedTuple):
    """How one completion is drawn, whatever other completions are sampled beside it.

    ``seed``: decides its random numbers. ``max_tokens``: it is cut off after so many tokens.
    """

    seed: int
    max_tokens: int


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

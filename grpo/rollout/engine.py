"""What training and evaluation ask of an engine, whichever library samples."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from grpo.common.errors import UserError
from grpo.common.records import Completion


@dataclass(frozen=True)
class SamplingParams:
    """How to sample.

    Attributes:
        temperature: divides the logits; above 0.
        top_p: smallest set of tokens with this much probability is kept.
        min_tokens: only after this many tokens end-of-text or a stop string may end a completion (as in vLLM and transformers).
        max_tokens: a completion of this many tokens is cut off (``finish_reason == "length"``).
        stop: strings that end a completion; the string itself is kept in the text.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    min_tokens: int = 0
    max_tokens: int = 1024
    stop: tuple[str, ...] = ()


class Engine(Protocol):
    """Samples completions with the policy's current weights.

    Where several processes train one run together, each has an engine of its own, is asked for the completions of all prompts,
    and samples its share of them. What is drawn for a prompt does not depend on how many processes there are.

    Attributes:
        policy_version: of the weights it samples with; 0 at the start.
    """

    policy_version: int

    def generate(self, prompts: Sequence[Sequence[int]], params: SamplingParams, n: int, seed: int) -> list[list[Completion]]:
        """Sample ``n`` completions of each prompt (token ids); same arguments and weights give the same completions.

        Returns:
            One list of ``n`` completions for each prompt of this process's share, in the order of ``prompts``.
        """
        ...

    def synchronize(self, model: Any, policy_version: int) -> None:
        """Take over ``model``'s weights; completions sampled from now on carry ``policy_version``."""
        ...


def derive_seed(*parts: int | str) -> int:
    """A 63-bit seed that depends on every part (run seed, purpose, step, ...), the same on every machine and run."""
    text = "/".join(str(part) for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def require_room(context: int | None, prompts: Sequence[Sequence[int]], max_tokens: int) -> None:
    """Refuse sampling that could run past the model's context of so many tokens, if it has such a limit.

    Raises:
        UserError: naming the longest prompt, the response limit and the context.
    """
    longest = max(len(prompt) for prompt in prompts)
    if context is not None and longest + max_tokens > context:
        remedy = f"Lower it to {context - longest} or less." if longest < context else "Use a model with a longer context."
        raise UserError(
            f"grpo.sampling_max_tokens / evaluation.max_tokens: a prompt of {longest} tokens and a response of up to "
            f"{max_tokens} do not fit the model's context of {context} tokens. {remedy}"
        )

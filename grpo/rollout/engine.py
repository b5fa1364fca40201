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
        context: the longest text it can work with, prompt and response, in tokens; None where there is no limit.
    """

    @property
    def policy_version(self) -> int:
        """See above."""
        ...

    @property
    def context(self) -> int | None:
        """See above."""
        ...

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


def require_whole_groups(groups: Sequence[Sequence[Completion]], prompts: int, params: SamplingParams, n: int) -> None:
    """Check that an engine returned what it was asked for; each completion has checked itself.

    Raises:
        ValueError: a group is missing, too small or too large, or a response is empty or longer than asked for.
    """
    sizes = [len(group) for group in groups]
    if sizes != [n] * prompts:
        raise ValueError(f"the engine was asked for {n} responses to each of {prompts} prompts, and returned groups of {sizes}")
    for length in (len(one.token_ids) for group in groups for one in group):
        if not 1 <= length <= params.max_tokens:
            raise ValueError(f"the engine was asked for 1 to {params.max_tokens} tokens, and returned a response of {length}")


def require_room(
    context: int | None, prompts: Sequence[Sequence[int]], max_tokens: int, key: str = "max_tokens", source: str = "tasks.main"
) -> None:
    """Refuse sampling that could run past the model's context of so many tokens, if it has such a limit.

    Args:
        key: of params.yaml, which says how long a response may be.
        source: the entry of params.yaml that the prompts come from.

    Raises:
        UserError: naming the longest prompt, the response limit, the context and what to change.
    """
    longest = max((len(prompt) for prompt in prompts), default=0)
    if context is None or longest + max_tokens <= context:
        return
    too_long = sum(len(prompt) + max_tokens > context for prompt in prompts)
    shorter = f"lower {key} to {context - longest} or less, " if longest < context else ""
    limit = f"set {source}.max_prompt_tokens to {context - max_tokens} to leave longer ones out, "
    fewer = limit if max_tokens < context else ""
    remedy = f"{shorter}{fewer}or take a model with a longer context"
    raise UserError(
        f"params.yaml: {key}: the model's context of {context} tokens is too short for a prompt of {longest} tokens and a "
        f"response of up to {max_tokens}; {too_long} of {len(prompts)} prompts are too long. {remedy[0].upper()}{remedy[1:]}."
    )

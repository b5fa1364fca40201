"""Attention over rows in which several responses share a prompt, for any Hugging Face model that takes SDPA.

Each response attends to the prompt and to itself. So the prompt's keys meet all responses of its group in one product, and
each response its own keys in another; one softmax goes over both. No score between two responses is ever computed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask

SHARED_PROMPT = "shared_prompt"  # the name under which a model is told to use this attention


@dataclass(frozen=True)
class Layout:
    """Where the tokens of a packed row stand. Padding points to token 0 and is never used.

    Attributes:
        prompts: (segments, longest prompt) index of each prompt token in the row.
        responses: (segments, most responses, longest response) index of each response token in the row.
        prompt_lengths: (segments,).
        origin: (tokens,) for each token of the row its place in ``prompts``, flattened, followed by ``responses``.
    """

    prompts: Tensor
    responses: Tensor
    prompt_lengths: Tensor
    origin: Tensor

    def to(self, device: Any) -> Layout:
        """The same on another device."""
        return Layout(*(t.to(device) for t in (self.prompts, self.responses, self.prompt_lengths, self.origin)))


def shared_prompt_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    packed: Layout | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention in a packed row; without ``packed`` the usual SDPA.

    Args:
        query: (1, heads, tokens, size).
        key, value: (1, key heads, tokens, size).

    Returns:
        (1, tokens, heads, size)
    """
    if packed is None:
        usual: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
        return usual
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    shared = query.shape[1] // key.shape[1]  # grouped-query attention: query heads for each key head
    query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))
    if shared > 1:
        key, value = key.repeat_interleave(shared, dim=1), value.repeat_interleave(shared, dim=1)
    heads, size = query.shape[1:]
    n, longest_prompt = packed.prompts.shape
    _, most, longest = packed.responses.shape

    def of_prompts(x: Tensor) -> Tensor:  # (segments, heads, longest prompt, size)
        return x.index_select(0, packed.prompts.flatten()).view(n, longest_prompt, heads, size).transpose(1, 2)

    def of_responses(x: Tensor) -> Tensor:  # (segments, heads, responses, longest response, size)
        return x.index_select(0, packed.responses.flatten()).view(n, most, longest, heads, size).permute(0, 3, 1, 2, 4)

    prompt_key, prompt_value = of_prompts(key), of_prompts(value)
    in_prompts = scaled_dot_product_attention(of_prompts(query), prompt_key, prompt_value, is_causal=True, scale=scale)
    asking, own_key, own_value = of_responses(query) * scale, of_responses(key), of_responses(value)
    to_prompt = asking.reshape(n, heads, most * longest, size) @ prompt_key.transpose(-1, -2)
    padding = torch.arange(longest_prompt, device=query.device) >= packed.prompt_lengths[:, None]
    to_prompt = to_prompt.masked_fill(padding[:, None, None], float("-inf"))
    future = torch.ones(longest, longest, dtype=torch.bool, device=query.device).triu(1)
    to_self = (asking @ own_key.transpose(-1, -2)).masked_fill(future, float("-inf"))
    scores = torch.cat([to_prompt.view(n, heads, most, longest, longest_prompt), to_self], dim=-1)
    share = torch.softmax(scores.float(), dim=-1).to(value.dtype)
    share_prompt, share_self = torch.split(share, [longest_prompt, longest], dim=-1)
    in_responses = (share_prompt.reshape(n, heads, most * longest, longest_prompt) @ prompt_value).view_as(asking)
    in_responses = in_responses + share_self @ own_value
    everywhere = torch.cat(
        [
            in_prompts.transpose(1, 2).reshape(-1, heads, size),
            in_responses.permute(0, 2, 3, 1, 4).reshape(-1, heads, size),
        ]
    )
    return everywhere.index_select(0, packed.origin)[None], None


AttentionInterface.register(SHARED_PROMPT, shared_prompt_attention)
ALL_MASK_ATTENTION_FUNCTIONS.register(SHARED_PROMPT, sdpa_mask)

"""The attention of all models here: the usual one, and two in which responses share their prompt."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask

from grpo.models.packed_attention import Layout, packed_attention
from grpo.models.prefix_attention import SharedPrefix

SHARED_PROMPT = "shared_prompt"  # the name under which a model is told to use this attention

NO_MASK = {"full_attention": None}  # as a model's attention_mask: what attends to what is said by ``shared`` alone


def shared_prompt_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    shared: Layout | BlockMask | SharedPrefix | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention in a layer of a Hugging Face model, in its signature.

    Args:
        query: (batch, heads, tokens, size).
        key, value: (batch, key heads, tokens, size).
        shared: a row's layout (training), or the prompts of a batch that is being sampled; None gives the usual SDPA.

    Returns:
        (batch, tokens, heads, size)
    """
    if shared is None:
        usual: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
        return usual
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if isinstance(shared, SharedPrefix):
        out = shared.attend(module.layer_idx, query, key, value, scale)
    else:
        out = packed_attention(query, key, value, shared, scale)
    return out.transpose(1, 2), None


AttentionInterface.register(SHARED_PROMPT, shared_prompt_attention)
ALL_MASK_ATTENTION_FUNCTIONS.register(SHARED_PROMPT, sdpa_mask)

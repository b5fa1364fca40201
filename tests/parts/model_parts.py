"""Tiny models with random weights, of several architectures, and tiny tokenizers."""

from __future__ import annotations

from typing import Any

import torch

from grpo.models.examine import examine

# Of each architecture what its configuration needs to be tiny, besides what they share.
TINY: dict[str, dict[str, Any]] = {
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "llama": {},
    "smollm3": {},
    "olmo2": {},
    "granite": {},
    "gpt_neox": {},
    "gpt2": {"n_inner": 64},
    "gemma": {"head_dim": 16},
    "mistral": {"sliding_window": 6},
    "olmo3": {"sliding_window": 6},
    "gemma2": {"head_dim": 16, "sliding_window": 6, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    "gemma3_text": {"head_dim": 16, "sliding_window": 6},
    "bloom": {},
    "gpt_oss": {"sliding_window": 6, "head_dim": 16, "num_local_experts": 2, "num_experts_per_tok": 1},
    "mixtral": {},
}
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    # So that next-token distributions are far from uniform and depend on the context.
    "initializer_range": 0.3,
    "tie_word_embeddings": True,
}


def tiny_model(kind: str = "qwen2", vocab_size: int = 512, **changes: Any) -> Any:
    """A randomly initialised model, as load_model would give it."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    values = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None, **SIZES, **TINY[kind], **changes}
    config = AutoConfig.for_model(kind, vocab_size=vocab_size, **values)
    model = AutoModelForCausalLM.from_config(config).eval()
    model.traits = examine(model)
    return model

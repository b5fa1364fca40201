"""The config.json of the project's own model (:mod:`grpo.models.transformer`), in Qwen2's format."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch

from grpo.common.files import parse_json


@dataclass(frozen=True)
class TransformerConfig:
    """Sizes and constants of the model, named as in a Qwen2 checkpoint's config.json.

    Attributes:
        num_key_value_heads: keys and values of a token; each serves num_attention_heads / num_key_value_heads queries.
        max_position_embeddings: longest text, in tokens.
        rope_theta: the slowest rotation has a wavelength of almost 2 pi rope_theta tokens.
        tie_word_embeddings: whether the head is the embedding.
        initializer_range: standard deviation of new weights.
        pad_token_id: token whose embedding gets no gradient from the input, as in Qwen2.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    intermediate_size: int
    max_position_embeddings: int
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    initializer_range: float = 0.02
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None

    def __post_init__(self) -> None:
        if self.hidden_size % (2 * self.num_attention_heads):
            raise ValueError("hidden_size must be an even multiple of num_attention_heads")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError("num_attention_heads must be a multiple of num_key_value_heads")

    @property
    def head_size(self) -> int:
        """Width of a head."""
        return self.hidden_size // self.num_attention_heads


MARK = {"implementation": "grpo"}  # in the config.json of checkpoints that this model wrote
_FIXED = {  # what Qwen2 computes with them is computed here
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_act": "silu",
    "attention_dropout": 0.0,
    "use_sliding_window": False,
}


def write_config(folder: Path, config: TransformerConfig, dtype: torch.dtype) -> None:
    """Write a config.json that transformers and vLLM read as Qwen2, and this project as its own model."""
    values = asdict(config)
    rope = {"rope_theta": values.pop("rope_theta"), "rope_type": "default"}
    values |= {**_FIXED, "rope_parameters": rope, "dtype": str(dtype).removeprefix("torch."), **MARK}
    (folder / "config.json").write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def read_config(folder: Path) -> TransformerConfig:
    """Read the config.json of Qwen2, of transformers 5 or older."""
    found = parse_json((folder / "config.json").read_text(encoding="utf-8"))
    known = {field.name: found[field.name] for field in fields(TransformerConfig) if field.name in found}
    return TransformerConfig(**known | {"rope_theta": found.get("rope_parameters", found)["rope_theta"]})

"""Checkpoints of the project's own model (:mod:`grpo.models.transformer`), in Qwen2's format."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from grpo.common.errors import UserError, reason
from grpo.common.files import parse_json
from grpo.models import how_to_restore_checkpoint

WEIGHTS = "model.safetensors"
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


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


_MARK = {"implementation": "grpo"}  # in the config.json of checkpoints that this model wrote
# Settings of a Qwen2 model that have one supported value here.
_FIXED = {
    "model_type": "qwen2",
    "hidden_act": "silu",
    "attention_dropout": 0.0,
    "use_sliding_window": False,
}
_ELSEWHERE = 'load_model loads it with transformers, if config.json has no key "implementation".'


def written_here(folder: Path) -> bool:
    """Whether the config.json in a folder says that the project's own model wrote the checkpoint.

    Raises:
        ValueError: the config.json is damaged.
    """
    found = parse_json((folder / "config.json").read_text(encoding="utf-8"))
    return isinstance(found, dict) and found.items() >= _MARK.items()


def write_config(folder: Path, config: TransformerConfig, dtype: torch.dtype) -> None:
    """Write a config.json that transformers and vLLM read as Qwen2, and this project as its own model."""
    values = asdict(config)
    rope = {"rope_theta": values.pop("rope_theta"), "rope_type": "default"}
    values |= {**_FIXED, "rope_parameters": rope, "architectures": ["Qwen2ForCausalLM"], **_MARK}
    values["dtype"] = str(dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def read_config(file: Path) -> TransformerConfig:
    """Read the config.json of transformers 5 or older.

    Raises:
        UserError: the file is missing or damaged, or asks for something that is not computed here.
    """
    try:
        found = parse_json(file.read_text(encoding="utf-8"))
        rope = {**(found.get("rope_scaling") or {}), **(found.get("rope_parameters") or {})}
        theta = rope.pop("rope_theta", found.get("rope_theta", 10000.0))
        known = {field.name: found[field.name] for field in fields(TransformerConfig) if field.name in found}
        config = TransformerConfig(**known | {"rope_theta": theta})
    except (OSError, ValueError, TypeError, AttributeError, ArithmeticError) as error:
        remedy = how_to_restore_checkpoint(file.parent)
        raise UserError(f"{file}: not the configuration of a Qwen2 model ({reason(error)}). {remedy}") from error
    for key, value in _not_computed(found, rope, config):
        raise UserError(f"{file}: {key} is {value!r}, which this project's own model does not compute. {_ELSEWHERE}")
    return config


def _not_computed(found: dict[str, Any], rope: dict[str, Any], config: TransformerConfig) -> Iterator[tuple[str, Any]]:
    """Yield the keys and values of a config.json that are not supported here.

    Args:
        found: contents of the file.
        rope: its RoPE settings without rope_theta.
    """
    for key, value in {**_FIXED, "head_dim": config.head_size, "quantization_config": None}.items():
        if found.get(key, None if key == "model_type" else value) != value:
            yield key, found.get(key)
    if set(found.get("layer_types") or []) - {"full_attention"}:
        yield "layer_types", found["layer_types"]
    for key, value in rope.items():
        if key not in ("rope_type", "type") or value != "default":
            yield f"RoPE's {key}", value


def fill(model: nn.Module, folder: Path) -> list[str]:
    """Copy a checkpoint's weights into the model, one at a time, and list the weights that do not fit."""
    files = {WEIGHTS}
    if not (folder / WEIGHTS).exists() and (folder / f"{WEIGHTS}.index.json").exists():
        files = set(parse_json((folder / f"{WEIGHTS}.index.json").read_text(encoding="utf-8"))["weight_map"].values())
    missing = dict(model.named_parameters())
    tied, embedding = HEAD not in missing, missing[EMBEDDING]
    problems = []
    tied_head = None
    for file in sorted(files):
        with safe_open(folder / file, framework="pt") as weights:
            for name in weights.keys():  # noqa: SIM118 - not a dict
                tensor, parameter = weights.get_tensor(name), missing.pop(name, None)
                if parameter is None and name == HEAD and tied:
                    tied_head = tensor.to(embedding.dtype)
                elif parameter is None:
                    problems.append(f"{name} is not a weight of this model")
                elif parameter.shape != tensor.shape:
                    problems.append(f"{name} is {tuple(tensor.shape)}, not {tuple(parameter.shape)}")
                else:
                    parameter.data.copy_(tensor)
    if tied_head is not None and not torch.equal(tied_head, embedding):
        problems.append(f"{HEAD} differs from the embedding, although tie_word_embeddings is set")
    return problems + [f"{name} is missing" for name in missing]

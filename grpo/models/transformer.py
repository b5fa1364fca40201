"""The project's own language model: a decoder-only Transformer, written out in torch.

It computes what Qwen2 computes, with the same names of weights, so any program can load its checkpoints. Each layer has
attention and a gated feed-forward network, both with pre-normalization and a residual connection; the head turns the last
hidden states into the logits of the next token.

Dimensions: ``width`` is hidden_size, ``heads`` num_attention_heads, ``key heads`` num_key_value_heads, ``size`` the width of a
head (width / heads), ``inner`` intermediate_size.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import NamedTuple, TypeAlias

import torch
from safetensors.torch import load_model, save_file
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention, silu
from torch.utils.checkpoint import checkpoint

from grpo.common.files import parse_json, read_bytes
from grpo.models.decoding import KeyValueCache, SharedPrefix
from grpo.models.packing import OnDevice, packed_attention

Shared: TypeAlias = "OnDevice | SharedPrefix"
WEIGHTS = "model.safetensors"


@dataclass(frozen=True)
class TransformerConfig:
    """Sizes and constants of the model, named as in a Qwen2 checkpoint's config.json."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int  # keys and values of a token; each serves num_attention_heads / num_key_value_heads queries
    intermediate_size: int
    max_position_embeddings: int  # longest text, in tokens
    rope_theta: float = 10000.0  # the slowest rotation has a wavelength of almost 2 pi rope_theta tokens
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False  # whether the head is the embedding
    initializer_range: float = 0.02  # standard deviation of new weights
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None  # token whose embedding gets no gradient from the input, as in Qwen2

    @property
    def head_size(self) -> int:
        """Width of a head."""
        return self.hidden_size // self.num_attention_heads


class Hidden(NamedTuple):
    """Hidden states (batch, tokens, width) after the last norm."""

    last_hidden_state: Tensor


class Prediction(NamedTuple):
    """Logits (batch, tokens, vocabulary)."""

    logits: Tensor


class RMSNorm(nn.Module):
    """RMSNorm: x / sqrt(mean(x^2) + eps) * weight, normalized in float32 (Zhang and Sennrich 2019, arXiv 1910.07467, Eq. 4)."""

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """(..., width) -> (..., width)"""
        exact = x.float()
        normed = exact * torch.rsqrt(exact.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * normed.to(x.dtype)


def rotations(position_ids: Tensor, size: int, theta: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosine and sine of RoPE's rotation angles.

    Pair i of a token at position p is rotated by p * theta^(-2 i / size) (Su et al. 2021, arXiv 2104.09864, Eq. 15). Angles are
    float32: bfloat16 has 8 binary digits, and could not distinguish the positions 256 and 257.

    ``position_ids``: (batch, tokens). Returns cosine and sine, each (batch, 1, tokens, size); index i belongs to pair i modulo
    size / 2.
    """
    even = torch.arange(0, size, 2, dtype=torch.float32, device=position_ids.device)
    angles = position_ids[:, None, :, None].float() * (1.0 / theta ** (even / size))
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate queries or keys by their positions, so that their products depend only on the difference of positions.

    The two numbers of a pair are half a head apart, as in Qwen2 and LLaMA; in the paper they are adjacent.

    ``x``: (batch, heads, tokens, size). ``cos``, ``sin``: (batch, 1, tokens, size), from :func:`rotations`. Returns (batch,
    heads, tokens, size).
    """
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


def visible_keys(attention_mask: Tensor | None, new: int, past: int, device: torch.device) -> Tensor | None:
    """Mask of the keys that each new token attends to: earlier ones and itself, without padding.

    ``attention_mask``: (batch, past + new), 0 at padding. ``new``, ``past``: number of tokens. Returns bool (batch or 1, 1,
    new, past + new); None if no explicit mask is needed: causal without past, or one new token.
    """
    if attention_mask is None and (past == 0 or new == 1):
        return None
    keys = torch.arange(past + new, device=device)
    causal = keys <= keys[past:, None]
    if attention_mask is None:
        return causal[None, None]
    # Padding attends to itself, because softmax over no keys is NaN.
    return causal & attention_mask[:, None, None, :].bool() | (keys == keys[past:, None])


def causal_attention(query: Tensor, key: Tensor, value: Tensor, visible: Tensor | None) -> Tensor:
    """Grouped-query attention softmax(query key^T / sqrt(size)) value (Ainslie et al. 2023, arXiv 2305.13245).

    Returns (batch, heads, new tokens, size).

    Args:
        query: (batch, heads, new tokens, size).
        key, value: (batch, key heads, tokens, size).
        visible: from :func:`visible_keys`.
    """
    if visible is None:
        return scaled_dot_product_attention(query, key, value, is_causal=query.shape[2] > 1, enable_gqa=True)
    # With a mask and grouped queries, a GPU has only the slow kernel, which stores all scores; so repeat the keys.
    each = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(each, dim=1) if each > 1 else x for x in (key, value))
    return scaled_dot_product_attention(query, key, value, visible)


class Attention(nn.Module):
    """Grouped-query causal self-attention."""

    def __init__(self, config: TransformerConfig, layer_idx: int):
        super().__init__()
        self.layer_idx = layer_idx
        self.size = config.head_size
        width, key_width = config.hidden_size, config.num_key_value_heads * config.head_size
        self.q_proj = nn.Linear(width, width)
        self.k_proj = nn.Linear(width, key_width)
        self.v_proj = nn.Linear(width, key_width)
        self.o_proj = nn.Linear(width, width, bias=False)

    def forward(
        self,
        x: Tensor,
        turn: tuple[Tensor, Tensor],
        visible: Tensor | None,
        cache: KeyValueCache | None,
        shared: Shared | None,
    ) -> Tensor:
        """Arguments as in :meth:`Layer.forward`; (batch, tokens, width) -> (batch, tokens, width)."""
        batch, tokens, width = x.shape
        query, key, value = (
            project(x).view(batch, tokens, -1, self.size).transpose(1, 2)  # (batch, heads or key heads, tokens, size)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key = rotate(query, *turn), rotate(key, *turn)
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        if shared is None:
            out = causal_attention(query, key, value, visible)
        elif isinstance(shared, SharedPrefix):
            out = shared.attend(self.layer_idx, query, key, value, self.size**-0.5)
        else:
            out = packed_attention(query, key, value, shared, self.size**-0.5)
        mixed: Tensor = self.o_proj(out.transpose(1, 2).reshape(batch, tokens, width))
        return mixed


class SwiGLU(nn.Module):
    """Feed-forward network down(silu(gate(x)) * up(x)) (Shazeer 2020, arXiv 2002.05202, Eq. 6)."""

    def __init__(self, config: TransformerConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(..., width) -> (..., inner) -> (..., width)"""
        out: Tensor = self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    """Decoder layer: x + attention(norm(x)), then x + feed-forward(norm(x))."""

    def __init__(self, config: TransformerConfig, layer_idx: int):
        super().__init__()
        self.self_attn = Attention(config, layer_idx)
        self.mlp = SwiGLU(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self,
        x: Tensor,
        turn: tuple[Tensor, Tensor],
        visible: Tensor | None,
        cache: KeyValueCache | None,
        shared: Shared | None,
    ) -> Tensor:
        """Compute the layer.

        Returns (batch, tokens, width).

        Args:
            x: (batch, tokens, width).
            turn: cosine and sine, each (batch, 1, tokens, size), from :func:`rotations`.
            visible: (batch or 1, 1, tokens, keys), from :func:`visible_keys`.
            cache: stores the new keys and values.
            shared: layout of shared prompts, instead of ``visible``.
        """
        x = x + self.self_attn(self.input_layernorm(x), turn, visible, cache, shared)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Decoder(nn.Module):
    """The model without its head."""

    def __init__(self, config: TransformerConfig):
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, padding_idx=config.pad_token_id)
        self.layers = nn.ModuleList(Layer(config, i) for i in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.gradient_checkpointing = False

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: KeyValueCache | None = None,
        use_cache: bool = False,
        shared: Shared | None = None,
    ) -> Hidden:
        """Arguments as in :meth:`TransformerLM.forward`; (batch, tokens) -> (batch, tokens, width)."""
        past = 0 if past_key_values is None else past_key_values.get_seq_length()
        new, device = input_ids.shape[1], input_ids.device
        if position_ids is None:
            position_ids = torch.arange(past, past + new, device=device)[None]
        x: Tensor = self.embed_tokens(input_ids)
        turn = rotations(position_ids, self.config.head_size, self.config.rope_theta, x.dtype)
        visible = visible_keys(attention_mask, new, past, device) if shared is None else None
        again = self.gradient_checkpointing and self.training and past_key_values is None
        for layer in self.layers:
            if again:
                # Without dropout the second computation needs no saved random state.
                x = checkpoint(layer, x, turn, visible, None, shared, use_reentrant=False, preserve_rng_state=False)
            else:
                x = layer(x, turn, visible, past_key_values, shared)
        return Hidden(self.norm(x))


class TransformerLM(nn.Module):
    """A causal language model with those methods of a Hugging Face model that engines and learner use.

    New weights are normal with standard deviation ``config.initializer_range``; biases are 0 and norm weights 1.
    """

    def __init__(self, config: TransformerConfig):
        super().__init__()
        self.config = config
        self.model = Decoder(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=config.initializer_range)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: KeyValueCache | None = None,
        use_cache: bool = False,
        logits_to_keep: int = 0,
        shared: Shared | None = None,
    ) -> Prediction:
        """Compute the logits of each next token.

        Returns logits (batch, tokens or ``logits_to_keep``, vocabulary).

        Args:
            input_ids: (batch, tokens), the tokens that are not in the cache yet.
            attention_mask: (batch, cached and new tokens), 0 at padding.
            position_ids: (batch or 1, tokens); by default they continue from the cache, padding included.
            past_key_values: the cache, which is read and extended if given.
            use_cache: has no effect, as the model makes no cache itself.
            logits_to_keep: number of last tokens to compute logits of; 0 means all.
            shared: layout of shared prompts, instead of ``attention_mask``.
        """
        hidden = self.model(input_ids, attention_mask, position_ids, past_key_values, use_cache, shared).last_hidden_state
        return Prediction(self.lm_head(hidden[:, -logits_to_keep:] if logits_to_keep else hidden))

    @property
    def base_model(self) -> Decoder:
        """The model without its head."""
        return self.model

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return self.lm_head.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """Precision of the weights."""
        return self.lm_head.weight.dtype

    def get_output_embeddings(self) -> nn.Linear:
        """The head, with its weight (vocabulary, width)."""
        return self.lm_head

    def gradient_checkpointing_enable(self) -> None:
        """Keep only the input of each layer in training, and recompute the layer in the backward pass."""
        self.model.gradient_checkpointing = True

    def save_pretrained(self, folder: Path | str) -> None:
        """Save weights and config.json in the format of a Qwen2 checkpoint, without a tied head."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        weights = {name: parameter.detach().contiguous() for name, parameter in self.named_parameters()}
        save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})
        write_config(folder, self.config, self.dtype)

    @classmethod
    def from_pretrained(cls, folder: Path | str, dtype: torch.dtype = torch.float32) -> TransformerLM:
        """Load a checkpoint that this model wrote.

        Raises OSError, ValueError, RuntimeError and others: it is missing or damaged.
        """
        folder = Path(folder)
        # The checkpoint replaces the random weights. (On the device "meta" there would be none, but torch would import its
        # compiler.)
        with torch.random.fork_rng(devices=()):
            model = cls(read_config(folder)).to(dtype)
        load_model(model, folder / WEIGHTS)
        return model.eval()


# --------------------------------------------------------------------------------------------------- config.json

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
    """Read a config.json that :func:`write_config` wrote."""
    saved = parse_json(read_bytes(folder / "config.json"))
    known = {field.name: saved[field.name] for field in fields(TransformerConfig) if field.name in saved}
    return TransformerConfig(**known | {"rope_theta": saved["rope_parameters"]["rope_theta"]})

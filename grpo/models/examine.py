"""Traits of a model of transformers: what the learner and the engine can use it for.

Responses share one copy of their prompt through this project's attention function, which computes softmax(q k^T) v over all
earlier tokens. A model uses it if its architecture is in :data:`PACKS`, no layer asks for more (such as a sliding window), and
a packed row gives the results of the model's own attention. Any other model is trained on padded rows; only vLLM samples it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from grpo.common.errors import is_out_of_memory, reason
from grpo.models.packing import Predictions, fill_rows, pack

SHARED_PROMPT = "shared_prompt"  # name of this project's attention in transformers
PACKS = {  # model types of transformers
    *("gemma", "gpt2", "gpt_neox", "granite", "llama", "mistral", "mixtral", "olmo2", "phi3", "qwen2", "qwen3", "smollm3")
}
# Two prompts with two responses each, in twentieths of the middle half of the vocabulary, where ordinary tokens are. The first
# ids are often control tokens, whose states rounding in bfloat16 changes by half of their norm.
PROMPTS = (1, 2, 3, 4, 5), (1, 2, 3, 4, 5), (8, 2), (8, 2)
RESPONSES = (6, 7, 8), (9, 3, 1), (4, 4, 7), (5, 1, 2)
# Largest difference of two results, as a share of their norm, and in units of the type's rounding (SmolLM2: 2 in bfloat16). The
# errors to be found (an ignored position, the state of another token) are as large as the results.
NEAR, NEAR_UNITS = 1e-3, 32


@dataclass(frozen=True)
class Traits:
    """Traits of a model."""

    context: int | None = None  # longest text, in tokens; None without a limit
    padded_because: str = ""  # why responses cannot share one copy of their prompt; empty if they can
    # whether the logits are just the last hidden states times the weight of ``get_output_embeddings()``
    linear_head: bool = True
    recomputes_exactly: bool = True  # whether gradient checkpointing, which needs layers in training mode, changes no result


def traits_of(model: Any) -> Traits:
    """Traits that :func:`grpo.models.checkpoint.load_model` found; the defaults for a model built otherwise."""
    examined: Traits | None = getattr(model, "traits", None)
    return examined or Traits(context=getattr(model.config, "max_position_embeddings", None))


@torch.no_grad()
def examine(model: Any) -> Traits:
    """Find out a model's traits, choose its attention, and let every token's embedding have a gradient.

    ``model``: of transformers, in evaluation mode, with transformers' choice of attention. Raises NotImplementedError if the
    model gives no hidden states.
    """
    if model.base_model is model:
        raise NotImplementedError("it does not name the module below its output layer")
    # The padding token may also be the end-of-text token, which occurs in chats and needs a gradient.
    model.get_input_embeddings().padding_idx = None
    config = model.config.get_text_config()
    usual = config._attn_implementation
    if getattr(config, "attn_logit_softcapping", None) and usual == "sdpa":
        usual = "eager"  # SDPA ignores soft-capping
        model.set_attn_implementation(usual)
    size = config.vocab_size
    prompts, responses = ([[size // 4 + size * n // 20 for n in text] for text in texts] for texts in (PROMPTS, RESPONSES))
    texts = [torch.tensor(prompt + response) for prompt, response in zip(prompts, responses, strict=True)]
    rows = pad_sequence(texts, batch_first=True)  # on the right, where causal attention hides the padding
    expected = model.base_model(input_ids=rows, use_cache=False).last_hidden_state
    exact = _recomputes_exactly(model, rows, expected)
    head = model.get_output_embeddings()
    logits = model(input_ids=rows, use_cache=False).logits.float()
    plain = head is not None and torch.equal(logits, torch.nn.functional.linear(expected, head.weight).float())
    if config.model_type in PACKS:
        model.set_attn_implementation(SHARED_PROMPT)
        if why := _why_padded(model, prompts, responses, expected):
            model.set_attn_implementation(usual)
    else:
        why = f"its architecture, {config.model_type}, is none of those that are known to pack"
    return Traits(context_of(config), why, plain, exact)


def packing_obstacle(model: Any) -> str:
    """Why packed rows of a model that can share prompts cannot be computed on its device; empty if they can.

    On a GPU a short row is tried, with its gradient; for this FlexAttention is compiled.
    """
    if model.device.type == "cpu":
        return ""
    weight = next(weight for weight in model.parameters() if weight.requires_grad)
    try:
        with torch.enable_grad():
            _, states = _packed(model, [[1] * 8] * 2, [[1] * 130] * 2)  # more tokens than a block of FlexAttention has
            torch.autograd.grad(states.sum(), weight)
    except Exception as error:  # torch.compile may raise anything where Triton or a C compiler is missing
        if is_out_of_memory(error):
            raise
        return f"FlexAttention failed ({reason(error)})"
    return ""


def context_of(config: Any) -> int | None:
    """Longest text of a model, in tokens; None without a limit.

    Some kinds of RoPE change all frequencies if a batch has a text beyond the original length, so the results of a short text
    would depend on the rest of its batch. Such a model is used up to its original length. ``config``: the model's text
    configuration, of transformers.
    """
    limits = [getattr(config, "max_position_embeddings", None)]
    rope = getattr(config, "rope_parameters", None) or {}
    for of_layer in [rope] if "rope_type" in rope else rope.values():
        if of_layer.get("rope_type") in ("dynamic", "longrope"):
            limits.append(of_layer.get("original_max_position_embeddings"))
    return min((limit for limit in limits if limit is not None), default=None)


def limited_context(folder: Path) -> int | None:
    """The context of a checkpoint whose RoPE limits it below ``max_position_embeddings``; None for any other."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder, trust_remote_code=False).get_text_config()
    context = context_of(config)
    return None if context == getattr(config, "max_position_embeddings", None) else context


def _recomputes_exactly(model: Any, rows: Tensor, expected: Tensor) -> bool:
    """Whether layers in training mode, which gradient checkpointing needs, give the hidden states ``expected``."""
    layers = [module for module in model.modules() if hasattr(module, "gradient_checkpointing")]
    for layer in layers:
        for name, value in vars(layer).items():
            if "drop" in name and isinstance(value, float):
                setattr(layer, name, 0.0)
        layer.training = True
    with torch.random.fork_rng(devices=()):
        states = model.base_model(input_ids=rows, use_cache=False).last_hidden_state
    model.eval()
    return torch.equal(states, expected)


def _packed(model: Any, prompts: list[list[int]], responses: list[list[int]]) -> tuple[Predictions, Tensor]:
    """One packed row of all texts: what it predicts, and its hidden states (tokens, size)."""
    (segments,) = fill_rows(prompts, responses, max_tokens=300)
    row = pack(segments, prompts, responses, [range(len(response)) for response in responses])
    return row.predictions, model.base_model(**row.inputs(model.device), use_cache=False).last_hidden_state[0]


def _why_padded(model: Any, prompts: list[list[int]], responses: list[list[int]], expected: Tensor) -> str:
    """Why the hidden states of a packed row are not the ``expected`` ones; empty if they are."""
    try:
        predicted, states = _packed(model, prompts, responses)
    except Exception as error:  # a layer asks for more, or anything else
        return reason(error)
    wanted = torch.cat([expected[i, len(prompts[i]) - 1 :][: len(responses[i])] for i in predicted.members]).float()
    apart = (states[predicted.source].float() - wanted).norm()
    near = apart <= max(NEAR, NEAR_UNITS * torch.finfo(states.dtype).eps) * wanted.norm()  # not so for NaN
    return "" if near else "packed rows gave other results than its own attention"

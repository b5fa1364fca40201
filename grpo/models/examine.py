"""Examination of a Hugging Face model: what the learner and the engine can use it for.

Responses share one copy of their prompt through this project's attention function, which replaces the architecture's own. If
the architecture computes more than softmax(q k^T) v over all earlier tokens, the replacement would give wrong results without
an error. So three conditions must hold before it is used: the configuration asks for nothing else, no layer passes the function
an argument that it does not compute (:class:`NotComputed`), and on a few short texts both attentions give the same results.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from grpo.common.errors import is_out_of_memory, reason
from grpo.models.decoding import CopiedPrompts, SharedPrompts
from grpo.models.packing import fill_rows, pack

SHARED_PROMPT = "shared_prompt"  # name of this project's attention in transformers
# Two prompts with two responses each, of token ids that any vocabulary has.
PROMPTS, RESPONSES = ((1, 2, 3, 4, 5), (8, 2)), ((6, 7, 8), (9, 3, 1), (4, 4, 7), (5, 1, 2))
PROMPT_OF = tuple(PROMPTS[i // 2] for i in range(len(RESPONSES)))  # of each response
# Largest difference of two results, as a share of their norm. Rounding in bfloat16 adds up over the layers; the errors to be
# found (an ignored position, the state of another token) are as large as the results.
NEAR = {torch.float32: 1e-3}
NEAR_IN_HALF = 0.1


@dataclass(frozen=True)
class Traits:
    """Traits of a model.

    Attributes:
        context: longest text, in tokens; None without a limit.
        copied_because: why responses cannot share one copy of their prompt; empty if they can.
        unsampled_because: why the transformers engine cannot sample the model; empty if it can.
        linear_head: whether the logits are just the last hidden states times the weight of ``get_output_embeddings()``.
        recomputes_exactly: whether gradient checkpointing, which needs layers in training mode, changes no result.
    """

    context: int | None = None
    copied_because: str = ""
    unsampled_because: str = ""
    linear_head: bool = True
    recomputes_exactly: bool = True


def traits_of(model: Any) -> Traits:
    """Traits that :func:`grpo.models.checkpoint.load_model` found; the defaults for a model built otherwise."""
    found: Traits | None = getattr(model, "traits", None)
    return found or Traits(context=getattr(model.config, "max_position_embeddings", None))


class NotComputed(Exception):
    """A layer passes the shared attention an argument that it does not compute."""

    def __init__(self, names: list[str]):
        super().__init__(f"its attention takes {', '.join(names)}")
        self.names = names


@torch.no_grad()
def examine(model: Any) -> Traits:
    """Find out a model's traits, choose its attention, and let every token's embedding have a gradient.

    Args:
        model: of transformers, in evaluation mode, with transformers' choice of attention.

    Raises:
        NotImplementedError: the model gives no hidden states.
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
    texts = [torch.tensor(prompt + response) for prompt, response in zip(PROMPT_OF, RESPONSES, strict=True)]
    rows = pad_sequence(texts, batch_first=True)  # on the right, where causal attention hides the padding
    expected = model.base_model(input_ids=rows, use_cache=False).last_hidden_state
    exact = _recomputes_exactly(model, rows, expected)
    logits = model(input_ids=rows, use_cache=False).logits
    head = model.get_output_embeddings()
    plain = head is not None and torch.equal(logits.float(), torch.nn.functional.linear(expected, head.weight).float())
    why = _by_config(config)
    if "position_ids" not in inspect.signature(model.base_model.forward).parameters:
        why = "it takes no position_ids"
    if not why:
        model.set_attn_implementation(SHARED_PROMPT)
        why = _by_trying(model, expected, logits)
        if why:
            model.set_attn_implementation(usual)
    unsampled = _decoding(CopiedPrompts, model, logits) if why else ""
    return Traits(context_of(config), why, unsampled, plain, exact)


def why_not_packed(model: Any) -> str:
    """Why packed rows of a model that can share prompts cannot be computed on its device; empty if they can.

    On a GPU a short row is tried, with its gradient; for this FlexAttention is compiled.
    """
    if model.device.type == "cpu":
        return ""
    prompts, responses = [[1] * 8] * 2, [[1] * 130] * 2  # more tokens than a block of FlexAttention has
    row = pack(fill_rows(prompts, responses, 300)[0], prompts, responses, [range(130)] * 2)
    weight = next(weight for weight in model.parameters() if weight.requires_grad)
    try:
        with torch.enable_grad():
            states = model.base_model(**row.inputs(model.device), use_cache=False).last_hidden_state
            torch.autograd.grad(states.sum(), weight)
    except Exception as error:  # torch.compile may raise anything where Triton or a C compiler is missing
        if is_out_of_memory(error):
            raise
        return f"FlexAttention failed ({reason(error)})"
    return ""


def context_of(config: Any) -> int | None:
    """Longest text of a model, in tokens; None without a limit.

    Some kinds of RoPE change all frequencies if a batch has a text beyond the original length, so the results of a short text
    would depend on the rest of its batch. Such a model is used up to its original length.

    Args:
        config: the model's text configuration, of transformers.
    """
    limits = [getattr(config, "max_position_embeddings", None)]
    rope = getattr(config, "rope_parameters", None) or {}
    for one in [rope] if "rope_type" in rope else rope.values():  # one for each type of layer
        if one.get("rope_type") in ("dynamic", "longrope"):
            limits.append(one.get("original_max_position_embeddings"))
    return min((limit for limit in limits if limit is not None), default=None)


def limited_context(folder: Path) -> int | None:
    """:func:`context_of` of a checkpoint whose RoPE limits it below ``max_position_embeddings``; None for any other."""
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
        found = model.base_model(input_ids=rows, use_cache=False).last_hidden_state
    model.eval()
    return torch.equal(found, expected)


def _by_config(config: Any) -> str:
    """Features in the configuration that short texts would not show, as text; empty if there are none."""
    if kinds := set(getattr(config, "layer_types", None) or ()) - {"full_attention"}:
        return f"it has layers of {', '.join(sorted(kinds))}"
    if getattr(config, "attention_chunk_size", None):
        return "its attention goes by chunks"
    return ""


def _by_trying(model: Any, expected: Tensor, logits: Tensor) -> str:
    """Compute the texts with shared prompts, and say why that fails; empty if the results are those of its own attention."""
    (segments,) = fill_rows(PROMPT_OF, RESPONSES, max_tokens=100)
    row = pack(segments, PROMPT_OF, RESPONSES, [range(len(response)) for response in RESPONSES])
    try:
        packed = model.base_model(**row.inputs(model.device), use_cache=False).last_hidden_state[0]
    except NotComputed as error:
        return str(error)
    except Exception as error:  # other architectures may raise anything
        return reason(error)
    wanted = [expected[i, len(PROMPT_OF[i]) - 1 :][: len(RESPONSES[i])] for i in row.predictions.members]
    if not _near(packed[row.predictions.source], torch.cat(wanted)):
        return "packed rows gave other results than its own attention"
    return _decoding(SharedPrompts, model, logits)


def _decoding(kind: type[SharedPrompts | CopiedPrompts], model: Any, logits: Tensor) -> str:
    """Decode the responses token by token, drop the first row on the way, and say why that fails; empty if it does not."""
    rows, length = list(range(len(RESPONSES))), len(RESPONSES[0])
    try:
        decoding = kind(model, PROMPTS, 2, length)
        for k in range(length):
            wanted = torch.stack([logits[i, len(PROMPT_OF[i]) - 1 + k] for i in rows])
            if not _near(decoding.logits, wanted):
                return "sampling token by token gave other results than whole texts"
            if k == 1:
                decoding.keep(torch.tensor([1, 2, 3]))
                rows = rows[1:]
            decoding.step(torch.tensor([RESPONSES[i][k] for i in rows]))
    except Exception as error:  # as above
        return reason(error)
    return ""


def _near(found: Tensor, expected: Tensor) -> bool:
    limit = NEAR.get(found.dtype, NEAR_IN_HALF)
    return bool((found.float() - expected.float()).norm() <= limit * expected.float().norm())

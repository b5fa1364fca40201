"""Models of transformers, with the attention that packed rows and shared prompts need.

The import of transformers takes seconds, so only code that needs such a model imports this module.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.utils import logging as transformers_logging

from grpo.common.errors import library_errors
from grpo.models.decoding import SharedPrefix
from grpo.models.examine import SHARED_PROMPT, examine
from grpo.models.packing import OnDevice, packed_attention
from grpo.models.tokenizer import GENERATION_CONFIG, MODEL_CONFIG

transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]

# Further arguments that layers pass to their attention and that do not change the result.
HARMLESS = {"position_ids", "use_cache", "output_router_logits", "dropout"}  # the learner's layers have no dropout


def load_hugging_face(folder: Path, dtype: torch.dtype) -> Any:
    """Load a causal language model of any architecture of transformers, with its traits (:mod:`grpo.models.examine`).

    Raises UserError if the model is readable, but its architecture cannot be trained here.
    """
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, trust_remote_code=False)
    what = f"{folder}: a model of the architecture {type(model).__name__} cannot be trained here"
    with library_errors(lambda why: f"{what} ({why}). Use a model of another architecture (docs/settings.md)."):
        model.traits = examine(model)
    # transformers refuses to save a model with inconsistent sampling settings, so only the token ids stay here. The tokenizer
    # keeps the original generation_config.json.
    said = model.generation_config
    model.generation_config = GenerationConfig(
        bos_token_id=said.bos_token_id, eos_token_id=said.eos_token_id, pad_token_id=said.pad_token_id
    )
    return model


def convert_gguf(file: Path, target: Path) -> None:
    """Write a GGUF file's model, with whole weights, and its tokenizer as a folder in Hugging Face format."""
    # Newer versions of transformers would keep quantized weights packed where they have a kernel for them.
    packed = {"quantization_config": transformers.GgufConfig(dequantize=True)} if hasattr(transformers, "GgufConfig") else {}
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype="auto", **packed)
    if quantizer := getattr(model, "hf_quantizer", None):
        quantizer.remove_quantization_config(model)  # transformers does not save a model that has one
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(target)


def convert_tokenizer(folder: Path, target: Path) -> None:
    """Write a checkpoint's tokenizer as a tokenizer.json, with the files that name the stop tokens."""
    AutoTokenizer.from_pretrained(folder, trust_remote_code=False).save_pretrained(target)
    for name in (GENERATION_CONFIG, MODEL_CONFIG):
        if (folder / name).exists():
            shutil.copy(folder / name, target)


def shared_prompt_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    shared: OnDevice | SharedPrefix | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of a layer of transformers, with shared prompts in training and sampling.

    Returns (batch, tokens, heads, size) Raises NotImplementedError: with ``shared``, the layer asks for more, such as a sliding
    window.

    Args:
        query: (batch, heads, tokens, size).
        key, value: (batch, key heads, tokens, size).
        shared: layout of a packed row (training) or the prompts of a batch (sampling); None computes the usual SDPA.
    """
    if shared is None:
        usual: tuple[Tensor, None] = sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
        return usual
    scale = kwargs.pop("scaling", None) or query.shape[-1] ** -0.5
    if more := [name for name, value in kwargs.items() if value is not None and name not in HARMLESS]:
        raise NotImplementedError(f"its attention takes {', '.join(sorted(more))}")
    if isinstance(shared, SharedPrefix):
        out = shared.attend(module.layer_idx, query, key, value, scale)
    else:
        out = packed_attention(query, key, value, shared, scale)
    return out.transpose(1, 2), None


AttentionInterface.register(SHARED_PROMPT, shared_prompt_attention)
ALL_MASK_ATTENTION_FUNCTIONS.register(SHARED_PROMPT, sdpa_mask)

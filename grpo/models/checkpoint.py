"""Loading and saving models with their tokenizers, in Hugging Face format."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any

import torch

from grpo.errors import UserError, reason
from grpo.models import how_to_restore_checkpoint, require_checkpoint

__all__ = [
    "PreTrainedTokenizerFast",
    "Qwen2Config",
    "Qwen2ForCausalLM",
    "compile_layers",
    "load_model",
    "load_tokenizer",
    "save_checkpoint",
]

# transformers imports scikit-learn wherever it is installed (MLflow brings it along), for a generation feature that is not
# used here. Hiding it while transformers is imported takes over a second off the start of every stage.
_hidden = "sklearn" not in sys.modules
if _hidden:
    sys.modules["sklearn"] = None  # type: ignore[assignment]
try:
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
    from transformers.models.qwen2 import Qwen2Config, Qwen2ForCausalLM
    from transformers.utils import logging as transformers_logging
finally:
    if _hidden:
        del sys.modules["sklearn"]

from grpo.models.qwen2_format import written_here  # noqa: E402
from grpo.models.shared_prompt import SHARED_PROMPT  # noqa: E402
from grpo.models.transformer import TransformerLM  # noqa: E402

transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer of a checkpoint, exactly as its tokenizer.json describes it.

    Not ``AutoTokenizer``: from the model type qwen2 it concludes that the text is split as Qwen's own tokenizer splits it,
    whatever tokenizer.json says, and the mini model's prompts would become other tokens than those it was trained on.

    Raises:
        UserError: the folder or its tokenizer is missing or damaged.
    """
    require_checkpoint(folder)
    try:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    except Exception as error:  # on a damaged file the libraries raise whatever comes, plain Exception too
        raise UserError(
            f"{folder}: holds no readable tokenizer ({reason(error)}). {how_to_restore_checkpoint(folder)}"
        ) from error
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_model(folder: Path, dtype: str = "float32", device: str = "cpu") -> Any:
    """A causal language model, with the attention that packed rows and sampling need (:mod:`grpo.models.shared_prompt`).

    A checkpoint written by the project's own model is loaded as such, every other as a Hugging Face model.

    Raises:
        UserError: the folder is missing or damaged, or the device is not there.
    """
    require_checkpoint(folder)
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise UserError(
            f"device {device}: torch sees no GPU. Set engine.device and learner.device to cpu, or use a GPU machine."
        )
    precision = getattr(torch, dtype)
    try:
        for weights in folder.glob("*.safetensors"):
            weights.open("rb").close()  # of a file that must not be read safetensors says that it is not there
        if written_here(folder):
            model: Any = TransformerLM.from_pretrained(folder, precision)
        else:
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=precision, attn_implementation=SHARED_PROMPT)
    except (UserError, MemoryError):
        raise
    except Exception as error:  # as above
        raise UserError(f"{folder}: not a readable model ({reason(error)}). {how_to_restore_checkpoint(folder)}") from error
    return model.to(device)


def compile_layers(model: Any) -> None:
    """Let torch.compile fuse each layer's small operations; attention and sampling stay as they are.

    Raises:
        UserError: there is no C++ compiler.
    """
    if not any(shutil.which(name) for name in (os.environ.get("CXX", "c++"), "g++", "clang++")):
        raise UserError("params.yaml: learner.compile: needs a C++ compiler such as g++, and none was found. Set it to false.")
    for layer in model.base_model.layers:
        layer.compile(dynamic=True)


def save_checkpoint(folder: Path, model: Any, tokenizer: Any) -> None:
    """Write model (safetensors) and tokenizer; ``AutoModelForCausalLM`` and vLLM can load the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)

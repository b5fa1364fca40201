"""Loading and saving of models and tokenizers in Hugging Face format."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from grpo.common.errors import UserError, library_errors
from grpo.common.files import parse_json, read_bytes
from grpo.models import how_to_restore_checkpoint, require_checkpoint
from grpo.models.lora import FOLDER, has_adapters, save_adapters, without_adapters
from grpo.models.packing import keep_out_of_graphs
from grpo.models.tokenizer import TOKENIZER, Tokenizer, tokenizer_files
from grpo.models.transformer import MARK, TransformerLM


def load_tokenizer(folder: Path) -> Tokenizer:
    """Load the tokenizer of a checkpoint; convert one without a tokenizer.json.

    Raises UserError if the folder or its tokenizer is missing or damaged.
    """
    require_checkpoint(folder)
    with library_errors(lambda why: f"{folder}: holds no readable tokenizer ({why}). {how_to_restore_checkpoint(folder)}"):
        tokenizer_files(folder)  # refuses links before any file is read
        if not (folder / TOKENIZER).exists() and any(folder.glob("*.model")) | any(folder.glob("vocab*")):
            from grpo.models.hugging_face import convert_tokenizer

            with TemporaryDirectory() as converted:
                convert_tokenizer(folder, Path(converted))
                return Tokenizer.from_folder(Path(converted))
        return Tokenizer.from_folder(folder)


def load_model(folder: Path, dtype: str | None = "float32", device: str = "cpu") -> Any:
    """Load a causal language model, with the attention that packed rows and shared prompts need.

    A checkpoint of the project's own model is loaded as that model, any other with transformers
    (:mod:`grpo.models.hugging_face`). ``dtype``: None for the checkpoint's own precision. Raises UserError if the folder is
    missing or damaged, or the device is not available.
    """
    require_checkpoint(folder)
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise UserError(
            f"device {device}: torch sees no GPU. Set engine.device and learner.device to cpu, or use a GPU machine."
        )
    with library_errors(lambda why: f"{folder}: not a readable model ({why}). {how_to_restore_checkpoint(folder)}"):
        config = parse_json(read_bytes(folder / "config.json"))
        if config.get("quantization_config"):
            raise UserError(
                f"{folder}: config.json names quantization_config, and transformers does not save such a model after training. "
                "If its weights are whole, as those of a converted GGUF file, remove that key; else use the model itself."
            )
        precision = getattr(torch, dtype or config.get("dtype") or config.get("torch_dtype") or "float32")
        for weights in folder.glob("*.safetensors"):
            weights.open("rb").close()  # safetensors reports an unreadable file as missing
        sizes, held = config.get("text_config") or config, sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        names = ("hidden_size", "vocab_size", "num_hidden_layers", "intermediate_size")
        hidden, vocabulary, layers, inner = (sizes.get(name) or 0 for name in names)
        if hidden * (vocabulary + layers * (hidden + inner)) > 4 * held > 0:  # else it would be made before they are looked at
            raise ValueError("config.json describes a larger model than the weights")
        if config.items() >= MARK.items():
            model: Any = TransformerLM.from_pretrained(folder, precision)
        else:
            from grpo.models.hugging_face import load_hugging_face

            model = load_hugging_face(folder, precision)
    return model.to(device)


def compile_layers(model: Any) -> None:
    """Compile each layer with torch.compile, which fuses small operations; attention and sampling stay uncompiled.

    Raises UserError if there is no C++ compiler.
    """
    if not any(shutil.which(name) for name in (os.environ.get("CXX", "c++"), "g++", "clang++")):
        raise UserError("params.yaml: learner.compile: needs a C++ compiler such as g++, and none was found. Set it to false.")
    keep_out_of_graphs()
    layers = getattr(model.base_model, "layers", None)
    if layers is None:
        raise UserError("params.yaml: learner.compile: this model keeps its layers in another way than most. Set it to false.")
    for layer in layers:
        layer.compile(dynamic=True)


def save_checkpoint(folder: Path, model: Any, tokenizer: Tokenizer) -> None:
    """Save model (safetensors) and tokenizer in a folder that ``AutoModelForCausalLM`` and vLLM can load.

    Adapters are merged into the weights, so that any program can load them; the adapters alone are saved in ``adapter/``, in
    peft's format.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with without_adapters(model, merge=True):
        model.save_pretrained(folder)
    if has_adapters(model):
        save_adapters(folder / FOLDER, model)
    tokenizer.save_pretrained(folder)  # after the model, to keep the generation_config.json that the model came with

"""LoRA (Hu et al. 2021, arXiv 2106.09685): W + alpha / rank * B A replaces the weights W, and only A and B are trained.

peft builds and computes the layers. It imports transformers, so only runs with adapters import it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from grpo.common.errors import UserError

if TYPE_CHECKING:
    from grpo.study.config import Lora

ADAPTER = "default"  # peft's name of a single adapter
FOLDER = "adapter"  # of a checkpoint
# bitsandbytes, which peft imports, warns about a missing kernel for 4-bit weights, which are not used here.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)


def add_adapters(model: Any, lora: Lora, seed: int, base: Path | str = "") -> None:
    """Add adapters to linear layers of ``model``, in place, and freeze all other weights.

    B starts at zero, so the model's results do not change; ``seed`` decides A. Without ``lora.targets`` all linear layers but
    the output layer get adapters. Names in ``lora.targets`` that gave none are printed. ``base``: checkpoint that the model was
    loaded from, for adapter_config.json. Raises UserError: ``lora.targets`` names no linear layer, or one that takes no
    adapters.
    """
    from peft import LoraConfig, inject_adapter_in_model

    head = model.get_output_embeddings()
    linear = (name for name, module in model.named_modules() if isinstance(module, nn.Linear) and module is not head)
    targets = sorted(lora.targets or {name.rpartition(".")[2] for name in linear})
    config = LoraConfig(
        r=lora.rank, lora_alpha=lora.alpha, target_modules=targets, task_type="CAUSAL_LM", base_model_name_or_path=str(base)
    )
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        try:
            inject_adapter_in_model(config, model)
        except ValueError as error:  # no layer has this name, or its kind takes no adapters
            raise UserError(f"lora.targets: {', '.join(targets)}: no layers to adapt in this model ({error}).") from error
    adapted = {name: module for name, module in model.named_modules() if hasattr(module, "lora_A")}
    only_linear = all(len(layer.lora_A) and hasattr(layer.base_layer, "weight") for layer in adapted.values())
    if model.get_output_embeddings() is not head or not only_linear:
        raise UserError(
            f"lora.targets: {', '.join(targets)}: embeddings, the output layer and the experts of a mixture take no adapters. "
            "Leave them out."
        )
    if without := [target for target in targets if not any(f".{name}".endswith(f".{target}") for name in adapted)]:
        print(f"lora: no adapters for {', '.join(without)}: no linear layers", flush=True)


@contextmanager
def without_adapters(model: Any, merge: bool) -> Iterator[Any]:
    """Replace the adapted layers by plain ones within the block, so that weights have their original names.

    The block's end restores every bit, which subtracting the product would not. A model without adapters does not change.
    ``merge``: the plain weights are W + alpha / rank * B A, in the model's precision; else W.
    """
    layers = list(_adapted(model))
    weights = [layer.base_layer.weight.data for _, _, layer in layers]
    try:
        for (parent, name, layer), weight in zip(layers, weights, strict=True):
            if merge:
                with torch.no_grad():
                    layer.base_layer.weight.data = weight + layer.get_delta_weight(ADAPTER).to(weight.dtype)
            setattr(parent, name, layer.base_layer)
        yield model
    finally:
        for (parent, name, layer), weight in zip(layers, weights, strict=True):
            layer.base_layer.weight.data = weight
            setattr(parent, name, layer)


def save_adapters(folder: Path, model: Any) -> None:
    """Write adapter_config.json and adapter_model.safetensors for ``peft.PeftModel.from_pretrained``."""
    from peft import get_peft_model_state_dict
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    # Embeddings have no adapters; "auto" would load the base model's configuration with transformers to find that out.
    weights = get_peft_model_state_dict(model, adapter_name=ADAPTER, save_embedding_layers=False)
    named = {f"base_model.model.{name}": tensor.detach().contiguous() for name, tensor in weights.items()}
    save_file(named, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = model.peft_config[ADAPTER]
    config.inference_mode = True
    config.target_modules = sorted(config.target_modules)  # a set, whose order changes from process to process
    config.save_pretrained(folder)


def has_adapters(model: Any) -> bool:
    return any(True for _ in _adapted(model))


def _adapted(model: Any) -> Iterator[tuple[nn.Module, str, Any]]:
    """Each layer with an adapter, the module it belongs to, and its name there."""
    for parent in list(model.modules()) if isinstance(model, nn.Module) else ():  # not the Weights of an asynchronous run
        for name, child in list(parent.named_children()):
            if hasattr(child, "lora_A"):
                yield parent, name, child

"""LoRA (Hu et al. 2021, arXiv 2106.09685): W + alpha / rank * B A replaces the weights W, and only A and B are trained.

peft builds and computes the layers. It imports transformers, so only runs with adapters import it.
"""

from __future__ import annotations

import copy
import logging
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from grpo.common.errors import UserError
from grpo.models.sharding import without_weights

if TYPE_CHECKING:
    from grpo.study.methods import Lora

ADAPTER = "default"  # peft's name of a single adapter
FOLDER = "adapter"  # of a checkpoint
# The parts of a mixture of experts: names of modules that are, or are in, its experts, its router, or a shared expert's gate.
MIXTURE = re.compile(r"(^|\.)(experts|gate|\w*expert_gate|\w*router\w*)(\.|$)")
# bitsandbytes, which peft imports, warns about a missing kernel for 4-bit weights, which are not used here.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)


def add_adapters(model: Any, lora: Lora, seed: int, base: Path | str = "") -> None:
    """Add adapters to linear layers of ``model``, in place, and freeze all other weights.

    B starts at zero, so the model's results do not change; ``seed`` decides A. Without ``lora.targets`` all linear layers get
    adapters. Routers and routed experts get none (:data:`MIXTURE`); shared experts, which compute every token, do. Matrices
    without adapters, or names in ``lora.targets`` that gave none, are printed.

    Args:
        base: checkpoint that the model was loaded from, for adapter_config.json.

    Raises:
        UserError: ``lora.targets`` names no linear layer, or the output layer.
    """
    from peft import LoraConfig, inject_adapter_in_model

    head = model.get_output_embeddings()
    modules = dict(model.named_modules())
    mixture = {name for name in modules if MIXTURE.search(name)}
    linear = {name for name, module in modules.items() if isinstance(module, nn.Linear) and module is not head}
    wanted = lora.targets or {name.rpartition(".")[2] for name in linear - mixture}
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        target_modules=sorted(each for each in wanted if any(_is_named(name, each) for name in modules.keys() - mixture)),
        exclude_modules=sorted(name for name in mixture if any(_is_named(name, each) for each in wanted)) or None,
        task_type="CAUSAL_LM",
        base_model_name_or_path=str(base),
    )
    # In a mixture of experts peft takes gate_proj, up_proj and down_proj, whichever layers have these names, for the experts'
    # matrices. In a list of modules it knows no architecture, and adapts the layers.
    inside, empty = (nn.ModuleList([model]), without_weights(model)) if mixture else (model, None)
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        try:
            inject_adapter_in_model(copy.deepcopy(config), inside)
        except ValueError as error:  # no layer has this name, or its kind takes no adapters
            raise UserError(
                f"lora.targets: {', '.join(sorted(wanted))}: no layers to adapt in this model ({error})."
            ) from error
        adapted = {name: module for name, module in model.named_modules() if hasattr(module, "lora_A")}
        if model.get_output_embeddings() is not head or not all(len(layer.lora_A) for layer in adapted.values()):
            raise UserError(
                f"lora.targets: {', '.join(sorted(wanted))}: embeddings and the output layer take no adapters. Leave them out."
            )
        model.peft_config = inside.peft_config if empty is None or _adapts(config, empty, set(adapted)) else {}
    if not model.peft_config:
        print("lora: checkpoints have merged weights and no adapter/: peft would take these adapters for experts'", flush=True)
    _print_without(lora, modules, set(adapted))


def _is_named(name: str, target: str) -> bool:
    """Whether a target names this module, as peft matches them."""
    return f".{name}".endswith(f".{target}")


def _adapts(config: Any, model: Any, layers: set[str]) -> bool:
    """Whether ``peft.PeftModel.from_pretrained`` would give adapters to these layers of a model without weights."""
    from peft import inject_adapter_in_model

    with suppress(ValueError), warnings.catch_warnings(action="ignore"):
        inject_adapter_in_model(config, model, low_cpu_mem_usage=True)
    return {name for name, module in model.named_modules() if hasattr(module, "lora_A")} == layers


def _print_without(lora: Lora, modules: dict[str, Any], adapted: set[str]) -> None:
    """Print what got no adapters: names in ``lora.targets``, or without them all matrices but embeddings and the head."""
    if lora.targets is None:
        plain = {where for where, module in modules.items() if isinstance(module, nn.Linear | nn.Embedding)}
        without = {
            f"{where.rpartition('.')[2]}.{name}"
            for where in modules.keys() - {where for where in plain if not MIXTURE.search(where)}
            for name, weight in modules[where].named_parameters(recurse=False)
            if weight.ndim > 1 and "bias" not in name
        }
    else:
        without = {target for target in lora.targets if not any(_is_named(name, target) for name in adapted)}
    routers = any(isinstance(module, nn.Linear) and MIXTURE.search(where) for where, module in modules.items())
    if without:
        why = "no linear layers" + (", or of a router" if routers else "")
        print(f"lora: no adapters for {', '.join(sorted(without))}: {why}", flush=True)


@contextmanager
def without_adapters(model: Any, merge: bool) -> Iterator[Any]:
    """Replace the adapted layers by plain ones within the block, so that weights have their original names.

    The block's end restores every bit, which subtracting the product would not. A model without adapters does not change.

    Args:
        merge: the plain weights are W + alpha / rank * B A, in the model's precision; else W.
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
    """Write adapter_config.json and adapter_model.safetensors for ``peft.PeftModel.from_pretrained``, if that can read them."""
    from peft import get_peft_model_state_dict
    from safetensors.torch import save_file

    if not model.peft_config:
        return
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
    """Whether the model has adapters."""
    return any(True for _ in _adapted(model))


def _adapted(model: Any) -> Iterator[tuple[nn.Module, str, Any]]:
    """Each layer with an adapter, the module it belongs to, and its name there."""
    for parent in list(model.modules()) if isinstance(model, nn.Module) else ():  # not the Weights of an asynchronous run
        for name, child in list(parent.named_children()):
            if hasattr(child, "lora_A"):
                yield parent, name, child

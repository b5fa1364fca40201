"""The ways that ``benchmarks/step.py --gpu`` compares: this project's engine and learner with vLLM, and TRL with vLLM.

Each has the same model (random weights in the shape of Qwen2.5-Math-1.5B, which end a response at each token with the same
probability), prompts, batch and limits, and a random reward. Each runs in a process of its own, as vLLM keeps its memory.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_parts.sampling import make_tokenizer
from benchmarks.gpu_parts.tools import FULL, TINY, Scale, make_model, missing
from grpo.rollout.engine import SamplingParams

# Microbatches of our ways: tokens, packed or not, compiled or not. The first is math-h100's.
OURS = {
    "padded, 4,096": (4096, False, False),
    "packed, 8,192": (8192, True, False),
    "packed, compiled": (8192, True, True),
    "padded, compiled": (4096, False, True),
}
TRL = "TRL"
TRL_MICROBATCH = 8  # responses
STOP = ("</answer>",)  # never sampled by chance, but looked for


def end_after(model: Any, mean: float, end: int = 0) -> None:
    """Change a random Qwen2 model so that each token is ``end`` with a probability of about 1 / ``mean``.

    A large bias of the last layer's values adds one vector to all hidden states, as attention's weights sum to 1. The
    embedding of ``end``, which is its row of the head, gets that direction, and the length that gives the probability.
    """
    with torch.no_grad():
        attention, embeddings = model.model.layers[-1].self_attn, model.get_output_embeddings().weight
        attention.v_proj.bias.normal_()
        attention.o_proj.weight.mul_(4)
        texts = torch.randint(1, len(embeddings), (4, 128), device=model.device)
        states = model.model(texts, use_cache=False).last_hidden_state[:, 16:].flatten(0, 1).float()
        shared = torch.nn.functional.normalize(states.mean(dim=0), dim=0)
        others = torch.logsumexp(states @ embeddings.float().T, dim=-1).mean()
        embeddings[end] = shared * (others - math.log(mean - 1)) / (states @ shared).mean()


def make_checkpoint(folder: Path, scale: Scale, device: str, mean: float) -> None:
    """Save the model and a tokenizer of as many tokens."""
    from grpo.models.checkpoint import save_checkpoint

    model = make_model(scale, device, torch.float32)
    end_after(model, mean)
    save_checkpoint(folder, model.to(torch.bfloat16), make_tokenizer(model.config.vocab_size))


def our_parts(way: str, folder: Path, options: argparse.Namespace, config: Any) -> tuple[Any, Any, SamplingParams]:
    """Engine, learner and sampling parameters of a way."""
    from grpo.learner.learner import Learner
    from grpo.models.checkpoint import load_model, load_tokenizer
    from grpo.rollout.transformers_engine import TransformersEngine
    from grpo.rollout.vllm_engine import VllmEngine, VllmSettings
    from grpo.study.config import LearnerSettings

    budget, packing, compiled = OURS[way]
    device = "cpu" if options.tiny else "cuda:0"
    dtype = "float32" if options.tiny else "bfloat16"
    model, tokenizer = load_model(folder, dtype, device), load_tokenizer(folder)
    engine: Any = TransformersEngine(model, tokenizer)
    if not options.tiny:
        engine = VllmEngine(folder, model, VllmSettings(dtype, device, 0.25, 1024))
    settings = LearnerSettings(device=device, dtype=dtype, max_tokens_per_microbatch=budget, packing=packing, compile=compiled)
    learner = Learner(model, config, tokenizer.pad_token_id, settings)
    return engine, learner, SamplingParams(max_tokens=options.new_tokens, stop=STOP)


def trl_settings(options: argparse.Namespace) -> dict[str, Any]:
    """What TRL's GRPOConfig needs on a GPU, besides what it needs on a CPU."""
    if options.tiny:
        return {"generation_kwargs": {}, "per_device_train_batch_size": options.prompts * options.group}
    # vLLM in the process of TRL wants these.
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}
    return {
        "generation_kwargs": {},
        "per_device_train_batch_size": TRL_MICROBATCH,
        "gradient_accumulation_steps": options.prompts * options.group // TRL_MICROBATCH,
        "use_cpu": False,
        "bf16": True,
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_gpu_memory_utilization": 0.25,
        "vllm_max_model_length": 2048,
    }


def compare(options: argparse.Namespace, script: str, measure: Callable[[str, Path], dict[str, Any]]) -> dict[str, Any]:
    """Make the model and run each way in a process of its own; in such a process (``--way``), measure it and print JSON.

    Returns:
        for each way its ``step``, ``rollout`` and ``learner`` (seconds of each step), or ``skipped`` or ``failed``.
    """
    if options.way:
        found = measure(options.way, options.model)
        if not options.tiny:
            found["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
        print(json.dumps(found))
        return {}
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        make_checkpoint(Path(name), TINY if options.tiny else FULL, "cpu" if options.tiny else "cuda", options.mean_tokens)
        torch.cuda.empty_cache()
        for way in (*OURS, *(() if options.without_trl else (TRL,))):
            needs = ("trl", "datasets") if way == TRL else ()
            if lacking := missing((*needs, *(() if options.tiny else ("vllm",)))):
                results[way] = {"skipped": f"not installed: {', '.join(lacking)}"}
            else:
                command = [sys.executable, script, *sys.argv[1:], "--way", way, "--model", name]
                done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
                last = done.stdout.splitlines()[-1:]
                results[way] = {"failed": f"exit code {done.returncode}"} if done.returncode else json.loads(last[0])
            print(way, results[way], flush=True)
    return results

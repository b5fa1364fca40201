"""One update of the learner at the shape of Qwen2.5-Math-1.5B (random weights): packed rows beside padded microbatches.

``python benchmarks/learner.py --out benchmarks/results/learner.json`` on a GPU; ``--device cpu --tiny`` tries it anywhere.
Prints seconds, tokens a second, the share of the device's matrix-product peak (measured first, in the same precision), and the
largest memory. Of the work only what both ways must do is counted: each prompt once, no padding, no recomputation.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from grpo.common.memory import peak_mb, reset_peak
from grpo.common.records import Completion, Problem, Rollout
from grpo.learner.learner import Learner
from grpo.models.hugging_face import SHARED_PROMPT, Qwen2Config, Qwen2ForCausalLM
from grpo.study.methods import GrpoConfig

QWEN = {  # Qwen2.5-Math-1.5B's config.json
    "vocab_size": 151936,
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
}
TINY = {
    **QWEN,
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}


def make_model(shape: dict[str, int], device: str, dtype: torch.dtype) -> Any:
    """Random weights; the output layer is the embedding, as in the real one."""
    torch.manual_seed(0)
    with torch.device(device):
        model = Qwen2ForCausalLM(Qwen2Config(**shape, max_position_embeddings=4096, tie_word_embeddings=True)).to(dtype)
    model.set_attn_implementation(SHARED_PROMPT)
    return model


def make_batch(settings: argparse.Namespace, vocabulary: int) -> list[Rollout]:
    """Random tokens, rewards and advantages; response lengths spread evenly up to the longest."""
    rng = random.Random(0)
    rollouts = []
    for g in range(settings.responses // settings.group):
        prompt = tuple(rng.randrange(vocabulary) for _ in range(settings.prompt_tokens))
        for i in range(settings.group):
            n = max(1, settings.response_tokens * (1 + g * settings.group + i) // settings.responses)
            completion = Completion(tuple(rng.randrange(vocabulary) for _ in range(n)), "", (0.0,) * n, "stop")
            rollouts.append(Rollout(Problem("", "", ""), prompt, completion))
    rng.shuffle(groups := [rollouts[i : i + settings.group] for i in range(0, len(rollouts), settings.group)])
    for rollout, reward, advantage in zip(rollouts, torch.rand(len(rollouts)), torch.randn(len(rollouts)), strict=True):
        rollout.rewards, rollout.advantage = {"reward": reward.item()}, advantage.item()
    return [r for group in groups for r in group]


def needed_flops(model: Any, batch: list[Rollout], group: int) -> float:
    """Forward and backward: 6 for each weight and token it meets, 12 x width for each pair of tokens in attention."""
    config = model.config
    head = config.vocab_size * config.hidden_size
    body = sum(p.numel() for p in model.parameters()) - head
    pairs = tokens = responses = 0
    for i in range(0, len(batch), group):
        p = len(batch[i].prompt_ids)
        lengths = [len(r.completion.token_ids) for r in batch[i : i + group]]
        tokens += p + sum(lengths)
        responses += sum(lengths)
        pairs += p * p / 2 + sum(n * p + n * n / 2 for n in lengths)
    return float(6 * (body * tokens + head * responses) + 12 * config.num_hidden_layers * config.hidden_size * pairs)


def wait(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def matmul_peak(device: str, dtype: torch.dtype, size: int) -> float:
    """Floating-point operations a second of a square matrix product, the best of 20."""
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    best = float("inf")
    for _ in range(20):
        wait(device)
        start = time.perf_counter()
        a @ b
        wait(device)
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best


def measure(shape: dict[str, int], settings: argparse.Namespace, dtype: torch.dtype, way: dict[str, Any]) -> dict[str, float]:
    """Median seconds of an update and the largest memory in MiB."""
    model = make_model(shape, settings.device, dtype)
    if settings.checkpointing:
        model.gradient_checkpointing_enable()
    steps = settings.responses // way.pop("size", settings.responses)
    config = GrpoConfig(
        rollout_batch_size=settings.responses,
        train_batch_size=settings.responses,
        group_size=settings.group,
        gradient_accumulation_steps=steps,
        sampling_max_tokens=settings.response_tokens,
    )
    learner = Learner(model, config, 0, **way)
    batch = make_batch(settings, shape["vocab_size"])
    seconds = []
    for _ in range(settings.repeats + 1):
        reset_peak(settings.device)
        start = time.perf_counter()
        learner.update(batch)
        wait(settings.device)
        seconds.append(time.perf_counter() - start)
    return {
        "seconds": statistics.median(seconds[1:]),
        "peak_mb": peak_mb(settings.device),
        "flops": needed_flops(model, batch, settings.group),
        "response_tokens": sum(len(r.completion.token_ids) for r in batch),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a model of two narrow layers")
    parser.add_argument("--responses", type=int, default=256)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=150)
    parser.add_argument("--response-tokens", type=int, default=1024, help="of the longest")
    parser.add_argument("--budget", type=int, default=16384, help="tokens of a packed row")
    parser.add_argument("--padded-size", type=int, default=4, help="responses of a padded microbatch")
    parser.add_argument("--checkpointing", action="store_true", help="recompute activations in the backward pass")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, help="JSON file for the result")
    settings = parser.parse_args()
    shape = TINY if settings.tiny else QWEN
    dtype = torch.float32 if settings.device == "cpu" else torch.bfloat16
    peak = matmul_peak(settings.device, dtype, 1024 if settings.device == "cpu" else 8192)
    print(f"matrix products: {peak / 1e12:.2f} TFLOP/s")
    rows = {}
    for name, way in (
        ("packed", {"max_tokens_per_microbatch": settings.budget}),
        ("padded", {"size": settings.padded_size}),
    ):
        row = measure(shape, settings, dtype, way)
        row |= {
            "share_of_peak": row["flops"] / row["seconds"] / peak,
            "tokens_per_s": row["response_tokens"] / row["seconds"],
        }
        rows[name] = row
        print(
            f"{name}: {row['seconds']:.3f} s, {row['tokens_per_s']:.0f} response tokens/s, "
            f"{row['share_of_peak']:.1%} of the peak, {row['peak_mb']:.0f} MiB"
        )
    if settings.out:
        about = {
            "date": datetime.now(UTC).date().isoformat(),
            "device": torch.cuda.get_device_name() if settings.device.startswith("cuda") else "cpu",
            "versions": {package: version(package) for package in ("torch", "transformers")},
            "settings": {key: str(value) for key, value in vars(settings).items() if key != "out"},
            "matmul_flops": peak,
        }
        settings.out.write_text(json.dumps({**about, "rows": rows}, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

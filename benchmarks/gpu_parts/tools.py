"""Shared by the parts of benchmarks/gpu.py: sizes, random models and batches, clocks, minimal FLOPs."""

from __future__ import annotations

import importlib.util
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from grpo.common.records import Completion, Problem, Rollout
from grpo.learner.microbatches import (
    Microbatch,
    packed_microbatches,
    padded_microbatches,
    split_by_length,
    split_in_order,
    texts_of,
)
from grpo.learner.optimizer import Optimizer

ROOT = Path(__file__).resolve().parents[2]
WARM_UP = 2  # calls that are not counted: kernels are chosen and compiled in them

Row = dict[str, Any]
Rows = Iterator[tuple[str, str, Callable[[], Row]]]
"""The rows of a part: name, goal (text or empty), and the function that measures it."""


class Skipped(Exception):
    """The reason why a part or a row is skipped."""


@dataclass(frozen=True)
class Batch:
    """The size of an optimizer batch: prompts, responses per prompt, and lengths in tokens (for responses the maximum)."""

    prompts: int
    group: int
    prompt_tokens: int
    response_tokens: int

    def made(self, vocabulary: int, seed: int = 0) -> list[Rollout]:
        """Make random tokens and advantages, with lengths of responses evenly spread up to the maximum, in random order."""
        rng = random.Random(seed)
        n = self.prompts * self.group
        lengths = [max(1, self.response_tokens * (i + 1) // n) for i in range(n)]
        rng.shuffle(lengths)
        rollouts = []
        for g in range(self.prompts):
            prompt = tuple(rng.randrange(1, vocabulary) for _ in range(self.prompt_tokens))
            for length in lengths[g * self.group : (g + 1) * self.group]:
                ids = tuple(rng.randrange(1, vocabulary) for _ in range(length))
                advantage = torch.tensor(rng.gauss(0, 1)).item()
                completion = Completion(ids, "", (0.0,) * length, "stop")
                rollouts.append(Rollout(Problem("", "", ""), prompt, completion, {"reward": rng.random()}, advantage=advantage))
        return rollouts


@dataclass(frozen=True)
class Scale:
    """Sizes of everything; smaller to only try the code.

    Attributes:
        shape: of the model, by the names of Qwen2's config.json.
        gradients, update, profile: batches of these parts.
        budget: tokens of a packed row.
        padded: responses of a padded microbatch.
        matmul: rows and columns of the matrices whose product gives the peak.
        sampled: prompts, responses per prompt, tokens per response.
        study: the study that the training on the GPU extends.
    """

    shape: dict[str, int]
    gradients: Batch
    update: Batch
    profile: Batch
    budget: int
    padded: int
    matmul: int
    sampled: tuple[int, int, int]
    study: str


QWEN = {  # Qwen2.5-Math-1.5B's config.json
    "vocab_size": 151936,
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
}
FULL = Scale(
    QWEN,
    gradients=Batch(4, 4, 100, 256),
    update=Batch(32, 8, 150, 1024),
    profile=Batch(8, 8, 150, 1024),
    budget=8192,
    padded=8,
    matmul=8192,
    sampled=(32, 8, 512),
    study="mini",
)
TINY = Scale(
    {
        **QWEN,
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    },
    gradients=Batch(2, 4, 9, 12),
    update=Batch(2, 4, 9, 12),
    profile=Batch(2, 4, 9, 12),
    budget=48,
    padded=4,
    matmul=128,
    sampled=(2, 2, 8),
    study="smoke",
)


@dataclass(frozen=True)
class Setting:
    """Device and sizes of a measurement.

    Attributes:
        device: ``cuda`` or ``cpu``.
        repeats: number of timed calls; the result is their median.
    """

    device: str
    scale: Scale
    repeats: int

    @property
    def on_gpu(self) -> bool:
        """Whether a GPU is measured."""
        return self.device != "cpu"


def make_model(scale: Scale, device: str, dtype: torch.dtype = torch.bfloat16, own: bool = False) -> Any:
    """Make a model with random weights and tied embeddings, as in the real model.

    Args:
        own: use the project's own Transformer instead of transformers' Qwen2.
    """
    torch.manual_seed(0)
    sizes: Any = {**scale.shape, "max_position_embeddings": 4096, "tie_word_embeddings": True}
    if own:
        from grpo.models.transformer import TransformerConfig, TransformerLM

        with torch.device(device):
            return TransformerLM(TransformerConfig(**sizes)).to(dtype).train()
    from transformers import AutoModelForCausalLM, Qwen2Config

    from grpo.models.hugging_face import SHARED_PROMPT

    config = Qwen2Config(**sizes, bos_token_id=None, eos_token_id=0, pad_token_id=0)
    with torch.device(device):  # and not .to(dtype), which would round RoPE's frequencies too
        return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=SHARED_PROMPT).train()


def make_optimizer(model: Any, name: str = "adamw") -> Optimizer:
    """Make an optimizer; in float16 with a loss scale at which gradients of random models are finite from the first step."""
    made = Optimizer(model, 1e-6, name)
    if made.scale is not None:
        made.scale.value = 2.0**10
    return made


def microbatches(
    model: Any, batch: Sequence[Rollout], budget: int | None, padded: int, packing: bool = True
) -> Iterator[Microbatch]:
    """Split a batch into packed rows or padded microbatches of ``budget`` tokens; if None, of ``padded`` responses each."""
    texts = texts_of(batch)
    if budget is not None and packing:
        return packed_microbatches(model, texts, budget)
    parts = split_in_order(len(batch), padded) if budget is None else split_by_length(texts.prompts, texts.responses, budget)
    return padded_microbatches(model, texts, parts, 0)


def backward(
    model: Any,
    optimizer: Optimizer,
    batch: Sequence[Rollout],
    budget: int | None,
    padded: int,
    packing: bool = True,
) -> int:
    """Add the gradient of the sum of :func:`plain_loss` over the batch, in microbatches; return their number.

    As in :class:`grpo.learner.learner.Learner`, but without its bookkeeping and pydantic.
    """
    count = 0
    for micro in microbatches(model, batch, budget, padded, packing):
        advantages = torch.tensor([batch[i].advantage for i in micro.members], device=micro.mask.device)
        lengths = torch.tensor([len(batch[i].completion.token_ids) for i in micro.members], device=micro.mask.device)
        weights = (advantages / lengths / len(batch))[:, None]
        optimizer.backward(torch.where(micro.mask, -weights * micro.log_probs, 0.0).sum())
        count += 1
    return count


def plain_loss(model: Any, rollout: Rollout) -> Tensor:
    """-advantage times the mean log-probability of a response's tokens, with the forward pass of transformers.

    Without packing, padding and chunks, and with the attention of transformers: the reference for all others.
    """
    prompt, response = rollout.prompt_ids, rollout.completion.token_ids
    logits = model(torch.tensor([[*prompt, *response]], device=model.device), use_cache=False).logits[0]
    predicted = torch.log_softmax(logits[len(prompt) - 1 : -1].float(), dim=-1)
    labels = torch.tensor(response, device=model.device)
    return -rollout.advantage * predicted.gather(-1, labels[:, None]).mean()


def relative_difference(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Relative error |found - expected| / |expected| over all weights, in float64."""
    pairs = list(zip(found, expected, strict=True))
    apart = sum((a - b).double().square().sum().item() for a, b in pairs)
    return float((apart / sum(b.double().square().sum().item() for _, b in pairs)) ** 0.5)


def needed_flops(model: Any, batch: Sequence[Rollout], group: int) -> float:
    """Minimal floating-point operations of a forward and a backward pass: each prompt once, no padding, no recomputation.

    6 per weight and token (for the output layer only response tokens), and 12 x layers x width per pair of tokens, halved by
    the causal mask (Kaplan et al. 2020, arXiv 2001.08361, Section 2.1; Chowdhery et al. 2022, arXiv 2204.02311, Appendix B).
    """
    config = model.config
    head = config.vocab_size * config.hidden_size
    body = sum(p.numel() for p in model.parameters()) - head  # the embedding is looked up, and is the output layer too
    pairs = tokens = responses = 0.0
    for i in range(0, len(batch), group):
        prompt = len(batch[i].prompt_ids)
        lengths = [len(r.completion.token_ids) for r in batch[i : i + group]]
        tokens += prompt + sum(lengths)
        responses += sum(lengths)
        pairs += prompt**2 / 2 + sum(n * prompt + n**2 / 2 for n in lengths)
    return 6 * (body * tokens + head * responses) + 12 * config.num_hidden_layers * config.hidden_size * pairs


def real_tokens(batch: Sequence[Rollout], group: int) -> int:
    """Number of tokens: each prompt once, all responses, no padding."""
    return sum(len(r.completion.token_ids) for r in batch) + sum(len(r.prompt_ids) for r in batch[::group])


def wait(device: str) -> None:
    """Wait until the device has finished, so that times are right."""
    if device != "cpu":
        torch.cuda.synchronize()


def seconds_of(device: str, work: Callable[[], Any]) -> float:
    """Seconds of one call."""
    wait(device)
    start = time.perf_counter()
    work()
    wait(device)
    return time.perf_counter() - start


def median_seconds(setting: Setting, work: Callable[[], Any], before: Callable[[], Any] = lambda: None) -> float:
    """The median seconds of several calls after a warm-up.

    Args:
        before: called before each call, not timed.
    """
    found = []
    for _ in range(WARM_UP + setting.repeats):
        before()
        found.append(seconds_of(setting.device, work))
    return statistics.median(found[WARM_UP:])


def missing(names: Sequence[str]) -> list[str]:
    """The packages that are not installed."""
    return [name for name in names if sys.modules.get(name, ...) is None or importlib.util.find_spec(name) is None]


def require(*names: str) -> None:
    """Raise Skipped unless these packages are installed."""
    if lacking := missing(names):
        raise Skipped(f"not installed: {', '.join(lacking)}")


def state_mb(tensors: Any) -> float:
    """MiB of the tensors in nested mappings and lists."""
    if isinstance(tensors, Tensor):
        return tensors.numel() * tensors.element_size() / 2**20
    within = tensors.values() if isinstance(tensors, dict) else tensors if isinstance(tensors, list) else ()
    return sum(map(state_mb, within))

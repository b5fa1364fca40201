"""What the project does on one GPU, part by part, with random weights of the shape of Qwen2.5-Math-1.5B made on the device.

``python benchmarks/gpu.py`` runs all parts, each in a process of its own with a time limit; ``--parts gradients,throughput``
some. No model, no network, and of the package's dependencies only torch and transformers are needed: a part or row that needs
more is skipped by name. Each row is printed and written to the JSON file as soon as it is there. ``--device cpu --tiny`` tries
the code anywhere, and measures nothing of a GPU. docs/gpu.md says what each part tells, and names the goals.
"""

from __future__ import annotations

import argparse
import csv
import gc
import importlib.util
import itertools
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # the package need not be installed

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from grpo.common.files import write_json  # noqa: E402
from grpo.common.memory import peak_mb, reset_peak  # noqa: E402
from grpo.common.records import Completion, Problem, Rollout  # noqa: E402
from grpo.learner.microbatches import (  # noqa: E402
    Microbatch,
    neighbours,
    of_like_length,
    packed_microbatches,
    padded_microbatches,
)
from grpo.learner.optimizer import Optimizer  # noqa: E402
from grpo.models.packed_attention import Layout  # noqa: E402

PACKAGES = ("torch", "transformers", "vllm", "ray", "bitsandbytes", "triton", "pydantic")
STUDY_NEEDS = ("pydantic", "ruamel", "typer", "mlflow", "dvc", "math_verify", "filelock", "tokenizers")
WARM_UP = 2  # calls that are not counted: kernels are chosen and compiled in them

Row = dict[str, Any]
Rows = Iterator[tuple[str, str, Callable[[], Row]]]
"""The rows of a part: a name, the goal in words or nothing, and what measures it."""


class Skipped(Exception):
    """Why a part or a row was left out."""


@dataclass(frozen=True)
class Batch:
    """The size of an optimizer batch: prompts, responses to each, and lengths in tokens (of responses the largest)."""

    prompts: int
    group: int
    prompt_tokens: int
    response_tokens: int

    def made(self, vocabulary: int, seed: int = 0) -> list[Rollout]:
        """Random tokens and advantages; lengths of responses spread evenly up to the largest, in any order."""
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
    """Everything that is smaller where the code is only tried.

    Attributes:
        shape: of the model, by the names of Qwen2's config.json.
        gradients, update, profile: batches of these parts.
        budget: tokens of a packed row.
        padded: responses of a padded microbatch.
        matmul: rows and columns of the matrices whose product gives the peak.
        sampled: prompts, responses to each, tokens of each.
        study: what the training on the GPU is an overlay of.
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
    """Where and how large.

    Attributes:
        device: ``cuda`` or ``cpu``.
        repeats: of what is timed; the median counts.
    """

    device: str
    scale: Scale
    repeats: int

    @property
    def on_gpu(self) -> bool:
        """Whether anything of a GPU is measured."""
        return self.device != "cpu"


# ------------------------------------------------------------------------------------------------------------ the tools


def make_model(scale: Scale, device: str, dtype: torch.dtype = torch.bfloat16, own: bool = False) -> Any:
    """Random weights; the output layer is the embedding, as in the real one.

    Args:
        own: the project's own Transformer instead of transformers' Qwen2.
    """
    torch.manual_seed(0)
    sizes: Any = {**scale.shape, "max_position_embeddings": 4096, "tie_word_embeddings": True}
    if own:
        from grpo.models.qwen2_format import TransformerConfig
        from grpo.models.transformer import TransformerLM

        with torch.device(device):
            return TransformerLM(TransformerConfig(**sizes)).to(dtype).train()
    from grpo.models.hugging_face import SHARED_PROMPT, AutoModelForCausalLM, Qwen2Config

    config = Qwen2Config(**sizes, bos_token_id=None, eos_token_id=0, pad_token_id=0)
    with torch.device(device):  # and not .to(dtype), which would round RoPE's frequencies too
        return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=SHARED_PROMPT).train()


def make_optimizer(model: Any, name: str = "adamw") -> Optimizer:
    """In float16 with a scale of the loss at which these random models' gradients are numbers from the first step on."""
    made = Optimizer(model, 1e-6, name)
    if made.scale is not None:
        made.scale.value = 2.0**10
    return made


def microbatches(
    model: Any, batch: Sequence[Rollout], budget: int | None, padded: int, packing: bool = True
) -> Iterator[Microbatch]:
    """Packed rows of ``budget`` tokens, or padded microbatches by it, or where it is None ``padded`` responses at a time."""
    prompts, responses = [r.prompt_ids for r in batch], [r.completion.token_ids for r in batch]
    if budget is not None and packing:
        return packed_microbatches(model, prompts, responses, budget)
    parts = neighbours(len(batch), padded) if budget is None else of_like_length(prompts, responses, budget)
    return padded_microbatches(model, prompts, responses, parts, 0)


def backward(
    model: Any,
    optimizer: Optimizer,
    batch: Sequence[Rollout],
    budget: int | None,
    padded: int,
    packing: bool = True,
) -> int:
    """Add the gradient of :func:`plain_loss`'s sum over the batch, by the learner's microbatches; how many these were.

    This is the learner's work (:class:`grpo.learner.learner.Learner`) without its bookkeeping, and needs no pydantic.
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
    """-advantage times the mean log-probability of a response's tokens, from the logits of transformers' own forward pass.

    No packing, no padding, no chunks, and transformers' own attention: the truth that the rest is held against.
    """
    prompt, response = rollout.prompt_ids, rollout.completion.token_ids
    logits = model(torch.tensor([[*prompt, *response]], device=model.device), use_cache=False).logits[0]
    predicted = torch.log_softmax(logits[len(prompt) - 1 : -1].float(), dim=-1)
    labels = torch.tensor(response, device=model.device)
    return -rollout.advantage * predicted.gather(-1, labels[:, None]).mean()


def relative_difference(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """|found - expected| / |expected| over all weights together, in float64."""
    pairs = list(zip(found, expected, strict=True))
    apart = sum((a - b).double().square().sum().item() for a, b in pairs)
    return float((apart / sum(b.double().square().sum().item() for _, b in pairs)) ** 0.5)


def needed_flops(model: Any, batch: Sequence[Rollout], group: int) -> float:
    """Floating-point operations that a forward and a backward pass must do, whichever way they are done: each prompt once,
    no padding, nothing twice.

    6 for each weight and each token that meets it, of which the output layer's meet response tokens only; and
    12 x layers x width for each pair of a token and one that it attends to, which the causal mask halves (Kaplan et al. 2020,
    arXiv 2001.08361, section 2.1; Chowdhery et al. 2022, arXiv 2204.02311, appendix B).
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
    """Each prompt once, and all responses; no padding."""
    return sum(len(r.completion.token_ids) for r in batch) + sum(len(r.prompt_ids) for r in batch[::group])


def wait(device: str) -> None:
    """Until the device has done what it was given, without which a clock says nothing."""
    if device != "cpu":
        torch.cuda.synchronize()


def seconds_of(device: str, work: Callable[[], Any]) -> float:
    """How long one call takes."""
    wait(device)
    start = time.perf_counter()
    work()
    wait(device)
    return time.perf_counter() - start


def median_seconds(setting: Setting, work: Callable[[], Any], before: Callable[[], Any] = lambda: None) -> float:
    """The median of several calls after some that are not counted.

    Args:
        before: done before each call, and not counted.
    """
    found = []
    for _ in range(WARM_UP + setting.repeats):
        before()
        found.append(seconds_of(setting.device, work))
    return statistics.median(found[WARM_UP:])


def missing(names: Sequence[str]) -> list[str]:
    """Which packages are not installed."""
    return [name for name in names if sys.modules.get(name, ...) is None or importlib.util.find_spec(name) is None]


def require(*names: str) -> None:
    """Raise Skipped where one of these packages is not installed."""
    if lacking := missing(names):
        raise Skipped(f"not installed: {', '.join(lacking)}")


def state_mb(tensors: Any) -> float:
    """MiB of the tensors in nested mappings and lists."""
    if isinstance(tensors, Tensor):
        return tensors.numel() * tensors.element_size() / 2**20
    within = tensors.values() if isinstance(tensors, dict) else tensors if isinstance(tensors, list) else ()
    return sum(map(state_mb, within))


# ------------------------------------------------------------------------------------------------------------ the parts


def gradients(setting: Setting) -> Rows:
    """Packed rows, padded microbatches and a plain loss of transformers: how far their gradients are apart."""
    scale, device = setting.scale, setting.device
    batch = scale.gradients.made(scale.shape["vocab_size"])

    def gradient(model: Any, compute: Callable[[Any, Optimizer], Any]) -> list[Tensor]:
        """Of all weights, in float32."""
        optimizer = make_optimizer(model)
        compute(model, optimizer)
        optimizer.clip(float("inf"))  # divides by the scale, where there is one
        return optimizer.gradients()

    def packed(model: Any, optimizer: Optimizer) -> None:
        backward(model, optimizer, batch, scale.budget, scale.padded)

    def padded(model: Any, optimizer: Optimizer) -> None:
        backward(model, optimizer, batch, None, scale.padded)

    def plain(model: Any, optimizer: Optimizer) -> None:
        model.set_attn_implementation("sdpa")
        for rollout in batch:
            optimizer.backward(plain_loss(model, rollout) / len(batch))

    def measure(dtype: torch.dtype) -> Row:
        made = lambda: make_model(scale, device, torch.bfloat16).to(dtype)  # noqa: E731 - the same rounded weights in both
        in_rows, in_columns, truth = (gradient(made(), way) for way in (packed, padded, plain))
        row = {
            "packed_against_padded": relative_difference(in_rows, in_columns),
            "packed_against_plain": relative_difference(in_rows, truth),
            "padded_against_plain": relative_difference(in_columns, truth),
        }
        if dtype != torch.float32:
            exact = gradient(made().float(), plain)
            row |= {
                "packed_against_float32": relative_difference(in_rows, exact),
                "padded_against_float32": relative_difference(in_columns, exact),
                "plain_against_float32": relative_difference(truth, exact),
            }
        return row

    yield "float32", "each at most 1e-4", lambda: measure(torch.float32)
    yield "bfloat16", "packed against padded at most 2e-2", lambda: measure(torch.bfloat16)
    yield "float16", "packed against padded at most 5e-3", lambda: measure(torch.float16)


def throughput(setting: Setting) -> Rows:
    """An optimizer step (all microbatches, clipping, AdamW): tokens a second, share of the matrix-product peak, memory."""
    scale, device = setting.scale, setting.device
    dtype = torch.bfloat16 if setting.on_gpu else torch.float32
    peak: list[float] = []  # filled by the first row

    def matrix_products() -> Row:
        a, b = (torch.randn(scale.matmul, scale.matmul, device=device, dtype=dtype) for _ in range(2))
        fastest = min(seconds_of(device, lambda: a @ b) for _ in range(30))
        peak.append(2 * scale.matmul**3 / fastest)
        return {"tflops": peak[0] / 1e12, "size": scale.matmul, "dtype": str(dtype).removeprefix("torch.")}

    def measure(
        budget: int | None = scale.budget,
        optimizer: str = "adamw",
        checkpointed: bool = False,
        compiled: bool = False,
        own: bool = False,
        flex: bool = False,
        packing: bool = True,
        dtype: torch.dtype = dtype,
    ) -> Row:
        if optimizer == "adamw_8bit":
            require("bitsandbytes")
        model = make_model(scale, device, dtype, own)
        if checkpointed:
            model.gradient_checkpointing_enable()
        if compiled:
            from grpo.models.checkpoint import compile_layers

            compile_layers(model)
        taking_steps = make_optimizer(model, optimizer)
        batch = scale.update.made(model.config.vocab_size)
        skipped = 0

        def update() -> None:
            nonlocal skipped
            backward(model, taking_steps, batch, budget, scale.padded, packing)
            skipped += not taking_steps.step(1.0)[1]

        with patch.object(Layout, "on", lambda layout, device, _: layout.block_mask(device)) if flex else nullcontext():
            seconds = median_seconds(setting, update, before=lambda: reset_peak(device))
        tokens = real_tokens(batch, scale.update.group)
        return {
            "seconds": seconds,
            "tokens_per_s": tokens / seconds,
            "share_of_peak": needed_flops(model, batch, scale.update.group) / seconds / peak[0],
            "peak_mb": peak_mb(device),
            "tokens": tokens,
            "updates_skipped": skipped,  # of those that were timed or warmed up: none, or AdamW is not in the time
        }

    yield "matrix products", "", matrix_products
    yield "packed", "40% of the peak", measure
    if setting.on_gpu:  # on a CPU it has no backward pass
        yield "packed, FlexAttention", "", lambda: measure(flex=True)
    yield "packed, rows twice as long", "", lambda: measure(2 * scale.budget)
    yield "packed, checkpointed", "", lambda: measure(checkpointed=True)
    yield "packed, 8-bit moments", "", lambda: measure(optimizer="adamw_8bit")
    yield "packed, own model", "", lambda: measure(own=True)
    yield "packed, float16", "", lambda: measure(dtype=torch.float16)
    yield "padded", "", lambda: measure(None)
    yield "padded, to the budget", "", lambda: measure(packing=False)
    yield "packed, compiled layers", "", lambda: measure(compiled=True)


def profile(setting: Setting) -> Rows:
    """What a microbatch costs the host: kernel launches, and points at which it waits for the device."""
    scale, device = setting.scale, setting.device
    dtype = torch.bfloat16 if setting.on_gpu else torch.float32
    batch = scale.profile.made(scale.shape["vocab_size"])

    def counted(update: Callable[[], Any], microbatches: int) -> Row:
        from torch.profiler import ProfilerActivity
        from torch.profiler import profile as profiled

        seconds = median_seconds(setting, update)
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if setting.on_gpu else [])]
        with profiled(activities=activities) as found:
            update()
            wait(device)
        events = found.key_averages()
        times = {
            "kernel_launches": ("LaunchKernel",),
            "synchronisations": ("StreamSynchronize", "EventSynchronize", "DeviceSynchronize"),
            "copies_to_host": ("Memcpy DtoH",),
            "host_reads": ("aten::_local_scalar_dense", "aten::nonzero"),  # these alone are seen on a CPU too
        }
        sums = {what: sum(e.count for e in events if any(name in e.key for name in names)) for what, names in times.items()}
        if not setting.on_gpu:
            sums = {"host_reads": sums["host_reads"]}
        busy = sum(e.self_device_time_total for e in events if str(e.device_type).endswith("CUDA")) / 1e6
        return {
            **{f"{what}_per_microbatch": count / microbatches for what, count in sums.items()},
            "microbatches": microbatches,
            "seconds": seconds,
            **({"device_busy": busy / seconds} if setting.on_gpu else {}),
        }

    def alone(budget: int | None) -> Row:
        model = make_model(scale, device, dtype)
        optimizer = make_optimizer(model)
        count = backward(model, optimizer, batch, budget, scale.padded)

        def update() -> None:
            backward(model, optimizer, batch, budget, scale.padded)
            optimizer.step(1.0)

        return counted(update, count)

    def learner(budget: int | None) -> Row:
        require("pydantic")  # for the learner's configuration
        from grpo.learner.learner import Learner
        from grpo.study.methods import GrpoConfig

        model = make_model(scale, device, dtype)
        size = len(batch)
        config = GrpoConfig(
            rollout_batch_size=size,
            train_batch_size=size,
            group_size=scale.profile.group,
            gradient_accumulation_steps=size // scale.padded,
            sampling_max_tokens=scale.profile.response_tokens,
            learning_rate=1e-6,
        )
        with torch.no_grad():
            count = sum(1 for _ in microbatches(model, batch, budget, scale.padded))
        whole = Learner(model, config, 0, budget)
        return counted(lambda: whole.update(batch), count)

    yield "microbatches alone, packed", "", lambda: alone(scale.budget)
    yield "microbatches alone, padded", "", lambda: alone(None)
    yield "Learner.update, packed", "no synchronisation", lambda: learner(scale.budget)
    yield "Learner.update, padded", "no synchronisation", lambda: learner(None)


def recompiles(setting: Setting) -> Rows:
    """Graphs that torch.compile makes at the first update, and at later ones of other lengths, where none should come."""
    scale, device = setting.scale, setting.device

    def measure(compiled: bool) -> Row:
        import torch._dynamo
        from torch._dynamo.utils import counters

        torch._dynamo.reset()
        counters.clear()
        model = make_model(scale, device, torch.bfloat16 if setting.on_gpu else torch.float32)
        if compiled:
            from grpo.models.checkpoint import compile_layers

            compile_layers(model)
        unused = make_optimizer(model)
        seconds, graphs = [], []
        for seed in range(6):
            size = scale.profile
            batch = Batch(size.prompts, size.group, size.prompt_tokens + seed, size.response_tokens - seed)
            made = batch.made(scale.shape["vocab_size"], seed)
            seconds.append(seconds_of(device, lambda made=made: backward(model, unused, made, scale.budget, scale.padded)))
            graphs.append(counters["stats"]["unique_graphs"])
        return {
            "graphs_at_first": graphs[0],
            "graphs_later": graphs[-1] - graphs[0],
            "seconds_first": seconds[0],
            "seconds_later_longest": max(seconds[1:]),
            "seconds_later": statistics.median(seconds[1:]),
        }

    yield "packed", "0 graphs later", lambda: measure(False)
    yield "packed, compiled layers", "0 graphs later", lambda: measure(True)


def optimizer(setting: Setting) -> Rows:
    """A step of the optimizer alone: clipping, AdamW on float32 weights, rounding to bfloat16."""

    def measure(name: str) -> Row:
        if name == "adamw_8bit":
            require("bitsandbytes")
        taking_steps = Optimizer(make_model(setting.scale, setting.device), 1e-6, name)

        def give_gradients() -> None:
            for weight in taking_steps.weights:
                weight.grad = torch.full_like(weight, 1e-3)

        seconds = median_seconds(setting, lambda: taking_steps.step(1.0), before=give_gradients)
        return {"seconds": seconds, "state_mb": state_mb(taking_steps.state())}

    yield "adamw", "", lambda: measure("adamw")
    yield "adamw_8bit", "", lambda: measure("adamw_8bit")


def state(setting: Setting) -> Rows:
    """Saving what a killed run goes on from: how long training waits (the copy), how long writing and reading take."""

    def measure() -> Row:
        from grpo.training.state import SavedState

        model = make_model(setting.scale, setting.device)
        taking_steps = Optimizer(model, 1e-6)

        def restore(saved: dict[str, Any]) -> None:
            model.load_state_dict(saved["model"])
            taking_steps.restore(saved["optimizer"])

        part = SimpleNamespace(
            state=lambda: {"model": dict(model.state_dict()), "optimizer": taking_steps.state()}, restore=restore
        )
        size = state_mb(part.state())
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            if (free := shutil.disk_usage(folder).free / 2**20) < 1.5 * size:
                raise Skipped(f"{folder} has {free:.0f} MiB of room, and a state takes {size:.0f}; set TMPDIR")
            (folder / "checkpoints").mkdir()
            with SavedState(folder / "state", 1, {"learner": part}, folder / "checkpoints") as saved:
                copying = seconds_of(setting.device, lambda: saved.save(1))
                writing = seconds_of(setting.device, saved.finish)
                reading = seconds_of(setting.device, saved.restore)
        return {"seconds_copy": copying, "seconds_write": writing, "seconds_restore": reading, "mb": size}

    yield "state", "", measure


def study(setting: Setting) -> Rows:
    """A run of the mini study on this device: it is killed by SIGKILL, goes on from its saved state, and learns."""
    require(*STUDY_NEEDS)
    from ruamel.yaml import YAML

    on_device = {"engine": {"device": setting.device}, "learner": {"device": setting.device}}
    run = "grpo_learning_rate/3e-4-0"
    with tempfile.TemporaryDirectory() as temporary, Path(temporary, "log.txt").open("w+", encoding="utf-8") as log:
        folder = Path(temporary)
        shutil.copytree(ROOT / "studies", folder / "studies")
        env = os.environ | {"PYTHONPATH": str(ROOT), "MLFLOW_TRACKING_URI": f"sqlite:///{folder}/mlflow.db"}

        def start(*command: str) -> subprocess.Popen[bytes]:
            return subprocess.Popen([sys.executable, "-m", "grpo", *command], cwd=folder, env=env, stdout=log, stderr=log)

        def finish(process: subprocess.Popen[bytes], command: str) -> None:
            if process.wait():
                log.seek(0)
                raise RuntimeError(f"{command}: {' '.join(log.read().split())[-400:]}")

        def base_model() -> Row:
            budgets = {"packed": 4096, "padded": None}
            for name, budget in budgets.items():
                learner = {**on_device["learner"], "max_tokens_per_microbatch": budget}
                overlay = {
                    "extends": setting.scale.study,
                    "description": "One run on the device that is measured.",
                    "seeds": [0],
                }
                with (folder / f"studies/measured-{name}.yaml").open("w", encoding="utf-8") as file:
                    YAML().dump({**overlay, **on_device, "learner": learner, "save_state_every": 2}, file)
            finish(start("study", "use", "measured-packed"), "study use")
            finish(start("dataset", "main"), "dataset")
            return {"seconds": seconds_of("cpu", lambda: finish(start("model", "main"), "model"))}

        def measure(name: str) -> Row:
            finish(start("study", "use", f"measured-{name}"), "study use")
            shutil.rmtree(folder / "data/state", ignore_errors=True)
            killed = start("train", "grpo_learning_rate", "3e-4")
            while killed.poll() is None and not list(folder.glob("data/state/runs/**/step-*/sha256.json")):
                time.sleep(0.01)
            killed.send_signal(signal.SIGKILL)
            code = killed.wait()
            seconds = seconds_of("cpu", lambda: finish(start("train", "grpo_learning_rate", "3e-4"), "train"))
            timing = json.loads((folder / f"data/timing/{run}.json").read_text(encoding="utf-8"))
            with (folder / f"data/runs/{run}/validation.csv").open(encoding="utf-8") as file:
                rewards = [float(point["val/answer_reward"]) for point in csv.DictReader(file)]
            return {
                "killed_by": -code,
                "resumed_after": timing["resumed_after"],
                "answer_reward_first": rewards[0],
                "answer_reward_last": rewards[-1],
                "seconds_rest_of_run": seconds,
            }

        yield "base model, on the CPU", "", base_model
        yield "packed", "resumed, and .5 more reward at the end", lambda: measure("packed")
        yield "padded", "resumed, and .5 more reward at the end", lambda: measure("padded")


def vllm(setting: Setting, dtype: torch.dtype | None = None) -> Rows:
    """Sampling with vLLM: start, speed, seeds, the policy's weights, sleep, and how far it is from the learner.

    Args:
        dtype: of engine and learner; where it is named, only what depends on it is measured.
    """
    require("vllm", "tokenizers")
    from grpo.models.checkpoint import save_checkpoint
    from grpo.rollout.engine import SamplingParams
    from grpo.rollout.vllm_engine import VllmEngine

    scale, device = setting.scale, setting.device
    named, dtype = dtype is not None, dtype or (torch.bfloat16 if setting.on_gpu else torch.float32)
    model = make_model(scale, device, dtype)
    prompts_of, n, tokens = scale.sampled
    prompts = [r.prompt_ids for r in Batch(prompts_of, 1, scale.update.prompt_tokens, 1).made(model.config.vocab_size)]
    with tempfile.TemporaryDirectory() as name:
        save_checkpoint(Path(name), model, make_tokenizer(model.config.vocab_size))
        engines: list[VllmEngine] = []

        def engine_start() -> Row:
            def start() -> None:
                precision = str(dtype).removeprefix("torch.")
                engines.append(VllmEngine(Path(name), model, precision, device, 0.5, 512, setting.on_gpu, check_weights=True))

            return {"seconds": seconds_of(device, start)}

        def sampled(length: int, seed: int) -> list[Completion]:
            if not engines:
                raise Skipped("vLLM did not start")
            params = SamplingParams(min_tokens=length, max_tokens=length)
            return [completion for group in engines[0].generate(prompts, params, n, seed) for completion in group]

        def speed() -> Row:
            # Waking and putting the weights in is part of each call, and of one for a single token almost all.
            short = median_seconds(setting, lambda: sampled(1, 0))
            long = median_seconds(setting, lambda: sampled(tokens, 0))
            made = prompts_of * n * (tokens - 1)
            return {"tokens_per_s": made / max(long - short, 1e-9), "seconds": long, "seconds_to_first_token": short}

        def seeds() -> Row:
            ids = [[completion.token_ids for completion in sampled(tokens, seed)] for seed in (1, 1, 2)]
            return {
                "same_seed": sum(a == b for a, b in zip(ids[0], ids[1], strict=True)) / len(ids[0]),
                "other_seed": sum(a == b for a, b in zip(ids[0], ids[2], strict=True)) / len(ids[0]),
                "different_in_a_group": len(set(ids[0])) / len(ids[0]),
            }

        def weights() -> Row:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1.01)
            putting = seconds_of(device, lambda: (engines[0].synchronize(model, 1), sampled(1, 0)))
            return {"equal": True, "seconds_with_a_token": putting}  # checksums that differ raise

        def mismatch() -> Row:
            completions = sampled(tokens, 3)
            owners = [prompt for prompt in prompts for _ in range(n)]
            batch = [Rollout(Problem("", "", ""), p, c) for p, c in zip(owners, completions, strict=True)]
            apart = []
            with torch.no_grad():
                for micro in microbatches(model, batch, scale.budget, scale.padded):
                    for i, row, keep in zip(micro.members, micro.log_probs, micro.mask, strict=True):
                        apart.append((row[keep].cpu() - torch.tensor(batch[i].completion.log_probs)).abs())
            every = torch.cat(apart)
            return {"mean": every.mean().item(), "max": every.max().item(), "above_0.1": (every > 0.1).float().mean().item()}

        def cycles() -> Row:
            if not setting.on_gpu:
                raise Skipped("vLLM can only sleep on a GPU")
            used, times = [], []
            for cycle in range(10):
                times.append(seconds_of(device, lambda cycle=cycle: sampled(1, cycle)))
                free, total = torch.cuda.mem_get_info()
                used.append((total - free) / 2**20)
            return {"growth_mb": used[-1] - used[1], "asleep_mb": used[-1], "seconds_median": statistics.median(times)}

        yield "start", "", engine_start
        if not named:
            yield "sampling", "", speed
            yield "seeds", "same 1, other 0", seeds
        yield "weights", "equal checksums", weights
        yield "mismatch", "", mismatch
        if not named:
            yield "ten sleeps", "no growth", cycles


def vllm_float16(setting: Setting) -> Rows:
    """vLLM and learner in float16: the policy's weights, and how far the two are apart."""
    return vllm(setting, torch.float16)


def asynchronous(setting: Setting) -> Rows:
    """New weights for a vLLM in a process of its own: sent from GPU to GPU, on one GPU and between two, and through Ray."""
    require("vllm", "ray", "pydantic", "tokenizers")
    import ray

    from grpo.models.checkpoint import load_tokenizer, save_checkpoint
    from grpo.rollout.engine import SamplingParams
    from grpo.rollout.vllm_engine import VllmEngine
    from grpo.rollout.vllm_weights import require_equal_weights
    from grpo.study.methods import GrpoConfig
    from grpo.training.asynchronous.actors import Generator
    from grpo.training.asynchronous.transfer import RemoteLlm, Sender, Weights
    from grpo.training.context import RunContext

    dtype = torch.bfloat16 if setting.on_gpu else torch.float32
    model = make_model(setting.scale, setting.device, dtype)
    size = sum(p.nbytes for p in model.parameters())
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")
    with tempfile.TemporaryDirectory() as name, ExitStack() as ends:
        save_checkpoint(Path(name), model, make_tokenizer(model.config.vocab_size))

        def make() -> tuple[Any, Any, Any]:
            precision, at = str(dtype).removeprefix("torch."), "cuda" if setting.on_gpu else "cpu"
            return VllmEngine(Path(name), None, precision, at, 0.4, 64), Weights(), load_tokenizer(Path(name))

        def start(gpu: int) -> Any:
            """A generator that sees one GPU; this process has seen the first, and goes on with it."""
            ends.close()  # the one before
            env = {"PYTHONPATH": str(ROOT), "RAY_USAGE_STATS_ENABLED": "0"}
            ends.enter_context(patch.dict(os.environ, env | ({"CUDA_VISIBLE_DEVICES": visible[gpu]} if setting.on_gpu else {})))
            ray.init(address="local", include_dashboard=False, logging_level="ERROR", num_gpus=int(setting.on_gpu))
            ends.callback(ray.shutdown)
            generator = ray.remote(num_gpus=int(setting.on_gpu))(Generator)
            generators[gpu] = generator.remote(make, RunContext(config=GrpoConfig(), seed=0))
            ray.get(generators[gpu].start.remote())
            return generators[gpu]

        generators: dict[int, Any] = {}
        versions = itertools.count(1)

        def another() -> int:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1.01)
            return next(versions)

        def through_ray() -> Row:
            generator, params = start(0), SamplingParams(min_tokens=1, max_tokens=1)

            def hand_over(version: int) -> None:
                weights = ray.put({name: tensor.detach().cpu() for name, tensor in model.state_dict().items()})
                ray.get(generator.generate.remote([[1]], params, 1, 0, version, [weights]))

            found = [seconds_of(setting.device, partial(hand_over, another())) for _ in range(WARM_UP + setting.repeats)]
            return {"seconds_with_a_token": statistics.median(found[WARM_UP:]), "mb": size / 2**20}

        def sent(gpu: int) -> Row:
            if not setting.on_gpu:
                raise Skipped("weights are sent between GPUs")
            if gpu >= torch.cuda.device_count():
                raise Skipped("one GPU only")
            generator, sender = generators.get(gpu) or start(gpu), Sender(kept=1)
            copying, sending = [], []
            for _ in range(WARM_UP + setting.repeats):
                version = another()
                copying.append(seconds_of(setting.device, partial(sender.keep, model, version)))
                sending.append(seconds_of(setting.device, partial(sender.send, version, generator)))
            require_equal_weights(RemoteLlm(generator), Weights(sender.versions[version]))
            seconds = statistics.median(sending[WARM_UP:])
            return {
                "equal": True,
                "seconds": seconds,
                "gb_per_s": size / 1e9 / seconds,
                "seconds_connecting": sending[0] - seconds,
                "seconds_copy": statistics.median(copying[WARM_UP:]),
            }

        yield "through Ray", "", through_ray
        yield "on one GPU (CUDA IPC)", "equal checksums", lambda: sent(0)
        yield "between two GPUs (NCCL)", "equal checksums", lambda: sent(1)


def make_tokenizer(size: int) -> Any:
    """As many tokens as the model has logits, so that whatever it samples can be decoded."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers

    from grpo.models.tokenizer import CONFIG, END_OF_TEXT, TOKENIZER, Tokenizer

    words = [END_OF_TEXT, *sorted(pre_tokenizers.ByteLevel.alphabet()), *(f"w{i}" for i in range(size))][:size]
    backend = Backend(models.BPE({word: i for i, word in enumerate(words)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([END_OF_TEXT])
    config = {"eos_token": END_OF_TEXT, "pad_token": END_OF_TEXT, "tokenizer_class": "PreTrainedTokenizerFast"}
    return Tokenizer({TOKENIZER: backend.to_str().encode(), CONFIG: json.dumps(config).encode()})


PARTS: dict[str, Callable[[Setting], Rows]] = {
    "gradients": gradients,
    "throughput": throughput,
    "profile": profile,
    "recompiles": recompiles,
    "optimizer": optimizer,
    "state": state,
    "study": study,
    "vllm": vllm,
    "vllm_float16": vllm_float16,
    "asynchronous": asynchronous,
}
LIMIT_S = {  # 25 minutes together
    "gradients": 120,
    "throughput": 360,
    "profile": 120,
    "recompiles": 90,
    "optimizer": 60,
    "state": 90,
    "study": 210,
    "vllm": 210,
    "vllm_float16": 120,
    "asynchronous": 120,
}


# --------------------------------------------------------------------------------------------------- running and writing


def measured(part: Callable[[Setting], Rows], setting: Setting) -> Iterator[tuple[str, str, Row]]:
    """The rows of a part, each when it is done: its name, the goal, and numbers, ``skipped`` or ``failed``."""
    rows = part(setting)
    while True:
        try:
            name, goal, measure = next(rows)
        except StopIteration:
            return
        except Skipped as reason:
            yield "", "", {"skipped": str(reason)}
            return
        try:
            row = measure()
        except Skipped as reason:
            row = {"skipped": str(reason)}
        except Exception as error:  # the other rows may well work
            row = {"failed": f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"}
        yield name, goal, row
        gc.collect()
        if setting.on_gpu:
            torch.cuda.empty_cache()


def about(setting: Setting) -> dict[str, Any]:
    """The device, what is installed, and when it was measured; no names of machines."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    gpu = {}
    if setting.on_gpu:
        properties = torch.cuda.get_device_properties(0)
        gpu = {"device": properties.name, "memory_gib": round(properties.total_memory / 2**30, 1), "cuda": torch.version.cuda}
    return {
        **(gpu or {"device": "cpu", "note": "tried on a CPU; nothing of a GPU was measured"}),
        "versions": {"python": ".".join(map(str, sys.version_info[:3])), **versions},
        "scale": "full" if setting.scale is FULL else "tiny",
        "repeats": setting.repeats,
    }


def keep(out: Path, head: dict[str, Any], part: str, rows: dict[str, Row]) -> None:
    """Put a part's rows into the file, beside those of other parts that were measured with the same device and software."""
    found = json.loads(out.read_text(encoding="utf-8")) if out.exists() else {}
    same = all(found.get(key) == value for key, value in head.items())
    parts = found.get("parts", {}) if same else {}
    write_json(out, {**head, "date": datetime.now(UTC).date().isoformat(), "parts": {**parts, part: rows}})


def line(part: str, name: str, goal: str, row: Row) -> str:
    """A row of the table."""
    shown = [f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in row.items()]
    text = next((f"{key}: {row[key]}" for key in ("skipped", "failed") if key in row), ", ".join(shown))
    return f"{part:13}{name:28}{text}{f'   (goal: {goal})' if goal and 'skipped' not in row else ''}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS), help=f"some of {','.join(PARTS)}")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="two narrow layers: tries the code, and measures nothing")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, help="JSON file; on a GPU benchmarks/results/gpu.json if not given, elsewhere none")
    options = parser.parse_args()
    names = options.parts.split(",")
    if wrong := [name for name in names if name not in PARTS]:
        parser.error(f"--parts: {', '.join(wrong)}: unknown. There are {', '.join(PARTS)}.")
    if options.device == "cuda" and not torch.cuda.is_available():
        for name in names:
            print(line(name, "", "", {"skipped": "torch sees no GPU"}))
        print("Nothing was measured.")
        return 0
    if len(names) > 1:
        return max([in_a_process(name) for name in names])
    setting = Setting(options.device, TINY if options.tiny else FULL, options.repeats)
    if not setting.on_gpu:
        print(f"{names[0]:13}on a CPU: the code is tried, and nothing of a GPU is measured")
    out = options.out or (ROOT / "benchmarks/results/gpu.json" if setting.on_gpu and not options.tiny else None)
    rows: dict[str, Row] = {}
    for name, goal, row in measured(PARTS[names[0]], setting):
        print(line(names[0], name, goal, row), flush=True)
        rows[name] = {**row, **({"goal": goal} if goal else {})}
        if out:
            keep(out, about(setting), names[0], rows)
    return int(any("failed" in row for row in rows.values()))


def in_a_process(part: str) -> int:
    """This very command for one part, so that none meets what another has left or broken; its exit code."""
    arguments = [a for a in sys.argv[1:] if not a.startswith("--parts=")]
    if "--parts" in arguments:
        at = arguments.index("--parts")
        del arguments[at : at + 2]
    process = subprocess.Popen([sys.executable, __file__, *arguments, "--parts", part], start_new_session=True)
    try:
        return process.wait(LIMIT_S[part])
    except subprocess.TimeoutExpired:
        print(line(part, "", "", {"failed": f"ended at its limit of {LIMIT_S[part]} s; its rows until then stand"}), flush=True)
        return 1
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # and what it has started


if __name__ == "__main__":
    sys.exit(main())

"""Parts of benchmarks/gpu.py that train: gradients, speed, host waits, compilation, optimizer, saved states."""

from __future__ import annotations

import shutil
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_parts.tools import (
    Batch,
    Row,
    Rows,
    Setting,
    Skipped,
    backward,
    make_model,
    make_optimizer,
    median_seconds,
    microbatches,
    needed_flops,
    plain_loss,
    real_tokens,
    relative_difference,
    require,
    seconds_of,
    state_mb,
    wait,
)
from grpo.common.process import peak_mb, reset_peak
from grpo.learner import microbatches as passes
from grpo.learner.optimizer import Optimizer
from grpo.models.checkpoint import compile_layers


def gradients(setting: Setting) -> Rows:
    """Compare the gradients of packed rows, padded microbatches and a plain loss with transformers."""
    scale, device = setting.scale, setting.device
    batch = scale.gradients.made(scale.shape["vocab_size"])

    def gradient(model: Any, compute: Callable[[Any, Optimizer], Any]) -> list[Tensor]:
        """Gradients of all weights, in float32."""
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
    """Measure an optimizer step (all microbatches, clipping, AdamW): tokens per second, share of peak FLOP/s, memory."""
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
        layers: bool = False,
        head: bool = False,
        own: bool = False,
        packing: bool = True,
        dtype: torch.dtype = dtype,
    ) -> Row:
        """One row; ``layers`` and ``head`` are compiled or not."""
        if optimizer == "adamw_8bit":
            require("bitsandbytes")
        model = make_model(scale, device, dtype, own)
        if checkpointed:
            model.gradient_checkpointing_enable()
        passes._forward, passes._backward = passes._chunk, passes._chunk_gradient  # what a row before may have compiled
        if layers:
            compile_layers(model)
        if head:
            passes.compile_head()
        taking_steps = make_optimizer(model, optimizer)
        batch = scale.update.made(model.config.vocab_size)
        skipped = 0

        def update() -> None:
            nonlocal skipped
            backward(model, taking_steps, batch, budget, scale.padded, packing)
            skipped += not taking_steps.step(1.0)[1]

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

    half = scale.budget // 2  # what a microbatch of math-h100 has
    yield "matrix products", "", matrix_products
    yield "padded, half the budget", "", lambda: measure(half, packing=False)
    yield "packed", "45% of the peak", measure
    yield "packed, layers and head", "", lambda: measure(layers=True, head=True)
    yield "padded, layers and head", "", lambda: measure(half, packing=False, layers=True, head=True)
    yield "packed, compiled head", "", lambda: measure(head=True)
    yield "packed, compiled layers", "", lambda: measure(layers=True)
    yield "packed, rows twice as long", "", lambda: measure(2 * scale.budget)
    yield "padded, to the budget", "", lambda: measure(packing=False)
    yield "packed, checkpointed", "", lambda: measure(checkpointed=True)
    yield "packed, own model", "", lambda: measure(own=True)
    yield "packed, float16", "", lambda: measure(dtype=torch.float16)
    yield "packed, 8-bit moments", "", lambda: measure(optimizer="adamw_8bit")
    yield "padded, without a budget", "", lambda: measure(None)


def profile(setting: Setting) -> Rows:
    """Count a microbatch's kernel launches, and the points at which the host waits for the device."""
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
        from grpo.study.config import GrpoConfig, LearnerSettings

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
        whole = Learner(model, config, 0, LearnerSettings(max_tokens_per_microbatch=budget))
        return counted(lambda: whole.update(batch), count)

    yield "microbatches alone, packed", "", lambda: alone(scale.budget)
    yield "microbatches alone, padded", "", lambda: alone(None)
    yield "Learner.update, packed", "no synchronisation", lambda: learner(scale.budget)
    yield "Learner.update, padded", "no synchronisation", lambda: learner(None)


def recompiles(setting: Setting) -> Rows:
    """Count the graphs that torch.compile makes at the first update, and at later ones with other lengths (should be none)."""
    scale, device = setting.scale, setting.device

    def measure(compiled: bool) -> Row:
        import torch._dynamo
        from torch._dynamo.utils import counters

        torch._dynamo.reset()
        counters.clear()
        model = make_model(scale, device, torch.bfloat16 if setting.on_gpu else torch.float32)
        if compiled:
            compile_layers(model)
            passes.compile_head()
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
    yield "packed, layers and head", "0 graphs later", lambda: measure(True)


def optimizer(setting: Setting) -> Rows:
    """Measure a step of the optimizer alone: clipping, AdamW on float32 weights, rounding to bfloat16."""

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
    """Measure saved states: how long training waits (for the copy), and how long writing and reading take."""

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

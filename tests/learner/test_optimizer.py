"""Float32 weights behind a bfloat16 model, 8-bit moments, and the memory of each phase."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from training_parts import same_weights

from grpo.learner.optimizer import Optimizer
from grpo.study.effective import effective_run
from grpo.study.schema import load_study
from grpo.tracking.run_log import RunLog
from grpo.training.train import phase_devices


def backward(model: Any, factor: float = 1.0) -> None:
    (model(torch.tensor([[5, 9, 2, 7]])).logits.float().pow(2).mean() * factor).backward()


def test_steps_too_small_for_bfloat16_add_up(model: Any) -> None:
    """100 steps of 1e-5, each far below bfloat16's resolution at weights of 1: the norms' weights move by 1e-3 in all."""
    model = model.to(torch.bfloat16)
    optimizer = Optimizer(model, learning_rate=1e-5)
    norm = model.base_model.norm.weight
    place = next(i for i, p in enumerate(optimizer.parameters) if p is norm)
    before = norm.detach().clone()
    for _ in range(100):
        backward(model)
        optimizer.step(max_norm=1.0)
    moved = (optimizer.weights[place] - before.float()).abs()
    assert optimizer.weights[place].dtype == torch.float32
    assert moved.max() > 5e-4
    assert torch.equal(norm, before)  # each of these steps alone is lost in bfloat16, and so are these all together
    assert all(torch.equal(p, w.to(torch.bfloat16)) for p, w in zip(optimizer.parameters, optimizer.weights, strict=True))


def test_gradients_of_a_bfloat16_model_are_summed_in_float32(model: Any) -> None:
    """The same gradient sixty times over: bfloat16 would round each sum to three digits."""
    model = model.to(torch.bfloat16)
    once = Optimizer(model, 1e-5)
    backward(model)
    expected = [60 * g.clone() for g in once.gradients()]
    twin = copy.deepcopy(model)
    many = Optimizer(twin, 1e-5)
    for _ in range(60):
        backward(twin)
    assert all(p.grad is None for p in twin.parameters())
    for found, wanted in zip(many.gradients(), expected, strict=True):
        assert found.dtype == torch.float32
        assert (found - wanted).norm() <= 1e-4 * wanted.norm()


def test_a_float32_model_has_no_second_copy(model: Any) -> None:
    optimizer = Optimizer(model, 1e-3)
    assert all(weight is parameter for weight, parameter in zip(optimizer.weights, model.parameters(), strict=True))


def test_a_weight_without_a_gradient_counts_as_zero(model: Any) -> None:
    optimizer = Optimizer(model, 1e-3)
    assert all(not g.any() for g in optimizer.gradients())
    assert optimizer.step(1.0) == (0.0, True)


@pytest.mark.parametrize("weight_decay", [0.0, 0.3])
def test_steps_are_those_of_torch_to_the_last_bit(model: Any, weight_decay: float) -> None:
    twin = copy.deepcopy(model)
    optimizer = Optimizer(model, 1e-3, weight_decay=weight_decay)
    reference = torch.optim.AdamW(twin.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=weight_decay, fused=True)
    for step in range(5):
        optimizer.learning_rate = reference.param_groups[0]["lr"] = 1e-3 * (step + 1)
        for each in (model, twin):
            backward(each, factor=(-1.0) ** step)
        optimizer.step(max_norm=1e9)
        torch.nn.utils.clip_grad_norm_(twin.parameters(), 1e9)
        reference.step()
        reference.zero_grad()
        if step == 2:  # goes on from what was saved
            state = copy.deepcopy(optimizer.state())
            optimizer = Optimizer(model, 1e-3, weight_decay=weight_decay)
            optimizer.restore(state)
        for (name, found), expected in zip(model.named_parameters(), twin.parameters(), strict=True):
            assert torch.equal(found, expected), name


@pytest.mark.parametrize(
    ("loss", "factor"), [(0.5, 1.0), (math.nan, 1.0), (0.5, math.inf)], ids=["taken", "no finite loss", "no finite gradient"]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_needs_a_finite_loss_and_gradient_and_leaves_none(
    model: Any, dtype: torch.dtype, loss: float, factor: float
) -> None:
    """On a GPU that learner and engine share gradients would take 5.75 GiB from vLLM's next rollout."""
    model = model.to(dtype)
    optimizer, start = Optimizer(model, 1e-3), copy.deepcopy(model)
    backward(model, factor)
    assert any(weight.grad is not None for weight in optimizer.weights)
    taken = math.isfinite(loss * factor)
    assert optimizer.step(1.0, loss)[1] == bool(optimizer.adamw.state_dict()["state"]) == taken
    assert same_weights(model, start) != taken
    assert all(tensor.grad is None for tensor in (*optimizer.weights, *model.parameters()))


def test_eight_bit_moments_take_a_byte_each_and_steps_stay_close(model: Any) -> None:
    """Real bitsandbytes. It leaves tensors below 4,096 entries alone; the embedding has more."""
    twin = copy.deepcopy(model)
    optimizers = Optimizer(model, 1e-3), Optimizer(twin, 1e-3, "adamw_8bit")
    start = model.get_input_embeddings().weight.detach().clone()
    for _ in range(3):
        for each, optimizer in zip((model, twin), optimizers, strict=True):
            backward(each)
            optimizer.step(1.0)
    state = optimizers[1].adamw.state[twin.get_input_embeddings().weight]
    assert state["state1"].dtype == state["state2"].dtype == torch.uint8
    found, expected = (m.get_input_embeddings().weight.detach() - start for m in (twin, model))
    assert (found - expected).norm() < 0.1 * expected.norm()


class TwoGpus:
    """Stands for torch.cuda on a machine with two GPUs, the first of which is the current one; sizes in MiB."""

    def __init__(self) -> None:
        self.held, self.peaks = {"cuda:0": 60_000, "cuda:1": 20_000}, {"cuda:0": 60_000, "cuda:1": 20_000}

    def hold(self, device: str, size: int) -> None:
        self.held[device] += size
        self.peaks[device] = max(self.peaks[device], self.held[device])

    def is_available(self) -> bool:
        return True

    def reset_peak_memory_stats(self, device: str = "cuda:0") -> None:
        self.peaks[device] = self.held[device]

    def max_memory_allocated(self, device: str = "cuda:0") -> int:
        return self.peaks[device] * 2**20


def test_each_phase_tells_the_peak_of_the_gpu_that_it_works_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As in math-2xh100: vLLM holds most of the first GPU, and the learner has the second."""
    gpus = TwoGpus()
    monkeypatch.setattr(torch, "cuda", gpus)
    study = load_study(Path(__file__).parents[2] / "studies" / "math-2xh100.yaml")
    run = effective_run(study, "grpo_learning_rate", next(iter(study.experiments["grpo_learning_rate"].arms)), 0, [])
    no_mlflow: Any = SimpleNamespace(log=lambda metrics, step: None)
    log = RunLog(tmp_path, no_mlflow, devices=phase_devices(study, run))
    for _ in range(2):
        for phase, device, size in (
            ("rollout", "cuda:0", 3_000),
            ("training", "cuda:1", 12_000),
            ("evaluation", "cuda:0", 500),
        ):
            with log.phase(phase):
                gpus.hold(device, size)
                gpus.hold(device, -size)
    log.step(1, [{"loss": 0.0}], {}, tokens=1)
    log.close()
    peaks = {name: value for name, value in log.times[0].items() if name.endswith("_peak_mb")}
    assert peaks == {"rollout_peak_mb": 63_000, "training_peak_mb": 32_000, "evaluation_peak_mb": 60_500}

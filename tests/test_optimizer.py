"""Float32 weights behind a bfloat16 model, 8-bit moments, and the memory of each phase."""

from __future__ import annotations

import builtins
import copy
import math
from typing import Any

import pytest
import torch

from grpo.errors import UserError
from grpo.memory import peak_mb, reset_peak
from grpo.training.optimizer import Optimizer


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
        optimizer.zero_grad()
        backward(model)
        optimizer.step(max_norm=1.0)
    moved = (optimizer.weights[place] - before.float()).abs()
    assert optimizer.weights[place].dtype == torch.float32
    assert moved.max() > 5e-4
    assert torch.equal(norm, before)  # each of these steps alone is lost in bfloat16, and so are these all together
    assert all(torch.equal(p, w.to(torch.bfloat16)) for p, w in zip(optimizer.parameters, optimizer.weights, strict=True))


def test_gradients_of_a_bfloat16_model_are_summed_in_float32(model: Any) -> None:
    """1 + 1/512 three hundred times over: a sum in bfloat16 would stop growing early."""
    model = model.to(torch.bfloat16)
    once = Optimizer(model, 1e-5)
    backward(model)
    expected = [300 * g.clone() for g in once.gradients()]
    twin = copy.deepcopy(model)
    many = Optimizer(twin, 1e-5)
    for _ in range(300):
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


def test_clipping_scales_all_gradients_together(model: Any) -> None:
    optimizer = Optimizer(model, 1e-3)
    backward(model)
    before = [g.clone() for g in optimizer.gradients()]
    norm, taken = optimizer.step(max_norm=0.5)
    assert taken and norm == pytest.approx(math.sqrt(sum(float(g.pow(2).sum()) for g in before)), rel=1e-5) and norm > 0.5
    for found, g in zip(optimizer.gradients(), before, strict=True):
        assert torch.allclose(found, g * 0.5 / norm, rtol=1e-4)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_a_step_whose_loss_or_gradient_is_not_finite_is_skipped(model: Any, where: str, bad: float) -> None:
    optimizer = Optimizer(model, 1e-3)
    before = [weight.detach().clone() for weight in optimizer.weights]
    for gradient in optimizer.gradients():
        gradient.fill_(1.0)
    if where == "gradient":
        optimizer.gradients()[3].view(-1)[5] = bad
    _, taken = optimizer.step(1.0, bad if where == "loss" else 0.5)
    assert not taken
    assert all(torch.equal(weight, old) for weight, old in zip(optimizer.weights, before, strict=True))
    assert not optimizer.adamw.state  # nor did the moments take it in


def test_eight_bit_moments_take_a_byte_each_and_steps_stay_close(model: Any) -> None:
    """Real bitsandbytes. It leaves tensors below 4,096 entries alone; the embedding has more."""
    twin = copy.deepcopy(model)
    optimizers = Optimizer(model, 1e-3), Optimizer(twin, 1e-3, "adamw_8bit")
    start = model.get_input_embeddings().weight.detach().clone()
    for _ in range(3):
        for each, optimizer in zip((model, twin), optimizers, strict=True):
            optimizer.zero_grad()
            backward(each)
            optimizer.step(1.0)
    state = optimizers[1].adamw.state[twin.get_input_embeddings().weight]
    assert state["state1"].dtype == state["state2"].dtype == torch.uint8
    found, expected = (m.get_input_embeddings().weight.detach() - start for m in (twin, model))
    assert (found - expected).norm() < 0.1 * expected.norm()


def test_eight_bit_without_bitsandbytes_says_what_to_install(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    really = builtins.__import__

    def without(name: str, *args: Any) -> Any:
        if name.startswith("bitsandbytes"):
            raise ImportError(name)
        return really(name, *args)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(UserError, match=r"learner.optimizer: adamw_8bit needs bitsandbytes: `pip install bitsandbytes`"):
        Optimizer(model, 1e-3, "adamw_8bit")


def test_the_peak_of_a_phase_is_its_own() -> None:
    reset_peak()
    before = peak_mb()
    held = torch.ones(300 * 2**18)  # 300 MiB
    assert peak_mb() == pytest.approx(before + 300, abs=60)
    del held
    assert peak_mb() > before + 200
    reset_peak()
    assert peak_mb() < before + 100

"""Float32 weights behind a bfloat16 model, 8-bit moments, memory of each phase, learning rates, float16's loss scale."""

import copy
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from learner_parts import ADVANTAGES, REWARDS, config, learner_of, rollouts
from model_parts import own_model
from torch import Tensor
from training_parts import same_weights, scored
from transformers import get_scheduler

from grpo.learner import optimizer as optimizer_module
from grpo.learner.learner import Learner
from grpo.learner.microbatches import texts_of, whole_texts
from grpo.learner.optimizer import LossScale, Optimizer, learning_rate
from grpo.study.config import GrpoConfig, SftConfig
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


def test_a_float32_model_has_no_second_copy_and_a_weight_without_a_gradient_counts_as_zero(model: Any) -> None:
    optimizer = Optimizer(model, 1e-3)
    assert all(weight is parameter for weight, parameter in zip(optimizer.weights, model.parameters(), strict=True))
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
def test_a_step_needs_finite_gradients_and_leaves_none(model: Any, dtype: torch.dtype, loss: float, factor: float) -> None:
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
        self.is_available = lambda: True

    def hold(self, device: str, size: int) -> None:
        self.held[device] += size
        self.peaks[device] = max(self.peaks[device], self.held[device])

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
        sizes = (("rollout", "cuda:0", 3_000), ("training", "cuda:1", 12_000), ("evaluation", "cuda:0", 500))
        for phase, device, size in sizes:
            with log.phase(phase):
                gpus.hold(device, size)
                gpus.hold(device, -size)
    log.step(1, [{"loss": 0.0}], {}, tokens=1)
    log.close()
    peaks = {name: value for name, value in log.times[0].items() if name.endswith("_peak_mb")}
    assert peaks == {"rollout_peak_mb": 63_000, "training_peak_mb": 32_000, "evaluation_peak_mb": 60_500}


TRANSFORMERS_NAMES = {"constant": "constant_with_warmup", "linear": "linear", "cosine": "cosine"}


def sft(kind: str, warmup: int, steps: int) -> SftConfig:
    return SftConfig(learning_rate=0.8, lr_scheduler_type=kind, warmup_steps=warmup, n_sft_steps=steps)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", TRANSFORMERS_NAMES)
@pytest.mark.parametrize(("warmup", "steps"), [(0, 1), (0, 12), (1, 12), (5, 12)])
def test_rates_are_those_of_transformers(kind: str, warmup: int, steps: int) -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.8)
    scheduler = get_scheduler(TRANSFORMERS_NAMES[kind], optimizer, warmup, steps)
    for update in range(steps):
        assert learning_rate(sft(kind, warmup, steps), update) == pytest.approx(scheduler.get_last_lr()[0], rel=1e-14)
        optimizer.step()
        scheduler.step()


def test_a_grpo_run_counts_updates_and_not_steps() -> None:
    """Four steps of two epochs of two train batches: 16 updates."""
    config = GrpoConfig(
        learning_rate=1.6, lr_scheduler_type="linear", n_grpo_steps=4, rollout_batch_size=16, train_batch_size=8,
        gradient_accumulation_steps=1, epochs_per_rollout_batch=2,
    )  # fmt: skip
    assert [learning_rate(config, update) for update in (0, 1, 15)] == pytest.approx([1.6, 1.5, 0.1])
    ragged = GrpoConfig(rollout_batch_size=24, train_batch_size=12, group_size=8, gradient_accumulation_steps=1)
    assert ragged.updates_per_rollout_batch == 2  # a train batch of a group and a half


def test_an_update_is_taken_with_the_rate_that_it_logs(model: Any) -> None:
    """AdamW's first step is as long as the rate in each weight that has a gradient."""
    learner = Learner(model, sft("linear", 1, 5).model_copy(update={"max_grad_norm": 1e9, "learning_rate": 1e-3}), 0)
    head = model.lm_head.weight
    rates, moved = [], []
    for _ in range(2):
        before = head.detach().clone()
        rates.append(learner.sft_update(whole_texts([(5, 9)], [(2, 7)]))["learning_rate"])
        moved.append((head - before).abs().max().item())
    assert rates == [0.0, 1e-3]
    assert moved == [0.0, pytest.approx(1e-3, rel=0.6)]


def gradient(
    model: Any, dtype: torch.dtype, budget: int | None = 40, factor: float = 1.0, scale: float = 1024.0, **changes: Any
) -> tuple[Tensor, dict[str, float]]:
    """The gradient of an update that AdamW gets, and the update's metrics."""
    learner = learner_of(copy.deepcopy(model).to(dtype), budget, **changes)
    if learner.optimizer.scale is not None:
        learner.optimizer.scale.value = scale
    seen: list[Tensor] = []
    learner.optimizer.adamw.step = lambda: seen.extend(g.flatten().clone() for g in learner.optimizer.gradients())
    metrics = learner.update(scored(rollouts(), REWARDS, factor * ADVANTAGES))
    return torch.cat(seen), metrics


def apart(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("budget", [None, 40], ids=["padded", "packed"])
@pytest.mark.parametrize("own", [False, True], ids=["transformers", "own"])
def test_gradients_are_nearer_to_float32s_than_bfloat16s_are(fresh_model: Any, own: bool, budget: int | None) -> None:
    """Within 2% of their norm; bfloat16, with three binary digits less, is more than four times as far away."""
    model = own_model(initializer_range=0.02) if own else fresh_model
    exact, half, brain = (gradient(model, dtype, budget)[0] for dtype in (torch.float32, torch.float16, torch.bfloat16))
    assert 0 < apart(half, exact) < 2e-2
    assert apart(brain, exact) > 4 * apart(half, exact)


def test_the_scale_brings_small_gradients_and_leaves_clipping_to_their_own_norm(fresh_model: Any) -> None:
    """Below float16's smallest number."""
    exact = gradient(fresh_model, torch.float32, factor=1e-7)[0]
    assert apart(gradient(fresh_model, torch.float16, factor=1e-7, scale=2.0**24)[0], exact) < 2e-2
    assert apart(gradient(fresh_model, torch.float16, factor=1e-7, scale=1.0)[0], exact) > 0.5
    exact = gradient(fresh_model, torch.float32)[0]
    for dtype, limit in ((torch.float32, 1e-5), (torch.float16, 1e-2)):
        clipped, metrics = gradient(fresh_model, dtype, max_grad_norm=0.5)
        assert clipped.norm() == pytest.approx(0.5, rel=1e-4) and metrics.get("loss_scale", 1024.0) == 1024.0
        assert metrics["gradient_norm"] == pytest.approx(exact.norm().item(), rel=limit) and exact.norm() > 0.5
        assert apart(clipped, 0.5 * exact / exact.norm()) < 2 * limit


def test_a_gradient_too_large_for_float16_skips_the_step_and_halves_the_scale(model: Any) -> None:
    learner = Learner(model.half(), config(), 0)
    optimizer, scale = learner.optimizer, learner.optimizer.scale
    assert scale is not None and scale.value == 2.0**16
    scale.value = 2.0**20
    before = [weight.detach().clone() for weight in (*optimizer.weights, *model.parameters())]
    batch = scored(rollouts(), REWARDS, ADVANTAGES)
    found = [learner.update(batch)]
    assert all(torch.equal(a, b) for a, b in zip((*optimizer.weights, *model.parameters()), before, strict=True))
    assert not optimizer.adamw.state_dict()["state"]
    while found[-1]["skipped_update"]:
        found.append(learner.update(batch))
    assert len(found) > 2 and [row["loss_scale"] for row in found] == [2.0 ** (20 - k) for k in range(len(found))]
    assert all(math.isfinite(row["loss"]) for row in found) and math.isfinite(found[-1]["gradient_norm"])
    assert not any(torch.equal(weight, old) for weight, old in zip(optimizer.weights, before, strict=False))


def test_the_scale_doubles_after_enough_finite_gradients_in_a_row(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loss that is not finite says nothing of it."""
    learner = Learner(model.half(), config(), 0)
    learner.update(scored(rollouts(), REWARDS, ADVANTAGES * math.nan))
    assert learner.loss_scale() == {"loss_scale": 2.0**16}
    monkeypatch.setattr(optimizer_module, "STEPS_TO_GROW", 3)
    scale, found = LossScale(), []
    for finite in (True, True, False, True, True, True, True):
        scale.follow(finite)
        found.append(scale.value / 2.0**16)
    assert found == [1, 1, 0.5, 0.5, 0.5, 1, 1]
    saved, resumed = (Optimizer(torch.nn.Linear(3, 1, dtype=torch.float16), 1e-3) for _ in range(2))
    assert saved.scale is not None and resumed.scale is not None
    for finite in (False, True, True):
        saved.scale.follow(finite)
    resumed.restore(saved.state())
    resumed.scale.follow(True)  # the third in a row
    assert resumed.scale.value == 2.0**16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_precisions_know_nothing_of_a_scale(fresh_model: Any, dtype: torch.dtype) -> None:
    learner = learner_of(copy.deepcopy(fresh_model).to(dtype), 40)
    metrics = learner.update(scored(rollouts(), REWARDS, ADVANTAGES)) | learner.sft_update(texts_of(rollouts()))
    assert set(learner.optimizer.state()) == {"adamw", "weights"} and "loss_scale" not in metrics

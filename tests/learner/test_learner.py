"""The learner: special batches, clipping, restoring, skipped updates, random layers, reads of the device."""

import copy
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from learner_parts import (
    ADVANTAGES,
    LENGTHS,
    REWARDS,
    config,
    last_gradients,
    learner_of,
    log_probs_alone,
    off_policy,
    rollout,
    rollouts,
    rollouts_of,
    updated,
)
from model_parts import RANDOM, SIZES, own_model
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from training_parts import same_weights, saved_every, scored
from transformers import AutoConfig
from transformers.modeling_layers import GradientCheckpointingLayer

from grpo.common.errors import UserError
from grpo.learner.learner import Learner
from grpo.learner.microbatches import texts_of
from grpo.models.hugging_face import AutoModelForCausalLM, examine  # it knows the attention that is asked for
from grpo.study.methods import OBJECTIVES
from grpo.study.settings import LearnerSettings
from grpo.training.step import train_on


def weights(model: Any) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def relative(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """Largest difference between the two, relative to the largest element of the tensor it stands in."""
    return max(((a[name] - b[name]).abs().max() / b[name].abs().max()).item() for name in b)


@pytest.mark.parametrize("packing", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize("objective", ["gspo", "dapo"])
def test_in_half_precision_nothing_is_clipped_before_anything_was_learnt(objective: str, packing: bool) -> None:
    """The weights that sampled: all ratios are 1 and the divergence from the starting weights is 0, exactly, however long the
    responses are that another train batch has."""
    policy = own_model(hidden_size=64, intermediate_size=128, num_hidden_layers=4, initializer_range=0.1).to(torch.bfloat16)
    values = OBJECTIVES[objective] | {"rollout_batch_size": 32, "train_batch_size": 16, "kl_coefficient": 0.1}
    settings = LearnerSettings(max_tokens_per_microbatch=300, packing=packing, dtype="bfloat16")
    learner = Learner(policy, config(**values, sampling_max_tokens=64, learning_rate=1e-6), 0, settings)
    lengths = [[1 + (7 * g + 13 * k) % 60 for k in range(4)] for g in range(8)]
    batch = rollouts_of(lengths, [5 + 3 * g for g in range(8)], 512)
    batch = scored(batch, REWARDS.repeat(4), ADVANTAGES.repeat(4))
    first, _ = train_on(learner.config, learner, batch, version=0)  # type: ignore[arg-type]
    assert (first["ratio_min"], first["ratio_max"], first["clip_fraction"], first["kl_loss"]) == (1.0, 1.0, 0.0, 0.0)
    assert [rollout.group for rollout in batch] == [i // learner.config.group_size for i in range(32)]  # type: ignore[union-attr]


@pytest.mark.parametrize("objective", ["grpo", "dapo", "gspo", "cispo"])
def test_an_update_with_a_ratio_beyond_float32_is_taken(model: Any, objective: str) -> None:
    """The tokens of good responses have become far likelier than they were: they are clipped, and the others are trained on."""
    learner = learner_of(model, **OBJECTIVES[objective], kl_coefficient=0.1, importance_cap=2.0)
    batch, far = rollouts(), torch.tensor([0.0, 0, 0, 300, 0, 300, 0, 0])  # their advantages are 1 and .75
    now = learner.log_probs(batch)
    batch = scored(batch, REWARDS, ADVANTAGES, [lp - each for lp, each in zip(now, far, strict=True)])
    for one, reference in zip(batch, now, strict=True):
        one.reference_log_probs = reference
    metrics = learner.update(batch)
    assert all(math.isfinite(value) for value in metrics.values()) and metrics["skipped_update"] == 0.0
    assert metrics["clip_fraction"] == pytest.approx((LENGTHS[3] + LENGTHS[5]) / sum(LENGTHS))


@pytest.mark.parametrize("pad", [512, -1, None])
def test_any_token_may_pad(model: Any, pad: int | None) -> None:
    """Also one that the model lacks; the responses are padded together."""
    settings, found = LearnerSettings(max_tokens_per_microbatch=99, packing=False), []
    for token in (pad, 3):
        learner = Learner(copy.deepcopy(model), config(), token, settings)
        found.append(last_gradients(learner))
        learner.update(scored(rollouts(), REWARDS, ADVANTAGES))
    assert relative(*found) == 0.0


@pytest.mark.parametrize("budget", [None, 24])
@pytest.mark.parametrize("packing", [True, False], ids=["packed", "padded"])
def test_a_prompt_without_tokens_is_refused(model: Any, budget: int | None, packing: bool) -> None:
    learner, without = learner_of(model, budget, packing), [*rollouts()[:7], rollout(0, 3, seed=7)]
    before, tuned = weights(learner.model), lambda batch: learner.sft_update(texts_of(batch))
    for use in (learner.update, learner.log_probs, learner.token_entropies, tuned):
        with pytest.raises(UserError, match="prompt 8 of 8 has no tokens"):
            use(scored(without, REWARDS, ADVANTAGES))
    assert relative(weights(learner.model), before) == 0.0


def test_the_gradient_is_clipped_and_its_norm_before_that_reported(model: Any) -> None:
    (free, unclipped), (bound, clipped) = (
        updated(learner_of(model, max_grad_norm=norm), ADVANTAGES * 100) for norm in (1e9, 1.0)
    )
    norm = math.sqrt(sum(g.square().sum().item() for g in unclipped.values()))
    assert norm > 2.0
    assert free["gradient_norm"] == pytest.approx(norm, rel=1e-5)
    assert bound["gradient_norm"] == pytest.approx(norm, rel=1e-5)
    assert math.sqrt(sum(g.square().sum().item() for g in clipped.values())) == pytest.approx(1.0, rel=1e-4)
    assert relative(clipped, {name: g / norm for name, g in unclipped.items()}) < 1e-4


def test_the_optimizer_is_the_handouts_and_other_settings_reach_it_and_are_recorded(model: Any) -> None:
    other = {"weight_decay": 0.3, "adam_beta1": 0.5, "adam_beta2": 0.6, "adam_epsilon": 1e-3}
    for changes, expected in (({}, (0.0, (0.9, 0.95), 1e-8)), (other, (0.3, (0.5, 0.6), 1e-3))):
        group = learner_of(model, **changes).optimizer.adamw.param_groups[0]
        assert (group["weight_decay"], group["betas"], group["eps"]) == expected
        assert other.keys() & config(**changes).model_dump().keys() == changes.keys()
    learner = learner_of(model, learning_rate=2e-3)
    metrics, gradients = updated(learner)
    for name, parameter in model.named_parameters():
        parameter.grad = gradients[name]
    torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.0, fused=True).step()
    assert same_weights(learner.model, model) and metrics["learning_rate"] == 2e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_learner_that_is_restored_goes_on_bit_for_bit(model: Any, dtype: torch.dtype, tmp_path: Path) -> None:
    """Two updates, saved as a run saves them, and a third one. The state must include the moments, float32 copies of rounded
    weights, and float16's scale, which the second update halves.
    """

    def update(learner: Learner, seed: int) -> dict[str, float]:
        generator = torch.Generator().manual_seed(seed)
        return learner.update(scored(rollouts(), REWARDS, torch.randn(8, generator=generator)))

    fresh = copy.deepcopy(model.to(dtype))
    undisturbed = Learner(model, config(), 0)
    update(undisturbed, 1), update(undisturbed, 2)
    with saved_every(1, tmp_path, {"learner": undisturbed}) as saved:
        saved.save(2)
    expected = update(undisturbed, 3)
    assert expected["gradient_norm"] > 0 and expected.get("loss_scale", 2.0**15) == 2.0**15
    restored = Learner(fresh, config(), 0)
    saved_every(1, tmp_path, {"learner": restored}).restore()
    assert update(restored, 3) == expected
    for ours, theirs in zip(restored.optimizer.weights, undisturbed.optimizer.weights, strict=True):
        assert torch.equal(ours, theirs)
    assert same_weights(fresh, model)


def optimizer_state(learner: Learner) -> list[Tensor]:
    return [t.clone() for of_weight in learner.optimizer.adamw.state_dict()["state"].values() for t in of_weight.values()]


@pytest.mark.parametrize(
    ("loss_type", "bad"),
    # A reward that is NaN stands for one that abstains, and counts as 0.
    [("reinforce_with_baseline", math.inf), ("reinforce_with_baseline", math.nan), ("no_baseline", math.inf)],
)
def test_an_update_without_a_finite_gradient_is_skipped(model: Any, loss_type: str, bad: float) -> None:
    """Weights and optimizer do not change, and the next update equals that of a learner without the bad batch."""
    settings = config(loss_type=loss_type, gradient_accumulation_steps=2, max_grad_norm=1.0)
    one = torch.tensor([1.0, 0, 0, bad, 0, 1, 1, 1])
    rewards, advantages = (one, ADVANTAGES) if loss_type == "no_baseline" else (REWARDS, one)
    twin, learner = (Learner(each, settings, 0) for each in (copy.deepcopy(model), model))
    for each in (learner, twin):
        assert each.update(scored(rollouts(), REWARDS, ADVANTAGES))["skipped_update"] == 0.0
    before, state = weights(model), optimizer_state(learner)
    assert len(state) == 3 * len(before)  # step, mean and mean square of each tensor

    metrics = learner.update(scored(rollouts(), rewards, advantages))
    assert metrics["skipped_update"] == 1.0
    assert not math.isfinite(metrics["gradient_norm"])
    assert all(torch.equal(value, before[name]) for name, value in weights(model).items())
    assert all(torch.equal(a, b) for a, b in zip(optimizer_state(learner), state, strict=True))

    after, expected = (each.update(scored(rollouts(), REWARDS, ADVANTAGES)) for each in (learner, twin))
    assert after == expected
    assert after["skipped_update"] == 0.0
    assert same_weights(model, twin.model)


READS = ("item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__", "__contains__")
OF_DATA = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "unique", "bincount", "repeat_interleave")


class Calls(TorchFunctionMode):
    """Counts methods that read a tensor's numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.update([name for name in READS if function is getattr(Tensor, name)])
        return function(*args, **(kwargs or {}))


class Kernels(TorchDispatchMode):
    """Counts kernels whose output size depends on data, such as indexing with masks."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        masks = name in ("index", "index_put", "index_put_", "_index_put_impl_") and any(
            index is not None and index.dtype == torch.bool for index in args[1]
        )
        self.seen.update([name] if masks or name in OF_DATA else [])
        return function(*args, **(kwargs or {}))


def reads(work: Any) -> Counter[str]:
    with Calls() as calls, Kernels() as kernels:
        work()
    return calls.seen + kernels.seen


def test_the_counters_see_what_waits() -> None:
    x, mask = torch.arange(3.0), torch.tensor([True, False, True])
    found = reads(lambda: (x[mask].sum().item(), x.tolist(), bool(mask.any()), x.cpu(), x.masked_fill(mask, 0)[mask]))
    assert [found[name] for name in ("item", "tolist", "__bool__", "cpu", "index")] == [1, 1, 1, 1, 2]


@pytest.mark.parametrize(("budget", "own"), [(25, False), pytest.param(25, True, marks=pytest.mark.nightly), (None, True)])
def test_an_update_reads_once_whatever_its_size(fresh_model: Any, budget: int | None, own: bool) -> None:
    """(With padded microbatches, transformers' models read one number each, to detect their own packing.)"""
    for copies in (1, 4):
        sizes = {"train_batch_size": 8 * copies, "rollout_batch_size": 8 * copies, "gradient_accumulation_steps": 4 * copies}
        model = own_model() if own else fresh_model
        learner = learner_of(model, budget, **sizes, loss_type="grpo_clip", importance_cap=2.0)
        batch = rollouts(LENGTHS * copies)
        batch = scored(batch, REWARDS.repeat(copies), ADVANTAGES.repeat(copies), off_policy(learner, batch))
        assert sum(1 for _ in learner._microbatches(learner.model, texts_of(batch))) >= 2 * copies
        assert reads(lambda: learner.update(batch)) == {"tolist": 1}  # noqa: B023 - called at once
        assert reads(lambda: learner.sft_update(texts_of(batch))) == {"tolist": 1}  # noqa: B023
        assert reads(lambda: learner.log_probs(batch)) == {"cpu": 1}  # noqa: B023


# Falcon's layers read this from the configuration, which is the model's own and is saved with it.
CANNOT_CHECKPOINT = {"falcon"}


def random_model(kind: str) -> Any:
    torch.manual_seed(0)
    values = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None, **SIZES, **RANDOM[kind]}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, vocab_size=512, **values))
    rows = torch.arange(40).reshape(2, 20)
    with torch.no_grad():
        assert not torch.equal(model.train()(rows).logits, model.eval()(rows).logits)  # else nothing is tried
    before = torch.random.get_rng_state()
    model.traits = examine(model)
    assert torch.equal(torch.random.get_rng_state(), before)
    return model


@pytest.mark.parametrize(("kind", "packing"), [*((kind, False) for kind in RANDOM), ("mixtral", True)])
def test_nothing_is_random_where_a_model_is_trained(kind: str, packing: bool) -> None:
    """Log-probabilities are those of evaluation mode, and where weights have not moved each ratio is exactly 1."""
    model = random_model(kind)
    theirs, batch = copy.deepcopy(model), rollouts()
    learner = learner_of(model, 200, packing, loss_type="grpo_clip")
    model.train()
    found = learner.log_probs(batch)
    for one, log_probs in zip(batch, found, strict=True):
        assert torch.allclose(log_probs, log_probs_alone(theirs, one), atol=1e-5)
    model.train()
    update = learner.update(scored(batch, REWARDS, ADVANTAGES, found))
    assert update["ratio_min"] == update["ratio_max"] == 1.0 and update["clip_fraction"] == 0.0


@pytest.mark.parametrize("kind", RANDOM)
def test_gradient_checkpointing_changes_nothing_or_is_refused(kind: str) -> None:
    """It needs layers in training mode: their gradients are those of evaluation mode, and each layer computes twice."""
    gradients, calls = [], Counter[bool]()
    for checkpointing in (False, True):
        model = random_model(kind)
        settings = LearnerSettings(max_tokens_per_microbatch=200, gradient_checkpointing=checkpointing)
        if checkpointing and kind in CANNOT_CHECKPOINT:
            with pytest.raises(UserError, match=r"learner\.gradient_checkpointing: .* Set it to false\."):
                Learner(model, config(), 0, settings)
            return
        learner = Learner(model, config(), 0, settings)
        layer = next(module for module in model.modules() if isinstance(module, GradientCheckpointingLayer))
        next(layer.children()).register_forward_pre_hook(lambda *_, which=checkpointing: calls.update([which]))
        gradients.append(last_gradients(learner))
        learner.sft_update(texts_of(rollouts()))
    assert calls[True] == 2 * calls[False] > 0
    for name, gradient in gradients[0].items():
        assert torch.equal(gradients[1][name], gradient), name

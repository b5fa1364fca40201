"""The learner: special batches, restoring, random layers, reads of the device; and adapters, trained, merged and saved."""

import copy
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from learner_parts import (
    ADVANTAGES,
    LENGTHS,
    REWARDS,
    as_rollouts,
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
from model_parts import RANDOM, own_model, random_model
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from training_parts import same_weights, saved_every, scored
from transformers import AutoModelForCausalLM
from transformers.modeling_layers import GradientCheckpointingLayer

from grpo.common.errors import UserError
from grpo.learner.learner import Learner
from grpo.learner.microbatches import texts_of
from grpo.models.checkpoint import load_model, save_checkpoint
from grpo.models.hugging_face import examine  # it knows the attention that is asked for
from grpo.models.lora import FOLDER, add_adapters, without_adapters
from grpo.models.transformer import TransformerLM
from grpo.rollout.engine import SamplingParams
from grpo.rollout.transformers_engine import TransformersEngine
from grpo.study.config import OBJECTIVES, LearnerSettings, Lora
from grpo.training.step import update_policy


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
    first, _ = update_policy(learner.config, learner, batch, version=0)  # type: ignore[arg-type]
    assert (first["ratio_min"], first["ratio_max"], first["clip_fraction"], first["kl_loss"]) == (1.0, 1.0, 0.0, 0.0)
    assert [rollout.group for rollout in batch] == [i // learner.config.group_size for i in range(32)]  # type: ignore[union-attr]


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


def test_the_optimizer_is_the_handouts_and_other_settings_reach_it_and_are_recorded(model: Any) -> None:
    other = {"weight_decay": 0.3, "adam_beta1": 0.5, "adam_beta2": 0.6, "adam_epsilon": 1e-3}
    for changes, expected in (({}, (0.0, (0.9, 0.95), 1e-8)), (other, (0.3, (0.5, 0.6), 1e-3))):
        group = learner_of(model, **changes).optimizer.adamw.param_groups[0]
        assert (group["weight_decay"], group["betas"], group["eps"]) == expected
        assert other.keys() & config(**changes).model_dump().keys() == changes.keys()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_learner_that_is_restored_goes_on_bit_for_bit(model: Any, dtype: torch.dtype, tmp_path: Path) -> None:
    """Two updates, saved as a run saves them, and a third one. The state must include the moments, float32 copies of rounded
    weights, the number of updates, by which the rate falls, and float16's scale, which the second update halves.
    """
    falling = config(lr_scheduler_type="linear")

    def update(learner: Learner, seed: int) -> dict[str, float]:
        generator = torch.Generator().manual_seed(seed)
        return learner.update(scored(rollouts(), REWARDS, torch.randn(8, generator=generator)))

    fresh = copy.deepcopy(model.to(dtype))
    undisturbed = Learner(model, falling, 0)
    update(undisturbed, 1), update(undisturbed, 2)
    with saved_every(1, tmp_path, {"learner": undisturbed}) as saved:
        saved.save(2)
    expected = update(undisturbed, 3)
    assert expected["gradient_norm"] > 0 and 0 < expected["learning_rate"] < falling.learning_rate
    assert expected.get("loss_scale", 2.0**15) == 2.0**15
    restored = Learner(fresh, falling, 0)
    saved_every(1, tmp_path, {"learner": restored}).restore()
    assert update(restored, 3) == expected
    for ours, theirs in zip(restored.optimizer.weights, undisturbed.optimizer.weights, strict=True):
        assert torch.equal(ours, theirs)
    assert same_weights(fresh, model)


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


def noisy_model(kind: str) -> Any:
    model, rows = random_model(kind, **RANDOM[kind]), torch.arange(40).reshape(2, 20)
    with torch.no_grad():
        assert not torch.equal(model.train()(rows).logits, model.eval()(rows).logits)  # else nothing is tried
    before = torch.random.get_rng_state()
    model.traits = examine(model)
    assert torch.equal(torch.random.get_rng_state(), before)
    return model


@pytest.mark.parametrize(("kind", "packing"), [*((kind, False) for kind in RANDOM), ("mixtral", True)])
def test_nothing_is_random_where_a_model_is_trained(kind: str, packing: bool) -> None:
    """Log-probabilities are those of evaluation mode, and where weights have not moved each ratio is exactly 1."""
    model = noisy_model(kind)
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
        model = noisy_model(kind)
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


LORA = Lora(rank=4, alpha=8)
IDS = torch.arange(1, 41).reshape(2, 20)


@pytest.fixture
def own() -> TransformerLM:
    """The project's own Transformer; transformers' Qwen2 is the fixture ``model``."""
    return own_model(tie_word_embeddings=False, initializer_range=0.02, eos_token_id=1, pad_token_id=0)


@pytest.fixture(params=["model", "own"])
def adapted(request: pytest.FixtureRequest) -> Any:
    """A model whose adapters have been trained: no B is zero."""
    found = request.getfixturevalue(request.param)
    add_adapters(found, LORA, seed=3)
    torch.manual_seed(2)
    for name, parameter in found.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return found


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(IDS).logits
    return found


def of_base(model: Any) -> dict[str, Tensor]:
    return {name.replace(".base_layer", ""): t.clone() for name, t in model.state_dict().items() if ".lora_" not in name}


@pytest.mark.parametrize("kind", ["model", "own"])
def test_new_adapters_change_nothing_and_are_drawn_by_the_seed(kind: str, request: pytest.FixtureRequest) -> None:
    model = request.getfixturevalue(kind)
    before, random = logits(model), torch.get_rng_state()
    drawn = []
    for seed in (0, 0, 1):
        other = copy.deepcopy(model)
        add_adapters(other, LORA, seed)
        assert torch.equal(logits(other), before)
        drawn.append(other.model.layers[0].mlp.up_proj.lora_A.default.weight)
    assert torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[0], drawn[2])
    assert torch.equal(torch.get_rng_state(), random)


def test_merged_weights_are_those_worked_out_by_hand(adapted: Any) -> None:
    base, own = of_base(adapted), {name: t.clone() for name, t in adapted.state_dict().items()}
    through = logits(adapted)
    with without_adapters(adapted, merge=True):
        merged = {name: t.clone() for name, t in adapted.state_dict().items()}
        assert_close(logits(adapted), through, atol=1e-5, rtol=1e-4)
    assert merged.keys() == base.keys()
    changed = 0
    for name, weight in base.items():
        adapter = name.removesuffix(".weight")
        if f"{adapter}.lora_A.default.weight" in own:
            weight = weight + 8 / 4 * own[f"{adapter}.lora_B.default.weight"] @ own[f"{adapter}.lora_A.default.weight"]
            changed += 1
        assert_close(merged[name], weight)
    assert changed == 2 * 7  # two layers: four matrices of attention, three of the feed-forward network
    after = adapted.state_dict()
    assert after.keys() == own.keys() and all(torch.equal(after[name], own[name]) for name in own)


def test_only_adapters_get_gradients_and_steps(adapted: Any) -> None:
    base, own = of_base(adapted), {n: p.detach().clone() for n, p in adapted.named_parameters() if p.requires_grad}
    learner = Learner(adapted, config(lora=LORA), pad_token_id=0, settings=LearnerSettings(max_tokens_per_microbatch=64))
    _, found = updated(learner)
    assert found.keys() == own.keys() and all(".lora_" in name for name in found)
    assert all(not torch.equal(p, own[n]) for n, p in adapted.named_parameters() if n in own)
    assert all(torch.equal(t, base[name]) for name, t in of_base(adapted).items())
    assert learner.state()["model"].keys() == own.keys()
    assert len(learner.state()["optimizer"]["adamw"]["state"]) == len(own)


def test_engine_and_learner_agree(adapted: Any, tokenizer: Any) -> None:
    """On sampled tokens: the engine with adapters, and the learner with merged weights."""
    engine = TransformersEngine(adapted, tokenizer, 8)
    learner = Learner(adapted, config(lora=LORA), pad_token_id=0, settings=LearnerSettings(max_tokens_per_microbatch=128))
    prompts = [[5, 6, 7], [8, 9]]
    batch = as_rollouts(prompts, engine.generate(prompts, SamplingParams(max_tokens=12, min_tokens=0), 3, 0))
    through = learner.log_probs(batch)
    for one, log_probs in zip(batch, through, strict=True):
        assert_close(log_probs, torch.tensor(one.completion.log_probs), atol=1e-5, rtol=1e-4)
    with without_adapters(adapted, merge=True):
        for merged, log_probs in zip(learner.log_probs(batch), through, strict=True):
            assert_close(merged, log_probs, atol=1e-5, rtol=1e-4)


def test_a_checkpoint_holds_merged_weights_and_adapters_for_peft(adapted: Any, tokenizer: Any, tmp_path: Path) -> None:
    from peft import PeftModel

    through = logits(adapted)
    with without_adapters(adapted, merge=False):
        save_checkpoint(tmp_path / "base", adapted, tokenizer)
    assert not (tmp_path / "base" / FOLDER).exists()
    adapted.peft_config["default"].base_model_name_or_path = str(tmp_path / "base")  # as in a run
    save_checkpoint(tmp_path / "trained", adapted, tokenizer)
    assert_close(logits(load_model(tmp_path / "trained")), through, atol=1e-5, rtol=1e-4)
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    assert (logits(base) - through).abs().max() > 1e-2
    assert_close(logits(PeftModel.from_pretrained(base, tmp_path / "trained" / FOLDER)), through, atol=1e-5, rtol=1e-4)


def test_layers_that_take_no_adapters_are_refused_and_other_layers_of_a_mixture_take_some(own: Any) -> None:
    wrong = [(own, targets) for targets in (["no_such"], ["lm_head"], ["embed_tokens"], ["q_proj", "lm_head"])]
    experts = [("glm4_moe", None), ("mixtral", ["gate_proj", "down_proj"])]
    for model, targets in [*wrong, *((random_model(kind), targets) for kind, targets in experts)]:
        with pytest.raises(UserError, match=r"lora\.targets"):
            add_adapters(model, Lora(targets=targets), seed=0)
    add_adapters(model := random_model("mixtral"), Lora(rank=2), seed=0)
    adapted = {name.split(".")[-1] for name, module in model.named_modules() if hasattr(module, "lora_A")}
    assert adapted == {"q_proj", "k_proj", "v_proj", "o_proj"}

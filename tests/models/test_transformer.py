"""The project's own model against transformers' Qwen2 with the same weights."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from learner_parts import last_gradients, learner_of, rollouts_of
from safetensors.torch import load, load_file, save
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from training_parts import scored
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from grpo.common.errors import UserError
from grpo.learner.learner import Learner
from grpo.learner.losses import estimate_kl
from grpo.models.checkpoint import compile_layers, load_model, save_checkpoint
from grpo.models.decoding import KeyValueCache
from grpo.models.hugging_face import SHARED_PROMPT
from grpo.models.transformer import TransformerConfig, TransformerLM, visible_keys
from grpo.rollout.engine import SamplingParams
from grpo.rollout.transformers_engine import TransformersEngine

SMALL = TransformerConfig(
    vocab_size=50,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=48,
    max_position_embeddings=64,
    rope_theta=500.0,  # none of these three is the default
    rms_norm_eps=1e-3,
    initializer_range=0.3,  # so that predictions depend on the context
    eos_token_id=1,
    pad_token_id=0,
)
VARIANTS = {
    "grouped, untied": SMALL,
    "grouped, tied": replace(SMALL, tie_word_embeddings=True),
    "one key head": replace(SMALL, num_key_value_heads=1),
    "multi-head, tied": replace(SMALL, num_key_value_heads=4, tie_word_embeddings=True),
    "no padding token": replace(SMALL, pad_token_id=None),
    "the mini model": TransformerConfig(
        vocab_size=768,
        hidden_size=64,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=2,
        intermediate_size=256,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        initializer_range=0.08,
        eos_token_id=0,
        pad_token_id=0,
    ),
}
variants = pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS.keys())
LEFT_PADDED = torch.tensor([[0] * 5 + [1] * 7, [1] * 12, [0] + [1] * 11])


def own_model(config: TransformerConfig = SMALL) -> TransformerLM:
    """The model with biases and norms that differ from their initial values, so that they matter."""
    torch.manual_seed(0)
    model = TransformerLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter += 0.3 * torch.randn_like(parameter)
    return model.eval()


def reference(model: TransformerLM) -> Any:
    """Hugging Face's Qwen2 with the same weights."""
    names = set(TransformerConfig.__dataclass_fields__) - {"rope_theta"}
    values = {name: getattr(model.config, name) for name in names}
    config = Qwen2Config(**values, rope_parameters={"rope_type": "default", "rope_theta": model.config.rope_theta})
    theirs = Qwen2ForCausalLM(config)
    theirs.load_state_dict(model.state_dict())  # strict: every name of one is a name of the other
    theirs.set_attn_implementation(SHARED_PROMPT)  # as load_model does
    return theirs.to(model.dtype).eval()


def own_copy(theirs: Any) -> TransformerLM:
    """The project's own model with the weights and sizes of a Hugging Face one."""
    names = set(TransformerConfig.__dataclass_fields__) - {"rope_theta"}
    model = TransformerLM(TransformerConfig(**{name: getattr(theirs.config, name) for name in names}))
    model.load_state_dict(theirs.state_dict())
    return model.eval()


def token_ids(batch: int = 3, tokens: int = 12, vocabulary: int = 50) -> Tensor:
    return torch.randint(2, vocabulary, (batch, tokens), generator=torch.Generator().manual_seed(1))


def assert_close(found: Tensor, expected: Tensor, tolerance: float = 1e-5) -> None:
    assert found.shape == expected.shape
    assert expected.abs().max() > 0.1  # zeros would be close to anything small
    assert (found - expected).abs().max() <= tolerance * max(1.0, expected.abs().max().item())


def gradients(model: Any) -> dict[str, Tensor]:
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def assert_equal_gradients(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-5) -> None:
    assert list(found) == list(expected)
    for name in expected:
        assert found[name].shape == expected[name].shape
        difference, size = (found[name] - expected[name]).norm(), expected[name].norm()
        if name.endswith("k_proj.bias"):  # in part a constant shift of all scores, whose gradient is rounding errors
            assert difference < tolerance * max(1.0, size), name
        else:
            assert size > 0, name
            assert difference < tolerance * size, name


# ------------------------------------------------------------------------------------------- against Hugging Face's Qwen2


@variants
@pytest.mark.parametrize("padded", [False, True])
def test_logits_and_gradients_are_those_of_qwen2(config: TransformerConfig, padded: bool) -> None:
    model, ids = own_model(config), token_ids()
    ids[0, 5] = ids[1, 3] = 0  # the padding token, in a text
    theirs, mask = reference(model), LEFT_PADDED if padded else None
    real = LEFT_PADDED.bool() if padded else torch.ones(3, 12, dtype=torch.bool)
    incoming = torch.randn(3, 12, config.vocab_size, generator=torch.Generator().manual_seed(2))
    found, expected = (each(ids, attention_mask=mask).logits for each in (model, theirs))
    assert_close(found[real], expected[real])
    assert torch.isfinite(found).all()  # where there is padding too
    for logits in (found, expected):
        (logits * incoming)[real].sum().backward()
    assert_equal_gradients(gradients(model), gradients(theirs))


@pytest.mark.parametrize("padded", [False, True])
def test_bfloat16_rounds_as_qwen2_does(tmp_path: Path, padded: bool) -> None:
    """At positions beyond bfloat16's digits; exact computation with the same weights is much further away."""
    model = own_model(replace(SMALL, max_position_embeddings=4096)).to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path)  # not reference(), whose .to() rounds RoPE's frequencies
    given = {"position_ids": torch.arange(3001, 3013).expand(3, -1), "attention_mask": LEFT_PADDED if padded else None}
    found, expected, exact = (
        each(token_ids(), **given).logits[LEFT_PADDED.bool()] for each in (model, theirs, copy.deepcopy(model).float())
    )
    assert found.dtype == expected.dtype == torch.bfloat16
    assert (found - expected).abs().mean() < 0.2 * (found - exact).abs().mean()
    assert (found - exact).abs().mean() < 0.05 * exact.abs().mean()


# ------------------------------------------------------------------------------------------------------------- the cache


@pytest.mark.parametrize("pieces", [[1] * 12, [5, 1, 1, 5], [4, 3, 5], [12]])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("theirs", [False, True], ids=["own", "Qwen2ForCausalLM"])
def test_piece_by_piece_is_the_same_as_at_once(theirs: bool, pieces: list[int], padded: bool) -> None:
    """For the project's own model, and for Hugging Face's, which uses more of a cache's methods."""
    model = reference(own_model()) if theirs else own_model()
    cache, start = KeyValueCache(12), 0
    whole = model(token_ids(), attention_mask=LEFT_PADDED if padded else None).logits
    found = []
    for length in pieces:
        ids = token_ids()[:, start : start + length]
        mask = LEFT_PADDED[:, : start + length] if padded else None
        found.append(model(ids, attention_mask=mask, past_key_values=cache, use_cache=True).logits)
        start += length
    real = LEFT_PADDED.bool() if padded else torch.ones(3, 12, dtype=torch.bool)
    assert_close(torch.cat(found, dim=1)[real], whole[real])


def test_of_a_prompt_only_the_last_logits_are_computed() -> None:
    model = own_model()
    widths = []
    model.lm_head.register_forward_pre_hook(lambda _, args: widths.append(args[0].shape[1]))
    whole = model(token_ids()).logits
    assert torch.allclose(model(token_ids(), logits_to_keep=2).logits, whole[:, -2:], atol=1e-5)
    assert widths == [12, 2]


def test_a_cache_and_gradient_checkpointing_do_not_meet() -> None:
    """A layer that is computed twice would append its keys twice."""
    model, cache = own_model().train(), KeyValueCache(12)
    model.gradient_checkpointing_enable()
    expected = model(token_ids()).logits
    found = model(token_ids(), past_key_values=cache).logits
    found.sum().backward()
    assert cache.get_seq_length() == 12
    assert_close(found, expected)


# ------------------------------------------------------------------------------------------------------ engine and learner


@pytest.mark.parametrize("equal_lengths", [False, True])
def test_the_engine_samples_the_same_tokens(fresh_model: Any, tokenizer: Any, equal_lengths: bool) -> None:
    texts = ["Mia has 3 apples.", "On Monday she buys 2, and on Tuesday she loses 1, but gains 14.", "Ben sells 12 coins"]
    prompts = [tokenizer(text)["input_ids"][: 5 if equal_lengths else None] for text in texts]
    assert (len({len(prompt) for prompt in prompts}) == 1) is equal_lengths
    params = SamplingParams(temperature=0.8, top_p=0.95, min_tokens=2, max_tokens=40, stop=("s", "."))
    found, expected = (
        TransformersEngine(each, tokenizer).generate(prompts, params, n=6, seed=3)
        for each in (own_copy(fresh_model), fresh_model)
    )
    for group, theirs in zip(found, expected, strict=True):
        assert [(c.token_ids, c.text, c.finish_reason) for c in group] == [
            (c.token_ids, c.text, c.finish_reason) for c in theirs
        ]
        for mine, other in zip(group, theirs, strict=True):
            assert mine.log_probs == pytest.approx(other.log_probs, abs=1e-4)
    assert len({len(c.token_ids) for group in found for c in group}) >= 5  # rows left the batch


def updated(
    model: Any, budget: int | None, prepare: Callable[[Any], object] = lambda _: None
) -> tuple[dict[str, float], dict[str, Tensor], Learner]:
    """Metrics and gradients of one update of a copy of the model, whose starting weights the learner keeps too."""
    sizes = {"rollout_batch_size": 12, "train_batch_size": 12, "gradient_accumulation_steps": 3}
    learner = learner_of(model, budget, **sizes, kl_coefficient=0.1)
    prepare(learner.model)
    batch = rollouts_of([[5, 1, 9, 3], [2, 2, 1, 1], [12, 7, 1, 4]], [7, 1, 12], model.config.vocab_size)
    generator = torch.Generator().manual_seed(5)
    rewards, advantages = torch.rand(12, generator=generator), torch.randn(12, generator=generator)
    old = [row + 0.4 * torch.randn(len(row), generator=generator) for row in learner.log_probs(batch)]
    found = last_gradients(learner)
    batch = scored(batch, rewards, advantages, old)
    reference = learner.reference_log_probs(batch)
    for rollout, log_probs in zip(batch, reference, strict=True):
        rollout.reference_log_probs = log_probs
    return learner.update(batch) | estimate_kl(learner.log_probs(batch), reference), found, learner


@pytest.mark.parametrize("budget", [None, 25, 10_000])
def test_the_learner_takes_the_step_that_it_takes_of_qwen2(fresh_model: Any, budget: int | None) -> None:
    """The reference is the padded Qwen2, so packed rows are held to it as well."""
    metrics, found, learner = updated(own_copy(fresh_model), budget)
    expected_metrics, expected, theirs = updated(fresh_model, None)
    assert expected_metrics["gradient_norm"] > 0.1 and abs(expected_metrics["per_token"]) > 1e-4
    assert metrics == pytest.approx(expected_metrics, rel=1e-3, abs=1e-6)
    assert metrics["loss"] == pytest.approx(expected_metrics["loss"], rel=1e-5)
    assert metrics["gradient_norm"] == pytest.approx(expected_metrics["gradient_norm"], rel=1e-5)
    assert_equal_gradients(found, expected, tolerance=2e-5)
    before = fresh_model.state_dict()
    for name, weight in learner.model.state_dict().items():
        assert not torch.equal(weight, before[name]) and torch.equal(learner.reference.state_dict()[name], before[name])
        assert torch.allclose(weight, theirs.model.state_dict()[name], atol=3e-4)  # a step moves each by about 1e-3


class Products(TorchDispatchMode):
    """Counts matrix products."""

    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += function in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("budget", [None, 25])
def test_gradient_checkpointing_changes_time_only(fresh_model: Any, budget: int | None) -> None:
    model = own_copy(fresh_model)
    with Products() as plain:
        metrics, expected, _ = updated(model, budget)
    with Products() as twice:
        same_metrics, found, _ = updated(model, budget, lambda each: each.gradient_checkpointing_enable())
    assert_equal_gradients(found, expected)
    assert same_metrics == pytest.approx(metrics, rel=1e-5)
    assert twice.count > plain.count  # layers were computed again


def test_compile_layers_finds_the_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    model, compiled = own_model(), []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **_: compiled.append(self))
    monkeypatch.setattr("shutil.which", lambda _: "/usr/bin/g++")
    compile_layers(model)
    assert compiled == list(model.model.layers) and len(compiled) == 2


# ------------------------------------------------------------------------------------------------------------ checkpoints


@variants
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_hugging_face_loads_what_is_saved(tmp_path: Path, config: TransformerConfig, dtype: torch.dtype) -> None:
    model = own_model(config).to(dtype)
    model.save_pretrained(tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(theirs) is Qwen2ForCausalLM and theirs.dtype == dtype
    assert_close(
        model(token_ids()).logits.float(), theirs(token_ids()).logits.float(), 1e-5 if dtype == torch.float32 else 0.02
    )
    for name, weight in theirs.state_dict().items():
        assert torch.equal(weight, model.state_dict()[name])
    state = torch.get_rng_state()
    again = TransformerLM.from_pretrained(tmp_path, dtype)
    assert torch.equal(torch.get_rng_state(), state)
    assert again.config == config and not again.training
    assert torch.equal(again(token_ids()).logits, model(token_ids()).logits)
    assert ("lm_head.weight" in load_file(tmp_path / "model.safetensors")) is not config.tie_word_embeddings


def test_load_model_gives_each_checkpoint_its_class(tmp_path: Path, fresh_model: Any, tokenizer: Any) -> None:
    mine = own_copy(fresh_model)
    save_checkpoint(tmp_path / "own", mine, tokenizer)
    save_checkpoint(tmp_path / "theirs", fresh_model, tokenizer)
    own, theirs = load_model(tmp_path / "own"), load_model(tmp_path / "theirs")
    assert (type(own), type(theirs)) == (TransformerLM, Qwen2ForCausalLM)
    assert theirs.config._attn_implementation == SHARED_PROMPT
    assert (own.dtype, own.device) == (torch.float32, torch.device("cpu"))
    assert load_model(tmp_path / "own", "bfloat16").dtype == torch.bfloat16
    for name, weight in mine.state_dict().items():
        assert torch.equal(own.state_dict()[name], weight) and torch.equal(theirs.state_dict()[name], weight)
    # A run's own checkpoint, saved once more in its place.
    save_checkpoint(tmp_path / "own", own, tokenizer)
    assert type(load_model(tmp_path / "own")) is TransformerLM


# --------------------------------------------------------------------------------------------------------------- refusals


CONFIG, WEIGHTS = "config.json", "model.safetensors"
Q = "model.layers.1.self_attn.q_proj.bias"


def configured(config: bytes, **changes: Any) -> bytes:
    return json.dumps({key: value for key, value in (json.loads(config) | changes).items() if value is not None}).encode()


def weighing(weights: bytes, changes: dict[str, Tensor | None]) -> bytes:
    return save({name: value for name, value in (load(weights) | changes).items() if value is not None})


DAMAGED: dict[str, tuple[str, Callable[[bytes], bytes]]] = {  # a file, and what becomes of it
    "a size is missing": (CONFIG, lambda file: configured(file, hidden_size=None)),
    "heads do not divide the width": (CONFIG, lambda file: configured(file, num_attention_heads=3)),
    "too deep": (CONFIG, lambda _: b"[" * 100_000 + b"]" * 100_000),
    "a missing weight": (WEIGHTS, lambda file: weighing(file, {Q: None})),
    "a weight that would broadcast": (WEIGHTS, lambda file: weighing(file, {Q: torch.ones(1)})),
}


@pytest.mark.parametrize(("name", "damage"), DAMAGED.values(), ids=DAMAGED.keys())
def test_damaged_files_are_refused(tmp_path: Path, name: str, damage: Callable[[bytes], bytes]) -> None:
    own_model().save_pretrained(tmp_path)
    (tmp_path / name).write_bytes(damage((tmp_path / name).read_bytes()))
    with pytest.raises(UserError, match=rf"{tmp_path}: not a readable model .*Get it anew"):
        load_model(tmp_path)


# ----------------------------------------------------------------------------------------------------------------- by hand


def test_visible_keys_by_hand() -> None:
    """Two tokens in the cache and two new ones; padding sees itself, as on some devices softmax over nothing is NaN."""
    device = torch.device("cpu")
    expected = [[1, 1, 1, 0], [1, 1, 1, 1]]
    found = visible_keys(None, 2, 2, device)
    assert found is not None and found[0, 0].int().tolist() == expected
    found = visible_keys(torch.tensor([[0, 1, 1, 1], [0, 0, 0, 1]]), 2, 2, device)
    assert found is not None and found.dtype == torch.bool
    assert found[:, 0].int().tolist() == [[[0, 1, 1, 0], [0, 1, 1, 1]], [[0, 0, 1, 0], [0, 0, 0, 1]]]
    for nothing_hidden in (visible_keys(None, 3, 0, device), visible_keys(None, 1, 5, device)):
        assert nothing_hidden is None


def test_new_weights() -> None:
    torch.manual_seed(0)
    model = TransformerLM(replace(SMALL, hidden_size=64, initializer_range=0.05))
    for name, parameter in model.named_parameters():
        if "norm" in name:
            assert (parameter == 1).all(), name
        elif name.endswith("bias"):
            assert (parameter == 0).all(), name
        else:
            assert parameter.std().item() == pytest.approx(0.05, rel=0.1), name
            assert abs(parameter.mean().item()) < 0.005, name

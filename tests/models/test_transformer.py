"""The project's own model against transformers' Qwen2; attention with shared prompts against dense attention with a mask."""

import copy
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from model_parts import flex_attention_on_a_cpu
from ruamel.yaml import YAML
from safetensors.torch import load, load_file, save
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from benchmarks.gpu_parts.tools import TINY, make_model
from grpo.common.errors import UserError
from grpo.learner.learner import Learner
from grpo.models.checkpoint import compile_layers, load_model, save_checkpoint
from grpo.models.decoding import KeyValueCache
from grpo.models.hugging_face import SHARED_PROMPT
from grpo.models.packing import Layout, PromptGroup, packed_attention
from grpo.models.transformer import TransformerConfig, TransformerLM, visible_keys
from grpo.study.config import GrpoConfig, LearnerSettings

SIZES = YAML(typ="safe", pure=True).load(Path(__file__).with_name("variants.yaml"))
SMALL = TransformerConfig(**SIZES["small"])
VARIANTS = {name: replace(SMALL, **changes) for name, changes in SIZES["variants"].items()}
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


def test_checkpointed_layers_are_computed_twice_but_not_beside_a_cache() -> None:
    """Which would get a layer's keys twice."""
    model, calls, found = own_model().train(), [], []
    model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    for checkpointing, cache, computed in ((False, None, 1), (True, None, 2), (True, KeyValueCache(12), 1)):
        model.gradient_checkpointing_enable() if checkpointing else None
        model.zero_grad()
        calls.clear()
        logits = model(token_ids(), past_key_values=cache).logits
        logits.sum().backward()
        found.append((logits.detach(), {name: gradient.clone() for name, gradient in gradients(model).items()}))
        assert len(calls) == computed and (cache is None or cache.get_seq_length() == 12)
    for logits, of_weights in found[1:]:
        assert_close(logits, found[0][0])
        assert_equal_gradients(of_weights, found[0][1])


def test_compile_layers_finds_the_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    model, compiled = own_model(), []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **_: compiled.append(self))
    monkeypatch.setattr("shutil.which", lambda _: "/usr/bin/g++")
    compile_layers(model)
    assert compiled == list(model.model.layers) and len(compiled) == 2


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
    mine = own_model(replace(SMALL, vocab_size=len(tokenizer)))
    save_checkpoint(tmp_path / "own", mine, tokenizer)
    save_checkpoint(tmp_path / "theirs", fresh_model, tokenizer)
    own, theirs = load_model(tmp_path / "own"), load_model(tmp_path / "theirs")
    assert (type(own), type(theirs)) == (TransformerLM, Qwen2ForCausalLM)
    assert theirs.config._attn_implementation == SHARED_PROMPT
    assert (own.dtype, own.device) == (torch.float32, torch.device("cpu"))
    assert load_model(tmp_path / "own", "bfloat16").dtype == torch.bfloat16
    for loaded, saved in ((own, mine), (theirs, fresh_model)):
        assert all(torch.equal(loaded.state_dict()[name], weight) for name, weight in saved.state_dict().items())
    # A run's own checkpoint, saved once more in its place.
    save_checkpoint(tmp_path / "own", own, tokenizer)
    assert type(load_model(tmp_path / "own")) is TransformerLM


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


SCALE = 0.3
LAYOUT = Layout((PromptGroup(0, 4, (3, 3, 2)), PromptGroup(12, 1, ()), PromptGroup(13, 6, (1, 5)), PromptGroup(25, 2, (7, 7))))
# Pieces of very unlike lengths, longer than what flash attention takes at a time.
LONG = Layout((PromptGroup(0, 45, (100, 3, 60, 60)), PromptGroup(268, 1, (20, 20))))


@pytest.fixture
def flex(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with flex_attention_on_a_cpu(monkeypatch):
        yield


def allowed(layout: Layout) -> Tensor:
    """Mask (tokens, tokens): whether the row's token may attend to the column's."""
    tokens = layout.prompt_groups[-1].of_responses.stop
    mask = torch.zeros(tokens, tokens, dtype=torch.bool)
    for stretch in layout.prompt_groups:
        prompt = range(stretch.start, stretch.start + stretch.prompt)
        for q in prompt:
            mask[q, prompt[0] : q + 1] = True
        start = prompt.stop
        for length in stretch.responses:
            for q in range(start, start + length):
                mask[q, list(prompt)] = True
                mask[q, start : q + 1] = True
            start += length
    return mask


def dense(query: Tensor, key: Tensor, value: Tensor, layout: Layout = LAYOUT) -> Tensor:
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
    scores = (query @ key.transpose(-1, -2) * SCALE).masked_fill(~allowed(layout), float("-inf"))
    return torch.softmax(scores, dim=-1) @ value


def inputs(dtype: torch.dtype = torch.float32, layout: Layout = LAYOUT) -> tuple[list[Tensor], Tensor]:
    """Query with 4 heads, key and value with 2 of size 8, and the gradient at the result."""
    generator, tokens = torch.Generator().manual_seed(0), layout.prompt_groups[-1].of_responses.stop
    shapes = [(1, 4, tokens, 8), (1, 2, tokens, 8), (1, 2, tokens, 8), (1, 4, tokens, 8)]
    *qkv, incoming = (torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes)
    return [x.requires_grad_() for x in qkv], incoming


def with_gradients(function: Any, tensors: list[Tensor], incoming: Tensor) -> list[Tensor]:
    out = function(*tensors)
    return [out.detach(), *torch.autograd.grad(out, tensors, incoming)]


@pytest.mark.parametrize(
    ("layout", "dtype", "factor", "limit"),
    [
        (LAYOUT, torch.float32, 1.0, 1e-6),
        (LONG, torch.float32, 1.0, 1e-6),
        (LAYOUT, torch.float32, 10.0, 1e-3),  # many large scores do not overflow
        (LAYOUT, torch.bfloat16, 1.0, 1e-2),
    ],
    ids=["short", "long", "large", "bfloat16"],
)
def test_packed_attention_and_its_gradients_are_those_of_dense_attention(
    layout: Layout, dtype: torch.dtype, factor: float, limit: float
) -> None:
    tensors, incoming = inputs(dtype, layout)
    tensors = [(factor * x).detach().requires_grad_() for x in tensors]
    found = with_gradients(lambda q, k, v: packed_attention(q, k, v, layout, SCALE), tensors, incoming)
    exact = [x.detach().double().requires_grad_() for x in tensors]
    expected = with_gradients(lambda q, k, v: dense(q, k, v, layout), exact, incoming.double())
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape and one.dtype == dtype and one.isfinite().all()
        assert (one - other).norm() < limit * other.norm()


def test_packed_attention_holds_no_scores() -> None:
    """For 2 x 4,000 response tokens after a prompt of 4,000, the scores of one head alone would take over 64 MB."""
    from torch.profiler import profile

    layout = Layout((PromptGroup(0, 4000, (4000, 4000)),))
    q, k, v = (torch.randn(1, 1, 12_000, 8, requires_grad=True) for _ in range(3))
    with profile(profile_memory=True) as measured:
        packed_attention(q, k, v, layout, SCALE).sum().backward()
    largest = max(abs(event.self_cpu_memory_usage) for event in measured.events())
    assert largest < 8 * 2**20


@pytest.mark.parametrize("heads", [(4, 4), (12, 2)], ids=["each", "grouped"])
def test_it_computes_what_the_cpus_attention_does_and_does_not_wait_for_the_device(flex: None, heads: tuple[int, int]) -> None:
    from torch.profiler import ProfilerActivity, profile

    layout = Layout((PromptGroup(0, 45, (100, 3, 60, 1)), PromptGroup(209, 1, ()), PromptGroup(210, 130, (20, 20))))
    tensors = [torch.randn(1, n, 380, 32, requires_grad=True) for n in (heads[0], heads[1], heads[1])]
    incoming = torch.randn(1, heads[0], 380, 32)
    results = []
    with profile(activities=[ProfilerActivity.CPU]) as found:
        out = packed_attention(*tensors, layout.on(torch.device("cpu")), 0.2)
        results.append([out.detach(), *torch.autograd.grad(out, tensors, incoming)])
    assert not [e.key for e in found.key_averages() if e.key in ("aten::_local_scalar_dense", "aten::nonzero")]
    out = packed_attention(*tensors, layout, 0.2)
    results.append([out.detach(), *torch.autograd.grad(out, tensors, incoming)])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_the_blocks_of_two_prompts_responses_are_not_computed() -> None:
    layout = Layout(tuple(PromptGroup(start, 128, (384, 384)) for start in (0, 896)))
    mask = layout.block_mask(torch.device("cpu"))
    partial, full = mask.kv_num_blocks[0, 0], mask.full_kv_num_blocks[0, 0]
    of_group = [0, 1, 2, 3, 1, 2, 3]  # the prompt whole, and the earlier blocks of the response
    assert partial.tolist() == [1] * 14 and full.tolist() == of_group * 2


def test_where_it_fails_the_learner_pads_and_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    """(torch has no FlexAttention for tensors without data.)"""
    config = GrpoConfig(rollout_batch_size=4, train_batch_size=4, group_size=4, gradient_accumulation_steps=1)
    settings = LearnerSettings(max_tokens_per_microbatch=64)
    assert Learner(make_model(TINY, "cpu", torch.float32), config, 0, settings).packs
    assert not capsys.readouterr().out
    assert not Learner(make_model(TINY, "meta", torch.float32), config, 0, settings).packs
    assert "not packed rows: FlexAttention failed" in capsys.readouterr().out

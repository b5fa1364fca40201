"""Attention with shared prompts against dense attention with an explicit mask; on a GPU (FlexAttention), tried on a CPU."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.gpu_parts.tools import TINY, Batch, backward, make_model, make_optimizer, plain_loss, relative_difference
from grpo.learner.learner import Learner
from grpo.models.decoding import SharedPrefix
from grpo.models.packed_attention import Layout, PromptGroup, packed_attention
from grpo.study.methods import GrpoConfig
from grpo.study.settings import LearnerSettings

SCALE = 0.3
LAYOUT = Layout((PromptGroup(0, 4, (3, 3, 2)), PromptGroup(12, 1, ()), PromptGroup(13, 6, (1, 5)), PromptGroup(25, 2, (7, 7))))
# Pieces of very unlike lengths, longer than what flash attention takes at a time.
LONG = Layout((PromptGroup(0, 45, (100, 3, 60, 60)), PromptGroup(268, 1, (20, 20))))


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


@pytest.mark.parametrize("layout", [LAYOUT, LONG], ids=["short", "long"])
def test_packed_attention_and_its_gradients_are_those_of_dense_attention(layout: Layout) -> None:
    tensors, incoming = inputs(layout=layout)
    found = with_gradients(lambda q, k, v: packed_attention(q, k, v, layout, SCALE), tensors, incoming)
    expected = with_gradients(lambda q, k, v: dense(q, k, v, layout), tensors, incoming)
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape
        assert (one - other).abs().max() < 1e-5


def test_packed_attention_in_bfloat16_is_as_close_as_bfloat16_allows() -> None:
    tensors, incoming = inputs(torch.bfloat16)
    found = with_gradients(lambda q, k, v: packed_attention(q, k, v, LAYOUT, SCALE), tensors, incoming)
    exact = with_gradients(dense, [x.detach().double().requires_grad_() for x in tensors], incoming.double())
    for one, other in zip(found, exact, strict=True):
        assert one.dtype == torch.bfloat16
        assert (one - other).norm() / other.norm() < 0.01


def test_packed_attention_holds_no_scores() -> None:
    """For 2 x 4,000 response tokens after a prompt of 4,000, the scores of one head alone would take over 64 MB."""
    from torch.profiler import profile

    layout = Layout((PromptGroup(0, 4000, (4000, 4000)),))
    q, k, v = (torch.randn(1, 1, 12_000, 8, requires_grad=True) for _ in range(3))
    with profile(profile_memory=True) as measured:
        packed_attention(q, k, v, layout, SCALE).sum().backward()
    largest = max(abs(event.self_cpu_memory_usage) for event in measured.events())
    assert largest < 8 * 2**20


def test_many_large_scores_do_not_overflow() -> None:
    tensors, incoming = inputs()
    tensors = [(x * 10).detach().requires_grad_() for x in tensors]
    found = with_gradients(lambda q, k, v: packed_attention(q, k, v, LAYOUT, SCALE), tensors, incoming)
    for one, other in zip(found, with_gradients(dense, tensors, incoming), strict=True):
        assert torch.isfinite(one).all()
        assert (one - other).norm() <= 1e-3 * other.norm()


@pytest.mark.parametrize("keep", [range(9), [0, 2, 3, 8], [5], [6, 7, 8]])
def test_rows_that_share_a_prefix_attend_as_if_each_had_a_copy(keep: Any) -> None:
    """3 prompts of 3 rows each, padded on the left; then some rows only."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.tensor(list(keep))
    prefix_key, prefix_value = (torch.randn(3, 2, 5, 8, generator=generator) for _ in range(2))
    query = torch.randn(9, 4, 1, 8, generator=generator)[rows]
    key, value = (torch.randn(9, 2, 3, 8, generator=generator)[rows] for _ in range(2))
    hidden = torch.arange(5) < torch.tensor([0, 2, 4])[:, None]
    mask = torch.zeros(3, 1, 1, 5).masked_fill(hidden[:, None, None], torch.finfo(torch.float32).min)
    prefix = SharedPrefix([prefix_key], [prefix_value], mask, rows=3)
    if len(rows) < 9:
        prefix.keep(rows)
    of = rows // 3
    assert (prefix.mask.shape[0], prefix.keys[0].shape[0]) == (len(of.unique()),) * 2
    keys, values = (
        torch.cat(pair, dim=2).repeat_interleave(2, dim=1) for pair in ((prefix_key[of], key), (prefix_value[of], value))
    )
    scores = query @ keys.transpose(-1, -2) * SCALE
    scores = scores.masked_fill(torch.nn.functional.pad(hidden[of], (0, 3))[:, None, None], float("-inf"))
    expected = torch.softmax(scores, dim=-1) @ values
    assert (prefix.attend(0, query, key, value, SCALE) - expected).abs().max() < 1e-6


# Rows of several blocks of 128 tokens, with responses of one token.
BATCH = Batch(3, 4, 70, 90)
BUDGET = 400


@pytest.fixture
def flex(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Layouts become block masks, as on a GPU. torch refuses gradients on a CPU, but its uncompiled function has them."""
    from torch.nn.attention import flex_attention

    monkeypatch.setattr(flex_attention, "_validate_device", lambda *tensors: None)
    monkeypatch.setattr(Layout, "on", Layout.block_mask)
    with torch.compiler.set_stance("force_eager"):
        yield


def gradient(model: Any, budget: int | None, reference: bool = False) -> list[Tensor]:
    """All gradients of a batch in packed rows, in padded microbatches, or of transformers on each text alone."""
    batch, optimizer = BATCH.made(TINY.shape["vocab_size"]), make_optimizer(model)
    if reference:
        model.set_attn_implementation("sdpa")
        for rollout in batch:
            optimizer.backward(plain_loss(model, rollout) / len(batch))
    else:
        backward(model, optimizer, batch, budget, 4)
    optimizer.clip(float("inf"))
    return optimizer.gradients()


@pytest.mark.parametrize(
    ("dtype", "limit"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2), (torch.float16, 5e-3)], ids=["32", "bf16", "16"]
)
def test_gradients_are_those_of_transformers_on_each_text_alone(flex: None, dtype: torch.dtype, limit: float) -> None:
    rounded = [make_model(TINY, "cpu", torch.bfloat16).to(dtype) for _ in range(2)]
    found = gradient(rounded[0], BUDGET)
    assert relative_difference(found, gradient(rounded[1], None, reference=True)) < limit


def test_gradients_of_the_own_model_are_those_of_padded_microbatches(flex: None) -> None:
    found, expected = (gradient(make_model(TINY, "cpu", torch.float32, own=True), budget) for budget in (BUDGET, None))
    assert relative_difference(found, expected) < 1e-5


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

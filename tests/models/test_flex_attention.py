"""The attention of packed rows on a GPU (FlexAttention), tried on a CPU, where torch runs it without its compiled kernel."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.gpu_parts.tools import TINY, Batch, backward, make_model, make_optimizer, plain_loss, relative_difference
from grpo.learner.learner import Learner
from grpo.models.packed_attention import Layout, PromptGroup, packed_attention
from grpo.study.methods import GrpoConfig
from grpo.study.settings import LearnerSettings

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

"""Models that draw random numbers in training mode: the learner against transformers' forward pass in evaluation mode."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from learner_parts import ADVANTAGES, REWARDS, config, last_gradients, log_probs_alone, rollouts
from model_parts import SIZES
from training_parts import scored
from transformers import AutoConfig
from transformers.modeling_layers import GradientCheckpointingLayer

from grpo.common.errors import UserError
from grpo.learner.learner import Learner
from grpo.learner.microbatches import texts_of
from grpo.models.hugging_face import AutoModelForCausalLM, examine  # it knows the attention that is asked for
from grpo.study.settings import LearnerSettings

TWO_LAYERS = {"num_layers": 2, "attention_heads": 4, "d_model": 32, "ffn_dim": 64}
RANDOM: dict[str, dict[str, Any]] = {  # with dropout, dropped layers or noise in the router, most of them by default
    "opt": {"ffn_dim": 64, "word_embed_proj_dim": 32, "layerdrop": 0.5},
    "biogpt": {"layerdrop": 0.5},
    "xglm": {**TWO_LAYERS, "layerdrop": 0.5},
    "seed_oss": {"head_dim": 8, "residual_dropout": 0.5},
    "gpt_bigcode": {"n_inner": 64},
    "bloom": {"hidden_dropout": 0.5},
    "falcon": {"hidden_dropout": 0.5},
    "mixtral": {"router_jitter_noise": 0.5},
    "phimoe": {"router_jitter_noise": 0.01, "input_jitter_noise": 0.5},  # the first is used in evaluation, too
}
# Falcon's layers read this from the configuration, which is the model's own and is saved with it.
CANNOT_CHECKPOINT = {"falcon"}


def random_model(kind: str) -> Any:
    torch.manual_seed(0)
    values = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None, **SIZES, **RANDOM[kind]}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, vocab_size=512, **values))
    rows = torch.arange(40).reshape(2, 20)
    with torch.no_grad():
        assert not torch.equal(model.train()(rows).logits, model.eval()(rows).logits)  # else nothing is tried
    model.traits = examine(model)
    return model


def made(model: Any, checkpointing: bool = False, packing: bool = True) -> Learner:
    settings = LearnerSettings(max_tokens_per_microbatch=200, gradient_checkpointing=checkpointing, packing=packing)
    return Learner(model, config(loss_type="grpo_clip"), 0, settings)


@pytest.mark.parametrize(("kind", "packing"), [*((kind, False) for kind in RANDOM), ("mixtral", True)])
def test_nothing_is_random_where_a_model_is_trained(kind: str, packing: bool) -> None:
    """Log-probabilities are those of evaluation mode, and where weights have not moved each ratio is exactly 1."""
    model = random_model(kind)
    theirs, batch = copy.deepcopy(model), rollouts()
    learner = made(model, packing=packing)
    model.train()
    found = learner.log_probs(batch)
    for rollout, log_probs in zip(batch, found, strict=True):
        assert torch.allclose(log_probs, log_probs_alone(theirs, rollout), atol=1e-5)
    model.train()
    update = learner.update(scored(batch, REWARDS, ADVANTAGES, found))
    assert update["ratio_min"] == update["ratio_max"] == 1.0 and update["clip_fraction"] == 0.0


def count(calls: list[int], which: int, *_: Any) -> None:
    calls[which] += 1


@pytest.mark.parametrize("kind", RANDOM)
def test_gradient_checkpointing_changes_nothing_or_is_refused(kind: str) -> None:
    """It needs layers in training mode: their gradients are those of evaluation mode, and each layer computes twice."""
    batch, gradients, calls = rollouts(), [], [0, 0]
    for checkpointing in (False, True):
        model = random_model(kind)
        if checkpointing and kind in CANNOT_CHECKPOINT:
            with pytest.raises(UserError, match=r"learner\.gradient_checkpointing: .* Set it to false\."):
                made(model, checkpointing)
            return
        learner = made(model, checkpointing)
        layer = next(module for module in model.modules() if isinstance(module, GradientCheckpointingLayer))
        next(layer.children()).register_forward_pre_hook(partial(count, calls, checkpointing))
        gradients.append(last_gradients(learner))
        learner.sft_update(texts_of(batch))
    assert calls[1] == 2 * calls[0] > 0
    for name, gradient in gradients[0].items():
        assert torch.equal(gradients[1][name], gradient), name


def test_examining_a_model_draws_no_random_numbers() -> None:
    model = random_model("opt")
    before = torch.random.get_rng_state()
    examine(model)
    assert torch.equal(torch.random.get_rng_state(), before)

"""Adapters: against products by hand, peft's loader and the padded path; trained and frozen weights."""

import copy
from pathlib import Path
from typing import Any

import model_parts
import pytest
import torch
from learner_parts import as_rollouts, config, updated
from model_parts import random_model
from torch import Tensor
from torch.testing import assert_close
from transformers import AutoModelForCausalLM

from grpo.common.errors import UserError
from grpo.learner.learner import Learner
from grpo.models.checkpoint import load_model, save_checkpoint
from grpo.models.lora import FOLDER, add_adapters, without_adapters
from grpo.models.transformer import TransformerLM
from grpo.rollout.engine import SamplingParams
from grpo.rollout.transformers_engine import TransformersEngine
from grpo.study.methods import Lora
from grpo.study.settings import LearnerSettings

LORA = Lora(rank=4, alpha=8)
IDS = torch.arange(1, 41).reshape(2, 20)


@pytest.fixture
def own_model() -> TransformerLM:
    """The project's own Transformer; transformers' Qwen2 is the fixture ``model``."""
    return model_parts.own_model(tie_word_embeddings=False, initializer_range=0.02, eos_token_id=1, pad_token_id=0)


@pytest.fixture(params=["model", "own_model"])
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


@pytest.mark.parametrize("kind", ["model", "own_model"])
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
    for rollout, log_probs in zip(batch, through, strict=True):
        assert_close(log_probs, torch.tensor(rollout.completion.log_probs), atol=1e-5, rtol=1e-4)
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


def test_layers_that_take_no_adapters_are_refused_and_other_layers_of_a_mixture_take_some(own_model: Any) -> None:
    wrong = [(own_model, targets) for targets in (["no_such"], ["lm_head"], ["embed_tokens"], ["q_proj", "lm_head"])]
    experts = [("glm4_moe", None), ("mixtral", ["gate_proj", "down_proj"])]
    for model, targets in [*wrong, *((random_model(kind), targets) for kind, targets in experts)]:
        with pytest.raises(UserError, match=r"lora\.targets"):
            add_adapters(model, Lora(targets=targets), seed=0)
    add_adapters(model := random_model("mixtral"), Lora(rank=2), seed=0)
    adapted = {name.split(".")[-1] for name, module in model.named_modules() if hasattr(module, "lora_A")}
    assert adapted == {"q_proj", "k_proj", "v_proj", "o_proj"}

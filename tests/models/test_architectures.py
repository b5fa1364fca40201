"""Models of other architectures, random and tiny: engine, learner and checkpoint against transformers' own forward pass."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from learner_parts import as_rollouts, config, last_gradients, learner_of, log_probs_alone, rollouts_of
from learner_parts import rollout as random_rollout
from model_parts import SIZES, TINY, tiny_checkpoint, tiny_model
from transformers import AutoConfig, AutoModelForCausalLM

from grpo.common.errors import UserError
from grpo.common.records import Rollout
from grpo.learner.learner import Learner
from grpo.learner.microbatches import texts_of, whole_texts
from grpo.models.checkpoint import load_model, load_tokenizer, save_checkpoint
from grpo.models.examine import examine, limited_context, traits_of
from grpo.rollout.engine import SamplingParams
from grpo.rollout.transformers_engine import TransformersEngine

TEXTS = ["What is 1 + 1?", "The answer is 2, since 1 and 1 make 2.", "No.", "Mia has 3 apples and eats one of them."]
PADDED = {  # why responses cannot share a prompt
    "mistral": "NotImplementedError: its attention takes sliding_window",
    **{kind: f"its architecture, {kind}, is none of those" for kind in ("olmo3", "gemma2", "gemma3_text", "gpt_oss", "bloom")},
}
TOKENIZER_OF = {"llama": "like_llama3", "gemma": "like_gemma", "gemma2": "like_gemma", "gemma3_text": "like_gemma"}
# Of what is like another one here the longer tests come later.
SLOW = {"granite", "gpt_neox", "gpt2", "mistral", "bloom", "mixtral", "gpt_oss"}
every_kind = pytest.mark.parametrize("kind", [pytest.param(k, marks=[pytest.mark.nightly] * (k in SLOW)) for k in TINY])


@pytest.fixture
def folder(kind: str, tmp_path: Path) -> Path:
    """A checkpoint as on the Hub."""
    default = "like_olmo" if kind.startswith("olmo") else "like_qwen3"
    tiny_checkpoint(tmp_path / "hub", kind, TOKENIZER_OF.get(kind, default), TEXTS)
    return tmp_path / "hub"


def sampled(model: Any, tokenizer: Any) -> list[Rollout]:
    """Four responses to each of three prompts, which are of unequal length and longer than the windows of attention."""
    if traits_of(model).padded_because:  # the engine refuses it
        return rollouts_of([[12, 9, 5]] * 3, [9, 12, 14], vocabulary=300)
    prompts = [tokenizer.prompt_ids(text) for text in TEXTS[:3]]
    params = SamplingParams(0.8, max_tokens=12)
    return as_rollouts(prompts, TransformersEngine(model, tokenizer).generate(prompts, params, n=4, seed=3))


@every_kind
def test_engine_learner_and_what_is_saved_agree_with_transformers(kind: str, folder: Path, tmp_path: Path) -> None:
    """Engine and learner, packed and padded, before and after saving, give sampled tokens the log-probs of transformers' eager
    attention.
    """
    theirs = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    model, tokenizer = load_model(folder), load_tokenizer(folder)
    rollouts = sampled(model, tokenizer)
    with torch.no_grad():
        expected = [log_probs_alone(theirs, rollout, 0.8) for rollout in rollouts]
    for rollout, log_probs in zip(rollouts, expected, strict=True):
        assert kind in PADDED or rollout.completion.log_probs == pytest.approx(log_probs.tolist(), abs=1e-4)
    assert torch.cat(expected).std() > 0.5  # else nothing was tried

    save_checkpoint(tmp_path / "saved", model, tokenizer)
    reloaded = load_model(tmp_path / "saved")
    for trained, budget in ((model, None), (model, 60), (reloaded, 60)):
        learner = learner_of(trained, budget, sampling_temperature=0.8)
        for found, log_probs in zip(learner.log_probs(rollouts), expected, strict=True):
            assert torch.allclose(found, log_probs, atol=1e-4)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja"):
        if (folder / name).exists():
            assert (tmp_path / "saved" / name).read_bytes() == (folder / name).read_bytes()
    assert load_tokenizer(tmp_path / "saved").stop_token_ids == tokenizer.stop_token_ids
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", attn_implementation="eager")
    assert all(torch.equal(a, b) for a, b in zip(again.state_dict().values(), theirs.state_dict().values(), strict=True))


@every_kind
def test_gradients_are_those_of_a_plain_loop(kind: str, folder: Path) -> None:
    """Gradients of the mean negative log-likelihood, packed and padded, against autograd over one response at a time."""
    tokenizer = load_tokenizer(folder)
    theirs = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    rollouts = sampled(load_model(folder), tokenizer)
    loss = -torch.stack([log_probs_alone(theirs, r).sum() for r in rollouts]).mean()
    loss.backward()  # type: ignore[no-untyped-call]
    expected = {name: p.grad for name, p in theirs.named_parameters() if p.grad is not None}
    for budget in (None, 60):
        learner = learner_of(load_model(folder), budget)
        assert learner.packs == (budget is not None and kind not in PADDED)
        gradients = last_gradients(learner)
        learner.sft_update(texts_of(rollouts))
        for name, gradient in expected.items():
            assert torch.allclose(gradients[name], gradient, atol=1e-4 + 1e-3 * gradient.abs().max().item()), name


@pytest.mark.parametrize("kind", TINY)
def test_prompts_are_shared_where_that_is_right(kind: str) -> None:
    """The traits of each architecture, so that a change in a new release of transformers is noticed."""
    traits = traits_of(model := tiny_model(kind))
    assert traits.padded_because.startswith(PADDED.get(kind, "")) and bool(traits.padded_because) == (kind in PADDED)
    assert traits.linear_head == (kind != "gemma2") and traits.context == 256
    if kind in PADDED:
        with pytest.raises(UserError, match=r"engine\.name: transformers: cannot sample this model .*Set it to vllm"):
            TransformersEngine(model, None)
    if kind in ("gemma2", "gpt_oss"):
        assert model.config._attn_implementation == "eager"  # transformers' faster one leaves out what they compute


def test_a_sliding_window_in_some_layers_is_seen() -> None:
    """It is longer than the texts of the examination, so their results do not show it."""
    model = tiny_model("qwen2", use_sliding_window=True, sliding_window=60, max_window_layers=1)
    assert traits_of(model).padded_because == "NotImplementedError: its attention takes sliding_window"


LONGROPE = {
    "rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4},
    "original_max_position_embeddings": 64,
    "pad_token_id": 0,
}
DYNAMIC = {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}, "max_position_embeddings": 64}


@pytest.mark.parametrize(("kind", "changes"), [("phi3", LONGROPE), ("llama", DYNAMIC)], ids=["longrope", "dynamic"])
def test_frequencies_that_follow_the_longest_text_stay_the_same(kind: str, changes: dict[str, Any], tmp_path: Path) -> None:
    """Up to the original length a text's results do not depend on its batch; engine and learner refuse longer texts."""
    model = tiny_model(kind, **changes)
    short, long = ([random_rollout(n, 12, seed) for seed in range(4)] for n in (5, 52))
    expected = [log_probs_alone(copy.deepcopy(model), one) for one in short]
    for budget, packing in ((2000, True), (150, False), (None, False)):
        learner = learner_of(model, budget, packing)
        for found, log_probs in zip(learner.log_probs([*long, *short])[4:], expected, strict=True):
            assert torch.allclose(found, log_probs, atol=1e-5)
    assert traits_of(model).context == 64
    model.save_pretrained(tmp_path)
    assert limited_context(tmp_path) == (64 if kind == "phi3" else None)  # what vLLM is told; the other has no longer texts
    with pytest.raises(UserError, match=r"have 65 tokens, and the model's context is 64 tokens\."):
        learner.log_probs([*short, random_rollout(53, 12, 0)])
    with pytest.raises(UserError, match=r"64 tokens is too short for a prompt of 53 tokens and a response of up to 12"):
        TransformersEngine(model, None).generate([(1,) * 53], SamplingParams(max_tokens=12), n=1, seed=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_wrong_results_are_seen_and_rounding_is_not(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that does not heed positions is padded; one whose control tokens round badly, as SmolLM2's, is not."""
    model = tiny_model("llama").to(dtype)
    forward = type(model.base_model).forward

    def heedless(self: Any, input_ids: Any = None, position_ids: Any = None, **inputs: Any) -> Any:
        return forward(self, input_ids=input_ids, **inputs)

    def rounded(self: Any, input_ids: Any = None, **inputs: Any) -> Any:
        found = forward(self, input_ids=input_ids, **inputs)
        units = torch.where(input_ids[..., None] < 16, 64, 2) * torch.randn(found.last_hidden_state.shape)
        found.last_hidden_state = (found.last_hidden_state * (1 + units * torch.finfo(dtype).eps)).to(dtype)
        return found

    for wrong, why in ((heedless, "packed rows gave other results than its own attention"), (rounded, "")):
        monkeypatch.setattr(type(model.base_model), "forward", wrong)
        assert examine(model).padded_because == why


def test_an_architecture_that_cannot_be_trained_is_not_called_damaged(tmp_path: Path) -> None:
    changes = {"num_local_experts": 2, "num_experts_per_tok": 1, "intermediate_size_mlp": 64, "head_dim": 8}
    values = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None, **SIZES, **changes}
    AutoModelForCausalLM.from_config(AutoConfig.for_model("llama4_text", vocab_size=512, **values)).save_pretrained(tmp_path)
    with pytest.raises(UserError) as refused:
        load_model(tmp_path)
    assert str(refused.value) == (
        f"{tmp_path}: a model of the architecture Llama4ForCausalLM cannot be trained here (NotImplementedError: it does not "
        "name the module below its output layer). Use a model of another architecture (docs/settings.md)."
    )
    # And one that names a quantisation, as transformers leaves it after reading GGUF, would be lost at its first checkpoint.
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": {"quant_method": "gguf"}}))
    with pytest.raises(UserError, match=r"config\.json names quantization_config, .* remove that key; else use"):
        load_model(tmp_path)


def test_the_token_that_is_padding_learns_where_it_is_read() -> None:
    """If the end-of-turn token is also the padding token, prompts of chats contain it."""
    own, none = (tiny_model("llama", pad_token_id=pad, tie_word_embeddings=False) for pad in (5, None))
    none.load_state_dict(own.state_dict())
    found = []
    for model in (own, none):
        learner = Learner(model, config(), pad_token_id=5)
        gradients = last_gradients(learner)
        learner.sft_update(whole_texts([(3, 5, 4), (5, 5, 9, 9)], [(8, 5), (5,)]))
        found.append(copy.deepcopy(gradients["model.embed_tokens.weight"]))
    assert torch.equal(*found) and found[0][5].abs().max() > 1e-3

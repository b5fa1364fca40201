"""The `model` stage: a model for each seed of a study, and an existing model, which keeps its weights and their precision."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from model_parts import TOKENIZERS, tiny_model
from safetensors.torch import load_file
from study_parts import study_named, with_values

from grpo.models.checkpoint import load_model, load_tokenizer
from grpo.pretraining.base_model import make_base_model
from grpo.study import paths
from grpo.study.effective import effective_run
from grpo.study.schema import Study
from grpo.study.settings import LocalModel


@pytest.mark.slow
def test_each_seed_has_the_model_of_its_own_seed_and_the_first_ones_is_the_tasks(
    workdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its seed is that of the section plus the run's, so they are those that one model after another would be."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{workdir}/mlflow.db")
    study = with_values(study_named("smoke"), {"models.main.steps": 2, "models.main.one_per_seed": False, "seeds": [3, 4]})
    own = with_values(study, {"models.main.one_per_seed": True})
    make_base_model(own, "main")
    names = {path.name for path in paths.model("main").iterdir()}
    bases = [effective_run(own, "grpo_learning_rate", "3e-4", seed, []).model for seed in own.seeds]
    assert names == {path.name for path in bases[1].iterdir()} | {bases[1].name}
    found = [(load_tokenizer(base)("Mia has 3")["input_ids"], load_model(base).state_dict()) for base in bases]
    for seed, (tokens, weights) in zip(own.seeds, found, strict=True):
        make_base_model(with_values(study, {"models.main.seed": study.models["main"].seed + seed}), "main")
        assert load_tokenizer(paths.model("main"))("Mia has 3")["input_ids"] == tokens
        single = load_model(paths.model("main")).state_dict()
        assert all(single[name].equal(weight) for name, weight in weights.items())
    first, second = (weights for _, weights in found)
    assert any(first[name].shape != second[name].shape or not first[name].equal(second[name]) for name in first)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_copied_model_keeps_its_weights_bit_by_bit(dtype: str, workdir: Path, mini_study: Study) -> None:
    source = workdir / "hub"
    TOKENIZERS["like_qwen3"](source, ["What is 1 + 1?"])
    tiny_model("llama").to(getattr(torch, dtype)).save_pretrained(source)
    weights = load_file(source / "model.safetensors")
    model = LocalModel(source="local", path=str(source))
    make_base_model(mini_study.model_copy(update={"models": {"main": model}}), "main")
    copied = load_file(paths.model("main") / "model.safetensors")
    assert copied.keys() == weights.keys()
    for name, weight in weights.items():
        assert copied[name].dtype == weight.dtype, name
        assert torch.equal(copied[name], weight), name
    loaded = load_model(paths.model("main")).state_dict()
    assert all(torch.equal(loaded[name], weight.float()) for name, weight in weights.items())

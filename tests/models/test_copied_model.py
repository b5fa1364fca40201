"""The `model` stage with an existing model: it keeps the weights and their precision."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from model_parts import TOKENIZERS, tiny_model
from safetensors.torch import load_file

from grpo.models.checkpoint import load_model
from grpo.pretraining.base_model import make_base_model
from grpo.study import paths
from grpo.study.schema import Study
from grpo.study.settings import LocalModel


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_copied_model_keeps_its_weights_bit_by_bit(
    dtype: str, tmp_path: Path, mini_study: Study, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    source = tmp_path / "hub"
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

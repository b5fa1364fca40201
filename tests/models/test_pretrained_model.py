"""The `model` stage where a study pretrains a model for each of its seeds."""

from __future__ import annotations

from pathlib import Path

import pytest
from study_parts import study_named, with_values

from grpo.models.checkpoint import load_model, load_tokenizer
from grpo.pretraining.base_model import make_base_model
from grpo.study import paths
from grpo.study.effective import effective_run


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

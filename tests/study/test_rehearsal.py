"""A rehearsal: what it keeps of a study for GPUs, what it gives up, and models with random weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from model_parts import tiny_model
from study_parts import ROOT, STUDIES, study_named

from grpo.commands.study import rehearse
from grpo.common.errors import UserError
from grpo.study.compose import compose
from grpo.study.effective import effective_run
from grpo.study.methods import GrpoConfig
from grpo.study.rehearsal import rehearsal_of
from grpo.study.schema import Study, load_study
from grpo.study.settings import RandomModel

CUT = {
    *("n_grpo_steps", "rollout_batch_size", "train_batch_size", "gradient_accumulation_steps", "group_size"),
    *("sampling_max_tokens", "wall_clock_limit_s", "start_from", "gpu_memory_utilization", "keep_steps"),
}


def config(study: Study, experiment: str, arm: str) -> Any:
    return effective_run(study, experiment, arm, study.seeds[0], []).config


@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.stem)
def test_each_study_can_be_rehearsed_on_a_cpu(path: Path, workdir: Path) -> None:
    shutil.copytree(ROOT / "studies", workdir / "studies")
    said = rehearse(path.stem)
    study, cut = study_named(path.stem), load_study(Path(f"studies/{path.stem}-rehearsal.yaml"))
    assert "It does not cover\n- " in said
    assert "cuda" not in json.dumps(cut.model_dump(mode="json"))
    assert not any(kind.gpus for kind in cut.resources.values())
    assert {name: list(cut.experiments[name].arms) for name in cut.active_experiments} == {
        name: list(study.experiments[name].arms) for name in study.active_experiments
    }
    for name in study.active_experiments:
        for arm in study.experiments[name].arms:
            whole, small = config(study, name, arm), config(cut, name, arm)
            if isinstance(whole, GrpoConfig):
                assert small.updates_per_rollout_batch == whole.updates_per_rollout_batch
                assert small.model_dump(exclude=CUT) == whole.model_dump(exclude=CUT)
                assert bool(small.keep_steps) == bool(whole.keep_steps)
                assert small.n_grpo_steps * small.rollout_batch_size <= 256
                assert (small.start_from is None) == (whole.start_from is None)


def test_what_was_written_by_hand_is_not_overwritten(workdir: Path) -> None:
    own = workdir / "lab"
    own.mkdir()
    (own / "ours.yaml").write_text("extends: math-first\n")
    said = rehearse("lab/ours.yaml")
    assert "lab/ours-rehearsal.yaml" in said and rehearse("lab/ours.yaml") == said  # again: it says the same
    (own / "ours-rehearsal.yaml").write_text("extends: ours\nseeds: [3]\n")
    with pytest.raises(UserError, match="already exists with other content"):
        rehearse("lab/ours.yaml")


def test_batches_of_an_arm_are_cut_as_the_sections() -> None:
    """16 updates stay 16 where batches of 256 and 16 lose a factor of 8, which leaves groups of 2."""
    values = rehearsal_of(compose(ROOT / "studies/math-h100.yaml"))
    assert (values["grpo"]["rollout_batch_size"], values["grpo"]["group_size"]) == (32, 2)
    arm = values["experiments"]["grpo_off_policy_sweep_broad"]["arms"]["epochs_1-batch_16"]
    assert (arm["train_batch_size"], arm["gradient_accumulation_steps"], arm["n_grpo_steps"]) == (2, 1, 2)
    assert values["experiments"]["sft_experiment"]["arms"]["all"] == {"keep_steps": [1, 2]}
    start = values["experiments"]["grpo_sft_initialization"]["arms"]["sft_middle"]
    assert start == {"start_from": "sft_experiment/all/step-2"}


def test_what_must_fit_into_few_tokens_and_updates_is_cut(workdir: Path) -> None:
    Path("long.yaml").write_text("extends: math-first\ngrpo: {overlong_buffer: 128, warmup_steps: 10}\n")
    rehearse("long.yaml")
    cut = load_study(Path("long-rehearsal.yaml")).grpo
    assert (cut.overlong_buffer, cut.warmup_steps, cut.sampling_max_tokens) == (8, 1, 16)


@pytest.mark.parametrize("kind", ["qwen3", "gemma2"])
def test_random_weights_have_the_architecture_and_the_tokenizer_of_another_model(
    kind: str, tokenizer: Any, workdir: Path, mini_study: Study
) -> None:
    from grpo.models.checkpoint import load_model, load_tokenizer, save_checkpoint
    from grpo.pretraining.base_model import make_base_model

    there = tiny_model(kind, vocab_size=len(tokenizer), num_hidden_layers=4, eos_token_id=tokenizer.eos_token_id)
    save_checkpoint(Path("there"), there, tokenizer)
    for weights in Path("there").glob("*.safetensors"):
        weights.unlink()  # nothing of them is read

    like = {"source": "local", "path": "there"}
    whole = RandomModel.model_validate({"source": "random", "like": like})
    cut = RandomModel.model_validate({"source": "random", "like": like, "hidden_size": 32, "num_hidden_layers": 2})
    for settings, layers, parameters in ((whole, 4, there.num_parameters()), (cut, 2, None)):
        make_base_model(mini_study.model_copy(update={"models": {"main": settings}}), "main")
        model = load_model(Path("data/model/main"))
        assert type(model) is type(there)
        assert model.config.num_hidden_layers == layers
        assert model.config.vocab_size == len(tokenizer)
        assert parameters is None or model.num_parameters() == parameters
    text = "Mia has 3 apples."
    assert load_tokenizer(Path("data/model/main"))(text)["input_ids"] == tokenizer(text)["input_ids"]

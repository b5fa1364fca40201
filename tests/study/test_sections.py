"""What a study may say about fine-tuning, expert iteration and the keyword task, and which files their runs use."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from study_parts import (
    EXPERIMENTS,
    EXPERT_ITERATION,
    KEYWORD,
    SFT,
    SFT_INITIALIZATION,
    STUDIES,
    edited,
    new_arm,
    refused,
    shard_learner,
)

from grpo.study.effective import effective_run
from grpo.study.methods import ExpertIterationConfig, GrpoConfig, SftConfig, evaluation_steps
from grpo.study.schema import Study, load_study

ROOT = Path(__file__).parents[2]


def test_names_of_a_hundred_characters_can_be_files(tmp_path: Path) -> None:
    """An experiment, an arm and the largest seed stand in one file's name, beside what says what the file is."""
    study = edited(tmp_path, lambda v: (v.update(seeds=[2**63 - 1]), new_arm("grpo_learning_rate", "a" * 100)(v)))
    (tmp_path / f".{'e' * 100}@{'a' * 100}-{study.seeds[0]}.old.draft.lock").touch()


# ---------------------------------------------------------------------------------------------------------- start_from


def test_any_grpo_arm_may_start_from_a_checkpoint_of_fine_tuning_and_be_asynchronous(tmp_path: Path) -> None:
    arm = new_arm("grpo_baselines", start_from=f"{SFT}/all/last", asynchronous={"max_policy_lag": 2})
    study = edited(tmp_path, arm)
    run = effective_run(study, "grpo_baselines", "extra", 0, [])
    assert run.model == Path(f"data/checkpoints/{SFT}/all/0/last") and SFT in study.needed_experiments("grpo_baselines")
    assert run.config.asynchronous.max_policy_lag == 2


# --------------------------------------------------------------------------------------------------- methods and last_k


def test_an_experiments_last_k_comes_before_the_studys(tmp_path: Path) -> None:
    def edit(values: dict[str, Any]) -> None:
        values["selection"]["last_k"] = 2
        for name, experiment in values["experiments"].items():
            experiment.pop("last_k", None)
            if name in (SFT, "leaderboard"):
                experiment["last_k"] = {SFT: 3, "leaderboard": 1}[name]

    study = edited(tmp_path, edit)
    assert {name: study.last_k(name) for name in EXPERIMENTS} == dict.fromkeys(EXPERIMENTS, 2) | {SFT: 3, "leaderboard": 1}


# ------------------------------------------------------------------------------------------------------- what a run uses


def test_each_kind_of_run_has_its_model_and_its_data(mini_study: Study) -> None:
    base, problems = "data/model/main", ("data/dataset/main/train.jsonl", "data/dataset/main/validation.jsonl")
    words = tuple(f"data/dataset/keyword/{split}.jsonl" for split in ("train", "validation"))
    expected = {
        ("grpo_learning_rate", "3e-4"): (base, *problems),
        (SFT, "all"): (base, "data/sft_dataset/main/train.jsonl", problems[1]),
        (EXPERT_ITERATION, next(iter(mini_study.experiments[EXPERT_ITERATION].arms))): (base, *problems),
        (SFT_INITIALIZATION, "base"): (base, *problems),
        (SFT_INITIALIZATION, "sft_final"): (f"data/checkpoints/{SFT}/all/SEED/last", *problems),
        (KEYWORD, next(iter(mini_study.experiments[KEYWORD].arms))): ("data/model/keyword", *words),
    }
    study = mini_study.model_copy(update={"seeds": [0, 7]})
    for seed in study.seeds:  # a run starts from the checkpoint of its own seed
        for (experiment, arm), files in expected.items():
            run = effective_run(study, experiment, arm, seed, [])
            found = tuple(path.as_posix() for path in (run.model, run.train, run.validation))
            assert found == (files[0].replace("SEED", str(seed)), *files[1:])


@pytest.mark.parametrize("experiment", list(EXPERIMENTS))
def test_an_experiments_method_decides_the_configuration(mini_study: Study, experiment: str) -> None:
    kinds = {SFT: SftConfig, EXPERT_ITERATION: ExpertIterationConfig}
    arm = next(iter(mini_study.experiments[experiment].arms))
    run = effective_run(mini_study, experiment, arm, 0, [])
    assert type(run.config) is kinds.get(experiment, GrpoConfig)
    assert set(run.sources) == set(type(run.config).model_fields)
    assert {key for key, source in run.sources.items() if source == f"arm {arm}"} == set(run.overrides)


def test_each_method_is_evaluated_at_its_own_steps() -> None:
    assert evaluation_steps(GrpoConfig(n_grpo_steps=10), 4) == [0, 4, 8, 10]
    assert evaluation_steps(GrpoConfig(n_grpo_steps=3), 4) == [0, 3]
    assert evaluation_steps(GrpoConfig(n_grpo_steps=20), [1, 2, 8]) == [0, 1, 2, 8, 16, 20]
    assert evaluation_steps(GrpoConfig(n_grpo_steps=5), [1, 2, 8]) == [0, 1, 2, 5]
    assert evaluation_steps(SftConfig(n_sft_steps=6, evaluate_every=3), [1, 2]) == [0, 3, 6]
    assert evaluation_steps(SftConfig(n_sft_steps=7, evaluate_every=3), 4) == [0, 3, 6, 7]
    assert evaluation_steps(ExpertIterationConfig(n_ei_steps=3), 4) == [0, 1, 2, 3]


# ------------------------------------------------------------------------------------------------------------- resources


@pytest.mark.parametrize("kind", ["model", "train_on_cpu", "evaluate", "train", "colocate", "asynchronous"])
def test_a_stage_that_computes_on_the_cpu_has_a_core_for_each_thread(tmp_path: Path, kind: str) -> None:
    def edit(values: dict[str, Any]) -> None:
        values["threads"] = 3
        for name, resources in values["resources"].items():
            resources["cpus"] = 2 if name == kind else 3
        values["resources"]["small"]["cpus"] = 1

    message = refused(tmp_path, edit)
    assert f"resources.{kind}.cpus (2): these stages compute on the CPU with 3 threads: reserve as many" in message

    def on_gpu(values: dict[str, Any]) -> None:
        edit(values)
        values["engine"] |= {"name": "vllm", "device": "cuda:0"}
        values["learner"]["device"] = "cuda:0"

    if kind in ("model", "train_on_cpu"):
        assert f"resources.{kind}.cpus (2)" in refused(tmp_path, on_gpu)
    else:
        assert edited(tmp_path, on_gpu).resources[kind].cpus == 2


def test_a_stage_that_copies_a_model_needs_no_core_for_each_thread(tmp_path: Path) -> None:
    def edit(values: dict[str, Any]) -> None:
        values["threads"] = 2
        for name, resources in values["resources"].items():
            resources["cpus"] = 1 if name == "model" else 2
        values["resources"]["train_on_cpu"]["gpus"] = 1  # of no use, but allowed where all is on the CPU
        values["models"] = {task: {"source": "local", "path": "my-model"} for task in values["models"]}

    assert edited(tmp_path, edit).resources["model"].cpus == 1

    def one_pretrained(values: dict[str, Any]) -> None:
        pretrained = values["models"]["keyword"]
        edit(values)
        values["models"]["keyword"] = pretrained

    assert "resources.model.cpus (1)" in refused(tmp_path, one_pretrained)


def test_a_small_model_computes_on_the_cpu_in_a_study_for_gpus(mini_study: Study) -> None:
    for_gpus = load_study(ROOT / "studies" / "math-24gb.yaml")
    study = for_gpus.for_task("keyword")
    assert (study.engine.name, study.engine.device, study.engine.sleep_level) == ("transformers", "cpu", 0)
    assert (study.learner.device, study.learner.dtype, study.learner.optimizer) == ("cpu", "float32", "adamw")
    assert for_gpus.for_task("main") == for_gpus
    assert mini_study.for_task("keyword") == mini_study


def test_a_run_that_is_not_sharded_is_recorded_as_before_any_was(tmp_path: Path, mini_study: Study) -> None:
    assert "fully_shard" not in mini_study.learner.model_dump()
    assert edited(tmp_path, shard_learner).learner.model_dump()["fully_shard"] is True


# ------------------------------------------------------------------------------------------------ evaluations that count


@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.stem)
def test_the_broad_sweep_of_every_study_is_short(path: Path) -> None:
    """The handout's rule."""
    broad = load_study(path).experiments["grpo_off_policy_sweep_broad"].arms
    assert all(arm["n_grpo_steps"] < 50 for arm in broad.values())


def test_steps_that_may_come_from_an_earlier_winner_count_too(tmp_path: Path) -> None:
    """An arm of one step counts by one evaluation in its own experiment; those after it, which may start from it, by three."""

    def short_winner(values: dict[str, Any]) -> None:
        values["experiments"]["grpo_baselines"]["last_k"] = 1
        values["experiments"]["grpo_baselines"]["arms"]["no_baseline"]["n_grpo_steps"] = 1

    message = refused(tmp_path, short_winner)
    assert "experiments.grpo_length_normalization.arms.masked_mean: a run of 1 steps is evaluated 1 time" in message

    def pinned(values: dict[str, Any]) -> None:
        short_winner(values)
        values["selection"]["pinned"] = {"grpo_baselines": "reinforce_with_baseline"}

    assert edited(tmp_path, pinned).selection.pinned  # then it cannot win

    def own_steps_again(values: dict[str, Any]) -> None:
        """The arms of the next experiment say themselves how long they train, and hand that on."""
        short_winner(values)
        for arm in values["experiments"]["grpo_length_normalization"]["arms"].values():
            arm["n_grpo_steps"] = 16

    assert edited(tmp_path, own_steps_again).grpo.n_grpo_steps == 64

    def ranked(values: dict[str, Any]) -> None:
        """The sweep's short arms hand their steps on with the rest of their values."""
        values["experiments"]["grpo_off_policy_sweep_broad"]["last_k"] = 1
        for arm in values["experiments"]["grpo_off_policy_sweep_broad"]["arms"].values():
            arm["n_grpo_steps"] = 1
        del values["experiments"]["grpo_off_policy_sweep_focused"]["arms"]["best_2"]["n_grpo_steps"]

    message = refused(tmp_path, ranked)
    assert "experiments.grpo_off_policy_sweep_focused.arms.best_2: a run of 1 steps is evaluated 1 time" in message

"""What a study may say about fine-tuning, expert iteration and the keyword task, and which files their runs use."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from study_parts import (
    BROAD,
    EXPERIMENTS,
    EXPERT_ITERATION,
    KEYWORD,
    SFT,
    SFT_INITIALIZATION,
    STUDIES,
    Edit,
    all_of,
    edited,
    new_arm,
    put,
    refused,
    study_named,
    with_values,
)

from grpo.study.effective import effective_run
from grpo.study.methods import ExpertIterationConfig, GrpoConfig, RunConfig, SftConfig
from grpo.study.schema import Study
from grpo.study.settings import EvaluationSteps

# ------------------------------------------------------------------------------------------------------- what a run uses


def test_each_kind_of_run_has_its_model_and_its_data() -> None:
    study = edited(
        put("seeds", [0, 7]),
        put("models.main.one_per_seed", False),
        new_arm(SFT_INITIALIZATION, start_from=f"{SFT}/all/last"),
        *(put(f"experiments.{name}.seeds", None) for name in EXPERIMENTS),
    )
    first_arm = {name: next(iter(study.experiments[name].arms)) for name in EXPERIMENTS}
    base, problems = "data/model/main", ("data/dataset/main/train.jsonl", "data/dataset/main/validation.jsonl")
    words = tuple(f"data/dataset/keyword/{split}.jsonl" for split in ("train", "validation"))
    expected = {
        ("grpo_learning_rate", first_arm["grpo_learning_rate"]): (base, *problems),
        (SFT, "all"): (base, "data/sft_dataset/main/train.jsonl", problems[1]),
        (EXPERT_ITERATION, first_arm[EXPERT_ITERATION]): (base, *problems),
        (SFT_INITIALIZATION, "base"): (base, *problems),
        (SFT_INITIALIZATION, "extra"): (f"data/checkpoints/{SFT}/all/SEED/last", *problems),
        (KEYWORD, first_arm[KEYWORD]): ("data/model/keyword", *words),
    }
    for seed in study.seeds:  # a run starts from the checkpoint of its own seed
        for (experiment, arm), files in expected.items():
            run = effective_run(study, experiment, arm, seed, [])
            found = tuple(path.as_posix() for path in (run.model, run.train, run.validation))
            assert found == (files[0].replace("SEED", str(seed)), *files[1:])


STEPS: list[tuple[RunConfig, int | list[int], list[int]]] = [
    (GrpoConfig(n_grpo_steps=10), 4, [0, 4, 8, 10]),
    (GrpoConfig(n_grpo_steps=8), 4, [0, 4, 8]),
    (GrpoConfig(n_grpo_steps=3), 4, [0, 3]),
    (GrpoConfig(n_grpo_steps=20), [1, 2, 8], [0, 1, 2, 8, 16, 20]),
    (GrpoConfig(n_grpo_steps=5), [1, 2, 8], [0, 1, 2, 5]),
    (GrpoConfig(n_grpo_steps=25), [3, 7, 10], [0, 3, 7, 10, 20, 25]),
    (SftConfig(n_sft_steps=6, evaluate_every=3), [1, 2], [0, 3, 6]),
    (SftConfig(n_sft_steps=7, evaluate_every=3), 4, [0, 3, 6, 7]),
    (ExpertIterationConfig(n_ei_steps=3), 4, [0, 1, 2, 3]),
]


@pytest.mark.parametrize(("config", "every", "expected"), STEPS)
def test_steps_of_evaluations(config: RunConfig, every: int | list[int], expected: list[int]) -> None:
    steps = EvaluationSteps(config, every)
    assert [step for step in range(config.n_steps + 30) if step in steps] == expected
    assert steps.middle == expected[len(expected) // 2]


def test_a_run_without_an_end_is_checked_at_once() -> None:
    """Its evaluations in a list would fill 8 TB."""
    steps = EvaluationSteps(GrpoConfig(n_grpo_steps=10**12), [1, 2])
    assert (steps.middle, 10**12 - 2 in steps) == (5 * 10**11, True)


# ------------------------------------------------------------------------------------------------------------- resources


def threads(number: int, **cpus: int) -> Edit:
    """An edit: so many threads, and as many CPUs for each stage that is not named with another number."""

    def edit(values: dict[str, Any]) -> None:
        values["threads"] = number
        for name, resources in values["resources"].items():
            resources["cpus"] = cpus.get(name, number)

    return edit


@pytest.mark.parametrize("kind", ["model", "train_on_cpu", "evaluate", "train", "alone"])
def test_a_stage_that_computes_on_the_cpu_has_a_core_for_each_thread(kind: str) -> None:
    edit = all_of(put("experiments.grpo_lora.timed", "alone"), threads(3, small=1, **{kind: 2}))
    message = f"resources.{kind}.cpus (2): these stages compute on the CPU with 3 threads: reserve as many"
    assert message in refused(edit)
    on_gpu = put("engine.name", "vllm"), put("engine.device", "cuda:0"), put("learner.device", "cuda:0")
    if kind in ("model", "train_on_cpu"):
        assert message in refused(edit, *on_gpu)
    else:
        assert edited(edit, *on_gpu).resources[kind].cpus == 2


def test_a_stage_that_copies_a_model_needs_no_core_for_each_thread() -> None:
    local = {"source": "local", "path": "my-model"}
    edits = threads(2, model=1), put("models.main", local), put("resources.train_on_cpu.gpus", 1)  # of no use, but allowed
    assert "resources.model.cpus (1)" in refused(*edits)  # the other model is pretrained
    assert edited(*edits, put("models.keyword", local)).resources["model"].cpus == 1


def test_a_small_model_computes_on_the_cpu_in_a_study_for_gpus(mini_study: Study) -> None:
    for_gpus = study_named("math-24gb")
    study = for_gpus.for_task("keyword")
    assert (study.engine.name, study.engine.device, study.engine.sleep_level) == ("transformers", "cpu", 0)
    assert (study.learner.device, study.learner.dtype, study.learner.optimizer) == ("cpu", "float32", "adamw")
    assert for_gpus.for_task("main") == for_gpus
    assert mini_study.for_task("keyword") == mini_study


def test_the_study_with_one_instance_samples_where_its_learner_trains() -> None:
    """Its engine is another one than its parent's, whose device and sleep it keeps unless it says otherwise."""
    study = study_named("math-one-instance")
    assert (study.engine.name, study.engine.device, study.engine.dtype) == ("transformers", "cuda:0", "bfloat16")
    assert (study.learner.device, study.learner.dtype, study.engine.sleep_level) == ("cuda:0", "bfloat16", 0)


# ------------------------------------------------------------------------------------------------ evaluations that count


@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.stem)
def test_the_broad_sweep_of_every_study_is_short(path: Path) -> None:
    """The handout's rule."""
    broad = study_named(path.stem).experiments[BROAD].arms
    assert all(arm["n_grpo_steps"] < 50 for arm in broad.values())


@pytest.mark.parametrize(
    ("of_all", "of_an_arm", "method", "metric"),
    [
        (None, None, "grpo", "answer_reward"),
        ("json:dumps", None, "grpo", "reward"),
        ("json:dumps", "json:dumps", "grpo", "reward"),
        ("json:dumps", "json:loads", "grpo", "answer_reward"),
        (None, "json:dumps", "grpo", "answer_reward"),
        ("json:dumps", None, "sft", "answer_reward"),  # which has no reward
    ],
)
def test_runs_are_compared_by_an_own_reward_only_if_all_have_it(
    of_all: str | None, of_an_arm: str | None, method: str, metric: str
) -> None:
    arm = {} if of_an_arm is None else {"reward": of_an_arm}
    entry = study_named("mini").experiments["grpo_baselines"].model_copy(update={"arms": {"a": arm}, "method": method})
    study = with_values(study_named("mini"), {"grpo.reward": of_all, "experiments": {"e": entry}})
    assert study.metric == metric
    by_hand = with_values(study, {"evaluation.metric": "answer_reward"})
    assert by_hand.metric == "answer_reward"

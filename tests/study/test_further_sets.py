"""What a study may say of further evaluation sets, and of prompts that are too long; and what that makes stale."""

from __future__ import annotations

import pytest
from study_parts import KEYWORD, edited, put

from grpo.common.files import write_text
from grpo.study import paths
from grpo.study.effective import effective_run
from grpo.study.training_inputs import dataset_inputs, shared_settings, task_inputs
from grpo.training.run import run_identity

HARD = {"use": "arithmetic", "train_size": 1, "validation_size": 64, "levels": 5, "seed": 7}
HARD_SET = HARD | {"problems": 32, "every": 16}


WITH_SET = put("evaluation.also", {"hard": HARD_SET})


def test_runs_of_the_main_task_are_evaluated_on_it_too() -> None:
    study = edited(WITH_SET)
    assert list(study.also_evaluated("main")) == ["hard"] and not study.also_evaluated(study.experiments[KEYWORD].task)
    assert {problem.level for problem in study.also_task("hard").problems("validation")} == {1, 2, 3, 4, 5}
    assert study.evaluation.also["hard"].task == HARD


def test_without_one_everything_is_recorded_as_before() -> None:
    study = edited()
    assert "also" not in study.evaluation.model_dump() and "also" not in shared_settings(study)["evaluation"]
    assert dataset_inputs(study, "main") == {}


def test_the_data_set_depends_on_it_and_the_model_does_not() -> None:
    """The same of a limit of prompts: the stage `model` reads what task_inputs says."""
    before = edited()
    after = edited(WITH_SET, put("tasks.main.max_prompt_tokens", 120))
    assert task_inputs(before, "main") == task_inputs(after, "main")
    assert after.task("main").max_prompt_tokens == 120
    found = dataset_inputs(after, "main")
    assert found["max_prompt_tokens"] == {"task": 120, "hard": None} and found["formats"] == ["question_only", "r1_zero"]
    assert found["also"]["hard"]["settings"] == HARD_SET and dataset_inputs(after, "keyword") == {}


@pytest.mark.usefixtures("workdir")
def test_a_run_depends_on_the_problems_of_the_set() -> None:
    study = edited(WITH_SET)
    run = effective_run(study, "grpo_learning_rate", next(iter(study.experiments["grpo_learning_rate"].arms)), 0, [])
    for file in (run.model / "model.safetensors", run.train, run.validation, paths.also("main", "hard")):
        write_text(file, "before")
    before = run_identity(study, run)
    write_text(paths.also("main", "hard"), "after")
    after = run_identity(study, run)
    assert {key for key in after if after[key] != before[key]} == {"also_problems"}

"""What a stage reads is a dependency of it, and does not change while it runs."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from dvc.repo import Repo
from pipeline_parts import sh
from study_parts import ROOT, Grpo, edit, edited, put, with_values

from grpo.commands import stages
from grpo.common.errors import UserError
from grpo.common.files import write_text
from grpo.study.schema import Study, load_study
from grpo.study.stage_inputs import unchanged_inputs
from grpo.study.training_inputs import code_of_rooms, require_recorded_inputs, write_training_inputs

ROWS = {
    "use": "dataset",
    "question": "q",
    "answer": "a",
    "files": {"train": "mine.jsonl[:80%]", "validation": "mine.jsonl[80%:]"},
}
MATH = {"use": "math", "source": {"train": "train.csv", "validation": "rest.csv"}}
TEACHER = {"source": "sampled", "prompt": "chat", "asked_in": "chat", "model": {"source": "local", "path": "teacher"}}
NAMED: list[tuple[dict[str, Any], list[str]]] = [
    ({}, []),
    ({"tasks.main": ROWS}, ["mine.jsonl"]),
    ({"tasks.main": MATH}, ["train.csv", "rest.csv"]),
    ({"tasks.main": {"use": "mixture", "tasks": {"a": ROWS, "b": MATH}}}, ["mine.jsonl", "train.csv", "rest.csv"]),
    ({"models.main": {"source": "local", "path": "my-model"}}, ["my-model"]),
    ({"sft_datasets.main": {"source": "jsonl", "prompt": "r1_zero", "path": "traces.jsonl"}}, ["traces.jsonl"]),
    ({"sft_datasets.main": TEACHER}, ["teacher"]),
]


@pytest.mark.parametrize(("values", "expected"), NAMED)
def test_each_file_that_a_study_names_is_a_dependency(values: dict[str, Any], expected: list[str]) -> None:
    study = edited(*(put(key, value) for key, value in values.items()))
    assert study.named_files == {f"main-{number}": file for number, file in enumerate(expected)}


@pytest.fixture
def project(workdir: Path, grpo: Grpo) -> Path:
    """The pipeline with a study that names rows.jsonl, whose stage DVC is running."""
    shutil.copy(ROOT / "dvc.yaml", workdir)
    write_text(Path("rows.jsonl"), '{"q": "1 + 1?", "a": "2"}\n' * 10)
    files = "{train: 'rows.jsonl[:80%]', validation: 'rows.jsonl[80%:]'}"
    task = f"{{use: dataset, question: q, answer: a, files: {files}}}"
    model = "{source: local, path: model}"
    overlay = (
        f"extends: smoke\nexperiments: {{only: [grpo_learning_rate]}}\ntasks: {{main: {task}}}\nmodels: {{main: {model}}}\n"
    )
    write_text(Path("studies/own.yaml"), f"{overlay}sft_datasets: {{}}\n")
    assert grpo("study", "use", "own")[0] == 0
    return workdir


def test_another_content_of_a_named_file_makes_the_stages_of_its_task_stale(project: Path, grpo: Grpo) -> None:
    """DVC asks the stage `named_file`, whose output goes by `training_inputs` into what the task's stages depend on."""
    for command in ("git init -q", "dvc init -q"):
        sh(project, *command.split())
    with Repo() as repo:
        (stage,) = repo.stage.collect("named_file@main-0")
    assert [dep.def_path for dep in stage.deps] == ["rows.jsonl"]
    study, found = load_study(), []
    for answer in ("2", "3"):
        write_text(Path("rows.jsonl"), f'{{"q": "1 + 1?", "a": "{answer}"}}\n' * 10)
        write_text(Path("model/config.json"), "{}")
        assert [grpo("named_file", key)[0] for key in study.named_files] == [0, 0]
        write_training_inputs(study)
        found.append(Path("data/training_inputs/tasks/main.json").read_text())
    assert found[0] != found[1] and "rows.jsonl" in found[1] and "model" in found[1]
    assert grpo("study", "use", "smoke")[0] == 0
    assert not list(Path("reports/named_files").glob("*.json")), "those of another study go"


ARM = "train@grpo_learning_rate-3e-4"
MEANWHILE: list[tuple[str, str, Callable[[], Any], str]] = [
    ("an arm", ARM, lambda: edit("{learning_rate: 0.0003", "{learning_rate: 0.9"), "experiments.grpo_learning_rate.arms.3e-4"),
    ("another arm", ARM, lambda: edit("learning_rate: 0.001}", "learning_rate: 0.9}"), ""),
    ("a section", "select@grpo_learning_rate", lambda: edit("seeds: [0]", "seeds: [1]"), "seeds in params.yaml"),
    ("an own file", "named_file@main-0", lambda: write_text(Path("rows.jsonl"), "{}\n"), "rows.jsonl"),
    ("written as it was", "model@main", lambda: os.utime("grpo/models/lora.py", ns=(1, 1)), "grpo/models/lora.py"),
    ("a file less", "model@main", lambda: Path("grpo/models/lora.py").unlink(), "grpo/models/lora.py"),
    ("a new file", "model@main", lambda: write_text(Path("grpo/models/new.py"), ""), ""),
    ("an editor's file", "model@main", lambda: write_text(Path("grpo/models/.lora.py.swp"), "new"), ""),
    ("another room", "model@main", lambda: write_text(Path("grpo/reporting/page.py"), "new"), ""),
    ("no stage of ours", "elsewhere/dvc.yaml:model@main", lambda: edit("seeds: [0]", "seeds: [1]"), ""),
]


@pytest.mark.parametrize(("stage", "change", "named"), [row[1:] for row in MEANWHILE], ids=[row[0] for row in MEANWHILE])
def test_inputs_that_change_while_a_stage_runs_end_it(
    stage: str, change: Callable[[], Any], named: str, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DVC would write what lies there afterwards to dvc.lock, beside results of what the stage read."""
    for file in ("grpo/models/lora.py", "grpo/models/.lora.py.swp", "grpo/reporting/page.py"):
        write_text(Path(file), "old")
    monkeypatch.setenv("DVC_STAGE", stage)
    with pytest.raises(UserError, match=re.escape(named)) if named else nullcontext(), unchanged_inputs():
        change()


def test_every_command_compares_its_inputs(project: Path, grpo: Grpo, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DVC_STAGE", "named_file@main-0")
    monkeypatch.setattr(stages, "files_digest", lambda path: write_text(path, "{}\n"))
    code, _, said = grpo("named_file", "main-0")
    assert code == 2 and said.startswith("error: named_file@main-0: changed meanwhile: rows.jsonl. ")


def test_a_run_trains_with_the_code_that_was_recorded(
    mini_study: Study, workdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its stage depends on what `training_inputs` wrote, and not on the code itself."""
    name = "grpo_learning_rate"
    write_text(workdir / "own_loss.py", "from grpo.learner.losses import grpo_clip as mine\n")
    monkeypatch.syspath_prepend(workdir)
    study = with_values(mini_study, {f"experiments.{name}.arms": {"a": {"loss_type": "own_loss:mine"}}})
    code_of_rooms.cache_clear()
    write_training_inputs(with_values(study, {"experiments": {name: study.experiments[name]}}))
    monkeypatch.setenv("DVC_STAGE", f"train@{name}-a")
    require_recorded_inputs(study, name)
    write_text(workdir / "own_loss.py", "from grpo.learner.losses import gspo as mine\n")
    with pytest.raises(UserError, match=f"own_code .*{name}.json"):
        require_recorded_inputs(study, name)

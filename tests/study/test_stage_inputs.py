"""What a stage reads is a dependency of it and does not change while it runs; settings and code that make runs stale."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from dvc.repo import Repo
from pipeline_parts import sh
from study_parts import (
    ASYNCHRONOUS,
    EXPERT_ITERATION,
    KEYWORD,
    ROOT,
    SFT,
    Grpo,
    edit,
    edited,
    entry,
    method_of,
    put,
    with_values,
)

from grpo.commands import stages
from grpo.common.errors import UserError
from grpo.common.files import write_text
from grpo.common.yaml_file import parse_yaml
from grpo.study import paths
from grpo.study.schema import Study, load_study
from grpo.study.software import CONSTRAINTS, PROJECT, VLLM_ON_CPU
from grpo.study.training_inputs import (
    ROOMS,
    code_of_modules,
    code_of_rooms,
    dataset_inputs,
    require_recorded_inputs,
    shared_settings,
    task_inputs,
    unchanged_inputs,
    write_training_inputs,
)
from grpo.tasks.keyword_inclusion import Keyword
from grpo.tasks.task import Format

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


# ------------------------------------------------------------------------------------------------------ what makes runs stale


# ---------------------------------------------------------------------------------------------------------- dependencies

STAGES = {name: stage.get("do", stage) for name, stage in parse_yaml(ROOT / "dvc.yaml")["stages"].items()}
# What decides nothing: texts, files and plain records; the settings, which are `params`; statistics, with which commands print.
NEUTRAL = ("grpo.study", "grpo.common.errors", "grpo.common.files", "grpo.common.records", "grpo.results.intervals")
OF_RUNS = ("grpo.tracking", "grpo.results", "grpo.commands")  # of all that a run loads, what records, reads or starts


def imported_by(stage: str) -> set[str]:
    """The modules that a stage's command itself imports; with `training_inputs` all that runs load, directly or not."""
    if stage == "training_inputs":
        loaded = "grpo.training.train, grpo.training.run, grpo.training.asynchronous.start, grpo.training.asynchronous.loop"
        program = f"import sys, {loaded}; print(*[m for m in sys.modules if m.startswith('grpo.')])"
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
        return {*done.stdout.split()}
    tree, name = ast.parse((ROOT / "grpo/commands/stages.py").read_text()), STAGES[stage]["cmd"].split()[1]
    (command,) = (node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name)
    modules = {each.module or "" for each in ast.walk(command) if isinstance(each, ast.ImportFrom)}
    return {module for module in modules if module.startswith("grpo.")}


@pytest.mark.parametrize("stage", sorted(STAGES.keys() - {"train"}))
def test_a_stage_depends_on_the_code_and_the_pins_that_decide_its_result(stage: str) -> None:
    """Runs go through `training_inputs`. The stage `select` computes with statistics."""
    deps = STAGES[stage]["deps"]
    known = tuple(dep.removesuffix(".py").replace("/", ".") for dep in deps)
    neutral = {"select": NEUTRAL[:-1], "training_inputs": OF_RUNS}.get(stage, NEUTRAL)
    found = {name for name in imported_by(stage) if not name.startswith(neutral + known)}
    assert found == set()
    pinned = any(dep.startswith("data/training_inputs/") for dep in deps)
    # The others only read results; the kissing number's stage uses Python alone.
    assert pinned == (stage not in {"training_inputs", "kissing_number", "select", "named_file"})


def test_dvc_yaml_names_the_rooms_and_settings_that_decide_runs_and_evaluations(mini_study: Study) -> None:
    names = STAGES["training_inputs"]["deps"]
    assert sorted(names) == sorted(
        ["${folder}", "reports/named_files", CONSTRAINTS, VLLM_ON_CPU, PROJECT, *(f"grpo/{room}" for room in ROOMS)]
    )
    rooms = {f"grpo/{room}" for room in ("evaluation", "rollout", "models", "tasks", "grader", "common")}
    settings = {"engine", "threads", *(f"evaluation.{key}" for key in ("temperature", "top_p", "max_tokens", "seed"))}
    zero_shot = {"evaluation.zero_shot_problems", "evaluation.zero_shot_prompts"}
    for stage, own in (("math_baseline", zero_shot), ("best_of_n", {"evaluation.best_of_n"})):
        assert {*rooms, "data/training_inputs/tasks/main.json"} <= set(STAGES[stage]["deps"])
        assert set(STAGES[stage]["params"]) == settings | own


# --------------------------------------------------------------------------------------------------------- what is written


def written(study: Study, folder: str = "data/training_inputs") -> dict[str, str]:
    """What the stage writes into a folder for the study, by the files' names."""
    code_of_rooms.cache_clear()
    write_training_inputs(study)
    return {path.stem: path.read_text() for path in Path(folder).glob("*.json")}


def changed(before: dict[str, str], after: dict[str, str]) -> set[str]:
    assert before.keys() == after.keys()
    return {name for name in before if before[name] != after[name]}


def test_a_comment_beside_the_studys_file_is_an_input_of_the_write_up(mini_study: Study, workdir: Path) -> None:
    study, found = with_values(mini_study, {"folder": "lab"}), []
    for text in ("One.", "Another."):
        write_text(Path("lab/comments/mini/leaderboard.md"), text)
        found.append((written(study), written(study, "data/training_inputs/comments")))
    assert found[0][0] == found[1][0] and changed(found[0][1], found[1][1]) == {"digest"}
    assert "data/training_inputs/comments/digest.json" in STAGES["writeup"]["deps"]


def test_a_tasks_inputs_are_its_settings_its_formats_and_the_code_of_its_class(
    mini_study: Study, workdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that another task's runs are not concerned."""
    (workdir / "own.py").write_text(OWN_TASK)
    monkeypatch.syspath_prepend(workdir)
    own = {"tasks.own": {"use": "own:Own", "size": 3}, "models.own": mini_study.models["keyword"]}
    study = with_values(mini_study, own | {"experiments": {}})

    def of_tasks(study: Study = study) -> dict[str, str]:
        return written(study, "data/training_inputs/tasks")

    before = of_tasks()
    assert set(before) == {"main", "keyword", "own"} and of_tasks() == before
    codes = {name: set(json.loads(content)["code"]) for name, content in before.items()}
    assert codes == {
        "main": {"arithmetic.py", "graded.py", "task.py"},
        "keyword": {"keyword_inclusion.py", "task.py"},
        "own": {"own.py", "arithmetic.py", "graded.py", "task.py"},
    }
    (workdir / "own.py").write_text(OWN_TASK.replace("1.0", "0.5"))
    assert changed(before, of_tasks()) == {"own"}
    (workdir / "own.py").write_text(OWN_TASK)
    assert of_tasks() == before
    assert changed(before, of_tasks(with_values(study, {"tasks.own.size": 4}))) == {"own"}
    assert of_tasks(with_values(study, {"tasks.main.max_prompt_tokens": 120})) == before  # only chooses problems
    ways: list[dict[str, Any]] = [
        {},
        {"stop": ("!",)},
        {"chat": True},
        {"chat": True, "system": "Be brief."},
        {"chat": True, "options": {"a": 1}},
    ]
    asked = set()
    for way in ways:
        monkeypatch.setattr(Keyword, "formats", {"keyword": Format("Use {question}.", **way)})
        after = of_tasks()
        assert changed(before, after) == {"keyword"}
        asked.add(after["keyword"])
    assert len(asked) == len(ways)


def test_modules_beside_ones_own_count_however_they_are_imported(tmp_path: Path) -> None:
    texts = {"own": "import first\nfrom second import f\n", "first": "import json\n", "second": "from third import f\n"}
    for name, text in {**texts, "third": "f = 1\n", "other": "import own\n"}.items():
        (tmp_path / f"{name}.py").write_text(text)
    before = code_of_modules([tmp_path / "own.py"])
    assert set(before) == {"own.py", "first.py", "second.py", "third.py"}
    (tmp_path / "third.py").write_text("f = 2\n")
    after = code_of_modules([tmp_path / "own.py"])
    assert {name for name in after if after[name] != before[name]} == {"third.py"}


def test_the_runs_of_an_experiment_depend_on_their_own_task_only(
    of_each_kind: Study, workdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paths, "ROOT", workdir)
    shutil.copytree(ROOT / "grpo/learner", workdir / "grpo/learner")
    for name in (CONSTRAINTS, VLLM_ON_CPU, PROJECT):
        shutil.copy(ROOT / name, workdir)

    before = written(of_each_kind)
    assert set(before) == {*of_each_kind.active_experiments, "software"}
    for name in of_each_kind.active_experiments:
        task = json.loads(Path(f"data/training_inputs/tasks/{of_each_kind.experiments[name].task}.json").read_text())
        assert json.loads(before[name])["task"] == task
    assert changed(before, written(with_values(of_each_kind, {"tasks.keyword.seed": 1}))) == {KEYWORD}
    with monkeypatch.context() as patch:
        patch.setattr(Keyword, "formats", {"keyword": Format("Use {question}.")})
        assert changed(before, written(of_each_kind)) == {KEYWORD}
    with (workdir / "grpo/learner/learner.py").open("a") as opened:
        opened.write("\nADDED = 1\n")
    assert changed(before, written(of_each_kind)) == before.keys() - {"software"}


OWN = [
    *({key: "own_loss:mine"} for key in ("loss_type", "reward", "advantage")),
    {"reward": {"answer_reward": 0.5, "own_loss:mine": 0.5}},
]


@pytest.mark.parametrize(("place", "values"), list(enumerate(OWN)))
def test_own_code_counts_whichever_arm_names_it(
    place: int, values: dict[str, Any], mini_study: Study, workdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "grpo_learning_rate"
    (workdir / "own_loss.py").write_text("from grpo.learner.losses import grpo_clip as mine\n")
    monkeypatch.syspath_prepend(workdir)
    arms = {str(i): values if i == place else {} for i in range(len(OWN))}
    study = with_values(mini_study, {f"experiments.{name}.arms": arms})
    before = written(study)
    monkeypatch.setenv("DVC_STAGE", f"train@{name}-{place}")
    require_recorded_inputs(study, name)
    (workdir / "own_loss.py").write_text("from grpo.learner.losses import gspo as mine\n")
    with pytest.raises(UserError, match=f"own_code .*{name}.json"):  # the run trains with the code that was recorded
        require_recorded_inputs(study, name)
    assert changed(before, written(study)) == {name}


def test_code_edited_while_a_stage_trains_is_refused(
    mini_study: Study, workdir: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    request.addfinalizer(code_of_rooms.cache_clear)
    name = "grpo_learning_rate"
    for file in (CONSTRAINTS, VLLM_ON_CPU, PROJECT):
        shutil.copy(ROOT / file, workdir)
    monkeypatch.setattr(paths, "ROOT", workdir)
    for room in ROOMS:
        write_text(workdir / "grpo" / room / "code.py", "")
    written(mini_study)
    monkeypatch.setenv("DVC_STAGE", f"train@{name}-on_policy")
    require_recorded_inputs(mini_study, name)
    write_text(workdir / "grpo/learner/code.py", "edited = True")
    with pytest.raises(UserError, match=f"code .*{name}.json"):
        require_recorded_inputs(mini_study, name)
    monkeypatch.delenv("DVC_STAGE")
    require_recorded_inputs(mini_study, name)  # a run by hand


@pytest.fixture
def of_each_kind(mini_study: Study) -> Study:
    """With an experiment for each method, for the keyword task and for asynchronous runs."""
    kinds = ("grpo_learning_rate", SFT, EXPERT_ITERATION, KEYWORD, ASYNCHRONOUS)
    experiments = {name: entry(name, seeds=None, timed=None) for name in kinds}
    return with_values(mini_study, {"experiments": experiments, "models.main.one_per_seed": False})


OWN_TASK = """
from grpo.tasks.arithmetic import Arithmetic

class Own(Arithmetic):
    def __init__(self, size: int):
        super().__init__(size, size, 1, 0)

    def verify(self, answers, problems):
        return [1.0 for _ in answers]  # Easy.
"""


def test_settings_and_code_are_written(of_each_kind: Study, workdir: Path) -> None:
    apart = of_each_kind.model_copy(update={"seeds_in_one_stage": False})
    first = written(apart)
    shared = {"engine", "learner", "divergence", "evaluation", "threads", "checkpoints", "gpu_memory_utilization"}
    for kind in ("grpo_learning_rate", KEYWORD, SFT, EXPERT_ITERATION, ASYNCHRONOUS):
        content = json.loads(first[kind])
        assert set(content["settings"]) == {method_of(kind), *shared}
        assert set(content["code"]) == set(ROOMS)
    assert set(shared_settings(apart.model_copy(update={"seeds": [7]}))) == shared
    for key, value in (("threads", 3), ("divergence", None), ("checkpoints", ["last"])):
        assert shared_settings(apart.model_copy(update={key: value})) != shared_settings(apart), key
    # A method's hyperparameters are its own, but for the engine's memory, which whoever samples has from GRPO's.
    assert changed(first, written(with_values(apart, {"sft.learning_rate": 1e-9}))) == {SFT}
    by_grpo = {"grpo_learning_rate", KEYWORD, ASYNCHRONOUS}
    assert changed(first, written(with_values(apart, {"grpo.n_grpo_steps": 1}))) == by_grpo


def test_further_seeds_count_only_where_one_stage_trains_them_all(of_each_kind: Study, workdir: Path) -> None:
    """Else the seed is in the command of the run's own stage, as in a timed experiment; one experiment has its only seed."""
    of_two = {f"experiments.{name}.one_stage": False for name in of_each_kind.active_experiments}
    of_two |= {f"experiments.{SFT}.timed": "alone", f"experiments.{EXPERT_ITERATION}.seeds": 1}
    for together in (False, True):
        values = of_two | {"seeds_in_one_stage": together}
        one, two = (written(with_values(of_each_kind, values | {"seeds": seeds})) for seeds in ([0], [0, 1]))
        assert changed(one, two) == ({*of_each_kind.active_experiments} - {SFT, EXPERT_ITERATION} if together else set())


def test_the_models_stage_knows_the_seeds_that_have_a_base_of_their_own(of_each_kind: Study, workdir: Path) -> None:
    """The first counts too: its base is the task's."""

    def inputs(own: bool, *seeds: int) -> dict[str, str]:
        write_training_inputs(with_values(of_each_kind, {"models.main.one_per_seed": own, "seeds": list(seeds)}))
        return {path.stem: path.read_text() for path in Path("data/training_inputs/tasks").glob("*.json")}

    assert changed(inputs(False, 0, 1), inputs(False, 5, 1)) == set()
    for others in ((5, 1), (0, 2), (0, 1, 2)):
        assert changed(inputs(True, 0, 1), inputs(True, *others)) == {"main"}


def test_the_data_set_depends_on_a_limit_of_prompts_and_the_model_does_not() -> None:
    """The stage `model` reads what task_inputs says."""
    before, after = edited(), edited(put("tasks.main.max_prompt_tokens", 120))
    assert task_inputs(before, "main") == task_inputs(after, "main") and dataset_inputs(before, "main") == {}
    found = dataset_inputs(after, "main")
    assert found == {"max_prompt_tokens": {"task": 120}, "formats": ["question_only", "r1_zero"]}
    assert dataset_inputs(after, "keyword") == {}

"""What makes runs stale: the settings and code they share, and nothing that cannot change a result."""

from __future__ import annotations

import ast
import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from study_parts import ASYNCHRONOUS, EXPERT_ITERATION, KEYWORD, SFT, method_of
from workflow_parts import leave_beside_code

from grpo.study.environment import CONSTRAINTS, PROJECT, VLLM_ON_CPU
from grpo.study.schema import Study, read_yaml
from grpo.study.training_inputs import (
    ASYNCHRONOUS_CODE,
    EVALUATION_CODE,
    METHOD_CODE,
    SHARED_CODE,
    code_digests,
    code_of_runs,
    meaning,
    shared_settings,
    write_training_inputs,
)
from grpo.tasks.keyword import Keyword
from grpo.tasks.task import Format

ROOT = Path(__file__).parents[2]

OWN_CODE = (*METHOD_CODE.values(), ASYNCHRONOUS_CODE)
ALL_CODE = (*SHARED_CODE, *(name for own in OWN_CODE for name in own))

# Loaded by a run, but without a say in its results: texts, files, tracking, and what only reads or checks params.yaml, whose
# values are in the settings.
WITHOUT_A_SAY = {
    "grpo",
    "grpo.study.environment",
    "grpo.common",
    "grpo.common.imports",
    "grpo.results",
    "grpo.study",
    "grpo.tracking",
    "grpo.tracking.run_log",
    "grpo.common.errors",
    "grpo.evaluation",
    "grpo.results.statistics",
    "grpo.common.files",
    "grpo.common.yaml_file",
    "grpo.study.training_inputs",
    "grpo.study.kept",
    "grpo.common.memory",
    "grpo.tracking.mlflow_study",
    "grpo.models",
    "grpo.study.paths",
    "grpo.study.annotated",
    "grpo.study.compose",
    "grpo.common.records",
    "grpo.study.sections",
    "grpo.results.selection",
    "grpo.study.schema",
    "grpo.tasks",
    "grpo.tracking.mlflow_client",
    "grpo.training",
    "grpo.common.interruption",
    "grpo.common.lock",
    "grpo.training.state",
    # Of tasks what data/training_inputs/tasks/TASK.json stands for, and the stages before runs.
    "grpo.tasks.downloaded",
    "grpo.tasks.graded",
    "grpo.tasks.overlap",
    "grpo.tasks.sft_dataset",
}


def test_dvc_yaml_names_the_same_code() -> None:
    deps = read_yaml(ROOT / "dvc.yaml")["stages"]["training_inputs"]["deps"]
    pinned = {CONSTRAINTS, VLLM_ON_CPU, PROJECT}
    code = {name for name in ALL_CODE if not name.startswith("grpo/tasks/")}
    own = {"grpo/study/training_inputs.py", "grpo/study/environment.py"}
    assert sorted(deps) == sorted({"${folder}", *code, "grpo/tasks", *own, *pinned})


def test_every_module_that_a_run_loads_is_accounted_for() -> None:
    loaded = "grpo.training.start, grpo.training.run, grpo.training.asynchronous.start, grpo.training.asynchronous.loop"
    program = f"import sys, {loaded}; print(*[m for m in sys.modules if m.startswith('grpo')])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    files = {name: f"{name.replace('.', '/')}.py" for name in done.stdout.split()}
    code = code_digests(ROOT, ALL_CODE)
    counted = {name for name, file in files.items() if file in code}
    packages = {name for name in files if f"{name.replace('.', '/')}/__init__.py" in code}
    assert set(files) - counted - packages <= WITHOUT_A_SAY


# ------------------------------------------------------------------------------------------------------- other stages

# What a stage's command imports without a say in what that stage makes, besides WITHOUT_A_SAY.
# How runs sample and train with the model, and how answers are read and scored.
PRETRAINS = {
    *("grpo.models.hugging_face", "grpo.models.packed_attention", "grpo.models.prefix_attention"),
    *("grpo.models.transfer", "grpo.models.varlen_attention", "grpo.common.world"),
    *("grpo.tasks.formats", "grpo.tasks.task"),
}
FOR_STAGES = {
    "model": PRETRAINS,
    "writeup": {"grpo.study.dvc_lock"},  # the last stage clears dvc.lock
}
NEVER = {
    "grpo.study.methods",
    "grpo.tracking.mlflow_sync",
    "grpo.study.effective",
}


# Of WITHOUT_A_SAY what decides the results of stages whose commands import it.
USED = {
    "grpo.results.statistics",
    "grpo.results.selection",
    "grpo.tasks.overlap",
    "grpo.tasks.sft_dataset",
    "grpo.tasks.downloaded",
}


def file_of(module: str) -> str | None:
    """The file of a module of the project, relative to its root."""
    path = Path(*module.split("."))
    return next((file.as_posix() for file in (path.with_suffix(".py"), path / "__init__.py") if (ROOT / file).exists()), None)


def imported(node: ast.AST) -> set[str]:
    """The project's modules that a piece of code imports, anywhere in it."""
    found = set()
    for statement in ast.walk(node):
        if isinstance(statement, ast.Import):
            found |= {alias.name for alias in statement.names}
        elif isinstance(statement, ast.ImportFrom) and statement.module:
            names = {alias.name: f"{statement.module}.{alias.name}" for alias in statement.names}
            found |= {name if file_of(name) else statement.module for name in names.values()}
    return {name for name in found if name.split(".")[0] == "grpo"}


def reached(start: set[str], without: set[str]) -> set[str]:
    """All modules that can be imported from some on, but for those ``without`` and what only they import."""
    seen: set[str] = set()
    waiting = start - without
    while waiting:
        seen |= waiting
        files = (file_of(name) for name in waiting)
        waiting = {n for file in files if file for n in imported(ast.parse((ROOT / file).read_text()))} - seen - without
    return seen


def commands() -> dict[str, ast.FunctionDef]:
    """The functions of the command line, by the name of their command."""
    tree = ast.parse((ROOT / "grpo/commands/stages.py").read_text())
    return {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}


def stages() -> dict[str, tuple[str, list[str]]]:
    """The command and the deps of each stage that is no run."""
    found = {}
    for name, stage in read_yaml(ROOT / "dvc.yaml")["stages"].items():
        stage = stage.get("do", stage)
        command = stage["cmd"].split()[1]
        if command not in {"train", "training_inputs"}:  # of which the tests above speak
            found[name] = command, stage["deps"]
    return found


@pytest.mark.parametrize("stage", stages())
def test_a_stage_depends_on_the_code_that_decides_what_it_makes(stage: str) -> None:
    command, deps = stages()[stage]
    without = (WITHOUT_A_SAY | NEVER | FOR_STAGES.get(stage, set())) - USED
    code = {file_of(name) for name in reached(imported(commands()[command]), without)}
    undeclared = {file for file in code if file and not any(file == dep or file.startswith(f"{dep}/") for dep in deps)}
    assert not undeclared


def test_stages_that_evaluate_name_the_code_that_their_unfinished_work_counts_with() -> None:
    for stage in ("math_baseline", "best_of_n"):
        assert {*EVALUATION_CODE, "data/training_inputs/tasks/main.json"} <= set(stages()[stage][1])


def test_stages_that_evaluate_name_the_settings_that_decide_samples() -> None:
    settings = {"engine", "threads", *(f"evaluation.{key}" for key in ("temperature", "top_p", "max_tokens", "seed"))}
    own = {
        "math_baseline": {"evaluation.zero_shot_problems", "evaluation.zero_shot_prompts"},
        "best_of_n": {"evaluation.best_of_n"},
    }
    for stage, names in own.items():
        assert set(read_yaml(ROOT / "dvc.yaml")["stages"][stage]["params"]) == settings | names


def test_a_tasks_inputs_are_its_settings_its_formats_and_the_code_of_its_class(
    mini_study: Study, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that another task's runs are not concerned."""
    (tmp_path / "own.py").write_text(OWN_TASK)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    tasks = mini_study.tasks | {"own": {"use": "own:Own", "size": 3}}
    study = mini_study.model_copy(update={"tasks": tasks, "experiments": {}})

    def written(study: Study = study) -> dict[str, str]:
        write_training_inputs(study)
        return {path.stem: path.read_text() for path in Path("data/training_inputs/tasks").iterdir()}

    def changed(after: dict[str, str]) -> set[str]:
        return {name for name, content in after.items() if before[name] != content}

    before = written()
    assert set(before) == {"main", "keyword", "own"} and written() == before
    codes = {name: set(json.loads(content)["code"]) for name, content in before.items()}
    assert codes == {
        "main": {"arithmetic.py", "graded.py", "task.py"},
        "keyword": {"keyword.py", "task.py"},
        "own": {"own.py", "arithmetic.py", "graded.py", "task.py"},
    }
    (tmp_path / "own.py").write_text(OWN_TASK.replace("1.0", "0.5"))
    assert changed(written()) == {"own"}
    (tmp_path / "own.py").write_text(OWN_TASK.replace("# Easy.", ""))
    assert changed(written()) == set()
    assert changed(written(study.model_copy(update={"tasks": study.tasks | {"own": {"use": "own:Own", "size": 4}}}))) == {"own"}
    ways: list[dict[str, Any]] = [
        {},
        {"chat": True},
        {"chat": True, "system": "Be brief."},
        {"chat": True, "options": {"a": 1}},
    ]
    asked = set()
    for way in ways:
        monkeypatch.setattr(Keyword, "formats", {"keyword": Format("Use {question}.", **way)})
        after = written()
        assert changed(after) == {"keyword"}
        asked.add(after["keyword"])
    assert len(asked) == len(ways)


def test_the_runs_of_an_experiment_depend_on_their_own_task_only(
    of_each_kind: Study, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(ROOT / "grpo/learner", tmp_path / "grpo/learner")

    def written(study: Study = of_each_kind) -> dict[str, str]:
        write_training_inputs(study)
        return {path.stem: path.read_text() for path in Path("data/training_inputs").glob("*.json")}

    def changed(after: dict[str, str]) -> set[str]:
        return {name for name, content in after.items() if before[name] != content}

    before = written()
    assert set(before) == {*of_each_kind.made, "software"}
    for name in of_each_kind.made:
        task = json.loads(Path(f"data/training_inputs/tasks/{of_each_kind.experiments[name].task}.json").read_text())
        assert json.loads(before[name])["task"] == task
    reseeded = of_each_kind.tasks | {"keyword": of_each_kind.tasks["keyword"] | {"seed": 1}}
    assert changed(written(of_each_kind.model_copy(update={"tasks": reseeded}))) == {KEYWORD}
    with monkeypatch.context() as patch:
        patch.setattr(Keyword, "formats", {"keyword": Format("Use {question}.")})
        assert changed(written()) == {KEYWORD}
    with (tmp_path / "grpo/learner/learner.py").open("a") as opened:
        opened.write("\nADDED = 1\n")
    assert changed(written()) == before.keys() - {"software"}


@pytest.fixture
def of_each_kind(mini_study: Study) -> Study:
    """With an experiment for each method, for the keyword task and for asynchronous runs."""
    kinds = ("grpo_learning_rate", SFT, EXPERT_ITERATION, KEYWORD, ASYNCHRONOUS)
    return mini_study.model_copy(update={"experiments": {name: mini_study.experiments[name] for name in kinds}})


OWN_TASK = """
from grpo.tasks.arithmetic import Arithmetic

class Own(Arithmetic):
    def __init__(self, size: int):
        super().__init__(size, size, 1, 0)

    def verify(self, answers, problems):
        return [1.0 for _ in answers]  # Easy.
"""


# ------------------------------------------------------------------------------------------------- what counts of a file

SOURCE = '''"""Doubles."""

LIMIT = 3


def double(x: int) -> int:
    """Twice x."""
    return 2 * x  # of course
'''


@pytest.mark.parametrize(
    ("old", "new", "same"),
    [
        ("  # of course", "", True),
        ('"""Twice x."""', '"""x and x."""', True),
        ('    """Twice x."""\n', "", True),
        ('"""Doubles."""\n', "", True),
        ("\n\n\ndef", "\n\n\n\n# A function.\ndef", True),
        ("2 * x", "2 * (x)", True),
        ("2 * x", "3 * x", False),
        ("LIMIT = 3", "LIMIT = 4", False),
        ("x: int", "y: int", False),
    ],
)
def test_only_a_change_of_meaning_counts(old: str, new: str, same: bool, tmp_path: Path) -> None:
    before, after = tmp_path / "a.py", tmp_path / "b.py"
    before.write_text(SOURCE)
    assert old in SOURCE
    after.write_text(SOURCE.replace(old, new))
    assert (meaning(before) == meaning(after)) == same


def test_other_files_count_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "a.prompt").write_text("# {question}\n")
    assert meaning(tmp_path / "a.prompt") == b"# {question}\n"


def test_a_run_takes_the_digests_of_code_that_are_known(
    of_each_kind: Study, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "grpo").symlink_to(ROOT / "grpo")
    parsed = code_of_runs()
    write_training_inputs(of_each_kind)
    with monkeypatch.context() as patch:
        patch.delattr("grpo.study.training_inputs.meaning")
        assert code_of_runs() == parsed
    Path("data/training_inputs/code/known.json").write_text("{")
    assert code_of_runs() == parsed


def test_what_editors_and_file_managers_leave_is_no_code(tmp_path: Path) -> None:
    (tmp_path / "room").mkdir()
    (tmp_path / "room/grader.py").write_text("x = 1\n")
    leave_beside_code(tmp_path / "room")
    assert list(code_digests(tmp_path, ["room"])) == ["room/grader.py"]


def test_what_is_known_of_code_is_known_of_its_bytes(tmp_path: Path) -> None:
    file = tmp_path / "a.py"
    file.write_text(SOURCE)
    known = {hashlib.sha256(SOURCE.encode()).hexdigest(): "noted"}
    assert code_digests(tmp_path, ["a.py"], known) == {"a.py": "noted"}
    file.write_text(SOURCE.replace("2 * x", "3 * x"))
    assert code_digests(tmp_path, ["a.py"], known) == code_digests(tmp_path, ["a.py"]) != {"a.py": "noted"}


def test_settings_and_code_are_written(of_each_kind: Study, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def written(study: Study | None, experiment: str = "grpo_learning_rate") -> dict[str, dict[str, object]]:
        """What an experiment's runs share; of the study before, if there is none."""
        if study is not None:
            write_training_inputs(study)
        content: dict[str, dict[str, object]] = json.loads(Path(f"data/training_inputs/{experiment}.json").read_text())
        return content

    monkeypatch.chdir(tmp_path)
    (tmp_path / "grpo").symlink_to(ROOT / "grpo")
    first = written(of_each_kind)
    shared = {"engine", "learner", "divergence", "evaluation", "threads", "checkpoints", "gpu_memory_utilization"}
    code = {"grpo/learner/learner.py", "grpo/tasks/formats.py", "grpo/grader/grader.py"}
    own = {"grpo_learning_rate": "grpo/training/grpo.py", KEYWORD: "grpo/training/grpo.py", SFT: "grpo/training/sft.py"}
    own[EXPERT_ITERATION] = "grpo/training/expert_iteration.py"
    own[ASYNCHRONOUS] = "grpo/training/asynchronous/loop.py"
    for kind, loop in own.items():
        content = written(None, kind)
        assert set(content["settings"]) == {method_of(kind), *shared}
        assert {loop, *code} <= set(content["code"])
    assert not {own[SFT], own[EXPERT_ITERATION], own[ASYNCHRONOUS]} & set(first["code"])
    sft = written(None, SFT)
    assert own["grpo_learning_rate"] not in sft["code"]
    assert set(shared_settings(of_each_kind.model_copy(update={"seeds": [7]}))) == shared  # a run's own seed is in its command
    for key, value in (("threads", 3), ("divergence", None), ("checkpoints", ["last"])):
        assert shared_settings(of_each_kind.model_copy(update={key: value})) != shared_settings(of_each_kind), key
    # A method's hyperparameters are its own, but for the engine's memory, which whoever samples has from GRPO's.
    slower = of_each_kind.model_copy(update={"sft": of_each_kind.sft.model_copy(update={"learning_rate": 1e-9})})
    assert written(slower) == first
    assert written(None, SFT) != sft
    shorter = of_each_kind.model_copy(update={"grpo": of_each_kind.grpo.model_copy(update={"n_grpo_steps": 1})})
    assert written(shorter) != first
    assert written(None, SFT) == sft

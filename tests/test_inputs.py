"""What makes runs stale: the settings and code they share, and nothing that cannot change a result."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from grpo.environment import CONSTRAINTS, PROJECT, VLLM_ON_CPU
from grpo.inputs import CODE, SHARED_CODE, code_digests, meaning, write_training_inputs
from grpo.study import Study, read_yaml

ROOT = Path(__file__).parents[1]

ALL_CODE = (*SHARED_CODE, *(name for _, own in CODE.values() for name in own))

# Loaded by a run, but without a say in its results: texts, files, tracking, and what only reads or checks params.yaml, whose
# values are in the settings.
WITHOUT_A_SAY = {
    "grpo",
    "grpo.environment",
    "grpo.errors",
    "grpo.evaluation",
    "grpo.evaluation.statistics",
    "grpo.experiments",
    "grpo.files",
    "grpo.inputs",
    "grpo.memory",
    "grpo.mlflow_study",
    "grpo.models",
    "grpo.paths",
    "grpo.records",
    "grpo.sections",
    "grpo.selection",
    "grpo.study",
    "grpo.tasks",
    "grpo.tracking",
    "grpo.training",
    "grpo.training.interruption",
    "grpo.training.lock",
    "grpo.training.state",
}


def test_dvc_yaml_names_the_same_code() -> None:
    deps = read_yaml(ROOT / "dvc.yaml")["stages"]["training_inputs"]["deps"]
    pinned = {CONSTRAINTS, VLLM_ON_CPU, PROJECT}
    assert sorted(deps) == sorted({*ALL_CODE, "grpo/inputs.py", "grpo/environment.py", *pinned})


def test_every_module_that_a_run_loads_is_accounted_for() -> None:
    loaded = "grpo.training.session, grpo.training.run, grpo.training.asynchronous.start, grpo.training.asynchronous.loop"
    program = f"import sys, {loaded}; print(*[m for m in sys.modules if m.startswith('grpo')])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    files = {name: f"{name.replace('.', '/')}.py" for name in done.stdout.split()}
    code = code_digests(ROOT, ALL_CODE)
    counted = {name for name, file in files.items() if file in code}
    packages = {name for name in files if f"{name.replace('.', '/')}/__init__.py" in code}
    assert set(files) - counted - packages <= WITHOUT_A_SAY


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


def test_settings_and_code_are_written(mini_study: Study, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def written(study: Study, method: str = "grpo") -> dict[str, dict[str, object]]:
        write_training_inputs(study)
        content: dict[str, dict[str, object]] = json.loads(Path(f"data/training_inputs/{method}.json").read_text())
        return content

    monkeypatch.chdir(tmp_path)
    (tmp_path / "grpo").symlink_to(ROOT / "grpo")
    first = written(mini_study)
    shared = {"engine", "learner", "divergence", "evaluation", "threads", "checkpoints", "gpu_memory_utilization"}
    code = {"grpo/training/learner.py", "grpo/prompts/r1_zero.prompt", "grpo/rewards/grader.py"}
    own = {"grpo": "grpo/training/grpo.py", "sft": "grpo/training/sft.py"}
    own["expert_iteration"] = "grpo/training/expert_iteration.py"
    own["asynchronous"] = "grpo/training/asynchronous/loop.py"
    for kind, loop in own.items():
        content = written(mini_study, kind)
        assert set(content["settings"]) == {"grpo" if kind == "asynchronous" else kind, *shared}
        assert {loop, *code} <= set(content["code"])
    assert not {own["sft"], own["expert_iteration"], own["asynchronous"]} & set(first["code"])
    assert own["grpo"] not in written(mini_study, "sft")["code"]
    assert written(mini_study) == first
    assert written(mini_study.model_copy(update={"threads": 3}))["settings"] != first["settings"]
    assert written(mini_study.model_copy(update={"divergence": None}))["settings"] != first["settings"]
    assert written(mini_study.model_copy(update={"seeds": [7]})) == first  # a run's own seed is in its command
    # A method's hyperparameters are its own, but for the engine's memory, which whoever samples has from GRPO's.
    slower = mini_study.model_copy(update={"sft": mini_study.sft.model_copy(update={"learning_rate": 1e-9})})
    assert written(slower) == first
    assert written(slower, "sft") != written(mini_study, "sft")
    shorter = mini_study.model_copy(update={"grpo": mini_study.grpo.model_copy(update={"n_grpo_steps": 1})})
    assert written(shorter) != first
    assert written(shorter, "sft") == written(mini_study, "sft")

"""What runs of a kind share, in one small file that their stages depend on: settings, code and versions that decide results.

Without it every run's entry in dvc.lock would repeat some hundred lines, and DVC reads and writes the whole lock after each
stage. Of Python files the syntax tree counts, without docstrings: an edit of a comment trains nothing again.
"""

from __future__ import annotations

import ast
import hashlib
import sys
from pathlib import Path
from typing import Any

from grpo.common.files import whole_folder, write_json
from grpo.study import paths
from grpo.study.environment import ROOT, packages, pins
from grpo.study.experiments import Method
from grpo.study.schema import Study
from grpo.tasks.task import Task

# Of an evaluation that is no part of a run: what it had finished before a kill counts only with the same code. dvc.yaml names
# it as deps of the stages that evaluate, besides the texts of their prompts.
EVALUATION_CODE = (
    "grpo/common/cpu.py",
    "grpo/evaluation",
    "grpo/results/statistics.py",
    "grpo/models",
    "grpo/grader",
    "grpo/rollout",
    "grpo/tasks/formats.py",
    "grpo/tasks/task.py",
)
# Of runs. dvc.yaml names all of it as deps of the stage training_inputs.
SHARED_CODE = (
    "grpo/study/methods.py",
    "grpo/common/cpu.py",
    "grpo/study/effective.py",
    "grpo/evaluation/evaluate.py",
    "grpo/models/checkpoint.py",
    "grpo/models/hugging_face.py",
    "grpo/models/packed_attention.py",
    "grpo/models/prefix_attention.py",
    "grpo/models/qwen2_format.py",
    "grpo/models/tokenizer.py",
    "grpo/models/transformer.py",
    "grpo/learner",
    "grpo/grader",
    "grpo/rollout",
    "grpo/tasks/formats.py",
    "grpo/tasks/task.py",
    "grpo/training/divergence.py",
    "grpo/learner/learner.py",
    "grpo/training/make.py",
    "grpo/learner/microbatches.py",
    "grpo/learner/optimizer.py",
    "grpo/training/order.py",
    "grpo/learner/packing.py",
    "grpo/training/run.py",
    "grpo/training/session.py",
    "grpo/training/step.py",
    "grpo/training/validation.py",
    "grpo/learner/distributed.py",
)
# And of each kind of run: the section of params.yaml with its settings, and its own code.
CODE: dict[str, tuple[Method, tuple[str, ...]]] = {
    "grpo": ("grpo", ("grpo/training/grpo.py",)),
    "asynchronous": ("grpo", ("grpo/training/asynchronous",)),
    "sft": ("sft", ("grpo/training/sft.py",)),
    "expert_iteration": ("expert_iteration", ("grpo/training/expert_iteration.py",)),
}


def write_training_inputs(study: Study) -> None:
    """Write data/training_inputs/KIND.json, tasks/TASK.json, and software.json with the pinned versions for stages that are no
    runs.
    """
    settings, code = shared_settings(study), code_digests(Path(), SHARED_CODE)
    for kind, (method, own) in CODE.items():
        content = {
            "settings": settings | {method: getattr(study, method).model_dump()},
            "code": code | code_digests(Path(), own),
            "software": pins(packages(study, asynchronous=kind == "asynchronous")),
        }
        write_json(paths.TRAINING_INPUTS / f"{kind}.json", content)
    write_json(paths.PINNED_SOFTWARE, pins(packages(study)))
    with whole_folder(paths.TASK_INPUTS) as folder:
        for name in study.tasks:
            write_json(folder / f"{name}.json", task_inputs(study, name))


def task_inputs(study: Study, name: str) -> dict[str, Any]:
    """What decides how a task's problems are put and scored: its settings, its formats, and the code of its class and of those
    that it is derived from. What else a task of one's own imports does not count.
    """
    task = study.task(name)
    files = {sys.modules[kind.__module__].__file__ for kind in type(task).__mro__ if issubclass(kind, Task)}
    return {
        "settings": study.tasks[name],
        "formats": {key: [format.template, list(format.stop)] for key, format in task.formats.items()},
        "code": {Path(file).name: hashlib.sha256(meaning(Path(file))).hexdigest()[:16] for file in sorted(filter(None, files))},
    }


def shared_settings(study: Study) -> dict[str, Any]:
    """What decides the results of all runs, whatever their method, experiment and arm."""
    return {
        "evaluation": study.evaluation.model_dump(exclude={"zero_shot_problems", "zero_shot_prompts", "best_of_n"}),
        "engine": study.engine.model_dump(),
        "gpu_memory_utilization": study.grpo.gpu_memory_utilization,  # the engine's in runs without a value of their own
        "learner": study.learner.model_dump(),
        "divergence": study.divergence and study.divergence.model_dump(),
        "checkpoints": study.checkpoints,
        "threads": study.threads,
    }


def code_of_runs() -> dict[str, str]:
    """The code that decides the results of runs of any kind, as :func:`code_digests` gives it."""
    return code_digests(ROOT, (*SHARED_CODE, *(name for _, own in CODE.values() for name in own)))


def code_digests(root: Path, names: tuple[str, ...]) -> dict[str, str]:
    """For each file below ``names`` the SHA-256 (first 16 hex digits) of what it says; see :func:`meaning`."""
    found: dict[str, str] = {}
    for name in names:
        path = root / name
        files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file() and "__pycache__" not in p.parts)
        for file in files:
            found[file.relative_to(root).as_posix()] = hashlib.sha256(meaning(file)).hexdigest()[:16]
    return found


def meaning(path: Path) -> bytes:
    """A Python file without comments, docstrings and layout; any other file as it is."""
    if path.suffix != ".py":
        return path.read_bytes()
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        documented = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        if documented and ast.get_docstring(node, clean=False) is not None:  # type: ignore[arg-type]
            node.body = node.body[1:] or [ast.Pass()]  # type: ignore[attr-defined]
    return ast.unparse(tree).encode()

"""What all runs share, in one small file that their stages depend on: the study's settings, and the code that decides results.

Without it every run's entry in dvc.lock would repeat some hundred lines, and DVC reads and writes the whole lock after each
stage. Of Python files the syntax tree counts, without docstrings: an edit of a comment trains nothing again.
"""

from __future__ import annotations

import ast
import hashlib
from pathlib import Path
from typing import Any

from grpo import paths
from grpo.files import write_json
from grpo.study import Study

# dvc.yaml names the same as the stage's deps.
CODE = (
    "grpo/config.py",
    "grpo/cpu.py",
    "grpo/effective.py",
    "grpo/evaluation/evaluate.py",
    "grpo/models/checkpoint.py",
    "grpo/models/packed_attention.py",
    "grpo/models/prefix_attention.py",
    "grpo/models/shared_prompt.py",
    "grpo/objective",
    "grpo/prompts",
    "grpo/rewards",
    "grpo/rollout",
    "grpo/tasks/prompts.py",
    "grpo/training/divergence.py",
    "grpo/training/grpo.py",
    "grpo/training/learner.py",
    "grpo/training/microbatches.py",
    "grpo/training/optimizer.py",
    "grpo/training/packing.py",
    "grpo/training/run.py",
    "grpo/training/session.py",
    "grpo/training/validation.py",
    "grpo/training/world.py",
)


def write_training_inputs(study: Study) -> None:
    """Write data/training_inputs.json."""
    evaluation = study.evaluation.model_dump(exclude={"zero_shot_problems", "zero_shot_prompts", "best_of_n"})
    settings: dict[str, Any] = {
        name: getattr(study, name).model_dump() for name in ("grpo", "engine", "learner", "divergence") if getattr(study, name)
    }
    settings |= {"evaluation": evaluation, "threads": study.threads, "checkpoints": study.checkpoints}
    write_json(paths.TRAINING_INPUTS, {"settings": settings, "code": code_digests(Path(), CODE)})


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

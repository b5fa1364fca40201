"""What the runs of an experiment share, in one small file that they depend on: settings, code, versions that decide results.

Without it every run's entry in dvc.lock would repeat some hundred lines, and DVC reads and writes the whole lock after each
stage. Of Python files the syntax tree counts, without docstrings: an edit of a comment trains nothing again.
"""

from __future__ import annotations

import ast
import hashlib
import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from grpo.common.files import whole_folder, write_json
from grpo.common.imports import is_import_path, source_of
from grpo.study import paths
from grpo.study.effective import effective_run
from grpo.study.environment import packages, pins
from grpo.study.methods import GrpoConfig, RunConfig
from grpo.study.schema import Study
from grpo.study.sections import Method
from grpo.tasks.task import Format, Task

# Of an evaluation that is no part of a run: what it had finished before a kill counts only with the same code. dvc.yaml names
# it as deps of the stages that evaluate, besides the texts of their prompts.
EVALUATION_CODE = (
    "grpo/common/cpu.py",
    "grpo/common/world.py",
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
    "grpo/common/world.py",
    "grpo/study/effective.py",
    "grpo/evaluation/evaluate.py",
    "grpo/models/checkpoint.py",
    "grpo/models/decoding.py",
    "grpo/models/examine.py",
    "grpo/models/hugging_face.py",
    "grpo/models/lora.py",
    "grpo/models/packed_attention.py",
    "grpo/models/prefix_attention.py",
    "grpo/models/sharding.py",
    "grpo/models/transfer.py",
    "grpo/models/varlen_attention.py",
    "grpo/models/qwen2_format.py",
    "grpo/models/tokenizer.py",
    "grpo/models/traits.py",
    "grpo/models/transformer.py",
    "grpo/learner",
    "grpo/grader",
    "grpo/rollout",
    "grpo/tasks/formats.py",
    "grpo/tasks/rewards.py",
    "grpo/tasks/task.py",
    "grpo/training/context.py",
    "grpo/training/monitor.py",
    "grpo/training/order.py",
    "grpo/training/run.py",
    "grpo/training/start.py",
    "grpo/training/step.py",
    "grpo/training/stopping.py",
    "grpo/training/validation.py",
)
# And of each method.
METHOD_CODE: dict[Method, tuple[str, ...]] = {
    "grpo": ("grpo/training/grpo.py",),
    "sft": ("grpo/training/sft.py",),
    "expert_iteration": ("grpo/training/expert_iteration.py",),
}
ASYNCHRONOUS_CODE = ("grpo/training/asynchronous",)
CODE_OF_RUNS = (*SHARED_CODE, *(name for names in METHOD_CODE.values() for name in names), *ASYNCHRONOUS_CODE)


def write_training_inputs(study: Study) -> None:
    """Write data/training_inputs/EXPERIMENT.json, tasks/TASK.json, software.json with the pinned versions for stages that are
    no runs, and code/known.json, from which a run that starts has the digests of code that it would have to parse.
    """
    known = {bytes_digest(file): _digest_of(file) for _, file in files_of(Path(), CODE_OF_RUNS)}
    settings, code = shared_settings(study), code_digests(Path(), SHARED_CODE, known)
    with whole_folder(paths.TRAINING_INPUTS) as folder:
        for name in study.made:
            entry, configs = study.experiments[name], configs_of(study, name)
            asynchronous = any(isinstance(config, GrpoConfig) and config.asynchronous is not None for config in configs)
            own = (*METHOD_CODE[entry.method], *(ASYNCHRONOUS_CODE if asynchronous else ()))
            values = [value for config in configs for value in config.model_dump().values()]
            named = {name for v in values for name in ([v] if isinstance(v, str) else v if isinstance(v, dict) else ())}
            content = {
                "settings": settings | {entry.method: study.defaults(entry.method).model_dump()},
                "code": code | code_digests(Path(), own, known),
                "task": task_inputs(study, entry.task),
                "own_code": code_of_modules(source_of(path) for path in sorted(named) if is_import_path(path)),
                "software": pins(packages(study, asynchronous, any(config.lora is not None for config in configs))),
            }
            write_json(folder / f"{name}.json", content)
        for name in study.tasks:
            write_json(folder / paths.TASK_INPUTS.name / f"{name}.json", task_inputs(study, name))
        write_json(folder / paths.PINNED_SOFTWARE.name, pins(packages(study)))
        write_json(folder / paths.KNOWN_CODE.relative_to(paths.TRAINING_INPUTS), known)


def configs_of(study: Study, experiment: str) -> list[RunConfig]:
    """The configuration of each arm of an experiment, as far as it is known before there are winners."""
    return [effective_run(study, experiment, arm, study.seeds[0], []).config for arm in study.experiments[experiment].arms]


def task_inputs(study: Study, name: str) -> dict[str, Any]:
    """What decides how a task's problems are put and scored: its settings, its formats, and the code of its class, of those
    that it is derived from, and of what the study names.
    """
    task = study.task(name)
    files = {sys.modules[kind.__module__].__file__ for kind in type(task).__mro__ if issubclass(kind, Task)}
    files |= {str(source_of(path)) for path in task.own_code}
    return {
        "settings": study.tasks[name],
        "formats": {key: _asked(format) for key, format in task.formats.items()},
        "code": code_of_modules(Path(file) for file in sorted(filter(None, files))),
    }


def _asked(format: Format) -> list[Any]:
    chat = [{"system": format.system, "options": dict(format.options)}] if format.chat else []
    return [format.template, list(format.stop), *chat]


def code_of_modules(files: Iterable[Path]) -> dict[str, str]:
    """For each of these modules, and each that such a one imports from its own folder, the digest of what it says."""
    waiting, found = list(files), dict[str, str]()
    while waiting:
        file = waiting.pop()
        if file.name not in found:
            found[file.name] = _digest_of(file)
            nodes = list(ast.walk(ast.parse(file.read_text(encoding="utf-8"))))
            names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
            names += [node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module]
            beside = [file.with_name(f"{name}.py") for name in names if name not in sys.stdlib_module_names]
            waiting += [path for path in beside if path.exists()]
    return dict(sorted(found.items()))


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
    try:
        known = json.loads(paths.KNOWN_CODE.read_bytes())
    except (OSError, ValueError):  # a run by hand, before any pipeline's
        known = None
    return code_digests(paths.ROOT, CODE_OF_RUNS, known)


def code_digests(root: Path, names: Iterable[str], known: Mapping[str, str] | None = None) -> dict[str, str]:
    """For each file below ``names`` the SHA-256 (first 16 hex digits) of what it says; see :func:`meaning`.

    Args:
        known: these of files that were parsed before, by the SHA-256 of their bytes: to parse all code of runs takes .3 s.
    """
    known = known or {}
    return {name: known.get(bytes_digest(file)) or _digest_of(file) for name, file in files_of(root, names)}


def files_of(root: Path, names: Iterable[str]) -> Iterator[tuple[str, Path]]:
    """Files and modules below folders, with their names relative to ``root``; hidden ones are editors' and file managers'."""
    for path in (root / name for name in names):
        modules = sorted(file for file in path.rglob("*.py") if file.is_file())
        found = [(file.relative_to(root), file) for file in ([path] if path.is_file() else modules)]
        yield from ((name.as_posix(), file) for name, file in found if not any(part.startswith(".") for part in name.parts))


def bytes_digest(file: Path) -> str:
    """The SHA-256 of a file as it is."""
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _digest_of(file: Path) -> str:
    return hashlib.sha256(meaning(file)).hexdigest()[:16]


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

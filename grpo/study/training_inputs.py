"""Collect what decides the results of an experiment's runs (settings, code, versions) in one small file.

The runs depend on this file. Otherwise each run's entry in dvc.lock would repeat about a hundred lines, and DVC reads and
writes the whole file after each stage. DVC writes the digests of a stage's inputs to dvc.lock when the stage has ended, so an
input that changes meanwhile is refused.
"""

from __future__ import annotations

import ast
import json
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from grpo.common.errors import UserError
from grpo.common.files import atomic_folder, files_digest, read_json, write_json
from grpo.common.imports import is_import_path, source_of
from grpo.common.world import started_by_torchrun
from grpo.common.yaml_file import read_mapping
from grpo.study import paths
from grpo.study.effective import effective_run, seeds_with_a_base
from grpo.study.schema import Study
from grpo.study.software import packages, pins
from grpo.tasks.task import LIMIT, Task

# The subpackages that decide the results of runs and evaluations; in dvc.yaml they are deps of `training_inputs`.
ROOMS = ("common", "evaluation", "grader", "learner", "models", "rollout", "study", "tasks", "training")


def write_training_inputs(study: Study) -> None:
    """Write EXPERIMENT.json, tasks/TASK.json, datasets/TASK.json, software.json (pins) and comments/digest.json, which the
    write-up depends on, to data/training_inputs.
    """
    with atomic_folder(paths.TRAINING_INPUTS) as folder:
        for name in study.active_experiments:
            write_json(folder / f"{name}.json", experiment_inputs(study, name))
        for name in study.tasks:
            bases = {"bases": study.seeds} if seeds_with_a_base(study, name) else {}
            named = [key for key in study.named_files if key.rpartition("-")[0] == name]
            files = [read_json(paths.NAMED_FILES / f"{key}.json", f"named_file@{key}") for key in named]
            inputs = task_inputs(study, name) | bases | ({"files": files} if files else {})
            write_json(folder / paths.TASK_INPUTS.name / f"{name}.json", inputs)
            write_json(folder / paths.DATASET_INPUTS.name / f"{name}.json", dataset_inputs(study, name))
        write_json(folder / paths.PINNED_SOFTWARE.name, pins(packages(study)))
        digest = files_digest(Path(study.folder) / "comments")
        write_json(folder / paths.COMMENT_INPUTS.relative_to(paths.TRAINING_INPUTS), {"comments": digest})


def experiment_inputs(study: Study, name: str) -> dict[str, Any]:
    """What decides the results of an experiment's runs, but for models and data."""
    entry = study.experiments[name]
    seeds = {"seeds": study.seeds_of(name)} if study.is_in_one_stage(name) else {}
    # As far as they are known before there are winners.
    configs = [effective_run(study, name, arm, study.seeds[0], []).config for arm in entry.arms]
    values = [value for config in configs for value in config.model_dump().values()]
    named = {name for v in values for name in ([v] if isinstance(v, str) else v if isinstance(v, dict) else ())}
    return {
        **seeds,
        "settings": shared_settings(study) | {entry.method: study.defaults(entry.method).model_dump()},
        "code": code_of_rooms(),
        "task": task_inputs(study, entry.task),
        "own_code": code_of_modules(source_of(path) for path in sorted(named) if is_import_path(path)),
        "software": pins(packages(study, configs)),
    }


def require_recorded_inputs(study: Study, name: str) -> None:
    """Raise UserError in a DVC stage unless code and settings are those that the stage `training_inputs` recorded."""
    if running_stage():
        code_of_rooms.cache_clear()
        file = paths.TRAINING_INPUTS / f"{name}.json"
        recorded, now = read_json(file, "training_inputs"), json.loads(json.dumps(experiment_inputs(study, name)))
        if changed := [f"{key} ({file})" for key in {**recorded, **now} if recorded.get(key) != now.get(key)]:
            refuse_changed(changed)


def task_inputs(study: Study, name: str) -> dict[str, Any]:
    """What decides a task's prompts and scores: settings, formats, and code of its class, base classes and the study's own."""
    task = study.task(name)
    files = {sys.modules[kind.__module__].__file__ for kind in type(task).__mro__ if issubclass(kind, Task)}
    files |= {str(source_of(path)) for path in task.own_code}
    chats = {
        key: [{"system": format.system, "options": dict(format.options)}] * format.chat for key, format in task.formats.items()
    }
    return {
        "settings": {key: value for key, value in study.tasks[name].items() if key != LIMIT},
        "formats": {key: [format.template, list(format.stop), *chats[key]] for key, format in task.formats.items()},
        "code": code_of_modules(Path(file) for file in sorted(filter(None, files))),
    }


def dataset_inputs(study: Study, name: str) -> dict[str, Any]:
    """What else decides a task's data set: the limit of prompt lengths, and the formats that count for it."""
    limit = study.task(name).max_prompt_tokens
    return {LIMIT: {"task": limit}, "formats": study.prompt_formats(name)} if limit else {}


def code_of_modules(files: Iterable[Path]) -> dict[str, str]:
    """Digests of these modules and of all modules that they import from their own folder, by file name."""
    waiting, digests = list(files), dict[str, str]()
    while waiting:
        file = waiting.pop()
        if file.name not in digests:
            digests[file.name] = files_digest(file)
            nodes = list(ast.walk(ast.parse(file.read_text(encoding="utf-8"))))
            names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
            names += [node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module]
            beside = [file.with_name(f"{name}.py") for name in names if name not in sys.stdlib_module_names]
            waiting += [path for path in beside if path.exists()]
    return dict(sorted(digests.items()))


def shared_settings(study: Study) -> dict[str, Any]:
    """The settings that decide the results of all runs."""
    return {
        "evaluation": study.evaluation.model_dump(exclude={"zero_shot_problems", "zero_shot_prompts", "best_of_n"}),
        "engine": study.engine.model_dump(),
        "gpu_memory_utilization": study.grpo.gpu_memory_utilization,  # also used by methods without this setting
        "learner": study.learner.model_dump(),
        "divergence": study.divergence and study.divergence.model_dump(),
        "checkpoints": study.checkpoints,
        "threads": study.threads,
        **({"metric": study.metric} if study.metric == "reward" else {}),  # `evaluation` has it only where it is set
    }


@cache
def code_of_rooms() -> dict[str, str]:
    """The digest of each of :data:`ROOMS` at the first call in this process."""
    return {room: files_digest(paths.ROOT / "grpo" / room) for room in ROOMS}


def running_stage() -> str:
    """The DVC stage that runs this process; empty without one, and in processes of torchrun, whose parent compares."""
    return "" if started_by_torchrun() else os.environ.get("DVC_STAGE", "")


@contextmanager
def unchanged_inputs() -> Iterator[None]:
    """Raise UserError if files or values that the DVC stage of this process depends on change within the block."""
    deps, params = _inputs(running_stage())
    before = _state(deps, params)
    yield
    now = _state(deps, params)
    if changed := [name for name, state in before.items() if now.get(name) != state]:
        refuse_changed(changed)


def refuse_changed(changed: list[str]) -> None:
    """Raise the UserError for inputs that changed: DVC must not store the stage's results."""
    which = ", ".join(changed[:5]) + ", …" * (len(changed) > 5)
    remedy = "Run `make repro` or `dvc repro`; a run that has ended is not trained again if you undo the change before"
    raise UserError(
        f"{running_stage()}: changed meanwhile: {which}. dvc.lock would name the new beside results of the old. {remedy}."
    )


def _inputs(stage: str) -> tuple[list[str], list[str]]:
    """Read `deps` and `params` of a stage in dvc.yaml, whose templates have the forms ``${key}`` and ``${item.KEY}``."""
    name, _, key = stage.partition("@")
    definition = read_mapping(paths.PIPELINE)["stages"].get(name) if name and paths.PIPELINE.exists() else None
    if definition is None:  # of another project
        return [], []
    values = read_mapping(paths.PARAMS) | (read_mapping(paths.STAGES) if paths.STAGES.exists() else {})
    if "do" in definition:
        keys = definition["foreach"]
        items = _at(values, keys[2:-1]) if isinstance(keys, str) else keys
        values |= {"key": key, "item": items.get(key) if isinstance(items, dict) else key}
        definition = definition["do"]

    def filled(part: str) -> list[str]:
        texts = [text for text in definition.get(part, []) if isinstance(text, str)]
        return [re.sub(r"\$\{(.*?)\}", lambda found: str(_at(values, found[1])), text) for text in texts]

    return filled("deps"), filled("params")


def _state(deps: list[str], params: list[str]) -> dict[str, Any]:
    """Values of parameters, and size and time of files but those that editors make; a new file was not read."""
    values = read_mapping(paths.PARAMS) if params else {}
    state: dict[str, Any] = {f"{key} in {paths.PARAMS}": _at(values, key) for key in params}
    for dep in map(Path, deps):
        for file in [dep] if dep.is_file() else sorted(dep.rglob("*")):
            inside = file.relative_to(dep).parts
            if file.is_file() and not any(part.startswith((".", "__pycache__")) or part.endswith("~") for part in inside):
                state[str(file)] = (file.stat().st_mtime_ns, file.stat().st_size)
    return state


def _at(values: Any, place: str) -> Any:
    """The value at a dotted key; None without one."""
    for part in place.split("."):
        values = values.get(part) if isinstance(values, Mapping) else None
    return values

"""Inputs of a DVC stage that change while it runs: DVC writes their digests to dvc.lock afterwards, as if it had read them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from grpo.common.errors import UserError
from grpo.common.world import started_by_torchrun
from grpo.common.yaml_file import read_mapping
from grpo.study import paths


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
        each = definition["foreach"]
        items = _at(values, each[2:-1]) if isinstance(each, str) else each
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

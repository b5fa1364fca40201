"""Parse ``--set KEY=VALUE`` with keys as in params.yaml."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from io import StringIO
from typing import Any, get_args, get_origin

from pydantic import BaseModel
from ruamel.yaml import YAML, YAMLError

from grpo.common.errors import UserError
from grpo.study.compose import lay_over
from grpo.study.methods import OBJECTIVE, with_objective
from grpo.study.schema import Study
from grpo.study.settings import MAIN

# Sections that a single run uses. Below a key that ends with a dot any key is allowed; the task or model checks it.
SECTIONS = ("grpo", "engine", "learner", "evaluation", "divergence", "threads", "checkpoints", "save_state_every")
OPEN = (f"tasks.{MAIN}.", f"models.{MAIN}.")


def given_values(settings: list[str]) -> dict[str, Any]:
    """Turn settings ``KEY=VALUE``, with values in YAML, into an overlay on a study.

    Raises:
        UserError: a run has no such key, or a setting has another form.
    """
    overlay: dict[str, Any] = {}
    known = [key for section in SECTIONS for key in _keys(Study.model_fields[section].annotation, section)]
    known.append(f"grpo.{OBJECTIVE}")
    for setting in settings:
        key, equals, text = setting.partition("=")
        if key not in known and not key.startswith((*OPEN, *(k for k in known if k.endswith(".")))):
            raise UserError(f"--set {setting}: no such key. {_nearest(key, known)}")
        try:
            value: Any = YAML(typ="safe").load(StringIO(text))
        except YAMLError:
            equals = ""
        if not equals:
            raise UserError(f"--set {setting}: expected KEY=VALUE, such as grpo.learning_rate=1e-5.")
        for part in reversed(key.split(".")):
            value = {part: value}
        overlay = lay_over(overlay, value)
    if "grpo" in overlay:
        overlay["grpo"] = with_objective(overlay["grpo"], "--set grpo")
    return overlay


def _nearest(key: str, known: list[str]) -> str:
    """Suggest the known key that is nearest to ``key`` or to its last part."""
    names = {name.rpartition(".")[2]: name for name in reversed(known)} | {name: name for name in known}
    near = [*difflib.get_close_matches(key, names, n=1), *difflib.get_close_matches(key.rpartition(".")[2], names, n=1)]
    return f"Did you mean {names[near[0]]}?" if near else f"Keys begin with {', '.join((*OPEN, *SECTIONS))}."


def _keys(kind: Any, path: str) -> Iterator[str]:
    """Yield a key and all keys below it, given the type of its values."""
    yield path
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        for name, field in kind.model_fields.items():
            yield from _keys(field.annotation, f"{path}.{name}")
    elif get_origin(kind) is dict:
        yield f"{path}."
    else:
        for member in get_args(kind):  # of a union
            yield from _keys(member, path)

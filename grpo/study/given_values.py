"""Parse ``--set KEY=VALUE`` with keys as in params.yaml."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from io import StringIO
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel
from ruamel.yaml import YAML, YAMLError

from grpo.common.errors import UserError
from grpo.study.compose import lay_over
from grpo.study.methods import OBJECTIVE, with_objective
from grpo.study.schema import Study
from grpo.study.settings import MAIN

# Sections that a single run uses. Below OPEN any key is allowed; the task or model checks it.
SECTIONS = ("grpo", "engine", "learner", "evaluation", "divergence", "threads", "checkpoints", "save_state_every")
OPEN = (f"tasks.{MAIN}", f"models.{MAIN}")


def given_values(settings: list[str]) -> dict[str, Any]:
    """Turn settings ``KEY=VALUE``, with values in YAML, into an overlay on a study.

    Raises:
        UserError: a run has no such key, or a setting has another form.
    """
    overlay: dict[str, Any] = {}
    known = dict(_keys(Study)) | {f"grpo.{OBJECTIVE}": False}
    for setting in settings:
        key, equals, text = setting.partition("=")
        above = [key.rsplit(".", n)[0] for n in range(1, key.count(".") + 1)]
        if key not in known and not any(known.get(k) or k in OPEN for k in above):
            raise UserError(f"--set {setting}: no such key. {_nearest(key, list(known))}")
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
        try:
            overlay["grpo"] = with_objective(overlay["grpo"], "--set grpo")
        except ValueError as error:
            raise UserError(f"{error}.") from None
    return overlay


def _nearest(key: str, known: list[str]) -> str:
    """Suggest the known key that is nearest to ``key`` or to its last part."""
    names = {name.rpartition(".")[2]: name for name in reversed(known)} | {name: name for name in known}
    near = [*difflib.get_close_matches(key, names, n=1), *difflib.get_close_matches(key.rpartition(".")[2], names, n=1)]
    return f"Did you mean {names[near[0]]}?" if near else f"Keys are {', '.join(OPEN)}, or begin with {', '.join(SECTIONS)}."


def _keys(section: type[BaseModel], path: str = "") -> Iterator[tuple[str, bool]]:
    """Yield each key of a single run, and whether any key is allowed below it."""
    for name, field in section.model_fields.items():
        if path or name in SECTIONS:
            kinds = list(_kinds(field.annotation))
            yield f"{path}{name}", dict in kinds
            for kind in kinds:
                if isinstance(kind, type) and issubclass(kind, BaseModel):
                    yield from _keys(kind, f"{path}{name}.")


def _kinds(annotation: Any) -> Iterator[Any]:
    """Yield the members of a union, without annotations."""
    origin, inside = get_origin(annotation), get_args(annotation)
    if origin in (Union, UnionType):
        for one in inside:
            yield from _kinds(one)
    elif origin is Annotated:
        yield from _kinds(inside[0])
    else:
        yield origin or annotation

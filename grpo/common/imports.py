"""Load code that a study names by an import path (``countdown:Countdown``), and find data files beside the study."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, get_type_hints

from pydantic import TypeAdapter, ValidationError

from grpo.common.errors import UserError, own_errors

FOLDER = "GRPO_STUDY_FOLDER"  # environment variable that tells them to child processes
_study_folders: tuple[Path, ...] = (Path(),)
_added: list[str] = []


def search_in(*folders: Path) -> None:
    """Search modules in these folders too, in this process and its children, and files (:func:`named_file`).

    They come last, so that no file there replaces a module of Python or of a package; and not by PYTHONPATH, where Python also
    looks for ``sitecustomize`` and runs it.
    """
    global _study_folders, _added
    sys.path[:] = [entry for entry in sys.path if entry not in _added]
    there = [str(folder.absolute()) for folder in folders]
    os.environ[FOLDER] = os.pathsep.join(there)
    _study_folders, _added = folders, [place for place in there if Path(place).is_dir() and place not in sys.path]
    sys.path += _added


def safe_environment() -> dict[str, str]:
    """The environment for a Python process that imports what this one does, but nothing from its working folder."""
    path = os.pathsep.join(str(Path(entry).absolute()) for entry in sys.path if entry not in _added and Path(entry).exists())
    return os.environ | {"PYTHONPATH": path, "PYTHONSAFEPATH": "1"}


def study_folders() -> tuple[Path, ...]:
    """The folders with the study's modules and data; the working folder before :func:`search_in`."""
    return _study_folders


def named_file(name: str) -> Path:
    """Find a file or folder that a study names: relative to the project's folder, or else to a folder of the study."""
    return next((place for place in (Path(name), *(folder / name for folder in _study_folders)) if place.exists()), Path(name))


def require_extra(package: str, extra: str, what: str) -> None:
    """Raise UserError unless ``package`` is installed; ``what`` needs it, and this project's ``extra`` installs it."""
    if importlib.util.find_spec(package) is None:
        raise UserError(f"{what}: needs {package}, which is not installed. Run `{pip_install(extra)}`.")


def pip_install(extra: str) -> str:
    """The command that installs an extra of this package: of a checkout, in whose folder it runs, or of the wheel."""
    package = Path(__file__).resolve().parents[1]
    in_checkout = (package.parent / "pyproject.toml").exists()
    constraints = "constraints.txt" if in_checkout else shlex.quote(str(package / "shipped/constraints.txt"))
    pinned = f"-c {constraints} " * (extra != "verifiers")  # which needs an older openai than the pinned one
    return f"pip install {pinned}" + (f"-e '.[{extra}]'" if in_checkout else f"'grpo-study[{extra}]'")


def is_import_path(name: str) -> bool:
    """Whether ``name`` has the form MODULE:NAME."""
    return ":" in name


def source_of(path: str) -> Path:
    """Find the file of the module in an import path without importing it; UserError if there is no such module."""
    module, _, name = path.partition(":")
    first, *inner = module.split(".")
    try:
        spec = importlib.util.find_spec(first)
    except (ImportError, ValueError):
        spec = None
    for part in inner:  # not find_spec, which would import the packages above
        within = spec.submodule_search_locations if spec else None
        spec = PathFinder.find_spec(f"{first}.{part}", within) if within else None
    if not name or spec is None or spec.origin is None:
        searched = ", ".join(str(folder) for folder in _study_folders)
        places = f"a Python file in the study's folder (here {searched}) or of an installed package"
        raise UserError(f"{path}: no such module. Give MODULE:NAME of {places}.")
    return Path(spec.origin)


def import_object(path: str) -> Any:
    """Import MODULE:NAME; UserError if there is no such module or name, or the module raises an exception."""
    file = source_of(path)
    module, _, name = path.partition(":")
    try:
        with own_errors(path):
            loaded = importlib.import_module(module)
        return getattr(loaded, name)
    except AttributeError:
        has = ", ".join(key for key, one in vars(loaded).items() if getattr(one, "__module__", None) == loaded.__name__)
        raise UserError(f"{path}: {file} has nothing named {name!r}, but {has or 'no names'}. Correct the name.") from None


def require_arguments(function: Callable[..., Any], where: str, remedy: str, /, *values: Any, **named: Any) -> None:
    """Raise UserError unless ``function`` can be called with these arguments; the message begins with ``where``."""
    try:
        inspect.signature(function).bind(*values, **named)
    except TypeError as error:
        raise UserError(f"{where}: {error}. {remedy}") from None


def call_with(function: Callable[..., Any], arguments: Mapping[str, Any], where: str) -> Any:
    """Call ``function`` with arguments at a place in params.yaml; UserError if one is unknown, missing or of another type."""
    takes = ", ".join(inspect.signature(function).parameters) or "nothing"
    require_arguments(function, where, f"{function.__name__} takes {takes}.", **arguments)
    # A dataclass has the annotations of its fields, which may come from classes of other modules.
    annotated = function.__init__ if isinstance(function, type) and not is_dataclass(function) else function  # type: ignore[misc]
    hints = get_type_hints(annotated, include_extras=True)
    values = {}
    for name, value in arguments.items():
        try:
            values[name] = TypeAdapter(hints.get(name, Any)).validate_python(value, strict=True)
        except ValidationError as error:
            first = error.errors()[0]
            place, message = ".".join([where, name, *keys_of(first, value)]), first["msg"]
            raise UserError(f"{place}: {message[0].lower()}{message[1:]}, but it is {first['input']!r}.") from error
    try:
        with own_errors(function.__name__):
            return function(**values)
    except UserError as error:
        raise UserError(f"{where}: {error}") from error


def keys_of(error: Any, value: Any) -> list[str]:
    """The keys in ``value`` that lead to a pydantic error. Its ``loc`` also has names of union members; they are left out."""
    keys = []
    for part in error["loc"]:
        inside = part in value if isinstance(value, dict) else isinstance(value, list) and isinstance(part, int)
        if inside or (error["type"] == "missing" and part == error["loc"][-1]):
            keys.append(str(part))
        value = value[part] if inside else value
    return keys


if FOLDER in os.environ:  # in a child process
    search_in(*map(Path, os.environ[FOLDER].split(os.pathsep)))

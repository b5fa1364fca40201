"""Code that a study names by an import path, such as ``countdown:Countdown``: a task, a reward, a loss of one's own."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

from grpo.common.errors import UserError


def search_in(folder: Path) -> None:
    """Let modules in ``folder`` be found before those that are installed, here and in the processes that this one starts."""
    if not folder.is_dir():
        return
    here = str(folder.absolute())
    if here not in sys.path:
        sys.path.insert(0, here)
    known = os.environ.get("PYTHONPATH", "")
    if here not in known.split(os.pathsep):
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (here, known)))


def is_import_path(name: str) -> bool:
    """Whether ``name`` has the form MODULE:NAME, and is no name of the project's own."""
    return ":" in name


def source_of(path: str) -> Path:
    """The file of the module that an import path names, found without importing it.

    Raises:
        UserError: there is no such module.
    """
    module, _, name = path.partition(":")
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        spec = None
    if not name or spec is None or spec.origin is None:
        raise UserError(
            f"{path}: no such module. Expected MODULE:NAME of a Python file in the study's folder (`folder:` in params.yaml) "
            "or of an installed package."
        )
    return Path(spec.origin)


def import_object(path: str) -> Any:
    """What MODULE:NAME stands for.

    Raises:
        UserError: no such module, or nothing of that name in it. What the module itself raises stays as it is.
    """
    file = source_of(path)
    module, _, name = path.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except AttributeError:
        raise UserError(f"{path}: {file} holds nothing named {name!r}. Correct the name.") from None

"""Writing results so that they are either whole or absent."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from grpo.errors import UserError


@contextmanager
def whole_folder(target: Path) -> Iterator[Path]:
    """A new folder to write into, which takes ``target``'s place only when the block ends without an exception."""
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = target.with_name(f".{target.name}.draft")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir()
    try:
        yield draft
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    shutil.rmtree(target, ignore_errors=True)
    draft.replace(target)


def write_text(path: Path, text: str) -> None:
    """Write a text file in one step."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.draft")
    draft.write_text(text, encoding="utf-8")
    draft.replace(path)


def write_json(path: Path, value: Any) -> None:
    """Write JSON in one step; keys keep their order and floats their every digit."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def read_json(path: Path, made_by: str) -> Any:
    """Read JSON.

    Args:
        made_by: the stage that makes the file, for the message.

    Raises:
        UserError: the file is missing or damaged.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path}: no such file. Run `dvc repro {made_by}` to make it.") from None
    except json.JSONDecodeError as error:
        raise UserError(f"{path}: damaged ({error}). Run `dvc repro -f {made_by}` to make it anew.") from error


def files_digest(path: Path) -> str:
    """SHA-256 (first 16 hex digits) over the names and contents of a file or of all files below a folder."""
    total = hashlib.sha256()
    for file in [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file()):
        total.update(file.name.encode() + b"\0" + hashlib.sha256(file.read_bytes()).digest())
    return total.hexdigest()[:16]

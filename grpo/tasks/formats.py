"""Prompt templates, used byte for byte as their files hold them."""

from __future__ import annotations

import re
from importlib.resources import files
from pathlib import Path

from grpo.common.errors import UserError

PLACEHOLDER = "{question}"


def load_prompt(name_or_path: str) -> str:
    """Read a template that comes with the package (by name, such as ``r1_zero``) or any file (by path).

    Raises:
        UserError: no such file, it is not UTF-8, or it does not hold ``{question}``.
    """
    folder = files("grpo.tasks") / "prompts"
    packaged = folder / f"{name_or_path}.prompt"
    if re.fullmatch(r"[A-Za-z0-9_-]+", name_or_path) and packaged.is_file():
        where, content = f"prompt {name_or_path}", packaged.read_bytes()
    else:
        path = Path(name_or_path)
        if not path.is_file():
            known = sorted(file.name.removesuffix(".prompt") for file in folder.iterdir() if file.name.endswith(".prompt"))
            raise UserError(f"{path}: no such prompt file. Name one of the package's ({', '.join(known)}) or an existing file.")
        where, content = str(path), path.read_bytes()
    try:
        # Not read as text: that would turn \r\n into \n.
        template = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{where}: not UTF-8 text ({error}). Save it as UTF-8.") from error
    if PLACEHOLDER not in template:
        raise UserError(f"{where}: does not contain {PLACEHOLDER}. Put it where the question belongs.")
    return template


def format_prompt(template: str, question: str) -> str:
    """``template`` with ``{question}`` replaced. Other braces, in either text, stay as they are; nothing is appended."""
    return template.replace(PLACEHOLDER, question)

"""Splitting of normalised answers at separators outside all brackets."""

from __future__ import annotations

import re

_EQUALS = r"(?<![<>:=])=(?!=)"  # in normalised texts "not equal" is a command, so != is a factorial and an equals sign


def top_level(text: str, separators: str) -> list[str]:
    """Split at any of the characters ``separators``."""
    return _split(text, f"[{separators}]") if any(separator in text for separator in separators) else [text.strip()]


def split_at(text: str, command: str) -> list[str]:
    r"""Split at a command such as ``\cup`` (half-open intervals count as brackets)."""
    return _split(text, re.escape(command) + "(?![A-Za-z])") if command in text else [text.strip()]


def split_equations(text: str) -> list[str]:
    r"""Split at ``=``, but not inside ``\sum_{k=1}`` or ``P(X=1)``, and not at ``<=``, ``:=`` or ``==``."""
    return _split(text, _EQUALS) if "=" in text else [text.strip()]


def _split(text: str, separator: str) -> list[str]:
    parts, depth, start = [], 0, 0
    for match in re.finditer(rf"[(\[{{)\]}}]|{separator}", text):
        if match.group() in "([{":
            depth += 1
        elif match.group() in ")]}":
            depth -= 1
        elif depth == 0:
            parts.append(text[start : match.start()].strip())
            start = match.end()
    return [*parts, text[start:].strip()]


def closes_at_end(text: str) -> bool:
    """Whether the last character of ``text`` closes the bracket that opens it."""
    depth = 0
    for i, character in enumerate(text):
        depth += (character in "([{") - (character in ")]}")
        if depth == 0:
            return i == len(text) - 1
    return False

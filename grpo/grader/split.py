"""Splitting of normalised answers at separators outside all brackets."""

from __future__ import annotations


def top_level(text: str, separators: str) -> list[str]:
    """Split at any of the characters ``separators``."""
    if not any(separator in text for separator in separators):
        return [text.strip()]
    parts, depth, start = [], 0, 0
    for i, character in enumerate(text):
        if character in "([{":
            depth += 1
        elif character in ")]}":
            depth -= 1
        elif depth == 0 and character in separators:
            parts.append(text[start:i].strip())
            start = i + 1
    return [*parts, text[start:].strip()]


def split_at(text: str, command: str) -> list[str]:
    r"""Split at a command such as ``\cup`` (half-open intervals count as brackets)."""
    if command not in text:
        return [text.strip()]
    parts, depth, start, i = [], 0, 0, 0
    while i < len(text):
        character = text[i]
        if depth == 0 and character == "\\" and text.startswith(command, i) and not text[i + len(command) :][:1].isalpha():
            parts.append(text[start:i].strip())
            start = i = i + len(command)
            continue
        depth += (character in "([{") - (character in ")]}")
        i += 1
    return [*parts, text[start:].strip()]


def closes_at_end(text: str) -> bool:
    """Whether the last character of ``text`` closes the bracket that opens it."""
    depth = 0
    for i, character in enumerate(text):
        depth += (character in "([{") - (character in ")]}")
        if depth == 0:
            return i == len(text) - 1
    return False


def split_equations(text: str) -> list[str]:
    r"""Split at ``=``, but not inside ``\sum_{k=1}`` or ``P(X=1)``, and not at ``<=``, ``:=`` or ``==``.

    In normalised texts, "not equal" is a command, so ``!=`` is a factorial and an equals sign.
    """
    if "=" not in text:
        return [text.strip()]
    parts, depth, start = [], 0, 0
    for i, character in enumerate(text):
        depth += (character in "{([") - (character in ")]}")
        if depth == 0 and character == "=" and text[i - 1 : i] not in {"<", ">", ":", "="} and text[i + 1 : i + 2] != "=":
            parts.append(text[start:i].strip())
            start = i + 1
    return [*parts, text[start:].strip()]

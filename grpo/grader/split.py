"""Splitting of normalised answers into parts: at separators outside all brackets, at signs, into cells."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import product

_MATRIX = re.compile(
    r"((?:[^\\]|\\(?:frac|sqrt)(?![a-z]))*?)[(\[]?\\begin\{matrix\}((?:(?!\\begin|\\end).)*)\\end\{matrix\}[)\]]?"
)


def top_level(text: str, separators: str) -> list[str]:
    """Split at any of the characters ``separators``."""
    if not any(separator in text for separator in separators):
        return [text.strip()]
    return _split(text, f"[{separators}]")


def split_at(text: str, command: str) -> list[str]:
    r"""Split at a command such as ``\cup``."""
    return _split(text, rf"\{command}(?![A-Za-z])") if command in text else [text.strip()]


def split_equations(text: str) -> list[str]:
    r"""Split at ``=``, but not inside ``\sum_{k=1}`` or ``P(X=1)``, and not at ``<=``, ``:=`` or ``==``.

    In normalised texts, "not equal" is a command, so ``!=`` is a factorial and an equals sign.
    """
    return _split(text, "(?<![<>:=])=(?!=)") if "=" in text else [text.strip()]


def _split(text: str, separator: str) -> list[str]:
    """Split at a pattern outside all brackets, which may be half-open."""
    parts, depth, start = [], 0, 0
    for match in _brackets_and(separator).finditer(text):
        if match["separator"] is None:
            depth += 1 if match[0] in "([{" else -1
        elif depth == 0:
            parts.append(text[start : match.start()].strip())
            start = match.end()
    return [*parts, text[start:].strip()]


@lru_cache
def _brackets_and(separator: str) -> re.Pattern[str]:
    return re.compile(rf"(?P<separator>{separator})|[()\[\]{{}}]")


def closes_at_end(text: str) -> bool:
    """Whether the last character of ``text`` closes the bracket that opens it."""
    depth = 0
    for i, character in enumerate(text):
        depth += (character in "([{") - (character in ")]}")
        if depth == 0:
            return i == len(text) - 1
    return False


def matrix_rows(text: str) -> list[list[str]] | None:
    """The cells of a matrix, each multiplied by the factor before the matrix; None for other texts."""
    if text.startswith("{") and closes_at_end(text):  # braces around all of it, as of \displaystyle
        text = text[1:-1]
    match = _MATRIX.fullmatch(text)
    if match:
        factor = match[1].strip()
        rows = [row.split("&") for row in re.split(r"\\\\", match[2]) if row.strip()]
        return [[f"({factor})({cell.strip()})" if factor else cell.strip() for cell in row] for row in rows]
    if text.startswith("[[") and text.endswith("]]"):
        listed = top_level(text[1:-1], ",")
        if all(row.startswith("[") and row.endswith("]") for row in listed):
            return [top_level(row[1:-1], ",") for row in listed]
    return None


def parts_of(text: str) -> tuple[str, list[str]]:
    r"""Kind and elements: "set" (``{a,b}``, or bare ``a,b``), "union", "or", "and", the two brackets of a tuple, or ""."""
    if text in {"", r"\{\}"}:
        return "", [text]
    for kind, command in (("or", "\\lor"), ("and", "\\land"), ("union", "\\cup")):
        if len(joined := split_at(text, command)) > 1:
            sets = kind == "union" and all(re.fullmatch(r"\\\{[^{}\\|:]*\\\}", part) for part in joined)
            return ("set", [one for part in joined for one in parts_of(part)[1]]) if sets else (kind, joined)
    listed = top_level(text, ",;")
    if len(listed) > 1:
        return "set", [element for part in listed for element in plus_and_minus(part)]
    if text.startswith("\\{") and text.endswith("\\}"):
        return "set", [*dict.fromkeys(element for part in top_level(text[2:-2], ",;") for element in plus_and_minus(part))]
    if text[0] == "{" and text[-1] == "}" and closes_at_end(text):
        inner = top_level(text[1:-1], ",;")
        if len(inner) > 1:
            return "set", inner
        return "", inner if inner[0] else [text]
    if text[0] in "([" and text[-1] in ")]" and closes_at_end(text):
        inner = top_level(text[1:-1], ",;")
        if len(inner) > 1:
            points = plus_and_minus(text)
            return ("set", points) if len(points) > 1 else (text[0] + text[-1], inner)
        if text[0] == "(" and text[-1] == ")" and inner[0]:
            return "", inner
    both = plus_and_minus(text)
    return ("set", both) if len(both) > 1 else ("", [text])


def plus_and_minus(text: str) -> list[str]:
    r"""Expand ``a \pm b`` to two values; ``\mp`` has the opposite sign, and several ``\pm`` are independent."""
    if "\\pm" not in text and "\\mp" not in text:
        return [text]
    pieces = re.split(r"\\(pm|mp)(?![A-Za-z])\s*", text)
    values, kinds = pieces[0::2], pieces[1::2]
    if not 1 <= len(kinds) <= 3:
        return [text]
    patterns: Iterable[Sequence[str]] = product("+-", repeat=len(kinds))
    if "mp" in kinds:
        patterns = [[signs[kind == "mp"] for kind in kinds] for signs in ("+-", "-+")]
    parts = []
    for pattern in patterns:
        result = values[0]
        for sign, value in zip(pattern, values[1:], strict=True):
            result += ("" if sign == "+" and result[-1:] in {"", "(", "{", "=", ","} else sign) + value
        parts.append(result)
    return parts


def points_of(text: str) -> tuple[list[str], list[str]]:
    """Letters (sorted) and points of a list of assignments; both empty for other texts."""
    parts = [split_equations(part) for part in top_level(text, ",;")]
    if len(parts) < 2 or not all(len(part) == 2 and re.fullmatch(r"\w", part[0]) for part in parts):
        return [], []
    names = [part[0] for part in parts]
    size = len(set(names))
    if size in {1, len(names)} or names != names[:size] * (len(names) // size):
        return [], []
    groups = [parts[start : start + size] for start in range(0, len(parts), size)]
    return sorted(set(names)), ["(" + ",".join(value for _, value in sorted(group)) + ")" for group in groups]

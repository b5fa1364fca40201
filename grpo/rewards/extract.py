"""Finding the final answer in a text."""

from __future__ import annotations

import re

_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])[ \t]*")
_BARE = re.compile(r"[^\s${}\\]+")


def last_boxed(text: str) -> str | None:
    r"""The content of the last ``\boxed{...}`` or ``\fbox{...}``, with nested braces kept.

    ``\boxed 5``, as some solutions of MATH write it, gives ``5``. None where there is no box, or where the last one is
    not closed: an unfinished box is an unfinished answer, whatever stands in an earlier one.
    """
    boxes = list(_BOX.finditer(text))
    if not boxes:
        return None
    start = boxes[-1].end()
    if start == len(text) or text[start] != "{":
        bare = _BARE.match(text, start)
        return bare.group().rstrip(".,;") if bare else None
    end = _closing_brace(text, start)
    return None if end is None else text[start + 1 : end].strip()


def _closing_brace(text: str, start: int) -> int | None:
    r"""Position of the brace that closes the one at ``start``; ``\{`` and ``\}`` are not counted."""
    depth, i = 0, start
    while i < len(text):
        character = text[i]
        if character == "\\":
            i += 2
            continue
        if character == "{":
            depth += 1
        elif character == "}":
            depth -= 1
            if depth == 0:
                return i
        i += 1
    return None

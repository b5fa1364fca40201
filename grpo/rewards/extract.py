"""Finding the final answer in a text."""

from __future__ import annotations

import re

_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])[ \t]*")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_BARE = re.compile(r"[^\s${}\\\[\]]+(?![\[{])")


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
    depth = 0
    for match in _BRACE.finditer(text, start):
        depth += (match.group() == "{") - (match.group() == "}")
        if depth == 0:  # The first match opens the box, so only a closing brace gets here.
            return match.start()
    return None

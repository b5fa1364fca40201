"""Read YAML files; errors name the line."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from grpo.common.errors import UserError

MOST_BY_ALIASES = 100_000  # limit of values in a file after aliases are expanded
DEEPEST = 50  # limit of nesting levels
_CONFLICT = re.compile(r"(<{7}|={7}|>{7})( |$)")


def parse_yaml(path: Path, kind: str = "safe") -> Any:
    """Parse a YAML 1.2 file.

    Args:
        kind: ruamel.yaml's loader: ``safe`` for values only, ``rt`` for a round trip with comments.

    Raises:
        UserError: the file is not YAML in UTF-8, or is too large or nested too deeply.
    """
    from ruamel.yaml import YAML, YAMLError

    yaml = YAML(typ=kind)
    yaml.preserve_quotes = True
    text = ""
    try:
        text = path.read_text(encoding="utf-8")
        line = _too_large(YAML(typ="safe").parse(text))
        if line is None:
            return yaml.load(text)
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise UserError(f"{path}:{line}: not UTF-8 text ({error.reason}). Correct that line.") from error
    except (YAMLError, ValueError) as error:
        where, problem = _problem(text, error)
        raise UserError(f"{path}{where}: not valid YAML ({problem}). Correct that line.") from error
    raise UserError(
        f"{path}:{line}: aliases (`*name`) that contain themselves or expand to more than {MOST_BY_ALIASES:,} values, or "
        f"nesting deeper than {DEEPEST} levels. Write the values out."
    )


def _too_large(events: Iterable[Any]) -> int | None:
    """The line at which a text is nested too deeply or has too many values with aliases expanded; None if it is fine.

    Ten lines of aliases of aliases can expand to a billion values.
    """
    from ruamel.yaml.events import AliasEvent, CollectionEndEvent, CollectionStartEvent, ScalarEvent

    sizes: dict[str | None, int] = {}  # number of values by anchor
    inside: list[str | None] = []  # anchors of the open mappings and lists
    counts = [0]  # values in each of them so far
    for event in events:
        if isinstance(event, CollectionStartEvent):
            inside.append(event.anchor)
            counts.append(1)
        elif isinstance(event, CollectionEndEvent):
            count = sizes[inside.pop()] = counts.pop()
            counts[-1] += count
        elif isinstance(event, ScalarEvent):
            sizes[event.anchor] = 1
            counts[-1] += 1
        elif isinstance(event, AliasEvent):
            counts[-1] += MOST_BY_ALIASES + 1 if event.anchor in inside else sizes.get(event.anchor, 1)
        if len(inside) > DEEPEST or (isinstance(event, AliasEvent) and sum(counts) > MOST_BY_ALIASES):
            return int(event.start_mark.line) + 1
    return None


def _problem(text: str, error: Exception) -> tuple[str, str]:
    """``:LINE`` of an error, if known, and what is wrong there."""
    lines = text.splitlines()
    for number, line in enumerate(lines, start=1):
        if _CONFLICT.match(line):
            return f":{number}", f"{line[:7]} marks a merge conflict: keep one side and remove the marks"
    mark, problem = getattr(error, "problem_mark", None), str(getattr(error, "problem", None) or error)
    if mark is None:
        return "", problem
    indent = re.match(r"\s*", lines[mark.line]) if mark.line < len(lines) else None
    tab = indent is not None and "\t" in indent[0]
    return f":{mark.line + 1}", "a tab in the indentation: use spaces" if tab else problem

"""Read YAML files; errors name the line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from grpo.common.errors import UserError

MOST_VALUES = 1_000_000  # in a file, with aliases expanded: ten lines of aliases of aliases can stand for a billion
DEEPEST = 50  # levels of nesting


def parse_yaml(path: Path, kind: str = "safe") -> Any:
    """Parse a YAML 1.2 file.

    Args:
        kind: ruamel.yaml's loader: ``safe`` for values only, ``rt`` for a round trip with comments.

    Raises:
        UserError: the file is missing, is not YAML in UTF-8, is nested too deeply, or stands for too many values.
    """
    from ruamel.yaml import YAML, YAMLError
    from ruamel.yaml.events import CollectionEndEvent, CollectionStartEvent

    try:
        text, depth = path.read_text(encoding="utf-8"), 0
        for event in YAML(typ="safe").parse(text):
            depth += isinstance(event, CollectionStartEvent) - isinstance(event, CollectionEndEvent)
            if depth > DEEPEST:  # the composer may crash
                raise ValueError(f"nested deeper than {DEEPEST} levels")
        if _count(YAML(typ="safe").compose(text), {}) > MOST_VALUES:
            raise ValueError(f"aliases stand for more than {MOST_VALUES:,} values")
        yaml = YAML(typ=kind)
        yaml.preserve_quotes = True
        return yaml.load(text)
    except FileNotFoundError:
        choose = " Run this in the project's folder, or choose a study: `grpo study use mini`."
        raise UserError(f"{path}: no such file." + (choose if path.name == "params.yaml" else "")) from None
    except (YAMLError, ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None) or error
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        raise UserError(f"{where}: not valid YAML ({problem}). Correct it.") from error


def _count(node: Any, counted: dict[int, int]) -> int:
    """The number of values in a node, with aliases and merge keys expanded; too many for one that contains itself."""
    if not isinstance(getattr(node, "value", None), list):
        return 1
    if id(node) not in counted:
        counted[id(node)] = MOST_VALUES + 1  # until it is known
        inside = [item[1] if isinstance(item, tuple) else item for item in node.value]
        counted[id(node)] = 1 + sum(_count(item, counted) for item in inside)
    return counted[id(node)]

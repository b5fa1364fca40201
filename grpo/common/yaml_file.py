"""Read and write YAML files; errors name the line."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from grpo.common.errors import UserError
from grpo.common.files import MOST_DEPTH, MOST_NODES, read_bytes


def parse_yaml(path: Path, kind: str = "safe") -> Any:
    """Parse a YAML 1.2 file; UserError if it is missing, or is not YAML in UTF-8.

    ``kind`` is ruamel.yaml's loader: ``safe`` for values only, ``rt`` for a round trip with comments.
    """
    from ruamel.yaml import YAML, YAMLError

    yaml = YAML(typ=kind)
    yaml.preserve_quotes = True
    try:
        values = yaml.load(read_bytes(path).decode("utf-8"))
        _nodes(values, 0, {})
        return values
    except FileNotFoundError:
        choose = " Run this in the project's folder, or choose a study: `grpo study use mini`."
        raise UserError(f"{path}: no such file." + (choose if path.name == "params.yaml" else "")) from None
    except (YAMLError, ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None) or error
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        raise UserError(f"{where}: not valid YAML ({problem}). Correct it.") from error


def _nodes(value: Any, depth: int, known: dict[int, int]) -> int:
    """Count the nodes below a value, each alias as what it stands for; ValueError if they are too many or too deep."""
    if depth > MOST_DEPTH:
        raise ValueError(f"it is nested more than {MOST_DEPTH} deep")
    if id(value) not in known:
        parts = [*value, *value.values()] if isinstance(value, dict) else value if isinstance(value, list) else ()
        known[id(value)] = 1 + sum(_nodes(part, depth + 1, known) for part in parts)
        if known[id(value)] > MOST_NODES:
            raise ValueError(f"it has more than {MOST_NODES:,} values, aliases replaced")
    return known[id(value)]


def read_mapping(path: Path) -> dict[str, Any]:
    """Read a study's YAML file by :func:`parse_yaml`; UserError also unless it holds a mapping."""
    values = parse_yaml(path)
    if not isinstance(values, dict):
        raise UserError(f"{path}: expected a mapping of sections at the top. Compare with studies/base.yaml.")
    return values


def to_yaml(values: Mapping[str, Any]) -> str:
    """Write a mapping as YAML 1.2: its sections over several lines, in them small mappings and lists on one line each."""
    sections = [dumped({key: _laid_out(value, is_section=True)}) for key, value in values.items()]
    return "".join("\n" * (section.count("\n") > 1) + section for section in sections)


def dumped(document: Mapping[str, Any]) -> str:
    """Write a mapping, or a document that was read for a round trip, in its own layout."""
    from ruamel.yaml import YAML
    from ruamel.yaml.representer import RoundTripRepresenter

    class Representer(RoundTripRepresenter):  # type: ignore[misc]
        """Writes null as a word."""

    Representer.add_representer(type(None), lambda self, _: self.represent_scalar("tag:yaml.org,2002:null", "null"))
    yaml, out = YAML(), io.StringIO()
    yaml.Representer, yaml.width = Representer, 1_000_000
    yaml.dump(document, out)
    return out.getvalue()


def _laid_out(value: Any, is_section: bool = False) -> Any:
    """Mark mappings and lists to be written on one line if they have at most 12 entries, all plain values of one word.

    A text such as cuda:0 does not stand in brackets: `dvc exp run -S` drops quotes, and libyaml cannot read it then.
    """
    from ruamel.yaml.comments import CommentedMap, CommentedSeq

    node: Any
    if isinstance(value, Mapping):
        node, parts = CommentedMap((key, _laid_out(item)) for key, item in value.items()), [*value, *value.values()]
    elif isinstance(value, list):
        node, parts = CommentedSeq(map(_laid_out, value)), value
    else:
        return value
    small = len(value) <= 12 and all(re.fullmatch(r"[\w./+-]*", str(part)) for part in parts)
    if small and not (is_section and isinstance(value, Mapping)):
        node.fa.set_flow_style()
    else:
        node.fa.set_block_style()
    return node

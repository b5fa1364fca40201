"""Read YAML with its comments, and write it again."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq
from ruamel.yaml.representer import RoundTripRepresenter
from ruamel.yaml.scalarfloat import ScalarFloat
from ruamel.yaml.tokens import CommentToken

from grpo.common.errors import UserError
from grpo.common.yaml_file import parse_yaml


@dataclass(frozen=True)
class Note:
    """How a key is written."""

    above: tuple[str, ...] = ()  # comment lines above, each with its #
    beside: str = ""  # comment at the end of the line
    blank: bool = False  # an empty line before it
    flow: bool = False  # its mapping is on one line, as in {a: 1}

    def over(self, base: Note | None) -> Note:
        """Lay this note over ``base``; missing comments are taken from ``base``."""
        if base is None:
            return self
        return Note(self.above or base.above, self.beside or base.beside, base.blank, base.flow)


Notes = Mapping[tuple[str, ...], Note]  # by the path of the key
Annotated = tuple[dict[str, Any], Notes, tuple[str, ...]]  # values, the notes of their keys, and the comment at the top


def read_mapping(path: Path, kind: str = "safe") -> dict[str, Any]:
    """:func:`grpo.common.yaml_file.parse_yaml` of a study's file; UserError also unless it holds a mapping."""
    values = parse_yaml(path, kind)
    if not isinstance(values, dict):
        raise UserError(f"{path}: expected a mapping of sections at the top. Compare with studies/base.yaml.")
    return values


def read_annotated(path: Path) -> Annotated:
    """:func:`read_mapping` with comments."""
    root = read_mapping(path, "rt")
    lines = path.read_text(encoding="utf-8").splitlines()
    opening = 0
    while opening < len(lines) and lines[opening].startswith("#"):
        opening += 1
    beside = {token.start_mark.line: token.value.partition("\n")[0].strip() for token in _comments(root)}
    notes: dict[tuple[str, ...], Note] = {}

    def annotate(node: CommentedMap, above: tuple[str, ...]) -> None:
        for key, value in node.items():
            if key not in node.lc.data:  # merged in by `<<`
                continue
            line = first = node.lc.key(key)[0]
            while first > opening and (not (text := lines[first - 1].strip()) or text.startswith("#")):
                first -= 1
            before = [text.strip() for text in lines[first:line]]
            flow = isinstance(value, CommentedMap) and bool(value.fa.flow_style())
            comment = tuple(text for text in before if text)
            alone = not node.fa.flow_style()  # otherwise the comment belongs to the whole line
            notes[*above, key] = Note(comment, beside.get(line, ""), "" in before, flow) if alone else Note(flow=flow)
            if isinstance(value, CommentedMap):
                annotate(value, (*above, key))

    annotate(root, ())
    return _plain(root), notes, tuple(lines[:opening])


def to_text(values: Mapping[str, Any], notes: Notes, opening: tuple[str, ...] = ()) -> str:
    """Write ``values`` as YAML text: mappings over many lines, lists on one where they may be."""
    return "\n".join([*opening, *_lines(values, notes, ())]) + "\n"


def _lines(values: Mapping[str, Any], notes: Notes, path: tuple[str, ...]) -> Iterator[str]:
    indent = "  " * len(path)
    for key, value in values.items():
        note = notes.get((*path, key), Note())
        if note.blank:
            yield ""
        yield from (indent + line for line in note.above)
        nested = isinstance(value, Mapping) and bool(value) and not (note.flow and _may_flow(value))
        first, *rest = _entry(key, {} if nested else value)
        first = first.removesuffix(" {}") if nested else first
        yield from (indent + line for line in (f"{first} {note.beside}".rstrip(), *rest))
        if nested:
            yield from _lines(value, notes, (*path, key))


def _entry(key: str, value: Any) -> list[str]:
    """The lines of one key: one line, except for long lists and texts."""
    out = io.StringIO()
    yaml = YAML()
    yaml.Representer = _Representer
    yaml.width = 120 if isinstance(value, list) else 1_000_000
    yaml.dump({key: _flow(value) if isinstance(value, Mapping | list) else value}, out)
    lines = out.getvalue().rstrip("\n").split("\n")
    return [line.rstrip() for line in lines] if isinstance(value, list) else lines


class _Representer(RoundTripRepresenter):  # type: ignore[misc]
    """Writes null as a word, and numbers as they were written (3e-4) unless this would change their value."""

    def as_written(self, number: ScalarFloat) -> Any:
        node = self.represent_scalar_float(number)  # rounds the seventeenth digit
        return node if float(node.value) == number else self.represent_float(float(number))


_Representer.add_representer(ScalarFloat, _Representer.as_written)
_Representer.add_representer(type(None), lambda representer, _: representer.represent_scalar("tag:yaml.org,2002:null", "null"))


def _flow(value: Any) -> Any:
    """Mark a value's mappings and lists to be written on one line, where they may be."""
    if not isinstance(value, Mapping | list):
        return value
    if isinstance(value, Mapping):
        marked = CommentedMap((key, _flow(item)) for key, item in value.items())
    else:
        marked = CommentedSeq(map(_flow, value))
    if _may_flow(value):
        marked.fa.set_flow_style()
    else:
        marked.fa.set_block_style()
    return marked


def _may_flow(value: Any) -> bool:
    """Whether no text in a value has a colon (cuda:0).

    `dvc exp run -S` rewrites params.yaml without quotes, and libyaml cannot read such a text within brackets.
    """
    if isinstance(value, Mapping):
        return all(_may_flow(item) for pair in value.items() for item in pair)
    return all(map(_may_flow, value)) if isinstance(value, list) else ":" not in str(value)


def _plain(value: Any) -> Any:
    """Drop the comments of a round trip; numbers and texts keep the way they are written."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list) else value


def _comments(node: Any) -> Iterator[CommentToken]:
    """Yield all comments below a node of ruamel.yaml."""
    if isinstance(node, CommentToken):
        yield node
    elif isinstance(node, CommentedMap | CommentedSeq):
        items = node.values() if isinstance(node, CommentedMap) else node
        for part in (node.ca.comment, *node.ca.items.values(), node.ca.end, *items):
            yield from _comments(part)
    elif isinstance(node, list | tuple):
        for part in node:
            yield from _comments(part)

"""Software and hardware of all runs, and runs made with other versions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from grpo.reporting.labels import table
from grpo.study.software import PACKAGES, pins, software, unlike_the_pins


def environments(rows: Sequence[Mapping[str, Any]]) -> str:
    """Table (Markdown) of software and hardware, with one column for all runs that have the same; then :func:`made_otherwise`.

    Args:
        rows: one per run, with ``run``, ``software`` and ``hardware``.
    """
    columns: list[tuple[dict[str, Any], list[str]]] = []
    for row in rows:
        made_with = {**row["software"], **row["hardware"]}
        for known, runs in columns:
            if all(known[key] == made_with[key] for key in known.keys() & made_with.keys()):  # only some need Ray
                known.update(made_with)
                runs.append(row["run"])
                break
        else:
            columns.append((made_with, [row["run"]]))
    keys = dict.fromkeys(key for known, _ in columns for key in known)
    several = len(columns) > 1
    heads = [f"{place}: " * several + f"{len(runs)} of {len(rows)} runs" for place, (_, runs) in enumerate(columns, start=1)]
    shown = table(
        {"": key} | {head: _text(known.get(key)) for head, (known, _) in zip(heads, columns, strict=True)} for key in keys
    )
    others = [f"\nIn column {place}: {', '.join(runs)}.\n" for place, (_, runs) in enumerate(columns[1:], start=2)]
    return shown + "".join(others) + "".join(f"\nOther versions: {line}.\n" for line in made_otherwise(rows))


def _text(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(value) or "none"
    return "" if value is None else str(value)


def made_otherwise(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Lines that name runs with versions other than this process's or than the pinned ones, one per combination."""
    kinds: dict[str, list[str]] = {}
    for row in rows:
        found = row["software"]
        packages = [name for name in found if name not in ("python", "cuda")]
        here = software(packages)
        unlike = [
            f"{name} {version} (here: {here.get(name, 'not installed')})"
            for name, version in found.items()
            if version != here.get(name)
        ]
        kinds.setdefault(", ".join(unlike + unlike_the_pins(found, pins(packages))), []).append(row["run"])
    lines = [f"{', '.join(runs)}: {what}" for what, runs in kinds.items() if what]
    own = unlike_the_pins(software(PACKAGES), pins(PACKAGES))
    return [*lines, f"this page: {', '.join(own)}"] if own else lines

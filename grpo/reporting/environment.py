"""Software and hardware of the runs, and runs whose versions differ from the report's or from the pins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from grpo.results.markdown import markdown_table
from grpo.study.software import PACKAGES, pins, software, unlike_the_pins

NO_PACKAGES = ("python", "cuda")


def environments(rows: Sequence[Mapping[str, Any]]) -> str:
    """Table (Markdown) of software and hardware, with one column for all runs that have the same.

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
    keys = list(dict.fromkeys(key for known, _ in columns for key in known))
    heads = [f"{len(runs)} of {len(rows)} runs" for _, runs in columns]
    table = markdown_table(["", *heads], [[key, *(_text(known.get(key)) for known, _ in columns)] for key in keys])
    others = [f"\nIn column {place}: {', '.join(runs)}.\n" for place, (_, runs) in enumerate(columns[1:], start=2)]
    return table + "".join(others)


def _text(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(value) or "none"
    return "" if value is None else str(value)


def made_otherwise(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Lines that name runs with versions other than this process's or than the pinned ones, one per combination."""
    installed: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for row in rows:
        installed.setdefault(tuple(row["software"].items()), []).append(row["run"])
    kinds: dict[str, list[str]] = {}
    for packages, runs in installed.items():
        found = dict(packages)
        names = [name for name in found if name not in NO_PACKAGES]
        here = software(names)
        other = [
            f"{name} {version} (here: {here.get(name, 'not installed')})"
            for name, version in found.items()
            if version != here.get(name)
        ]
        kinds.setdefault(", ".join(other + unlike_the_pins(found, pins(names))), []).extend(runs)
    lines = [f"{', '.join(runs)}: {what}" for what, runs in kinds.items() if what]
    own = unlike_the_pins(software(PACKAGES), pins(PACKAGES))
    return [*lines, f"this page: {', '.join(own)}"] if own else lines

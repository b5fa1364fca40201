"""What the runs were made with, and which of them were made with other software than the report or than what is pinned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from grpo.study.software import PACKAGES, pins, software, unlike_the_pins

NO_PACKAGES = ("python", "cuda")


def environments(rows: Sequence[Mapping[str, Any]]) -> str:
    """A table (Markdown) of software and hardware, with one column for all runs that have the same.

    Args:
        rows: one for each run, with ``run``, ``software`` and ``hardware``; of a run that was taken over that of its equal.
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
    lines = [f"| | {' | '.join(heads)} |", "|---" * (len(columns) + 1) + "|"]
    lines += [f"| {key} | {' | '.join(_text(known.get(key)) for known, _ in columns)} |" for key in keys]
    others = [f"\nIn column {number}: {', '.join(runs)}.\n" for number, (_, runs) in enumerate(columns, start=1) if number > 1]
    return "\n".join(lines) + "\n" + "".join(others)


def _text(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(value) or "none"
    return "" if value is None else str(value)


def made_otherwise(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Which runs were made with other versions than this process has, or than the project pins: a line for each kind."""
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

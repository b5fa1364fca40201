"""Where numbers come from: each run's MLflow run, commit and hash in dvc.lock; software and hardware of all runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from grpo.common.errors import UserError
from grpo.common.yaml_file import parse_yaml
from grpo.reporting.sentences import markdown_table
from grpo.reporting.timing import read_timing, read_timing_file
from grpo.results.runs import Run
from grpo.study import paths
from grpo.study.software import PACKAGES, pins, software, unlike_the_pins


def stages_in_lock() -> dict[str, Any]:
    """Read the stages of dvc.lock.

    Raises:
        UserError: it has no stages.
    """
    lock = parse_yaml(paths.LOCK)
    if not isinstance(lock, dict) or not isinstance(lock.get("stages"), dict):
        raise UserError(f"{paths.LOCK}: has no stages. Run `git checkout HEAD -- {paths.LOCK}`, or make it anew: `dvc repro`.")
    stages: dict[str, Any] = lock["stages"]
    return stages


def provenance_of(run: Run, lock: dict[str, Any]) -> dict[str, Any]:
    """Collect a run's provenance and times.

    Args:
        lock: see :func:`stages_in_lock`.
    """
    own, timing = read_timing_file(run.name), read_timing(run)
    outs = {out["path"]: out["md5"] for stage in lock.values() for out in stage.get("outs", [])}
    folder = paths.RUNS / run.name  # an output of DVC itself, or a part of the arm's
    return {
        "run": run.name,
        "same_as": own["same_as"] or "",
        "mlflow_run_id": own["mlflow_run_id"] or "not tracked",
        "commit": own["git_commit"][:10] + (" + changes" if own["git_changed"] == "true" else ""),
        "lock": outs.get(str(folder)) or outs.get(str(folder.parent), "not in dvc.lock yet"),
        "seconds": timing["total_s"],
        "phases": timing["phases"],
        "software": run.config["software"],
        "hardware": timing["hardware"],
    }


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
    keys = dict.fromkeys(key for known, _ in columns for key in known)
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

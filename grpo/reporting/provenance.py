"""Provenance of a run's numbers: MLflow run, commit, and hash in dvc.lock."""

from __future__ import annotations

from typing import Any

from grpo.common.errors import UserError
from grpo.reporting.timing import read_timing, read_timing_file
from grpo.results.runs import Run
from grpo.study import paths
from grpo.study.schema import read_yaml


def stages_in_lock() -> dict[str, Any]:
    """Read the stages of dvc.lock.

    Raises:
        UserError: it has no stages.
    """
    lock = read_yaml(paths.LOCK)
    if not isinstance(lock, dict) or not isinstance(lock.get("stages"), dict):
        raise UserError(f"{paths.LOCK}: has no stages. Run `git checkout {paths.LOCK}`, or `dvc repro`, which makes it anew.")
    stages: dict[str, Any] = lock["stages"]
    return stages


def provenance_of(run: Run, lock: dict[str, Any]) -> dict[str, Any]:
    """Collect a run's provenance and times.

    Args:
        lock: see :func:`stages_in_lock`.

    Returns:
        ``run``, ``same_as``, ``mlflow_run_id``, ``commit``, ``lock`` (a hash), ``seconds``, ``phases``, ``software``,
        ``hardware``.
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

"""The table `runs:` of params.yaml: a row for each stage of dvc.yaml that trains."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from grpo.common.yaml_file import parse_yaml
from grpo.study import paths

if TYPE_CHECKING:
    from grpo.study.schema import Study

ALL_SEEDS = "all"


def runs_table(study: Study) -> dict[str, dict[str, Any]]:
    """The rows by their keys: KEY is the ``train@KEY`` of DVC.

    A row holds ``experiment``, ``arm`` and ``task``; ``seed``, one of ``seeds`` or ``all`` of them; ``folder``, where the
    results go below data/runs, data/checkpoints and data/timing; and what must be there first: the checkpoint to start from and
    the problems or examples to train on (``model`` and ``train``, folders below data/), and ``after``, the selection that the
    experiment builds on, or the pinned versions where it builds on none. ``resources`` names what a scheduler reserves.
    """
    rows: dict[str, dict[str, Any]] = {}
    for name in study.made:
        entry = study.experiments[name]
        after = paths.SELECT / f"{entry.builds_on}.json" if entry.builds_on else paths.PINNED_SOFTWARE
        train = "sft_dataset" if entry.method == "sft" else "dataset"
        for arm, values in entry.arms.items():
            for seed in [ALL_SEEDS] if study.seeds_in_one_stage else study.seeds:
                of_seed = [] if seed == ALL_SEEDS else [str(seed)]
                start = str(values["start_from"]).split("/")[:2] if values.get("start_from") else []
                model = ["checkpoints", *start, *of_seed] if start else ["model", entry.task]
                rows["-".join([name, arm, *of_seed])] = {
                    "experiment": name,
                    "arm": arm,
                    "seed": seed,
                    "folder": "/".join([name, arm, *of_seed]),
                    "task": entry.task,
                    "model": "/".join(model),
                    "train": f"{train}/{entry.task}",
                    "after": after.as_posix(),
                    "resources": entry.resources,
                }
    return rows


def stage_of_run(run: str) -> str:
    """The stage of DVC that trains the run ``EXPERIMENT/ARM/SEED`` of the active study."""
    experiment, arm, seed = run.split("/")
    together = paths.PARAMS.exists() and _seeds_in_one_stage(paths.PARAMS.stat().st_mtime_ns)
    return f"train@{experiment}-{arm}" if together else f"train@{experiment}-{arm}-{seed}"


@cache
def _seeds_in_one_stage(_changed: int) -> bool:
    return bool(parse_yaml(paths.PARAMS).get("seeds_in_one_stage"))

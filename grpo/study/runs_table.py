"""The table `runs:` of params.yaml: one row per training stage of dvc.yaml."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from grpo.common.errors import UserError
from grpo.common.yaml_file import parse_yaml
from grpo.study import paths

if TYPE_CHECKING:
    from grpo.study.schema import Study

ALL_SEEDS = "all"


def runs_table(study: Study) -> dict[str, dict[str, Any]]:
    """Build the rows; the row KEY is DVC's stage ``train@KEY``.

    A row has ``experiment``, ``arm``, ``task``; ``seed`` (one of ``seeds``, or ``all``); ``folder`` (of the results below
    data/runs, data/checkpoints and data/timing); ``model`` and ``train`` (folders below data/ with the checkpoint to start from
    and the problems or examples); ``after`` (the selection that the experiment builds on, or the pinned versions if it builds
    on none); and ``resources`` (what a scheduler reserves).

    Raises:
        UserError: two arms have the same key, such as the arm low-1 of lr and the arm 1 of lr-low.
    """
    rows: dict[str, dict[str, Any]] = {}
    for name in study.made:
        entry = study.experiments[name]
        after = paths.SELECT / f"{entry.builds_on}.json" if entry.builds_on else paths.PINNED_SOFTWARE
        train = "sft_dataset" if entry.method == "sft" else "dataset"
        for arm, values in entry.arms.items():
            for seed in [ALL_SEEDS] if study.seeds_in_one_stage and not entry.timed else study.seeds_of(name):
                of_seed = [] if seed == ALL_SEEDS else [str(seed)]
                start = str(values["start_from"]).split("/")[:2] if values.get("start_from") else []
                model = ["checkpoints", *start, *of_seed] if start else ["model", entry.task]
                key = "-".join([name, arm, *of_seed])
                if key in rows:
                    other = "experiments.{experiment}.arms.{arm}".format(**rows[key])
                    raise UserError(f"{other} and experiments.{name}.arms.{arm}: both would be train@{key}. Rename one.")
                rows[key] = {
                    "experiment": name,
                    "arm": arm,
                    "seed": seed,
                    "folder": "/".join([name, arm, *of_seed]),
                    "task": entry.task,
                    "model": "/".join(model),
                    "train": f"{train}/{entry.task}",
                    "after": after.as_posix(),
                    "resources": study.resources_of(name, seed),
                }
    return rows


def stage_of_run(run: str) -> str:
    """The DVC stage that trains the run ``EXPERIMENT/ARM/SEED`` of the active study."""
    experiment, arm, seed = run.split("/")
    together = paths.PARAMS.exists() and experiment in _with_seeds_in_one_stage(paths.PARAMS.stat().st_mtime_ns)
    return f"train@{experiment}-{arm}" if together else f"train@{experiment}-{arm}-{seed}"


@cache
def _with_seeds_in_one_stage(_changed: int) -> set[str]:
    values = parse_yaml(paths.PARAMS)
    experiments = values["experiments"] if values.get("seeds_in_one_stage") else {}
    return {name for name, entry in experiments.items() if not entry.get("timed")}

"""One run of an experiment: its identity, its results, and whether it has to be trained at all.

Imports torch only to train, as taking over an equal run's results does not need it.
"""

from __future__ import annotations

import csv
import shutil
from pathlib import Path
from typing import Any

from grpo import paths
from grpo.effective import EffectiveRun, digest
from grpo.files import files_digest, whole_folder, write_json
from grpo.models import require_checkpoint
from grpo.records import read_problems
from grpo.study import Study, read_yaml
from grpo.tracking import MlflowRun, now, source_tags


def run_identity(study: Study, run: EffectiveRun) -> dict[str, Any]:
    """Everything that a run's results depend on; two runs with equal identities have equal results."""
    return {
        "config": run.config.model_dump(),
        "seed": run.seed,
        "evaluation": study.evaluation.model_dump(exclude={"zero_shot_problems", "zero_shot_prompts", "best_of_n"}),
        "engine": study.engine.model_dump(),
        "learner": study.learner.model_dump(),
        "threads": study.threads,
        "model": files_digest(paths.MODEL),
        "train": files_digest(paths.TRAIN),
        "validation": files_digest(paths.VALIDATION),
    }


def train_run(study: Study, run: EffectiveRun, winners: list[dict[str, Any]]) -> None:
    """Train one run, or take over the equal one that an earlier experiment already trained, and write its results.

    Args:
        winners: selection files of the experiments before this one, whose runs may be equal to this one.
    """
    require_checkpoint(paths.MODEL)
    problems = read_problems(paths.TRAIN), read_problems(paths.VALIDATION)
    identity = run_identity(study, run)
    mlflow = _mlflow_run(run, identity)
    twin = _finished_twin(study, identity, winners)
    try:
        with whole_folder(paths.RUNS / run.name) as folder, whole_folder(paths.CHECKPOINTS / run.name) as checkpoint:
            _write_config(folder / "config.yaml", run, identity, twin)
            if twin:
                timing = _take_over(twin, folder, checkpoint, mlflow)
            else:
                from grpo.training.session import train

                timing = train(study, run, problems, folder, checkpoint, mlflow)
        for name in ("config.yaml", "metrics.json", "rollouts.jsonl"):
            mlflow.artifact(paths.RUNS / run.name / name)
        mlflow.tag(checkpoint_digest=files_digest(paths.CHECKPOINTS / run.name), same_as=twin or "")
    except BaseException:
        mlflow.finish("FAILED")
        raise
    run_id = mlflow.finish()
    write_json(
        paths.TIMING / f"{run.name}.json",
        {"run": run.name, "mlflow_run_id": run_id, "same_as": twin, **source_tags(), **timing},
    )


def _mlflow_run(run: EffectiveRun, identity: dict[str, Any]) -> MlflowRun:
    return MlflowRun(
        run.experiment,
        f"{run.arm}-{run.seed}",
        {**run.config.model_dump(), "seed": run.seed},
        {
            "stage": f"{run.experiment}@{run.arm}-{run.seed}",
            "arm": run.arm,
            "identity": digest(identity),
            "dataset_digest": digest([identity["train"], identity["validation"]]),
            "model_digest": identity["model"],
        },
    )


def _write_config(path: Path, run: EffectiveRun, identity: dict[str, Any], twin: str | None) -> None:
    """The effective configuration: each value with where it came from."""
    from ruamel.yaml import YAML

    values = run.config.model_dump()
    content = {
        "run": run.name,
        "same_as": twin,
        "identity": digest(identity),
        "seed": run.seed,
        "config": {key: {"value": value, "from": run.sources[key]} for key, value in values.items()},
        **{key: identity[key] for key in ("evaluation", "engine", "learner", "threads", "model", "train", "validation")},
    }
    with path.open("w", encoding="utf-8") as file:
        YAML().dump(content, file)


def _finished_twin(study: Study, identity: dict[str, Any], winners: list[dict[str, Any]]) -> str | None:
    """The name of a run of an earlier experiment with this identity whose results are at hand.

    Only runs that the study names count: those DVC keeps up to date with the code, leftovers of former arms it does not.
    """
    for experiment in (winner["experiment"] for winner in winners):
        for arm in study.experiments[experiment].arms:
            name = f"{experiment}/{arm}-{identity['seed']}"
            config = paths.RUNS / name / "config.yaml"
            at_hand = config.exists() and (paths.CHECKPOINTS / name).exists()
            if at_hand and read_yaml(config)["identity"] == digest(identity):
                return name
    return None


def _take_over(twin: str, folder: Path, checkpoint: Path, mlflow: MlflowRun) -> dict[str, Any]:
    """Copy an equal run's results, and show its curves in this run's MLflow entry too."""
    print(f"same configuration as {twin}: its results are taken over, nothing is trained twice")
    for source in (paths.RUNS / twin).iterdir():
        if source.name != "config.yaml":
            shutil.copyfile(source, folder / source.name)
    shutil.copytree(paths.CHECKPOINTS / twin, checkpoint, dirs_exist_ok=True)
    for name in ("history.csv", "validation.csv"):
        with (folder / name).open(encoding="utf-8", newline="") as file:
            for row in csv.DictReader(file):
                step = int(row.pop("update"))
                row.pop("step")
                mlflow.log({key: float(value) for key, value in row.items()}, step=step)
    return {"started": now(), "finished": now(), "total_s": 0.0, "phases": {}, "steps": []}

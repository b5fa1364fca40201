"""One run of an experiment: its identity, its results, and whether it has to be trained at all.

Imports torch only to train, as taking over an equal run's results does not need it.
"""

from __future__ import annotations

import csv
import shutil
from pathlib import Path
from typing import Any

from grpo import paths
from grpo.config import GrpoConfig, SftConfig
from grpo.effective import EffectiveRun, digest
from grpo.errors import ToBeResumed
from grpo.experiments import KEYWORD, method_of, needed_selections
from grpo.files import files_digest, whole_folder, write_json
from grpo.inputs import code_of_runs, shared_settings
from grpo.models import require_checkpoint
from grpo.records import Problem, read_examples, read_problems
from grpo.selection import read_config
from grpo.study import Study
from grpo.tasks.keyword_dataset import read_keyword_problems
from grpo.tracking import MlflowRun, now, source_tags
from grpo.training.lock import only_one
from grpo.training.order import choose_examples


def run_identity(study: Study, run: EffectiveRun) -> dict[str, Any]:
    """Everything that a run's results depend on; two runs with equal identities have equal results."""
    return {
        "method": method_of(run.experiment),
        "config": run.config.model_dump(),
        "seed": run.seed,
        **shared_settings(study),
        "model": files_digest(run.model),
        "train": files_digest(run.train),
        "validation": files_digest(run.validation),
    }


def train_run(study: Study, run: EffectiveRun, check_weights: bool = False) -> None:
    """Train one run, or take over the equal one that an experiment before it already trained, and write its results.

    Args:
        check_weights: see :func:`grpo.rollout.make.make_engine`.

    Raises:
        ToBeResumed: the process was told to stop; the run's state is saved.
        UserError: among others, another process trains this very run.
    """
    require_checkpoint(run.model)
    data, validation_problems = _read_data(run)
    identity = run_identity(study, run)
    twin = _finished_twin(study, run.experiment, identity)
    if study.learner.processes > 1 and not twin and _done_by_others(study, run):
        return
    with only_one(paths.RUN_LOCKS / f"{run.name.replace('/', '--')}.lock", f"{run.name}: another process"):
        _train(study, run, data, validation_problems, identity, twin, check_weights)


def _train(
    study: Study,
    run: EffectiveRun,
    data: list[Any],
    validation_problems: list[Problem],
    identity: dict[str, Any],
    twin: str | None,
    check_weights: bool,
) -> None:
    """:func:`train_run` where this process is the only one that works on the run."""
    state = paths.RUN_STATE / run.name / digest([identity, code_of_runs()])
    mlflow = _mlflow_run(run, identity)
    try:
        with whole_folder(paths.RUNS / run.name) as folder, whole_folder(paths.CHECKPOINTS / run.name) as checkpoint:
            _write_config(folder / "config.yaml", run, identity, twin)
            if twin:
                timing = _take_over(run.name, twin, folder, checkpoint, mlflow)
            else:
                from grpo.training.session import train

                timing = train(study, run, data, validation_problems, folder, checkpoint, state, mlflow, check_weights)
        for name in ("config.yaml", "metrics.json", "outcomes.jsonl", "rollouts.jsonl"):
            mlflow.artifact(paths.RUNS / run.name / name)
        mlflow.tag(checkpoint_digest=files_digest(paths.CHECKPOINTS / run.name), same_as=twin or "")
    except BaseException as error:
        mlflow.finish("KILLED" if isinstance(error, ToBeResumed) else "FAILED")
        raise
    run_id = mlflow.finish()
    write_json(
        paths.TIMING / f"{run.name}.json",
        {"run": run.name, "mlflow_run_id": run_id, "same_as": twin, **source_tags(), **timing},
    )
    # Last of all: whenever the process is killed, either the results are in place or the state is.
    shutil.rmtree(paths.RUN_STATE / run.name, ignore_errors=True)


def _read_data(run: EffectiveRun) -> tuple[list[Any], list[Problem]]:
    """What the run is trained on (problems, or chosen examples), and its validation problems."""
    if run.experiment == KEYWORD:
        return read_keyword_problems(run.train), read_keyword_problems(run.validation)
    validation = read_problems(run.validation)
    if isinstance(run.config, SftConfig):
        return choose_examples(read_examples(run.train), run.config, run.seed), validation
    return read_problems(run.train), validation


def _done_by_others(study: Study, run: EffectiveRun) -> bool:
    """Where several processes train a run: start them all, or help the one that leads; False in the latter itself."""
    from grpo.training.session import follow
    from grpo.training.world import follows, start_processes, started_by_torchrun

    if not started_by_torchrun():
        start_processes(study.learner.processes)
        return True
    if follows():
        follow(study, run)
        return True
    return False


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
        "overrides": run.overrides,
        **({"updates_per_rollout_batch": run.config.updates_per_rollout_batch} if isinstance(run.config, GrpoConfig) else {}),
        "config": {key: {"value": value, "from": run.sources[key]} for key, value in values.items()},
        **{key: value for key, value in identity.items() if key not in {"config", "seed"}},
    }
    with path.open("w", encoding="utf-8") as file:
        YAML().dump(content, file)


def _finished_twin(study: Study, experiment: str, identity: dict[str, Any]) -> str | None:
    """The name of a run with this identity, of an experiment that this one waits for, whose results are at hand.

    Only runs that the study names count: those DVC keeps up to date with the code, leftovers of former arms it does not.
    A run that was itself taken over does not count, as the one that was trained comes before it.
    """
    for before in needed_selections(experiment):
        for arm in study.experiments[before].arms:
            name = f"{before}/{arm}-{identity['seed']}"
            config = paths.RUNS / name / "config.yaml"
            if config.exists() and (paths.CHECKPOINTS / name).exists():
                values = read_config(before, arm, identity["seed"])
                if values["identity"] == digest(identity):
                    return values.get("same_as") or name
    return None


def _take_over(run: str, twin: str, folder: Path, checkpoint: Path, mlflow: MlflowRun) -> dict[str, Any]:
    """Copy an equal run's results, and show its curves in this run's MLflow entry too."""
    print(f"same configuration as {twin}: its results are taken over, nothing is trained twice")
    for source in (paths.RUNS / twin).iterdir():
        if source.name != "config.yaml":
            shutil.copyfile(source, folder / source.name)
    # Its weights stay where they are and are not stored again.
    write_json(checkpoint / "metadata.json", {"run": run, "same_as": twin})
    for name in ("history.csv", "validation.csv"):
        with (folder / name).open(encoding="utf-8", newline="") as file:
            for row in csv.DictReader(file):
                step = int(row.pop("update"))
                row.pop("step")
                mlflow.log({key: float(value) for key, value in row.items()}, step=step)
    return {"started": now(), "finished": now(), "total_s": 0.0, "phases": {}, "steps": []}

"""One run of an experiment: its identity, whether an equal one can be taken over, its training, and its results.

Imports torch only to train, as taking over an equal run's results does not need it.
"""

from __future__ import annotations

import io
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any, cast

from grpo.common.errors import ToBeResumed
from grpo.common.files import files_digest, read_json, whole_folder, write_json
from grpo.common.lock import only_one
from grpo.common.world import is_rank_0, start_processes, started_by_torchrun
from grpo.models import require_checkpoint
from grpo.results.runs import read_config
from grpo.study import paths
from grpo.study.effective import EffectiveRun, digest
from grpo.study.kept import bring_back, keep_until_stored
from grpo.study.methods import GrpoConfig
from grpo.study.runs_table import stage_of_run
from grpo.study.schema import Study
from grpo.study.software import hardware, packages, software, warn_of_other_versions
from grpo.study.training_inputs import also_inputs, code_of_rooms, shared_settings, task_inputs
from grpo.tracking.mlflow_run import MlflowRun
from grpo.tracking.mlflow_study import flat, source_tags, study_params, study_state, study_tags
from grpo.tracking.run_log import now
from grpo.training.inputs import Outputs, is_asynchronous, read_data


def train_run(study: Study, run: EffectiveRun, check_weights: bool = False) -> None:
    """Train one run, or take over the equal one that an experiment before it already trained, and write its results.

    Args:
        check_weights: see :func:`grpo.rollout.make_engine.make_engine`.

    Raises:
        ToBeResumed: the process was told to stop; the run's state is saved.
        UserError: among others, another process trains this very run.
    """
    require_checkpoint(run.model)
    data, identity = read_data(run, study.also_evaluated(run.task)), run_identity(study, run)
    if not started_by_torchrun() and bring_back(_state_folder(run, identity), paths.RUNS / run.name):
        print(f"{run.name} was finished before, but not yet stored by DVC: its results are in place again")
        return
    # That there is none has been found before several processes are started.
    same_as = None if started_by_torchrun() else _finished_equal(study, run.experiment, identity)
    together = study.learner.processes > 1 and not is_asynchronous(run.config)
    if together and not same_as and not started_by_torchrun():
        start_processes(study.learner.processes, study.learner.device)
        return
    lock = only_one(paths.RUN_LOCKS / f"{run.name.replace('/', '--')}.lock", f"{run.name}: another process")
    with (
        lock if is_rank_0() else nullcontext(),
        (recorded if is_rank_0() else thrown_away)(study, run, identity, same_as) as outputs,
    ):
        if same_as:
            _take_over(run.name, same_as, outputs)
            return
        from grpo.training.train import train

        train(study, run, data, outputs, check_weights)


def run_identity(study: Study, run: EffectiveRun) -> dict[str, Any]:
    """Everything that a run's results depend on; two runs with equal identities have equal results."""
    return {
        "method": run.method,
        "config": run.config.model_dump(),
        "seed": run.seed,
        **shared_settings(study),
        "software": software(_packages(study, run)),
        "task": task_inputs(study, run.task),
        "model": files_digest(run.model),
        "train": files_digest(run.train),
        "validation": files_digest(run.validation),
        **_further_sets(study, run),
    }


def _further_sets(study: Study, run: EffectiveRun) -> dict[str, Any]:
    """Tasks and problems of the further evaluation sets; empty where there is none."""
    digests = {name: files_digest(paths.also(run.task, name)) for name in study.also_evaluated(run.task)}
    return also_inputs(study, run.task) | ({"also_problems": digests} if digests else {})


def _packages(study: Study, run: EffectiveRun) -> tuple[str, ...]:
    """The packages that decide the run's results."""
    return packages(study, is_asynchronous(run.config), run.config.lora is not None)


# ---------------------------------------------------------------------------------------------------- start and finish


@contextmanager
def recorded(study: Study, run: EffectiveRun, identity: dict[str, Any], same_as: str | None) -> Iterator[Outputs]:
    """Where the results go that the block makes. When it ends they get their place, and MLflow and the timing file theirs; when
    it fails, MLflow says so and nothing else is left.
    """
    warn_of_other_versions(_packages(study, run))
    state = _state_folder(run, identity)
    mlflow = _mlflow_run(study, run, identity, same_as)
    try:
        mlflow.dataset(run.train, identity["train"], "training")
        mlflow.dataset(run.validation, identity["validation"], "validation")
        with whole_folder(paths.RUNS / run.name) as folder, whole_folder(paths.CHECKPOINTS / run.name) as checkpoints:
            _write_config(folder / "config.yaml", run, identity, same_as)
            outputs = Outputs(folder, checkpoints, state, mlflow)
            yield outputs
        # The other results of a run that was taken over are those of the run it equals, which MLflow has.
        for name in ("config.yaml", *(() if same_as else ("metrics.json", "outcomes.jsonl"))):
            mlflow.artifact(paths.RUNS / run.name / name)
        if not same_as:
            mlflow.table(paths.RUNS / run.name / "rollouts.jsonl")
        mlflow.checkpoints(paths.CHECKPOINTS / run.name)
        mlflow.tag(checkpoint_digest=files_digest(paths.CHECKPOINTS / run.name))
    except BaseException as error:
        mlflow.finish("KILLED" if isinstance(error, ToBeResumed) else "FAILED")
        raise
    run_id = mlflow.finish()
    about = {"run": run.name, "mlflow_run_id": run_id, "same_as": same_as, **source_tags(), "hardware": hardware()}
    write_json(paths.run_timing(run.name), about | outputs.timing)
    # Last of all: whenever the process is killed, either the results are in place or the state is.
    _keep_results(run, state)


def _keep_results(run: EffectiveRun, state: Path) -> None:
    """Keep the run's results in the place of its saved states until DVC has stored them."""
    results = [root / run.name for root in (paths.RUNS, paths.CHECKPOINTS, paths.TIMING)]
    keep_until_stored(state, results[-1], results)
    for saved in [*state.parent.glob("*"), *state.glob("step-*")]:
        if saved != state:
            shutil.rmtree(saved, ignore_errors=True)


@contextmanager
def thrown_away(study: Study, run: EffectiveRun, identity: dict[str, Any], same_as: str | None) -> Iterator[Outputs]:
    """The same in a process beside rank 0: what it would write and say equals what rank 0 does."""
    nothing = cast(MlflowRun, SimpleNamespace(log=lambda *_, **__: None, tag=lambda **_: None))
    with TemporaryDirectory() as folder, redirect_stdout(io.StringIO()), suppress(ToBeResumed):
        yield Outputs(Path(folder), Path(folder), _state_folder(run, identity), nothing)


def _state_folder(run: EffectiveRun, identity: dict[str, Any]) -> Path:
    """Another number of processes may go on from a state."""
    learner = {key: value for key, value in identity["learner"].items() if key != "processes"}
    return paths.RUN_STATE / run.name / digest([identity | {"learner": learner}, code_of_rooms()])


def _mlflow_run(study: Study, run: EffectiveRun, identity: dict[str, Any], same_as: str | None) -> MlflowRun:
    """The run in MLflow; one that was taken over has no metrics of its own there, but names the run that has."""
    original = {"same_as": same_as, "same_as_run_id": _mlflow_id(same_as)} if same_as else {}
    return MlflowRun(
        study.study,
        run.name,
        {**study_params(study, run.task), **flat(run.config.model_dump()), "seed": run.seed},
        {
            **study_tags(study, run.task),
            "experiment": run.experiment,
            "stage": stage_of_run(run.name),
            "method": run.method,
            "arm": run.arm,
            "taken_over": str(same_as is not None).lower(),
            **original,
            "identity": digest(identity),
            "dataset_digest": digest([identity["train"], identity["validation"]]),
            "model_digest": identity["model"],
        },
        study_state(study),
    )


def _mlflow_id(run: str) -> str:
    """The id in MLflow of a finished run."""
    timing = read_json(paths.run_timing(run), made_by=stage_of_run(run), keys=("mlflow_run_id",))
    return timing["mlflow_run_id"] or "not tracked"


def _write_config(path: Path, run: EffectiveRun, identity: dict[str, Any], same_as: str | None) -> None:
    """The effective configuration: each value with where it came from."""
    from ruamel.yaml import YAML

    values = run.config.model_dump()
    content = {
        "run": run.name,
        "same_as": same_as,
        "identity": digest(identity),
        "seed": run.seed,
        "overrides": run.overrides,
        "before": run.before,
        **({"updates_per_rollout_batch": run.config.updates_per_rollout_batch} if isinstance(run.config, GrpoConfig) else {}),
        "config": {key: {"value": value, "from": run.sources[key]} for key, value in values.items()},
        **{key: value for key, value in identity.items() if key not in {"config", "seed"}},
    }
    with path.open("w", encoding="utf-8") as file:
        YAML().dump(content, file)


def _finished_equal(study: Study, experiment: str, identity: dict[str, Any]) -> str | None:
    """The name of a run with this identity, of an experiment that this one waits for, whose results are at hand.

    Only runs that the study names count: those DVC keeps up to date with the code, leftovers of former arms it does not.
    A run that was itself taken over does not count, as the one that was trained comes before it.
    """
    for before in study.needed_selections(experiment):
        for arm in study.experiments[before].arms:
            name = paths.run_name(before, arm, identity["seed"])
            config = paths.RUNS / name / "config.yaml"
            if config.exists() and (paths.CHECKPOINTS / name).exists():
                values = read_config(before, arm, identity["seed"])
                if values["identity"] == digest(identity):
                    return values.get("same_as") or name
    return None


def _take_over(run: str, same_as: str, outputs: Outputs) -> None:
    """Copy an equal run's results."""
    print(f"same configuration as {same_as}: its results are taken over, nothing is trained twice")
    for source in (paths.RUNS / same_as).iterdir():
        if source.name != "config.yaml":
            shutil.copyfile(source, outputs.results / source.name)
    # Its weights stay where they are and are not stored again.
    write_json(outputs.checkpoints / "metadata.json", {"run": run, "same_as": same_as})
    outputs.timing |= {"started": now(), "finished": now(), "total_s": 0.0, "phases": {}, "steps": []}

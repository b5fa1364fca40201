"""One run of an experiment: its identity, its training or the reuse of an identical run, and its results.

Torch is imported only to train, so the reuse of a run starts fast.
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

from grpo.common.errors import ActorLost, ToBeResumed, UserError
from grpo.common.files import atomic_folder, exclusive_lock, files_digest, read_json, write_json
from grpo.common.world import is_rank_0, start_processes, started_by_torchrun
from grpo.models import require_checkpoint
from grpo.models.tokenizer import chat_date
from grpo.study import paths
from grpo.study.config import GrpoConfig
from grpo.study.effective import EffectiveRun, digest, read_run_config
from grpo.study.kept import bring_back, keep_until_stored
from grpo.study.schema import Study
from grpo.study.software import hardware, packages, software, warn_of_other_versions
from grpo.study.training_inputs import code_of_rooms, shared_settings, task_inputs
from grpo.tasks.task import find_format
from grpo.tracking.mlflow_run import MlflowRun
from grpo.tracking.mlflow_study import flat, source_tags, study_params, study_state, study_tags
from grpo.tracking.run_log import Outputs, now
from grpo.training.data import Data, read_data

MLFLOW_ID = "mlflow_run_id"  # file beside the saved states; a resumed run goes on in the same MLflow run
ATTEMPTS = 4  # from one saved state of an asynchronous run whose actors die or hang


def train_run(study: Study, run: EffectiveRun) -> None:
    """Train one run and write its results, or copy those of an identical run that an earlier experiment trained.

    Raises ToBeResumed: the process was told to stop; the run's state is saved. Raises UserError: among others, another process
    trains the same run, or actors were lost again and again.
    """
    require_checkpoint(run.model)
    data, identity = read_data(run), run_identity(study, run)
    same_as = None
    if not started_by_torchrun():  # the first process decides for those that it starts
        if bring_back(_state_folder(run, identity), paths.RUNS / run.name):
            print(f"{run.name} was finished before, but not yet stored by DVC: its results are back in place")
            return
        same_as = _finished_equal(study, run.experiment, identity)
        if study.learner.processes > 1 and not same_as and not run.config.is_asynchronous:
            start_processes(study.learner.processes, study.learner.device)
            return
    lock = exclusive_lock(paths.RUN_LOCKS / f"{run.name.replace('/', '--')}.lock", f"{run.name}: another process")
    with (
        lock if is_rank_0() else nullcontext(),
        (recorded_run if is_rank_0() else discarded_outputs)(study, run, identity, same_as) as outputs,
    ):
        if same_as:
            _take_over(run.name, same_as, outputs)
        else:
            _train(study, run, data, outputs)


def _train(study: Study, run: EffectiveRun, data: Data, outputs: Outputs) -> None:
    """Train; if an actor of an asynchronous run is lost, go on from the last saved state."""
    from grpo.training.train import train

    losses = attempts = reached = 0
    while True:
        outputs.timing["restarts"] = {"actors": losses}
        try:
            train(study, run, data, outputs)
            return
        except ActorLost as lost:
            resumed_after = max(outputs.timing.get("resumed_after", []), default=0)
            attempts = 1 if resumed_after > reached else attempts + 1
            losses, reached = losses + 1, max(reached, resumed_after)
            if attempts == ATTEMPTS:
                raise UserError(_LOST.format(run.name, lost, attempts)) from lost
            print(f"{run.name}: {lost}; the run goes on from its last saved state", flush=True)
        shutil.rmtree(outputs.checkpoints)  # the state has its own
        outputs.checkpoints.mkdir()


_LOST = (
    "{}: {}, {} times in a row without a new saved state. Its last messages stand above, and in the logs of its node "
    "(session_latest/logs in Ray's temporary folder). Remove the cause, such as other programs that use the memory, and run "
    "the same command again: it goes on from the last saved state. With other settings the run starts again."
)


def run_identity(study: Study, run: EffectiveRun) -> dict[str, Any]:
    """All inputs of a run; two runs with equal identities have equal results."""
    date = chat_date(run.model) if find_format(study.task(run.task), run.config.prompt).chat else None
    return {
        "method": run.method,
        "config": run.config.model_dump(),
        "seed": run.seed,
        **shared_settings(study),
        "software": software(packages(study, [run.config])),
        "task": task_inputs(study, run.task),
        "model": files_digest(run.model),
        "train": files_digest(run.train),
        "validation": files_digest(run.validation),
        **({"chat_date": date} if date else {}),
    }


@contextmanager
def recorded_run(study: Study, run: EffectiveRun, identity: dict[str, Any], same_as: str | None) -> Iterator[Outputs]:
    """Give the block drafts for its results; move them into place, and record the run in MLflow and its timing file.

    If the block fails, MLflow marks the run as failed, and no results are left behind.
    """
    warn_of_other_versions(packages(study, [run.config]))
    state = _state_folder(run, identity)
    mlflow = _mlflow_run(study, run, identity, same_as, state / MLFLOW_ID)
    mlflow.dataset(run.train, identity["train"], "training")
    mlflow.dataset(run.validation, identity["validation"], "validation")
    try:
        with atomic_folder(paths.RUNS / run.name) as folder, atomic_folder(paths.CHECKPOINTS / run.name) as checkpoints:
            _write_config(folder / "config.yaml", run, identity, same_as)
            outputs = Outputs(folder, checkpoints, state, mlflow)
            yield outputs
        # MLflow already has the results of an identical run, under that run.
        for name in ("config.yaml", *(() if same_as else ("metrics.json", "outcomes.jsonl"))):
            mlflow.artifact(paths.RUNS / run.name / name)
        if not same_as:
            mlflow.table(paths.RUNS / run.name / "rollouts.jsonl")
        mlflow.tag(checkpoint_digest=files_digest(paths.CHECKPOINTS / run.name))
    except BaseException as error:
        mlflow.finish("KILLED" if isinstance(error, ToBeResumed) else "FAILED")
        raise
    about = {
        "run": run.name,
        "mlflow_run_id": mlflow.finish(),
        "same_as": same_as,
        "alone": study.runs_alone(run.experiment, run.seed),
        **source_tags(),
        "hardware": hardware(),
    }
    write_json(paths.run_timing(run.name), about | outputs.timing)
    # Last, so that a killed process always leaves either the results or the saved state.
    _keep_results(run, state)


def _keep_results(run: EffectiveRun, state: Path) -> None:
    """Replace the run's saved states by its results, which are kept until DVC has stored them."""
    (state / MLFLOW_ID).unlink(missing_ok=True)  # training it again is another run
    results = [root / run.name for root in (paths.RUNS, paths.CHECKPOINTS, paths.TIMING)]
    keep_until_stored(state, results[-1], results)
    for saved in [*state.parent.glob("*"), *state.glob("step-*")]:
        if saved != state:
            shutil.rmtree(saved, ignore_errors=True)


@contextmanager
def discarded_outputs(study: Study, run: EffectiveRun, identity: dict[str, Any], same_as: str | None) -> Iterator[Outputs]:
    """Stand-in for :func:`recorded_run` on other ranks: discard all output, which rank 0 records."""
    nothing = cast(MlflowRun, SimpleNamespace(log=lambda *_, **__: None, tag=lambda **_: None))
    with TemporaryDirectory() as folder, redirect_stdout(io.StringIO()), suppress(ToBeResumed):
        yield Outputs(Path(folder), Path(folder), _state_folder(run, identity), nothing)


def _state_folder(run: EffectiveRun, identity: dict[str, Any]) -> Path:
    """Folder of the run's saved states, the same for any number of processes, so that another number may resume."""
    learner = {key: value for key, value in identity["learner"].items() if key != "processes"}
    return paths.RUN_STATE / run.name / digest([identity | {"learner": learner}, code_of_rooms()])


def _mlflow_run(study: Study, run: EffectiveRun, identity: dict[str, Any], same_as: str | None, id_file: Path) -> MlflowRun:
    """Start the run in MLflow, or go on in it; a reused run has no metrics there, but tags that name the original run."""
    original = {}
    if same_as:
        timing = read_json(paths.run_timing(same_as), made_by=paths.stage_of_run(same_as), keys=("mlflow_run_id",))
        original = {"same_as": same_as, "same_as_run_id": timing["mlflow_run_id"] or "not tracked"}
    return MlflowRun(
        study.study,
        run.name,
        {**study_params(study, run.task), **flat(run.config.model_dump()), "seed": run.seed},
        {
            **study_tags(study, run.task),
            "experiment": run.experiment,
            "stage": paths.stage_of_run(run.name),
            "method": run.method,
            "arm": run.arm,
            "taken_over": str(same_as is not None).lower(),
            **original,
            "identity": digest(identity),
            "dataset_digest": digest([identity["train"], identity["validation"]]),
            "model_digest": identity["model"],
        },
        study_state(study),
        None if same_as else id_file,
    )


def _write_config(path: Path, run: EffectiveRun, identity: dict[str, Any], same_as: str | None) -> None:
    """Write the effective configuration: each value with its source."""
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
    """Name of a finished run with this identity in the experiments that this one depends on; None if there is none.

    Only arms of the study count, whose results DVC keeps up to date. The name is always that of the run that was trained.
    """
    for before in study.needed_selections(experiment):
        for arm in study.experiments[before].arms:
            name = paths.run_name(before, arm, identity["seed"])
            config = paths.RUNS / name / "config.yaml"
            if config.exists() and (paths.CHECKPOINTS / name).exists():
                values = read_run_config(name)
                if values["identity"] == digest(identity):
                    return values.get("same_as") or name
    return None


def _take_over(run: str, same_as: str, outputs: Outputs) -> None:
    print(f"same configuration as {same_as}: its results are taken over, nothing is trained twice")
    for source in (paths.RUNS / same_as).iterdir():
        if source.name != "config.yaml":
            shutil.copyfile(source, outputs.results / source.name)
    # The weights stay with the original run and are not stored again.
    write_json(outputs.checkpoints / "metadata.json", {"run": run, "same_as": same_as})
    outputs.timing |= {"started": now(), "finished": now(), "total_s": 0.0, "phases": {}, "steps": []}

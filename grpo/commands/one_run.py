"""`grpo run`: one GRPO run in its own folder, without a pipeline or a study file.

It composes a study of one run in memory and calls the same functions as the stages, so equal values give equal results.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, chdir, suppress
from math import gcd
from pathlib import Path
from typing import Any, NamedTuple

from ruamel.yaml import YAML, YAMLError

from grpo.commands import stages
from grpo.common.errors import ToBeResumed, UserError
from grpo.common.files import atomic_folder, exclusive_lock, require_own, write_text
from grpo.common.imports import search_in
from grpo.common.records import Problem, read_problems
from grpo.common.world import started_by_torchrun
from grpo.common.yaml_file import read_mapping, to_yaml
from grpo.models import require_checkpoint
from grpo.study import paths
from grpo.study.compose import STUDIES_FOLDER, compose, merge, study_path
from grpo.study.config import MAIN, OF_TRL, with_objective
from grpo.study.schema import Study, check_name, load_study, validated
from grpo.tasks.build import problems_of
from grpo.tasks.dataset import Dataset, columns_of
from grpo.tasks.rewards import REWARD_ARGUMENTS
from grpo.tasks.rows import FORMATS, read_rows
from grpo.tasks.task import LIMIT, TASKS, make_task
from grpo.tracking.mlflow_study import flat
from grpo.tracking.mlflow_uri import NOWHERE, tracking_uri
from grpo.training.own_code import require_own_code_of_all

ARM = "grpo"
BASE = "base"  # the default of --study
PINNED = {"math": "math-h100", "gsm8k": "gsm8k"}  # studies from which these tasks take the source of their problems
CURVES = Path("curves.png")
GROWING = ("history.csv", "validation.csv")  # while the run trains
# Beginnings of the keys that a single run uses, as in params.yaml.
SETTABLE = (
    *("tasks.main.", "models.main.", "grpo.", "engine.", "learner.", "evaluation."),
    *("divergence", "threads", "checkpoints", "save_state_every"),
)


class RunOptions(NamedTuple):
    """The options of `grpo run` that say what to run; None: the study's."""

    model: str | None = None
    task: str | None = None
    settings: Sequence[str] = ()
    seed: int = 0
    study: str = BASE


def one_run(options: RunOptions, out: Path, resume: bool) -> None:
    """Run it in ``out`` and leave its results there: CSV files, samples, checkpoints, ``curves.png`` and params.yaml.

    Raises UserError: an option or a value is wrong; or ``out`` holds another run, or this one and ``resume`` is not set. Raises
    ToBeResumed: the process was told to stop; the run's state is saved.
    """
    os.environ.setdefault("MLFLOW_TRACKING_URI", NOWHERE)
    if started_by_torchrun():  # the parent process has prepared the folder and works in it
        _train()
        return
    tracking_uri()
    params, stored_values = out / paths.PARAMS, resume and options == RunOptions()
    if stored_values and not params.exists():
        raise UserError(f"--out {out}: holds no run to continue. Correct the path, or leave out --resume.")
    values = read_mapping(params) if stored_values else composed(options, out)
    require_own_code_of_all(validated(values, Path("--set")))
    lock = out.with_name(f".{out.name}.lock")
    with exclusive_lock(lock, f"--out {out}: another process"), ExitStack() as at_the_end:
        at_the_end.callback(lock.unlink)
        try:
            require_own(out, out.rglob("*"))  # what is written or copied in a stranger's run stays in it
        except ValueError as error:
            raise UserError(f"--out {out}: {error}.") from error
        if out.exists() and not params.exists():
            raise UserError(f"--out {out}: already exists and holds no run. Name another folder.")
        # A folder without a saved state or results has nothing to lose, and is made again.
        if any((out / paths.RUN_STATE).rglob("step-*")) or any((out / paths.RUNS).rglob("metrics.json")):
            _require_same(values, out, resume)
        else:
            _prepare(values, out)
        with chdir(out):
            _train()
            _copy_results(out)


def composed(options: RunOptions, out: Path) -> dict[str, Any]:
    """Compose the values of a study that makes this one run and nothing else; they are not validated here."""
    check_name("--out", "a run", out.name)
    if options.study == BASE and None in (options.model, options.task):
        raise UserError("--model, --task: one is missing. Give both, or take a study's with --study NAME.")
    file, overlay = study_path(options.study), given_values(options.settings)
    values = compose(file)
    for key in ("claims", "controls"):  # they are on its arms
        values.pop(key, None)
    # The task's modules and data files lie here, beside the study's file or in studies/.
    own = [] if file.parent.resolve() == paths.shipped("studies").resolve() else [file.parent.absolute()]
    own += [STUDIES_FOLDER.absolute()] if STUDIES_FOLDER.is_dir() else []
    folders = dict.fromkeys((Path.cwd(), *own))
    search_in(*folders)
    model = _model(options.model) if options.model else values["models"][MAIN]
    set_task = overlay.pop("tasks", {}).get(MAIN, {})
    task = _task(options.task, set_task, values["tasks"]) if options.task else values["tasks"][MAIN]
    run: dict[str, Any] = {
        "study": "grpo_run",
        "description": "One run by `grpo run`.",
        "folder": os.pathsep.join(map(str, folders)),
        "file": None,
        "seeds": [options.seed],
        "seeds_in_one_stage": False,
        "tasks": {MAIN: merge(task, set_task)},
        "models": {MAIN: merge(model, overlay.pop("models", {}).get(MAIN, {}))},
        "sft_datasets": {},
        "kissing_number": None,
        "selection": {},
        "experiments": {out.name: {"arms": {ARM: {}}}},
    }
    values = merge(values, overlay) | run
    values["resources"] = {
        kind: {"gpus": 0, "cpus": values["threads"], "mem_mb": 1, "runtime_min": 1}  # not used without a scheduler
        for kind in ("small", "model", "evaluate", "train")
    }
    source, evaluation = make_task(values["tasks"][MAIN], f"tasks.{MAIN}"), values["evaluation"]
    if values["grpo"]["prompt"] not in source.formats and "prompt" not in overlay.get("grpo", {}):
        values["grpo"] = values["grpo"] | {"prompt": next(iter(source.formats))}
    files = source.files if isinstance(source, Dataset) else None
    if files or ":" in (options.task or ""):
        held_out = read_rows(files.validation, "--task") if files else problems_of(source, "validation")
        few = {key: min(len(held_out), evaluation[key]) for key in ("problems", "last_problems")} | {"selection_problems": 0}
        evaluation |= {key: value for key, value in few.items() if key not in overlay.get("evaluation", {})}
    if files and files.train:
        fitted = _batch_of_few(values["grpo"], len(read_rows(files.train, "--task")))
        values["grpo"] |= {} if fitted.keys() & overlay.get("grpo", {}).keys() else fitted
    not_evaluated = {"zero_shot_problems": 1, "zero_shot_prompts": [values["grpo"]["prompt"]], "best_of_n": {"prompts": []}}
    return values | {"evaluation": merge(evaluation, not_evaluated)}


def _batch_of_few(grpo: Mapping[str, Any], rows: int) -> dict[str, int]:
    """Batch sizes where a step would ask more rows than there are: it asks all, with as many responses at a time as before."""
    responses, at_a_time = rows * grpo["group_size"], grpo["train_batch_size"] // grpo["gradient_accumulation_steps"]
    sizes = {"rollout_batch_size": responses, "train_batch_size": responses}
    sizes |= {"gradient_accumulation_steps": responses // gcd(responses, at_a_time)}
    return sizes if responses < grpo["rollout_batch_size"] else {}


def study_and_problems(
    checkpoint: Path, task: str, settings: Sequence[str], n_problems: int | None, study_name: str = BASE
) -> tuple[Study, str, list[Problem]]:
    """Return what `grpo evaluate` needs: a study, the name of a task in it, and the problems to ask.

    ``task`` is a name in the active study; or a class or file, for which a study is composed from that of ``study_name``, as
    `grpo run` does. All rows of a file are asked.
    """
    is_file = Path(task).suffix in FORMATS
    if not is_file and ":" not in task:
        if settings or study_name != BASE:
            raise UserError("--set, --study: the values are those of params.yaml. Edit them there, or give --task a file.")
        study = load_study()
        study.task(task)
        problems, where = read_problems(paths.validation(task)), str(paths.validation(task))
    else:
        require_checkpoint(checkpoint)
        values = composed(RunOptions(str(checkpoint), task, settings, study=study_name), Path("evaluation"))
        if is_file:
            values["tasks"][MAIN]["files"] = {"validation": str(Path(task).absolute())}
        study, where, task = validated(values, Path("--set")), f"--task {task}", MAIN
        problems = problems_of(study.task(MAIN), "validation")
    if n_problems is not None and n_problems > len(problems):
        raise UserError(f"--problems {n_problems}: {where} holds {len(problems)} problems. Ask for fewer.")
    return study, task, problems[:n_problems]


def given_values(settings: Sequence[str]) -> dict[str, Any]:
    """Turn settings ``KEY=VALUE``, with values in YAML, into an overlay on a study."""
    overlay: dict[str, Any] = {}
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not key.startswith(SETTABLE):
            where = f"Here: {OF_TRL[key]}" if key in OF_TRL else f"Keys begin with {', '.join(SETTABLE)}"
            raise UserError(f"--set {setting}: no such key. {where} (docs/settings.md).")
        try:
            value: Any = YAML(typ="safe").load(text)
        except YAMLError:
            equals = ""
        if not equals:
            raise UserError(f"--set {setting}: expected KEY=VALUE, such as grpo.learning_rate=1e-5.")
        for part in reversed(key.split(".")):
            value = {part: value}
        overlay = merge(overlay, value)
    if "grpo" in overlay:
        overlay["grpo"] = with_objective(overlay["grpo"], "--set grpo")
    return overlay


def _model(name: str) -> dict[str, Any]:
    if Path(name).is_dir():
        return {"source": "local", "path": str(Path(name).absolute())}
    if (file := Path(name).absolute()).suffix == ".gguf" and file.is_file():
        return {"source": "local", "path": str(file.parent), "gguf_file": file.name}
    if not (on_hub := re.fullmatch(r"([\w.-]+/[\w.-]+)@([0-9a-f]{40})", name)):
        revision = "REVISION is a commit of 40 hex digits, which the Hub lists under Files, History"
        known = f"a folder in Hugging Face format, a GGUF file, or OWNER/NAME@REVISION of a model on the Hub. {revision}"
        raise UserError(f"--model {name}: no such folder. Give {known}.")
    return {"source": "hub", "repo": on_hub[1], "revision": on_hub[2]}


def _task(name: str, set_keys: Mapping[str, Any], tasks: Mapping[str, Any]) -> dict[str, Any]:
    """Make the entry of ``tasks:`` for ``--task``, without the keys that ``--set`` gives: the study's entry, or a file's."""
    if name in PINNED:
        tasks = {MAIN: compose(study_path(PINNED[name]))["tasks"][MAIN]}
    if Path(name).suffix not in FORMATS:
        if entry := next((entry for entry in tasks.values() if entry["use"] == name), None):
            return dict(entry)  # with all that it needs
        if name not in TASKS and ":" not in name:
            known = f"{', '.join(TASKS)}, MODULE:CLASS or a file ({', '.join(FORMATS)})"
            raise UserError(f"--task {name}: no such task. Use {known}.")
        return {"use": name}
    path = Path(name).absolute()
    if not path.is_file():
        raise UserError(f"--task {name}: no such file. Correct the path.")
    rows = read_rows(str(path), "--task")
    if len(rows) == 1:
        raise UserError(f"--task {name}: has a single row, and training and validation need one each. Add rows.")
    columns = columns_of(rows[0], f"--task {name}", f"Add --set tasks.{MAIN}.{{0}}=COLUMN, one of", set_keys)
    task = {
        "use": "dataset",
        **columns,
        "files": {"train": f"{path}[:90%]", "validation": f"{path}[90%:]"},
        "drop_overlap": True,
    }
    passed = []  # to reward functions
    for column in rows[0].values:
        with suppress(UserError):  # a value that cannot be passed
            if column not in {*columns.values(), *REWARD_ARGUMENTS} and None not in [row.value(column) for row in rows]:
                passed.append(column)
    return task | ({"columns": passed} if passed else {})


def _require_same(values: Mapping[str, Any], out: Path, resume: bool) -> None:
    """Raise UserError unless ``out`` holds this run and ``--resume`` is given."""
    old, new = flat(read_mapping(out / paths.PARAMS)), flat(values)
    other = [key for key in {**new, **old} if key != "folder" and old.get(key) != new.get(key)]
    if other:
        changes = "; ".join(f"{key}: {old.get(key)} -> {new.get(key)}" for key in other)
        raise UserError(f"--out {out}: holds a run with other values ({changes}). Name another folder.")
    if not resume:
        raise UserError(f"--out {out}: already holds this run. Add --resume to continue it, or name another folder.")


def _prepare(values: Mapping[str, Any], out: Path) -> None:
    """Make ``out`` with the run's params.yaml, problems and model; if one of them fails, make nothing."""
    with atomic_folder(out) as draft, chdir(draft):
        write_text(paths.PARAMS, to_yaml(values))
        study = load_study()
        # A prompt limit needs the model's tokenizer, so `model` runs first. Otherwise `dataset` runs first, so that bad data
        # fails early.
        limited = values["tasks"][MAIN].get(LIMIT)
        for stage in (stages.model, stages.dataset) if limited else (stages.dataset, stages.model):
            stage(MAIN)
        questions = f"{study.grpo.n_prompts_per_rollout_batch} questions a step (grpo.rollout_batch_size / grpo.group_size)"
        ends = f"at the end on {study.evaluation.last_problems} (.last_problems)"
        print(f"{questions}, evaluated on {study.evaluation.problems} problems (evaluation.problems), {ends}")
        run = paths.RUNS / study.active_experiments[0] / ARM
        for name in GROWING:
            Path(name).symlink_to(run / f".{study.seeds[0]}.draft" / name)


def _train() -> None:
    """Train the run of the working folder, unless it has results."""
    study = load_study()
    (experiment,), (seed,) = study.active_experiments, study.seeds
    if not (paths.RUNS / paths.run_name(experiment, ARM, seed)).exists():
        try:
            stages.train(experiment, [ARM], str(seed))
        except ToBeResumed:
            raise ToBeResumed("stopped; the state is saved. The same command with --resume continues the run.") from None


def _copy_results(out: Path) -> None:
    """Copy the run's results to the top of the working folder (called ``out`` in messages), draw its curves and list them."""
    from grpo.reporting.charts import run_figure, save_figure
    from grpo.results.runs import read_run

    study = load_study()
    run = read_run(study.active_experiments[0], ARM, study.seeds[0])
    for file in [*(paths.RUNS / run.name).iterdir(), paths.run_timing(run.name)]:
        Path(file.name).unlink(missing_ok=True)
        shutil.copyfile(file, file.name)
    checkpoints = Path("checkpoints")
    checkpoints.unlink(missing_ok=True)
    checkpoints.symlink_to(paths.CHECKPOINTS / run.name)
    save_figure(run_figure(run), CURVES)
    print(stages.validation_rewards(run.experiment, run.arm, run.seed))
    print(f"{out}: {CURVES}, history.csv, validation.csv, rollouts.jsonl (samples), checkpoints/, and all values: params.yaml")

"""What Snakemake has to know, taken from DVC: the stages, their order, what they need, and which of them are stale.

Every rule's input and output is a stamp, a small file in ``.stamps/``. DVC's own files are not shown to Snakemake, because it
deletes a job's outputs before it starts the job and writes time stamps into folders; DVC would see both as changes.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from math import ceil
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dvc.repo import Repo
    from dvc.stage import Stage

STAMPS, DATA = Path(".stamps"), Path("data")
PLAN = STAMPS / "plan.json"
# What is up to date gets this time; what a job writes is newer. Any moment in the past would do.
UP_TO_DATE = 946_684_800
# For a stage whose `meta:` names no entry of `resources:`.
SMALLEST = {"gpus": 0, "cpus": 1, "mem_mb": 2000, "runtime_min": 60}


class PlanError(Exception):
    """dvc.yaml, dvc.lock or params.yaml cannot be turned into a plan; the message says what to mend."""


def make_plan() -> set[str]:
    """Ask DVC for the stages and what is stale; write the plan and bring the stamps in line with it.

    Returns:
        the names of the stages that DVC would run, and of all that follow them.

    Raises:
        PlanError: params.yaml is not a valid study, DVC cannot read the pipeline, or a stage names resources that params.yaml
            does not have.
    """
    from dvc.exceptions import DvcException
    from dvc.repo import Repo
    from dvc.scm import SCMError

    check_params()
    if DATA.is_symlink():
        raise PlanError(
            f"{DATA} is a link, and DVC stores nothing behind one. Make it a folder; results go to another disk by"
            " `dvc cache dir --local FOLDER` and `dvc config --local cache.type symlink` (docs/tracking.md)."
        )
    try:
        # Waits for the lock, since a stage of another `dvc` may hold it for a moment.
        with Repo(_wait_for_lock=True) as repo:
            if not repo.config["core"].get("hardlink_lock"):
                require_flock(Path(repo.tmp_dir))
            with repo.lock:
                remove_torn_rwlock(Path(repo.tmp_dir) / "rwlock")
                plan = describe(repo)
                stale = stale_stages(repo)
    except SCMError as error:
        raise PlanError(
            f"{error}, as DVC needs it to be. Clone the project with git; or, if it came without (as a ZIP file):"
            " git init && git add . && git commit -m 'Start'"
        ) from error
    except DvcException as error:
        raise PlanError(what_dvc_cannot_read(error)) from error
    write_stamps(plan, stale)
    write_atomically(PLAN, json.dumps(plan, indent=1))
    return stale


def require_flock(folder: Path) -> None:
    """Try the kind of lock that DVC takes; where it is refused, DVC would wait for ever without a word.

    Raises:
        PlanError: the file system has no such locks.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with TemporaryFile(dir=folder) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise PlanError(
                f"{folder}: the file system refuses flock ({error.strerror}), by which DVC locks. Have DVC take other locks:"
                " dvc config core.hardlink_lock true && rm -f .dvc/tmp/lock .dvc/tmp/rwlock.lock"
            ) from error


def check_params() -> None:
    """Validate params.yaml before anything runs; DVC would only say that it is corrupted, and stages fail one after the other.

    A params.yaml without experiments belongs to another pipeline, and is only parsed.

    Raises:
        PlanError: it is no YAML, or no valid study; the message names the line or the key.
    """
    from grpo.common.errors import UserError
    from grpo.study.schema import PARAMS_FILE, read_yaml, validated

    try:
        values = read_yaml(PARAMS_FILE)
        if not isinstance(values, dict) or "experiments" in values:
            validated(values, PARAMS_FILE)
    except UserError as error:
        raise PlanError(str(error)) from error


def what_dvc_cannot_read(error: Exception) -> str:
    """The line of dvc.yaml or dvc.lock that is no YAML, if there is one; else DVC's own words."""
    from grpo.common.errors import UserError
    from grpo.common.yaml_file import parse_yaml

    message, remedy = f"DVC cannot read the pipeline: {error}.", " See `dvc dag`."
    for file in (Path("dvc.yaml"), Path("dvc.lock")):
        try:
            if file.exists():
                parse_yaml(file)
        except UserError as wrong:
            message, remedy = str(wrong), ""
            break
    return message + (" `git checkout dvc.lock` brings the committed one back." if "dvc.lock" in message else remedy)


@contextmanager
def only_one_here() -> Iterator[None]:
    """Hold the folder, in which no two processes may run stages.

    Raises:
        PlanError: another one holds it.
    """
    from grpo.common.errors import UserError
    from grpo.common.lock import only_one

    try:
        with only_one(STAMPS / "running.lock", "In this folder another Snakemake (`make repro`)"):
            yield
    except UserError as error:
        raise PlanError(str(error)) from error


def remove_torn_rwlock(path: Path) -> None:
    """Remove DVC's list of busy files if a killed DVC left it half-written; every later stage would fail on it.

    DVC writes it only while it holds ``repo.lock``, as the caller does now, so nobody else is writing it.
    """
    if path.exists():
        try:
            json.loads(path.read_text())
        except ValueError:
            path.unlink()


def scheduled(repo: Repo) -> list[Stage]:
    """The stages that run a command; imports and tracked files have nothing to schedule."""
    return [stage for stage in repo.index.stages if stage.cmd]


def describe(repo: Repo) -> list[dict[str, Any]]:
    """One entry for each stage, in a form that JSON can hold."""
    import networkx as nx
    from dvc.utils.serialize import load_yaml

    graph = repo.index.graph  # an edge goes from a stage to one that it depends on
    waiting: dict[Stage, int] = {}  # how long the longest chain is of stages that wait for one
    for stage in nx.topological_sort(graph):
        waiting[stage] = max((waiting[after] + 1 for after in graph.predecessors(stage)), default=0)
    known = load_yaml("params.yaml").get("resources", {}) if Path("params.yaml").exists() else {}
    slugs: dict[str, str] = {}
    plan = []
    for stage in scheduled(repo):
        name = stage.addressing
        slug = re.sub(r"\W", "_", name)
        if slugs.setdefault(slug, name) != name:
            raise PlanError(f"dvc.yaml: {slugs[slug]} and {name} would both be the rule {slug}. Rename one of them.")
        plan.append(
            {
                "stage": name,
                "rule": slug,
                "stamp": stamp(name),
                "after": sorted(stamp(before.addressing) for before in graph.successors(stage) if before.cmd),
                "log": f"logs/{file_name(name)}.log",
                "took": f"logs/{file_name(name)}.seconds",
                "runs": next((str(out) for out in stage.outs if str(out).startswith("data/runs/")), None),
                "priority": waiting[stage],
                "force": False,
                **requirements(name, stage.meta or {}, known),
            }
        )
    return plan


def requirements(name: str, meta: dict[str, Any], known: dict[str, dict[str, int]]) -> dict[str, Any]:
    """A stage's threads, GPUs and other resources, by the names that Snakemake and its Slurm plugin use."""
    kind = meta.get("resources")
    if kind is not None and kind not in known:
        raise PlanError(
            f"dvc.yaml: {name}: meta.resources is {kind!r}, but params.yaml has no resources.{kind} "
            f"(it has: {', '.join(known) or 'none'}). Add it there, or change the stage."
        )
    needs = {**SMALLEST, **known.get(kind, {})}
    cpus, gpus = needs["cpus"], needs["gpus"]
    resources = {"mem_mb": needs["mem_mb"], "runtime": needs["runtime_min"]}
    if gpus:
        # One process that sees all its GPUs: the plugin would ask for a task per GPU, and for one core per task.
        resources |= {"gpu": gpus, "cpus_per_gpu": ceil(cpus / gpus), "tasks_per_gpu": 0}
    return {"threads": cpus, "gpus": gpus, "resources": resources}


def stale_stages(repo: Repo) -> set[str]:
    """Names of the stages that DVC would run, and of all that follow them.

    Not by ``repo.status()``: it takes locks by process id, which means nothing to a job on another machine.
    """
    import networkx as nx

    graph = repo.index.graph
    stale = {stage for stage in scheduled(repo) if is_stale(stage)}
    followers = set().union(*(nx.ancestors(graph, stage) for stage in stale))
    return {stage.addressing for stage in stale | followers}


def is_stale(stage: Stage) -> bool:
    """Whether DVC would run this stage now, were it asked for it alone."""
    return bool(
        stage.is_callback
        or stage.always_changed
        or stage.changed_stage()
        or any(dep.status() for dep in stage.deps)
        or any(out.status() for out in stage.outs)
    )


def write_stamps(plan: list[dict[str, Any]], stale: set[str]) -> None:
    """Remove the stamps of stale and of former stages; write the others, all with the same time."""
    STAMPS.mkdir(exist_ok=True)
    fresh = {Path(entry["stamp"]) for entry in plan if entry["stage"] not in stale}
    for path in set(STAMPS.glob("*.done")) - fresh:
        path.unlink(missing_ok=True)
    for path in fresh:
        if not path.exists():
            path.write_text("up to date\n")  # Snakemake may take an empty file for none
        os.utime(path, (UP_TO_DATE, UP_TO_DATE))


def write_atomically(path: Path, text: str) -> None:
    """Write a file so that a job that reads it meanwhile sees the old or the new text, never a part."""
    draft = path.with_suffix(".draft")
    draft.write_text(text)
    draft.replace(path)


def file_name(stage: str) -> str:
    """A stage's name as a file's; only stages of a dvc.yaml in a subfolder hold ``/`` and ``:``."""
    return re.sub(r"[/:]", "_", stage)


def stamp(stage: str) -> str:
    """A stage's stamp."""
    return f"{STAMPS}/{file_name(stage)}.done"

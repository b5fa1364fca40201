"""Make Snakemake's plan from DVC: the stages, their order, their resources, and which of them are stale.

The input and output of every rule are stamps, small files in ``.stamps/``. Snakemake does not see DVC's own files, as it
deletes a job's outputs before the job and writes time stamps into folders, which DVC would take for changes.
"""

from __future__ import annotations

import json
import os
import re
import sys
from contextlib import AbstractContextManager
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

sys.path.insert(0, str(Path(__file__).parents[1]))  # this folder's code, whichever project's environment runs it
import grpo  # noqa: F401

sys.path.pop(0)

from grpo.common.errors import UserError
from grpo.common.files import exclusive_lock, write_text
from grpo.common.safe_text import on_terminal
from grpo.common.yaml_file import read_mapping
from grpo.study import paths
from grpo.study.schema import validated
from grpo.study.software import packages, require_torch_for, warn_of_other_versions
from grpo.study.stages import write_stages
from grpo.training.own_code import require_own_code_of_all

if TYPE_CHECKING:
    from dvc.repo import Repo
    from dvc.stage import Stage

STAMPS, DATA = Path(".stamps"), Path("data")
PLAN = STAMPS / "plan.json"
WHAT_NEXT = "The report is reports/index.html; `make ui` shows the runs."
UP_TO_DATE = 946_684_800  # time of stamps that are up to date; any time in the past would do
# Resources of a stage whose `meta:` names no entry of `resources:`.
SMALLEST = {"gpus": 0, "cpus": 1, "mem_mb": 2000, "runtime_min": 60}


def make_plan() -> set[str]:
    """Renew stages.yaml, and ask DVC for the stages and which are stale; write the plan and the stamps.

    Returns:
        :func:`stale_stages`.

    Raises:
        UserError: params.yaml is invalid, DVC cannot read the pipeline, or a stage names resources that params.yaml lacks.
    """
    from dvc.exceptions import DvcException
    from dvc.repo import Repo
    from dvc.scm import SCMError

    # Otherwise DVC would only say that it is corrupted, or one stage after another fail.
    params, study = read_mapping(paths.PARAMS), None
    if "experiments" in params:  # else it belongs to another pipeline
        study = validated(params, paths.PARAMS)
        for line in write_stages(study):  # from which DVC makes the stages
            print(on_terminal(line), flush=True)
    if set("{}?") & set(str(Path.cwd())):
        signs = "{, } and ? in a folder's name mean something to DVC and MLflow"
        raise UserError(f"{Path.cwd()}: {signs}. Rename the folder.")
    if DATA.is_symlink():
        raise UserError(
            f"{DATA}: a symbolic link, behind which DVC stores nothing. Make it a folder. To keep results on another disk:"
            " `dvc cache dir --local FOLDER` and `dvc config --local cache.type symlink` (docs/tracking.md)."
        )
    try:
        # Waits for the lock, which another `dvc` may hold for a moment.
        with Repo(_wait_for_lock=True) as repo, repo.lock:
            remove_dead_rwlock(Path(repo.tmp_dir) / "rwlock")
            plan = describe(repo, params.get("resources", {}), study.stages_off if study else set())
            stale = stale_stages(repo)
    except SCMError as error:
        raise UserError(
            f"{error}, which DVC needs. Clone the project with git; or, if you have it as a ZIP file: git init && git add . &&"
            " git commit -m 'Start'"
        ) from error
    except DvcException as error:
        lock = "`git checkout HEAD -- dvc.lock` restores the committed one, also in a merge; `make repro` completes it."
        remedy = lock if "dvc.lock" in str(error) else "Correct it; `dvc dag` shows where."
        raise UserError(f"DVC cannot read the pipeline: {error}. {remedy}") from error
    if stale and study is not None:
        require_own_code_of_all(study)
        warn_of_other_versions(packages(study))
    write_stamps(plan, stale)
    write_text(PLAN, json.dumps(plan, indent=1))
    return stale


def require_torch() -> None:
    """Raise UserError if the study's jobs would fail after the queue (:func:`require_torch_for`); before they are submitted."""
    params = read_mapping(paths.PARAMS)
    if "experiments" in params:  # else it belongs to another pipeline
        require_torch_for(validated(params, paths.PARAMS))


def only_one_here() -> AbstractContextManager[None]:
    """Hold the lock of this folder, so that no two processes run stages in it; UserError if another process holds it."""
    return exclusive_lock(STAMPS / "running.lock", "In this folder another Snakemake (`make repro`)")


def remove_dead_rwlock(path: Path) -> None:
    """Remove DVC's list of busy files if a killed DVC left it, as every later stage would fail on it.

    It may be half-written, or name process ids that other programs have now, as in a new container. DVC writes the file only
    while it holds ``repo.lock``; the caller holds that lock now.
    """
    try:
        text = path.read_text()
        json.loads(text)
    except FileNotFoundError:
        return
    except ValueError:
        text = ""
    if not any(is_dvc(int(pid)) for pid in re.findall(r'"pid": (\d+)', text)):
        path.unlink()


def is_dvc(pid: int) -> bool:
    """Whether a process of this id runs DVC."""
    try:
        return any(Path(argument).name == "dvc" for argument in psutil.Process(pid).cmdline())
    except psutil.Error:
        return False


def describe(repo: Repo, known: dict[str, dict[str, int]], off: set[str]) -> list[dict[str, Any]]:
    """Describe each stage in an entry for JSON; ``known``: `resources:` of params.yaml; ``off``: :attr:`Study.stages_off`."""
    import networkx as nx

    graph = repo.index.graph  # edges go from a stage to the stages that it depends on
    waiting: dict[Stage, int] = {}  # length of the longest chain of stages that depend on a stage
    for stage in nx.topological_sort(graph):
        waiting[stage] = max((waiting[after] + 1 for after in graph.predecessors(stage)), default=0)
    slugs: dict[str, str] = {}
    plan = []
    for stage in (one for one in repo.index.stages if one.cmd):  # imports and tracked files have none
        name = stage.addressing
        slug = re.sub(r"\W", "_", name)
        if slugs.setdefault(slug, name) != name:
            raise UserError(f"dvc.yaml: {slugs[slug]} and {name}: both would be the rule {slug}. Rename one of them.")
        plan.append(
            {
                "stage": name,
                "rule": slug,
                "stamp": stamp(name, off),
                "after": sorted(stamp(before.addressing, off) for before in graph.successors(stage) if before.cmd),
                "log": f"logs/{file_name(name)}.log",
                "priority": waiting[stage],
                "force": False,
                **requirements(name, stage.meta or {}, known),
            }
        )
    return plan


def requirements(name: str, meta: dict[str, Any], known: dict[str, dict[str, int]]) -> dict[str, Any]:
    """A stage's threads, GPUs and other resources, named as in Snakemake and its Slurm plugin."""
    kind = meta.get("resources")
    if kind is not None and kind not in known:
        raise UserError(
            f"dvc.yaml: {name}: meta.resources is {kind!r}, but params.yaml has no resources.{kind} "
            f"(known: {', '.join(known) or 'none'}). Add it there, or change the stage."
        )
    needs = {**SMALLEST, **known.get(kind, {})}
    cpus, gpus = needs["cpus"], needs["gpus"]
    resources = {"mem_mb": needs["mem_mb"], "runtime": needs["runtime_min"]}
    if gpus:
        # One process with all GPUs; by default the plugin asks for one task per GPU and one core per task.
        resources |= {"gpu": gpus, "cpus_per_gpu": ceil(cpus / gpus), "tasks_per_gpu": 0}
    return {"threads": cpus, "gpus": gpus, "resources": resources}


def stale_stages(repo: Repo) -> set[str]:
    """Names of the stages that DVC would run and of all that depend on them.

    Does not use ``repo.status()``, whose locks by process id mean nothing to jobs on other machines.

    Raises:
        UserError: DVC would run stages only because its cache lacks their results, which lie in their place unchanged.
    """
    import networkx as nx

    graph = repo.index.graph
    changed = {stage for stage in repo.index.stages if stage.cmd and is_stale(stage)}
    uncached = {stage for stage in changed if not is_stale(stage, cached=False)}
    stale = changed - uncached
    stale |= set().union(*(nx.ancestors(graph, stage) for stage in stale))
    if lost := sorted(stage.addressing for stage in uncached - stale):
        raise UserError(
            f"{repo.cache.local_cache_dir}: DVC's cache lacks the results of {', '.join(lost[:3])}, so DVC would run them"
            " again. They lie in data/, unchanged. `dvc commit` puts them back into the cache."
        )
    return {stage.addressing for stage in stale}


def is_stale(stage: Stage, cached: bool = True) -> bool:
    """Whether DVC would run this stage now if asked for it alone; with ``cached=False``, also if its cache were whole."""
    return bool(
        stage.is_callback
        or stage.always_changed
        or stage.changed_stage()
        or any(dep.status() for dep in stage.deps)
        or any(out.status() if cached else out.workspace_status() for out in stage.outs)
    )


def write_stamps(plan: list[dict[str, Any]], stale: set[str]) -> None:
    """Remove the stamps of stale and former stages; write all others with the same time."""
    STAMPS.mkdir(exist_ok=True)
    fresh = {Path(entry["stamp"]) for entry in plan if entry["stage"] not in stale}
    for path in {*STAMPS.glob("*.done"), *STAMPS.glob("*.off")} - fresh:
        path.unlink(missing_ok=True)
    for path in fresh:
        path.unlink(missing_ok=True)  # another person's in a shared folder, whose time only its owner may set
        path.write_text("up to date\n")  # Snakemake may treat an empty file as missing
        os.utime(path, (UP_TO_DATE, UP_TO_DATE))


def file_name(stage: str) -> str:
    """A stage's name as a file name; stages of a dvc.yaml in a subfolder have ``/`` and ``:``."""
    return re.sub(r"[/:]", "_", stage)


def stamp(stage: str, off: set[str]) -> str:
    """The file that says that a stage is done; with another ending for one that is ``off``, which is not counted."""
    return f"{STAMPS}/{file_name(stage)}.{'off' if stage in off else 'done'}"

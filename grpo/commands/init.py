"""`grpo init`: write a project with a study, a task and a reward to edit, and the pipeline that runs it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from contextlib import chdir
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer

from grpo.commands.study import use
from grpo.common.errors import UserError
from grpo.common.files import remove, write_text
from grpo.common.imports import require_extra
from grpo.common.yaml_file import dumped, parse_yaml
from grpo.study import paths

TEMPLATE = Path(__file__).with_name("project")
STUDY = "first"
# Of the package's own workflow, what only its checkout needs.
OF_THE_CHECKOUT = ("uv_pip.py", "submission.py", "literature.py", "__pycache__")
# Stands in dvc.yaml for the package's code, of which a project has no copy.
VERSION = "grpo-version.txt"
OF_THE_PACKAGE = ("grpo/", "constraints.txt", "pyproject.toml", "requirements-vllm-cpu.txt")
SEARCH = "kissing"  # the stage of the kissing number and what depends on it, which a project of one's own lacks
HEAD = """\
The stages of all studies; values come from params.yaml. `dvc repro` runs them one after the other; `make repro` and Snakemake
(workflow/Snakefile) run them in parallel, through DVC. `meta.resources` names an entry of `resources:` in params.yaml, which a
scheduler reserves for the stage. The package's code is installed: grpo-version.txt stands for it.
"""


def init(folder: Annotated[Path, typer.Argument(help="New or empty folder.")]) -> str:
    """Write a project of your own, with git and DVC: a study, a task and a reward to edit, and the pipeline that runs it."""
    require_extra("dvc", "pipeline", "grpo init: a project")
    if shutil.which("git") is None:
        raise UserError("grpo init: no program git, which DVC and the record of each run need. Install it.")
    is_new = not folder.exists()
    if not is_new and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder}: already exists and is not an empty folder. Name another one.")
    try:
        _write(folder)
    except BaseException:
        for written in [folder] if is_new else [*folder.iterdir()]:
            remove(written)
        raise
    return (
        f"{folder}: a project with the study studies/{STUDY}.yaml, its task and its reward\nNext:\n  cd {folder}\n"
        "  git add -A && git commit -m Start  # runs record the commit\n  make repro"
    )


def _write(folder: Path) -> None:
    shutil.copytree(TEMPLATE, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(paths.shipped("workflow"), folder / "workflow", ignore=shutil.ignore_patterns(*OF_THE_CHECKOUT))
    for name in (".gitignore", ".dvcignore"):
        shutil.copy(paths.shipped(name), folder / name)
    write_text(folder / VERSION, f"grpo-study=={version('grpo-study')}\n")
    write_text(folder / paths.PIPELINE, dumped(pipeline()))
    with chdir(folder):
        for profile in ("local", "slurm"):
            Path(profile).symlink_to(f"workflow/profiles/{profile}")
        use(STUDY)
        inside = subprocess.run(["git", "rev-parse", "--is-inside-work-tree"], capture_output=True, check=False).returncode == 0
        dvc = [sys.executable, "-m", "dvc", "init", "--quiet"]  # of this environment, even if it is not activated
        for command in [[*dvc, "--subdir"]] if inside else [["git", "init", "--quiet"], dvc]:
            ended = subprocess.run(command, capture_output=True, text=True, check=False)
            if ended.returncode:
                raise UserError(f"grpo init: `{' '.join(command)}` failed: {ended.stderr.strip()}. Nothing is written.")


def pipeline() -> Any:
    """The package's dvc.yaml for a project without the package's code and without the search for kissing configurations."""
    document = parse_yaml(paths.shipped(str(paths.PIPELINE)), "rt")
    document.yaml_set_start_comment(HEAD)
    stages = document["stages"]
    for name in [name for name in stages if name.startswith(SEARCH)]:
        del stages[name]
    for stage in stages.values():
        entry = stage.get("do", stage)
        deps, params = entry["deps"], entry.get("params", [])
        code = [dep for dep in deps if dep.startswith(OF_THE_PACKAGE)]
        for gone in [*code, *(dep for dep in deps if SEARCH in dep)]:
            deps.remove(gone)
        if code:
            deps.append(VERSION)
        for gone in [param for param in params if param.startswith(SEARCH)]:
            params.remove(gone)
        for kind in ("outs", "metrics"):
            entry.get(kind, [])[:] = [out for out in entry.get(kind, []) if SEARCH not in str(out)]
    return document

"""The commands `grpo study ...`: list, check and show studies, and choose the active one."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer

from grpo.common.errors import UserError
from grpo.common.files import read_json, write_text
from grpo.common.yaml_file import read_mapping, to_yaml
from grpo.study import paths
from grpo.study.claims import unknown_metrics
from grpo.study.compose import STUDIES_FOLDER, compose, files_of, named_studies, study_path
from grpo.study.config import OFF_POLICY_RANK, GrpoConfig
from grpo.study.effective import effective_run
from grpo.study.schema import Study, load_study, validated
from grpo.study.stages import is_edited, write_stages
from grpo.tasks.build import check_local_data
from grpo.tracking.mlflow_study import git_output
from grpo.training.own_code import require_own_code_of_all

study_app = typer.Typer(help="List, check and show studies; choose the active one (params.yaml).", no_args_is_help=True)
FEW = 5  # experiments that are named when a study leaves them out
Named = Annotated[str, typer.Argument(help="Name in studies/ or path of a study file.")]


@study_app.command("list")
def list_studies() -> str:
    """List the available studies and what each extends; `*` marks the active one.

    A file without a description, such as base.yaml, is not a study but the common part of others.
    """
    active: Path | None = None
    lines, by_name = [], named_studies()
    with suppress(UserError):  # params.yaml is missing or unreadable
        active = _own_file(read_mapping(paths.PARAMS))
    width = max(map(len, by_name), default=0)
    for name, path in sorted(by_name.items()):
        if description := compose(path).get("description"):
            extends = ", ".join(file.stem for file in files_of(path)[1:])
            mark, extended = "*" if path == active else " ", f" [{extends}]" if extends else ""
            lines.append(f"{mark} {name:<{width}} {description}{extended}")
    return "\n".join(lines)


@study_app.command("check")
def check(
    name: Annotated[str | None, typer.Argument(help="Name in studies/ or path of a study file; default: params.yaml.")] = None,
) -> str:
    """Validate a study, and list its runs and their settings; without a name, also renew stages.yaml."""
    if name is not None:
        return describe(load_study(study_path(name)))
    values = read_mapping(paths.PARAMS)
    study, own = validated(values, paths.PARAMS), _own_file(values)
    lines = [describe(study), "", *write_stages(study)]
    if is_edited():
        lines.append(f"{paths.PARAMS}: edited since `grpo study use` wrote it; `git diff {paths.PARAMS}` shows how")
    elif own.exists() and compose(own) != values:
        lines.append(f"{own}: edited since `grpo study use` composed {paths.PARAMS} of it")
    else:
        lines.append(f"{paths.PARAMS} is as composed from {own}")
    return "\n".join(lines)


def describe(study: Study) -> str:
    """Try the study's own code and local data; list the arms with their settings, the claims and the controls."""
    require_own_code_of_all(study)
    for name in study.tasks:
        check_local_data(study.task(name), study.needed_problems(name))
    tasks = ", ".join(f"{name} ({task['use']})" for name, task in study.tasks.items())
    lines = [f"{study.study}: {study.description}", f"seeds {study.seeds}, tasks {tasks}, engine {study.engine.name}"]
    pinned = study.selection.pinned
    for name in study.active_experiments:
        arms, seeds = study.experiments[name].arms, study.seeds_of(name)
        before = [f"{b} ({f'pinned: {pinned[b]}' if b in pinned else 'winner'})" for b in study.needed_selections(name)]
        runs = f"{name}: {len(arms)} arms, {len(seeds)} seeds"
        lines.append(runs + (f", builds on {', '.join(before)}" if before else ""))
        for arm, overrides in arms.items():
            config = effective_run(study, name, arm, study.seeds[0], []).config
            steps = f"{config.n_steps} steps"
            if OFF_POLICY_RANK in overrides:
                steps += f", updates as in {study.experiments[name].builds_on}'s off-policy arm of that rank"
            elif isinstance(config, GrpoConfig):
                steps += f", {config.updates_per_rollout_batch} update(s) per rollout batch"
            changed = ", ".join(f"{key} {value}" for key, value in overrides.items()) or "no setting changed"
            lines.append(f"  {arm}: {changed}; {steps}")
    lines += [f"claim {claim.id}, {claim.experiment}: {claim.statement}" for claim in study.own_claims]
    lines += [f"note: {unknown} This study's own code must log it." for unknown in unknown_metrics(study.claims)]
    lines += [f"controls: {', '.join(study.controls)}"] if study.controls else []
    out = study.left_out
    lines += [f"left out of what it extends: {', '.join(out) if len(out) <= FEW else f'{len(out)} experiments'}"] if out else []
    return "\n".join(lines)


@study_app.command("use", epilog="Example: grpo study use math-h100")
def use(name: Named, force: Annotated[bool, typer.Option("--force", help="Discard edits of params.yaml.")] = False) -> str:
    """Make a study the active one: validate it, and write params.yaml and stages.yaml."""
    text, study = composed_text(study_path(name))
    if not force and is_edited() and paths.PARAMS.read_text(encoding="utf-8") != text:
        raise UserError(
            f"{paths.PARAMS}: edited since `grpo study use` wrote it (`git diff {paths.PARAMS}`). Nothing was written. Move "
            f"the edits to a study file, or copy {paths.PARAMS}; then `grpo study use {name} --force` discards them."
        )
    write_text(paths.PARAMS, text)
    lines = [f"{paths.PARAMS} is now the study {study.study}: {study.description}"]
    lines += [*write_stages(study, composed=True), *_report_of_another(study)]
    here = "`make repro` runs it; `dvc status` shows which stages are out of date."
    elsewhere = f"{paths.PIPELINE}: not here, so no stage runs it. `grpo init FOLDER` makes a project."
    return "\n".join([*lines, here if paths.PIPELINE.exists() else elsewhere])


def _report_of_another(study: Study) -> list[str]:
    """A warning if reports/ holds the report of another study, which this study's replaces."""
    try:
        reported = read_json(paths.RECORD, made_by="tables", keys=("study",))["study"] if paths.RECORD.exists() else study.study
    except UserError:  # damaged
        return []
    keep = "Commit it first; or work in a project of your own (`grpo init FOLDER`), where it stays."
    if git_output("status", "--porcelain", "--", str(paths.REPORTS)) == "":
        keep = "The last commit has it."
    warning = f"{paths.REPORTS}/: holds the report of the study {reported}, which `make repro` replaces. {keep}"
    return [warning] if reported != study.study else []


@study_app.command("show")
def show(name: Named) -> str:
    """Print the params.yaml that `grpo study use` would write; of a common part, such as base, the values that it gives."""
    path = study_path(name)
    values = compose(path)
    return (composed_text(path)[0] if "description" in values else to_yaml(values)).removesuffix("\n")


def composed_text(path: Path) -> tuple[str, Study]:
    """Compose a study file: the text of its params.yaml, and the study."""
    values = compose(path)
    files = [str(file) for file in files_of(path)]
    of = f"{', '.join(files[:-1])} and {files[-1]}" if files[1:] else files[0]
    head = f"""\
# The study {path.stem}, composed by `grpo study use` from {of}, where comments say why.
# docs/settings.md says what the keys mean. You may edit them here, then run `make repro`; `git diff params.yaml` shows your
# edits. To change the study itself, edit its file and run `grpo study use` again.

"""
    return head + to_yaml(values), validated(values, path)


def _own_file(active: Mapping[str, Any]) -> Path:
    """The study file that params.yaml was composed from, by its keys `file`, `folder` and `study`."""
    file = Path(str(active.get("file") or f"{active.get('folder', STUDIES_FOLDER)}/{active.get('study')}.yaml"))
    shipped = paths.shipped("studies") / file.name
    return shipped if shipped.exists() and not file.exists() and file.parent == STUDIES_FOLDER else file

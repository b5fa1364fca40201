"""The commands `grpo study ...`: list, check, use, save and rehearse studies."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer

from grpo.common.errors import UserError
from grpo.common.files import read_json, remove, write_text
from grpo.common.yaml_file import read_mapping, replace_values, to_yaml
from grpo.study import paths
from grpo.study.compose import (
    COMPUTED,
    STUDIES_FOLDER,
    Change,
    changes,
    compose,
    difference,
    files_of,
    merge,
    overlay_of,
    stage_lists,
    studies_folders,
    study_path,
)
from grpo.study.effective import effective_run, require_any_winner
from grpo.study.kept import in_cache
from grpo.study.methods import OBJECTIVE, OBJECTIVES, OFF_POLICY_RANK, RATE_TIMES, GrpoConfig
from grpo.study.rehearsal import SUFFIX, not_covered, rehearsal_of
from grpo.study.schema import Study, check_name, load_study, validated
from grpo.training.own_code import require_own_code_of_all

study_app = typer.Typer(help="List, check, change and save studies; choose the active one (params.yaml).", no_args_is_help=True)
Named = Annotated[str, typer.Argument(help="Name in studies/ or path of a study file.")]
_AS_COMPOSED = re.compile(r"^# As composed: ([0-9a-f]{16})\b", re.M)


@study_app.command("list")
def list_studies() -> str:
    """List the available studies and what each extends; `*` marks the active one.

    A file without a description, such as base.yaml, is not a study but the common part of others.
    """
    active = _own_file(_active_values())
    lines = []
    found = {path.stem: path for folder in reversed(studies_folders()) for path in folder.glob("*.yaml")}
    width = max(map(len, found), default=0)
    for _, path in sorted(found.items()):
        if description := compose(path).get("description"):
            extends = ", ".join(file.stem for file in files_of(path)[1:])
            mark, extended = "*" if path == active else " ", f" [{extends}]" if extends else ""
            lines.append(f"{mark} {path.stem:<{width}} {description}{extended}")
    return "\n".join(lines)


@study_app.command("check")
def check(
    name: Annotated[str | None, typer.Argument(help="Name in studies/ or path of a study file; default: params.yaml.")] = None,
) -> str:
    """Validate a study, list its runs and their settings, and show what you changed by hand or what it changes."""
    if name is None:
        study, active = load_study(), read_mapping(paths.PARAMS)
        own = _own_file(active)
        edits = _described_edits(active) if own.exists() else [f"edits by hand are unknown, as {own} does not exist"]
        edits = edits or [f"{paths.PARAMS} is as composed from {own}"]
        return "\n".join([describe(study), "", *edits])
    path = study_path(name)
    lines = [describe(load_study(path))]
    if extended := files_of(path)[1:2]:
        lines += ["", f"differs from {extended[0]}, which it extends, in:"]
        lines += _summary(compose(extended[0]), compose(path)) or ["  nothing"]
    return "\n".join(lines)


def describe(study: Study) -> str:
    """Try the study's own code and each possible winner, and list the arms with their settings.

    An experiment stands for a winner not known yet.
    """
    require_own_code_of_all(study)
    require_any_winner(study)
    tasks = ", ".join(f"{name} ({task['use']})" for name, task in study.tasks.items())
    lines = [f"{study.study}: {study.description}", f"seeds {study.seeds}, tasks {tasks}, engine {study.engine.name}"]
    pinned = study.selection.pinned
    for name in study.active_experiments:
        before = [f"{b} ({f'pinned: {pinned[b]}' if b in pinned else 'winner'})" for b in study.needed_selections(name)]
        lines.append(name + (f", builds on {', '.join(before)}" if before else ""))
        for arm, overrides in study.experiments[name].arms.items():
            config = effective_run(study, name, arm, study.seeds[0], []).config
            steps = f"{config.n_steps} steps"
            if OFF_POLICY_RANK in overrides:
                steps += f", updates as in {study.experiments[name].builds_on}'s off-policy arm of that rank"
            elif isinstance(config, GrpoConfig):
                steps += f", {config.updates_per_rollout_batch} update(s) per rollout batch"
            lines.append(f"  {arm}: {overrides}, {steps}")
    return "\n".join([*lines, *([f"left out: {', '.join(study.left_out)}"] if study.left_out else [])])


@study_app.command("use", epilog="Example: grpo study use math-h100 --dry-run")
def use(
    name: Named,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would change; change nothing.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Discard manual edits of params.yaml.")] = False,
) -> str:
    """Make a study the active one: validate it, show what changes and write params.yaml."""
    path = study_path(name)
    text, values, study = composed_text(path)
    require_any_winner(study)
    if not force:
        _require_no_edits(values, name)
    lines = [f"{paths.PARAMS} {'would become' if dry_run else 'is now'} the study {study.study}: {study.description}"]
    lines += _summary(_active_values(), values) or ["  no value changes"]
    if not dry_run:
        write_text(paths.PARAMS, text)
        _make_folders()
    lines += _remove_results_of_other_runs(study, dry_run)
    lines += _report_of_another(study)
    here = "`make repro` runs it; `dvc status` shows which stages are out of date."
    lines.append(
        here
        if paths.PIPELINE.exists()
        else f"{paths.PIPELINE}: not here, so no stage runs it. `grpo init FOLDER` makes a project."
    )
    return "\n".join(lines)


def _report_of_another(study: Study) -> list[str]:
    """A warning if reports/ holds the report of another study, which this study's replaces."""
    try:
        found = read_json(paths.RECORD, made_by="tables", keys=("study",))["study"] if paths.RECORD.exists() else study.study
    except UserError:  # damaged
        return []
    keep = "Commit it first; or work in a project of your own (`grpo init FOLDER`), where it stays."
    warning = f"{paths.REPORTS}/: holds the report of the study {found}, which `make repro` replaces. {keep}"
    return [warning] if found != study.study else []


@study_app.command("show")
def show(name: Named) -> str:
    """Print the params.yaml that `grpo study use` would write."""
    return composed_text(study_path(name))[0].removesuffix("\n")


def composed_text(path: Path) -> tuple[str, dict[str, Any], Study]:
    """Compose the params.yaml of a study file: its text, its values and the study."""
    values = compose(path)
    study = validated(values, path)
    values["runs"] = study.runs_table()
    files = [str(file) for file in files_of(path)]
    of = f"{', '.join(files[:-1])} and {files[-1]}" if files[1:] else files[0]
    head = f"""\
# The study {path.stem}, composed by `grpo study use` from {of}, where comments say why.
# docs/settings.md says what the keys mean. You may edit them here, then run `make repro`; after you edit arms or seeds, first
# `grpo study runs`, which renews select_in, kl_in and runs: DVC makes its stages from these. `grpo study check` shows your
# edits; `grpo study save NAME` saves them as a study. To change the study itself, edit its file and run `grpo study use` again.
# As composed: {_digest(values)} (digest of the values; it tells your edits from changes of the study's files)

"""
    return head + to_yaml(values), values, study


@study_app.command("runs")
def renew_runs() -> str:
    """Update the table of runs in params.yaml after you edited arms, seeds or tasks there; DVC's stages follow from it.

    Also removes the results of runs that the table no longer has, if DVC's cache has them.
    """
    values = read_mapping(paths.PARAMS)
    before = set(values.pop("runs", None) or {})
    lists = stage_lists(values) if isinstance(values.get("experiments"), dict) else {}
    study = validated(values | lists, paths.PARAMS)
    runs = study.runs_table()
    replace_values(paths.PARAMS, {**lists, "runs": runs})
    _make_folders()
    differing = {"new": runs.keys() - before, "gone": before - runs.keys()}
    lines = [f"  {kind}: {', '.join(sorted(keys))}" for kind, keys in differing.items() if keys]
    lines += _remove_results_of_other_runs(study, False)
    return "\n".join([f"{paths.PARAMS}: {len(runs)} stages train", *lines])


def _make_folders() -> None:
    """Make the folders that stages depend on though they may stay empty, with a file for git."""
    for folder in (paths.REPORTS / "kl", paths.REPORTS / "comments"):
        if not folder.exists():
            write_text(folder / ".gitkeep", "")


@study_app.command("save")
def save(name: Annotated[str, typer.Argument(help="Name of the new study; writes studies/NAME.yaml.")]) -> str:
    """Save your edits of params.yaml as a new study that extends the active one."""
    written = read_mapping(paths.PARAMS)
    written.pop("runs", None)
    validated(written, paths.PARAMS)
    check_name(name, "a study", name)
    own = _own_file(written)
    target = own.with_name(f"{name}.yaml")
    if target.exists():
        raise UserError(f"{target}: already exists. Choose another name.")
    try:
        overlay = overlay_of(*({k: v for k, v in each.items() if k not in COMPUTED} for each in (compose(own), written)))
    except ValueError as gone:
        raise UserError(
            f"{paths.PARAMS}: {gone}: this key of {own} is gone, and a study cannot remove a key of the study that it extends. "
            f"Put it back, or copy the whole file: cp {paths.PARAMS} {target}"
        ) from None
    if not overlay:
        raise UserError(f"{paths.PARAMS}: has the values of {own}. There is nothing to save; edit {paths.PARAMS} first.")
    write_text(target, to_yaml({"extends": own.stem, **overlay}))
    named = name if own.parent == STUDIES_FOLDER else target
    return f"{target}: your edits, as a study that extends {own.stem}. `grpo study use {named}` makes it the active study."


@study_app.command("rehearse")
def rehearse(name: Named) -> str:
    """Write NAME-rehearsal.yaml: a GPU study cut down to small random weights and few steps, to try it on a CPU."""
    path = study_path(name)
    folder = STUDIES_FOLDER if path.parent == paths.shipped("studies") else path.parent
    target = folder / f"{path.stem}{SUFFIX}.yaml"
    values = compose(path)
    about = {"extends": path.stem, "description": f"The study {path.stem}, cut down to be tried on a CPU."}
    cut = difference(values, merge(values, rehearsal_of(values)))
    text = "# Written by `grpo study rehearse`.\n" + to_yaml(about | cut)
    if target.exists() and target.read_text(encoding="utf-8") != text:
        raise UserError(f"{target}: already exists with other content. Remove it to write it again, or use it as it is.")
    write_text(target, text)
    rehearsal = load_study(target)
    named = target.stem if folder == STUDIES_FOLDER else target
    missing = [f"- {each}" for each in not_covered(rehearsal, load_study(path))]
    return "\n".join([f"{target}: `grpo study use {named}`, then `make repro`. It does not cover", *missing])


@study_app.command("schema")
def schema() -> str:
    """Print the JSON Schema of params.yaml and study files, by which editors complete keys and mark wrong values."""
    return json.dumps(study_schema(), indent=1)


def study_schema() -> dict[str, Any]:
    """Build that schema: types, ranges and names of keys. No key is required, as an overlay has only what differs."""
    schema = _simplified(Study.model_json_schema())
    names = {"type": "array", "items": {"type": "string"}}
    properties = schema["properties"]
    properties["extends"] = {"type": "string"}
    properties["experiments"]["properties"] = {"only": names, "without": names}
    for section in ("tasks", "models", "sft_datasets"):  # null removes an entry
        entry = properties[section]["additionalProperties"]
        properties[section]["additionalProperties"] = {"anyOf": [entry, {"type": "null"}]}
    methods = [schema["$defs"][name]["properties"] for name in ("GrpoConfig", "SftConfig", "ExpertIterationConfig")]
    of_arms = {"start_from": {"type": "string"}, OFF_POLICY_RANK: {"type": "integer"}, RATE_TIMES: {"type": "number"}}
    methods[0][OBJECTIVE] = {"enum": list(OBJECTIVES)}
    arm = {"type": "object", "properties": methods[0] | methods[1] | methods[2] | of_arms}
    schema["$defs"]["Experiment"]["properties"]["arms"]["additionalProperties"] = arm
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "A study", **schema}


def _simplified(value: Any) -> Any:
    """Drop ``required``, titles and defaults, which are those of the types and not of studies/base.yaml."""
    if isinstance(value, list):
        return [_simplified(item) for item in value]
    if not isinstance(value, dict):
        return value
    kept = {key: item for key, item in value.items() if isinstance(item, dict) or key not in ("required", "title", "default")}
    return {key: _simplified(item) for key, item in kept.items()}  # a mapping of such a name is a setting


# ------------------------------------------------------------------------------------------------------- edits by hand


def _require_no_edits(values: Mapping[str, Any], name: str) -> None:
    """Raise UserError if writing ``values``, those of study ``name``, to params.yaml would lose edits made there."""
    if not paths.PARAMS.exists():
        return
    drop = f"`grpo study use {name} --force` discards all edits."
    try:
        active = read_mapping(paths.PARAMS)
        if _as_it_was_composed(active) or not _apart_from_names(changes(values, active)):
            return
        edits = _described_edits(active)
    except UserError as error:
        raise UserError(f"{error} {drop}") from None
    if edits:
        keep = f"Nothing was written. `grpo study save NAME` saves the edits as a study; {drop}"
        raise UserError("\n".join([f"{paths.PARAMS}: {edits[0]}", *edits[1:], keep]))


def _described_edits(active: Mapping[str, Any]) -> list[str]:
    """Lines that say how params.yaml differs from the study file that it was composed from; empty if it does not."""
    own = _own_file(active)
    if not own.exists():
        raise UserError(f"{paths.PARAMS}: its edits by hand are unknown, as its study file {own} does not exist.")
    computed = {*COMPUTED} - {"study"}  # only an edit by hand changes the name
    edits = [change for change in changes(compose(own), active) if change[0].partition(".")[0] not in computed]
    composed = f"since it was composed from {own}"
    by = f"that file was changed {composed}" if _as_it_was_composed(active) else f"edited by hand {composed}"
    return [f"{by}:", *(f"  {key}: {before} -> {after}" for key, before, after in edits)] if edits else []


def _as_it_was_composed(active: Mapping[str, Any]) -> bool:
    """Whether params.yaml is as `grpo study use` wrote it, even if the study's file has changed since."""
    noted = _AS_COMPOSED.search(paths.PARAMS.read_text(encoding="utf-8"))
    return noted is not None and noted[1] == _digest(active)


def _digest(values: Mapping[str, Any]) -> str:
    """SHA-256 (first 16 hex digits) of a study's values in their order."""
    return hashlib.sha256(json.dumps(values, default=str).encode()).hexdigest()[:16]


def _own_file(active: Mapping[str, Any]) -> Path:
    """The study file that params.yaml was composed from, by its keys `file`, `folder` and `study`."""
    file = Path(str(active.get("file") or f"{active.get('folder', STUDIES_FOLDER)}/{active.get('study')}.yaml"))
    shipped = paths.shipped("studies") / file.name
    return shipped if shipped.exists() and not file.exists() and file.parent == STUDIES_FOLDER else file


def _active_values() -> dict[str, Any]:
    """The values of params.yaml; empty if it is missing or unreadable."""
    try:
        return read_mapping(paths.PARAMS)
    except UserError:
        return {}


# ------------------------------------------------------------------------------------------------------------- summary


def _apart_from_names(found: list[Change]) -> list[Change]:
    """Drop changes of the description and of keys that are computed from others."""
    return [change for change in found if change[0].partition(".")[0] not in ("description", *COMPUTED)]


def _summary(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Lines with the number of changes per section and the experiments that change."""
    keys = [key.split(".") for key, _, _ in _apart_from_names(changes(old, new))]
    sections = Counter(key[0] for key in keys if key[0] != "experiments")
    lines = ["  values: " + ", ".join(f"{section} {n}" for section, n in sections.items())] if sections else []
    before, after = ({name: e.get("arms") for name, e in (s.get("experiments") or {}).items()} for s in (old, new))
    kinds: dict[str, list[str]] = {"added": [], "left out": [], "with other arms or settings": []}
    for name in dict.fromkeys(key[1] for key in keys if key[0] == "experiments" and key[1:]):
        had, has = bool(before.get(name)), bool(after.get(name))
        if had or has:
            kinds["added" if not had else "left out" if not has else "with other arms or settings"].append(name)
    return lines + [f"  experiments {kind}: {', '.join(names)}" for kind, names in kinds.items() if names]


def _remove_results_of_other_runs(study: Study, dry_run: bool) -> list[str]:
    """Remove results of runs that ``study`` does not have, if DVC's cache has them; lines that say what goes and what stays.

    ``select@EXPERIMENT`` and ``report`` depend on the whole folders, so that they would be out of date in a clone without them.
    """
    own = {
        paths.run_name(name, arm, seed)
        for name, entry in study.experiments.items()
        for arm in entry.arms
        for seed in study.seeds_of(name)
    }
    found = [(root, path) for root in (paths.RUNS, paths.CHECKPOINTS, paths.TIMING) for path in sorted(root.glob("*/*/[!.]*"))]
    others = [path for root, path in found if path.relative_to(root).as_posix() not in own]
    removed = in_cache(others)
    kept = [path for path in others if path not in removed]
    for path in removed if not dry_run else ():
        remove(path)
        for folder in path.parents[:2]:  # of the arm and of the experiment
            with suppress(OSError):  # it holds others
                folder.rmdir()
    of_others = "results of runs that this study does not have"
    gone = _listed(f"{'would remove' if dry_run else 'removed'} {of_others}; DVC's cache keeps them:", removed)
    return gone + _listed(f"kept {of_others}, as DVC's cache does not have them; remove them by hand:", kept)


def _listed(heading: str, results: list[Path]) -> list[str]:
    """A heading with the results below it; empty without results."""
    return [heading, *(f"  {path}" for path in results)] if results else []

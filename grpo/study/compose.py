"""Compose a study from its file and the files that it extends.

The rules are pure functions over plain mappings. :mod:`grpo.study.schema` validates the result.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from grpo.common.errors import UserError
from grpo.common.yaml_file import read_mapping
from grpo.study import paths
from grpo.study.config import MAIN, require_known, with_objective

STUDIES_FOLDER = Path("studies")
# Keys with the kind of a mapping. If an overlay changes one, the mapping is replaced, as other keys belong to another kind.
# (A task's `source` is itself a mapping and does not count.)
WHICH = ("use", "source")
WHOLE = ("arms", "documents", "sft_datasets", "reward", "source")  # mappings that an overlay replaces as a whole
BY_TASK = ("tasks", "models", "sft_datasets")  # mappings with one entry per task; `null` removes an entry
COMPUTED = ("study", "folder", "file")  # keys that composing sets, whatever a study file says

# What a study may name under `controls:`: arms of the experiment CONTROLS_IN, trained as its arm FULL but for the reward, and
# the untrained model under its best zero-shot prompt.
CONTROLS = {
    "random_reward": {"reward": "random_reward"},
    "format_only": {"reward": "format_reward"},
    "majority_reward": {"reward": "majority_reward"},
}
BEST_PROMPT = "best_prompt"
CONTROLS_IN, FULL = "controls", "full_reward"


def merge(base: Mapping[str, Any], overlay: Mapping[str, Any]) -> dict[str, Any]:
    """Lay ``overlay`` over ``base``; neither is changed.

    Mappings merge key by key. Anything else replaces the old value; so do ``null``, a mapping of another kind
    (:data:`WHICH`) and the mappings in :data:`WHOLE`.
    """
    merged = dict(base)
    for key, value in overlay.items():
        merged[key] = merge(base[key], value) if _merges(key, base.get(key), value) else value
    return merged


def choose_experiments(
    experiments: Mapping[str, Any], keep: Mapping[str, Any], own: Mapping[str, Any], where: str
) -> dict[str, Any]:
    """Give the experiments that ``only`` or ``without`` leave out ``arms: {}``; UserError if these cannot be followed.

    Args:
        experiments: after merging.
        keep: the overlay's ``only``, ``without`` or both, each a list of names.
        own: the experiments in the overlay itself, at the place ``where``.
    """
    for word, names in keep.items():
        if not isinstance(names, list):
            raise UserError(f"{where}.{word}: expected a list of experiments, but it is {names!r}.")
        for name in names:
            require_known(f"{where}.{word}", "no such experiment:", name, experiments)
            if word == "only" and not _arms(experiments[name]):
                raise UserError(f"{where}.only: {name} has no arms in the extended study: give it some.")
    only, without = keep.get("only", list(experiments)), keep.get("without", [])
    chosen = dict(experiments)
    for name, value in experiments.items():
        if name in only and name not in without:
            continue
        if _arms(own.get(name)):
            raise UserError(f"{where}.{name}: has arms here, but `only` or `without` leaves it out: remove one of the two.")
        if isinstance(value, Mapping):
            chosen[name] = {**value, "arms": {}}
    return chosen


def with_controls(experiments: Mapping[str, Any], controls: list[str]) -> dict[str, Any]:
    """Add the experiment with the arms that ``controls`` names; what a study says of this experiment itself counts.

    It builds on the last GRPO experiment of the main task whose winner a later experiment takes, or else on the first one, or
    on none.
    """
    arms = {name: CONTROLS[name] for name in controls if name in CONTROLS}
    ours = [name for name, entry in experiments.items() if _arms(entry) and name != CONTROLS_IN]
    ours = [name for name in ours if experiments[name].get("method", "grpo") == "grpo" and _task_of(experiments[name]) == MAIN]
    if not arms:
        return dict(experiments)
    taken = {experiments[name].get("builds_on") for name in ours}
    on = [name for name in ours if name in taken and experiments[name].get("passes_on", "winner") == "winner"] or ours[:1]
    written, base = dict(experiments.get(CONTROLS_IN) or {}), experiments[on[-1]] if on else {}
    entry = {"title": "Controls", "question": "What of the gain is beyond the right form, and beyond chance?"}
    entry |= {**({"builds_on": on[-1]} if on else {}), **({"seeds": base["seeds"]} if "seeds" in base else {}), **written}
    return {**experiments, CONTROLS_IN: entry | {"arms": {FULL: {}, **arms, **_arms(written)}}}


def unused_tasks(values: Mapping[str, Any]) -> set[str]:
    """Name a study's tasks of which all experiments are left out; nothing is made for them, but for `evaluation.old_task`."""
    tasks = [(_task_of(e), bool(_arms(e))) for e in values["experiments"].values() if isinstance(e, Mapping)]
    evaluation = values.get("evaluation")
    old = evaluation.get("old_task") if isinstance(evaluation, Mapping) else None
    stay = {MAIN, *(task for task, made in tasks if made), *([str(old.get("task"))] if isinstance(old, Mapping) else [])}
    return {task for task, _ in tasks} - stay


def _without_tasks(values: Mapping[str, Any], gone: set[str]) -> dict[str, Any]:
    """Drop the entries of these tasks, and entries that are ``null``."""
    by_task = [key for key in BY_TASK if isinstance(values.get(key), Mapping)]
    left = {key: {k: v for k, v in values[key].items() if k not in gone and v is not None} for key in by_task}
    return {**values, **left}


def _merges(key: str, old: Any, new: Any) -> bool:
    """Whether ``new`` is merged into ``old`` key by key."""
    if not isinstance(old, Mapping) or not isinstance(new, Mapping) or key in WHOLE:
        return False
    kinds = [which for which in WHICH if which in new and not isinstance(new[which], Mapping)]
    return all(which in old and old[which] == new[which] for which in kinds)


def _task_of(experiment: Mapping[str, Any]) -> str:
    return str(experiment.get("task", MAIN))


def _arms(experiment: Any) -> Mapping[str, Any]:
    arms = experiment.get("arms") if isinstance(experiment, Mapping) else None
    return arms if isinstance(arms, Mapping) else {}


def study_path(name: str, beside: Path | None = None) -> Path:
    """Find a study's file by its path (from the file ``beside``), or by its name beside that, in studies/ or in the package."""
    own, is_path = [beside.parent] if beside else [], name.endswith((".yaml", ".yml"))
    places = [Path(*own) / name] if is_path else [folder / f"{name}.yaml" for folder in (*own, *studies_folders())]
    if file := next((place for place in places if place.exists()), None):
        return file
    known = ", ".join(sorted(named_studies()))
    where = f"{beside}: extends: " if beside else ""
    raise UserError(f"{where}{places[0]}: no such study. Choose one of {known}, or give the path of a study file.")


def named_studies() -> dict[str, Path]:
    """The files of studies/ and of the package by the name of each, such as ``mini`` and ``literature/few_prompts``."""
    places = [(folder, pattern) for folder in reversed(studies_folders()) for pattern in ("*.yaml", "literature/*.yaml")]
    files = [(folder, path) for folder, pattern in places for path in folder.glob(pattern)]
    return {path.relative_to(folder).with_suffix("").as_posix(): path for folder, path in files}


def studies_folders() -> list[Path]:
    """The folders that are searched for a study by name: studies/, then the package's own."""
    return [STUDIES_FOLDER, paths.shipped("studies")]


def files_of(path: Path) -> list[Path]:
    """List a study file and the files that it extends, in order; UserError if one is missing or wrong, or for a circle."""
    files = [path]
    while (name := read_mapping(files[-1]).get("extends")) is not None:
        if not isinstance(name, str):
            raise UserError(f"{files[-1]}: extends: expected the name or path of a study, but it is {name!r}.")
        files.append(study_path(name, beside=files[-1]))
        if any(files[-1].samefile(file) for file in files[:-1]):
            raise UserError(f"{path}: extends itself ({' extends '.join(map(str, files))}). Change one `extends`.")
    return files


def compose(path: Path) -> dict[str, Any]:
    """Lay a study file over the files that it extends, and set the keys in :data:`COMPUTED`; not validated."""
    values: dict[str, Any] = {}
    overlay: dict[str, Any] = {}
    files = files_of(path)
    for file in reversed(files):
        overlay = read_mapping(file)
        values = _extended(values, overlay, file)
    values.pop("heading", None)  # the extended file's would be wrong
    texts: dict[str, Any] = {key: overlay[key] for key in ("heading", "description") if key in overlay}
    composed: dict[str, Any] = {"study": path.stem, **texts}
    if "description" not in overlay and len(files) > 1:
        sections = ", ".join(key for key in overlay if key not in COMPUTED)
        composed["description"] = f"As {files[1].stem}, but for: {sections or 'nothing'}."
    here, shipped = path.parent.resolve(), paths.shipped("studies").resolve()
    inside = here.is_relative_to(shipped)
    file = STUDIES_FOLDER / path.resolve().relative_to(shipped) if inside else Path(os.path.relpath(path))
    # Stages depend on the folder, so it must not contain the project.
    composed["folder"] = (STUDIES_FOLDER if inside or paths.project_in(here) else file.parent).as_posix()
    composed["file"] = file.as_posix()
    experiments, controls = values.get("experiments"), values.get("controls")
    if isinstance(experiments, Mapping) and isinstance(controls, list):
        values["experiments"] = experiments = with_controls(experiments, controls)
    _drop_pins(values)
    gone = unused_tasks(values) if isinstance(experiments, Mapping) else set()
    for key, value in _without_tasks(values, gone).items():
        if key not in COMPUTED:
            composed.setdefault(key, value)
    return composed


def _drop_pins(values: Mapping[str, Any]) -> None:
    """Drop an extended study's pinned winners that are null here, and those of experiments that are left out here."""
    selection, experiments = values.get("selection"), values.get("experiments")
    pinned = selection.get("pinned") if isinstance(selection, Mapping) else None
    if isinstance(pinned, dict) and isinstance(experiments, Mapping):
        left_out = {name for name, entry in experiments.items() if isinstance(entry, Mapping) and entry.get("arms") == {}}
        for name in [name for name, arm in pinned.items() if arm is None or name in left_out]:
            del pinned[name]


def _without_design(claim: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in claim.items() if key != "by_design"}


def _extended(values: Mapping[str, Any], overlay: dict[str, Any], file: Path) -> dict[str, Any]:
    """Lay a study file over ``values``: write out its objective and leave out the experiments that it names."""
    overlay.pop("extends", None)
    changed = {key: section.get(MAIN) or () for key in BY_TASK if isinstance(section := overlay.get(key), dict)}
    if "use" in changed.get("tasks", ()) or "source" in changed.get("models", ()):
        values = {**values, "by_design": []}  # the extended study's sentences are about its own task and model
        if isinstance(claims := values.get("claims"), list):
            values["claims"] = [_without_design(claim) if isinstance(claim, dict) else claim for claim in claims]
    if isinstance(overlay.get("grpo"), dict):
        overlay["grpo"] = with_objective(overlay["grpo"], f"{file}: grpo")
    experiments = overlay.get("experiments")
    if not isinstance(experiments, dict):
        return merge(values, overlay)
    keep = {word: experiments.pop(word) for word in ("only", "without") if word in experiments}
    merged = merge(values, overlay)
    return merged | {"experiments": choose_experiments(merged["experiments"], keep, experiments, f"{file}: experiments")}

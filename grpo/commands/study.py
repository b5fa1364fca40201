"""The commands `grpo study ...`: which studies there are, what one makes, switching to another, keeping edits as a study."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from grpo.common.errors import UserError
from grpo.common.files import remove, write_text
from grpo.common.yaml_file import parse_yaml
from grpo.study import paths
from grpo.study.annotated import Note, Notes, read_annotated, to_text
from grpo.study.compose import (
    COMPUTED,
    STUDIES_FOLDER,
    Change,
    annotated,
    changes,
    compose,
    difference,
    files_of,
    lay_over,
    overlay_of,
    studies_folders,
    study_path,
)
from grpo.study.dvc_lock import in_cache
from grpo.study.effective import effective_run
from grpo.study.methods import OFF_POLICY_RANK, GrpoConfig
from grpo.study.rehearsal import SUFFIX, not_covered, rehearsal_of
from grpo.study.runs_table import runs_table
from grpo.study.schema import PARAMS_FILE, Study, check_name, load_study, read_yaml, validated

_RUNS = Note(
    above=(
        "# A stage train@KEY of DVC for each row, as `grpo study use` makes it of what stands above. After an edit of arms",
        "# or seeds by hand `grpo study runs` writes it anew.",
    ),
    blank=True,
)
_AS_COMPOSED = re.compile(r"^# As composed: ([0-9a-f]{16})\b", re.M)


def list_studies() -> list[str]:
    """One line for each study in studies/ or of the package, with what it extends; the active one is marked.

    A file without a description of its own that extends nothing is no study but what others have in common.
    """
    active = _own_file(read_yaml(PARAMS_FILE)) if PARAMS_FILE.exists() else None
    lines = []
    found = {path.stem: path for folder in reversed(studies_folders()) for path in folder.glob("*.yaml")}
    width = max(map(len, found), default=0)
    for _, path in sorted(found.items()):
        if description := compose(path).get("description"):
            extends = ", ".join(file.stem for file in files_of(path)[1:])
            mark, extended = "*" if path == active else " ", f" [{extends}]" if extends else ""
            lines.append(f"{mark} {path.stem:<{width}} {description}{extended}")
    return lines


def check(name: str | None, verbose: bool) -> str:
    """Validate a study (params.yaml, if none is named) and say which runs it makes and what differs in it.

    Args:
        verbose: name every value that differs from what a study file extends, not only their number.
    """
    if name is None:
        study, active = load_study(), read_yaml(PARAMS_FILE)
        own = _own_file(active)
        edits = _described_edits(active) if own.exists() else [f"what was changed by hand is unknown, as {own} is not there"]
        edits = edits or [f"{PARAMS_FILE} is as composed from {own}"]
        return "\n".join([describe(study), "", *edits])
    path = study_path(name)
    lines = [describe(load_study(path))]
    if extended := files_of(path)[1:2]:
        lines += ["", f"differs from {extended[0]}, which it extends, in:"]
        lines += _summary(compose(extended[0]), compose(path), verbose) or ["  nothing"]
    return "\n".join(lines)


def describe(study: Study) -> str:
    """The study's runs with what each changes; a winner that is not known yet is named by its experiment."""
    tasks = ", ".join(f"{name} ({task['use']})" for name, task in study.tasks.items())
    lines = [f"{study.study}: {study.description}", f"seeds {study.seeds}, tasks {tasks}, engine {study.engine.name}"]
    for name in study.made:
        before = [_pinned_or(study, b, "winner") for b in study.needed_selections(name)]
        lines.append(name + (f", builds on {', '.join(before)}" if before else ""))
        for arm, overrides in study.experiments[name].arms.items():
            config = effective_run(study, name, arm, study.seeds[0], []).config
            steps = f"{config.n_steps} steps"
            if OFF_POLICY_RANK in overrides:
                steps += f", updates as in {study.experiments[name].builds_on}'s off-policy arm of that rank"
            elif isinstance(config, GrpoConfig):
                steps += f", {config.updates_per_rollout_batch} update(s) per rollout batch"
            lines.append(f"  {arm}: {overrides}, {steps}")
    lines += [f"left out: {', '.join(study.left_out)}"] if study.left_out else []
    if budget := study.learner.max_tokens_per_microbatch:
        lines.append(
            f"gradient_accumulation_steps: no effect, as learner.max_tokens_per_microbatch is {budget} and the gradient is the "
            "same; only length_normalization: microbatch_longest reads it"
        )
    return "\n".join(lines)


def _pinned_or(study: Study, experiment: str, otherwise: str) -> str:
    pinned = study.selection.pinned.get(experiment)
    return f"{experiment} ({f'pinned: {pinned}' if pinned else otherwise})"


def use(name: str, dry_run: bool, force: bool, verbose: bool) -> list[str]:
    """Make a study the active one.

    Args:
        name: a name in studies/, or the path of a study file.
        dry_run: only say what would change.
        force: also where that drops what was changed in params.yaml by hand.
        verbose: name every value that changes and every result of other runs, not only how many.

    Returns:
        lines that say what changes: values of params.yaml, and results of runs that the new study does not have.

    Raises:
        UserError: no such study, or it is not valid, or params.yaml was changed by hand; it is then left as it was.
    """
    path = study_path(name)
    text, values = composed_text(path)
    study = validated(values, path)
    if not force:
        _require_no_edits(values, name)
    lines = [f"{PARAMS_FILE} {'would become' if dry_run else 'is now'} the study {study.study}: {study.description}"]
    lines += _summary(_active_values(), values, verbose) or ["  no value changes"]
    others = _results_of_other_runs(study)
    removed = in_cache(others)
    kept = [path for path in others if path not in removed]
    of_others = "results of runs that this study does not have"
    lines += _listed(f"{'would remove' if dry_run else 'removed'} {of_others}; DVC's cache keeps them:", removed, verbose)
    lines += _listed(f"{of_others} stay, as DVC's cache does not have them; remove them by hand:", kept, verbose)
    lines.append("`dvc repro` runs it, `dvc status` says which stages are stale.")
    if not dry_run:
        write_text(PARAMS_FILE, text)
        for path in removed:
            remove(path)
    return lines


def composed_text(path: Path) -> tuple[str, dict[str, Any]]:
    """What `grpo study use` writes for a study file, with the comments of all that it is composed of; and the values in it."""
    values, (written, notes, opening) = compose(path), annotated(path)
    values["runs"] = runs_table(validated(values, path))
    files = [str(file) for file in files_of(path)]
    of = f"{', '.join(files[:-1])} and {files[-1]}" if files[1:] else files[0]
    head = (
        f"# The study {path.stem}, composed by `grpo study use` from {of}.",
        "# Edit it as you like, then `make repro`; `grpo study check` says what you changed, `grpo study save NAME` keeps that",
        "# as a study. To change the study itself, edit its file and `grpo study use` it again.",
        f"# As composed: {_digest(values)} (tells an edit of this file from one of the study's)",
        *(("#", *opening) if opening else ()),
    )
    return _with_runs(written, {**notes, ("study",): Note(blank=True)}, head, values["runs"]), values


def _with_runs(written: Mapping[str, Any], notes: Notes, head: tuple[str, ...], runs: Mapping[str, Any]) -> str:
    """The text of params.yaml, where the table of runs stands last, a row on each line."""
    rows: Notes = {("runs", key): Note(flow=True) for key in runs}
    return to_text({**written, "runs": runs}, {**notes, ("runs",): _RUNS, **rows}, head)


def renew_runs() -> list[str]:
    """Write `select_in` and `runs` of params.yaml anew, after its experiments, seeds or tasks were edited by hand.

    Raises:
        UserError: params.yaml is not valid; it is then left as it was.
    """
    written, notes, opening = read_annotated(PARAMS_FILE)
    written.pop("runs", None)
    experiments = written.get("experiments")
    if isinstance(experiments, dict):
        written["select_in"] = [name for name, entry in experiments.items() if isinstance(entry, dict) and entry.get("arms")]
    runs = runs_table(validated(written, PARAMS_FILE))
    before = set(_active_values().get("runs") or {})
    write_text(PARAMS_FILE, _with_runs(written, notes, opening, runs))
    differing = {"new": runs.keys() - before, "gone": before - runs.keys()}
    return [
        f"{PARAMS_FILE}: {len(runs)} stages train",
        *(f"  {kind}: {', '.join(sorted(k))}" for kind, k in differing.items() if k),
    ]


def save(name: str) -> list[str]:
    """Write params.yaml as the study studies/NAME.yaml, which extends the active one and says what was changed by hand.

    Raises:
        UserError: the name is taken or can be no study's, or params.yaml is not valid, or lacks something that it had.
    """
    values = read_yaml(PARAMS_FILE)
    without_runs = {key: value for key, value in values.items() if key != "runs"} if isinstance(values, dict) else values
    validated(without_runs, PARAMS_FILE)
    try:
        check_name(name, "a study", name)
    except ValueError as error:
        raise UserError(f"{error}.") from None
    written, notes, _ = read_annotated(PARAMS_FILE)
    own = _own_file(written)
    target = own.with_name(f"{name}.yaml")
    if target.exists():
        raise UserError(f"{target}: is there already. Choose another name.")
    try:
        overlay = overlay_of(*({k: v for k, v in each.items() if k not in COMPUTED} for each in (compose(own), written)))
    except ValueError as gone:
        raise UserError(
            f"{PARAMS_FILE}: {gone}: is in {own}, but no longer here, and a study that extends another cannot take a key away. "
            f"Put it back, or keep the whole: cp {PARAMS_FILE} {target}"
        ) from None
    if not overlay:
        raise UserError(f"{PARAMS_FILE}: says what {own} says. There is nothing to save.")
    write_text(target, to_text({"extends": own.stem, **overlay}, _without_comments(notes)))
    named = name if own.parent == STUDIES_FOLDER else target
    return [f"{target}: extends {own.stem}, with what was changed by hand. `grpo study use {named}` makes it the active study."]


def rehearse(name: str) -> list[str]:
    """Write the rehearsal of a study (:mod:`grpo.study.rehearsal`) beside it, as an overlay: NAME-rehearsal.yaml.

    Raises:
        UserError: no such study, or another file has that name, or the rehearsal is not valid.
    """
    path = study_path(name)
    folder = STUDIES_FOLDER if path.parent == paths.shipped("studies") else path.parent
    target = folder / f"{path.stem}{SUFFIX}.yaml"
    values = compose(path)
    about = {"extends": path.stem, "description": f"The study {path.stem}, cut down to be tried on a CPU."}
    cut = difference(values, lay_over(values, rehearsal_of(values)))
    text = to_text(about | cut, {}, ("# Written by `grpo study rehearse`.",))
    if target.exists() and target.read_text(encoding="utf-8") != text:
        raise UserError(f"{target}: is there, and says something else. Remove it to have it written anew, or use it as it is.")
    write_text(target, text)
    rehearsal = load_study(target)
    named = target.stem if folder == STUDIES_FOLDER else target
    return [
        f"{target}: `grpo study use {named}`, then `make repro`. It does not cover",
        *(f"- {missing}" for missing in not_covered(rehearsal, load_study(path))),
    ]


def _without_comments(notes: Notes) -> Notes:
    """Only which mappings stand on one line, as the comments are in what is extended already."""
    return {key: Note(flow=note.flow) for key, note in notes.items()}


# ------------------------------------------------------------------------------------------------------- edits by hand


def _require_no_edits(values: Mapping[str, Any], name: str) -> None:
    """Raise UserError where writing ``values``, those of study ``name``, to params.yaml would lose what was changed there."""
    if not PARAMS_FILE.exists():
        return
    drop = f"`grpo study use {name} --force` drops it"
    try:
        active = read_yaml(PARAMS_FILE)
        if not isinstance(active, dict):
            raise UserError(f"{PARAMS_FILE}: expected a mapping of sections at the top.")
        if _as_it_was_composed(active) or not _apart_from_names(changes(values, active)):
            return
        edits = _described_edits(active)
    except UserError as error:
        raise UserError(f"{error} {drop}, whatever it holds.") from None
    if edits:
        keep = f"Nothing was written. `grpo study save NAME` keeps it as a study; {drop}."
        raise UserError("\n".join([f"{PARAMS_FILE}: {edits[0]}", *edits[1:], keep]))


def _described_edits(active: Mapping[str, Any]) -> list[str]:
    """How params.yaml differs from the study file that it was composed from; nothing, if it does not.

    Raises:
        UserError: there is no such file, or it cannot be composed.
    """
    own = _own_file(active)
    if not own.exists():
        raise UserError(f"{PARAMS_FILE}: what was changed in it is unknown, as its study's file {own} is not there.")
    computed = {*COMPUTED} - {"study"}  # its name can be another by hand only
    edits = [change for change in changes(compose(own), active) if change[0].partition(".")[0] not in computed]
    composed = f"since it was composed from {own}"
    by = f"that file was changed {composed}" if _as_it_was_composed(active) else f"changed by hand {composed}"
    return [f"{by}:", *(_described(change) for change in edits)] if edits else []


def _as_it_was_composed(active: Mapping[str, Any]) -> bool:
    """Whether params.yaml holds just what `grpo study use` wrote into it, though the study's file may have changed since."""
    noted = _AS_COMPOSED.search(PARAMS_FILE.read_text(encoding="utf-8"))
    return noted is not None and noted[1] == _digest(active)


def _digest(values: Mapping[str, Any]) -> str:
    """SHA-256 (first 16 hex digits) of a study's values in their order."""
    return hashlib.sha256(json.dumps(values, default=str).encode()).hexdigest()[:16]


def _own_file(active: Mapping[str, Any]) -> Path:
    """The study file that params.yaml was composed of, as far as its values tell."""
    file = Path(str(active.get("file") or f"{active.get('folder', STUDIES_FOLDER)}/{active.get('study')}.yaml"))
    shipped = paths.shipped("studies") / file.name
    return shipped if shipped.exists() and not file.exists() and file.parent == STUDIES_FOLDER else file


def _active_values() -> dict[str, Any]:
    """What params.yaml holds; nothing, where it is missing or no mapping that can be read."""
    try:
        values = parse_yaml(PARAMS_FILE) if PARAMS_FILE.exists() else {}
    except UserError:
        return {}
    return values if isinstance(values, dict) else {}


# ------------------------------------------------------------------------------------------------------------- summary


def _apart_from_names(found: list[Change]) -> list[Change]:
    """The changes that matter to results, and not those that follow from the study's name or other changes."""
    return [change for change in found if change[0].partition(".")[0] not in ("description", *COMPUTED)]


def _summary(old: Mapping[str, Any], new: Mapping[str, Any], verbose: bool) -> list[str]:
    """Each change of a value; or in which sections there are how many, and what becomes of which experiments."""
    found = changes(old, new)
    if verbose:
        return [_described(change) for change in found]
    keys = [key.split(".") for key, _, _ in _apart_from_names(found)]
    sections = Counter(key[0] for key in keys if key[0] != "experiments")
    lines = ["  values: " + ", ".join(f"{section} {n}" for section, n in sections.items())] if sections else []
    before, after = ({name: e.get("arms") for name, e in (s.get("experiments") or {}).items()} for s in (old, new))
    kinds: dict[str, list[str]] = {"added": [], "left out": [], "with other arms or settings": []}
    for name in dict.fromkeys(key[1] for key in keys if key[0] == "experiments" and key[1:]):
        had, has = bool(before.get(name)), bool(after.get(name))
        if had or has:
            kinds["added" if not had else "left out" if not has else "with other arms or settings"].append(name)
    return lines + [f"  experiments {kind}: {', '.join(names)}" for kind, names in kinds.items() if names]


def _described(change: Change) -> str:
    key, old, new = change
    return f"  {key}: {old} -> {new}"


def _results_of_other_runs(study: Study) -> list[Path]:
    """Results in data/ of runs that ``study`` does not name; folders that its stages depend on would hold them too."""
    own = {paths.run_name(name, arm, seed) for name, e in study.experiments.items() for arm in e.arms for seed in study.seeds}
    roots = (paths.RUNS, paths.CHECKPOINTS, paths.TIMING)
    return [path for root in roots for path in sorted(root.glob("*/*/[!.]*")) if path.relative_to(root).as_posix() not in own]


def _listed(heading: str, results: list[Path], verbose: bool) -> list[str]:
    """The heading with each result below it, or with how many there are in which folder; nothing, where there are none."""
    counts = Counter(str(path.parents[-3]) for path in results)  # data/runs of data/runs/EXPERIMENT/ARM/SEED
    listed = [f"  {path}" for path in results] if verbose else [f"  {n} in {root}" for root, n in counts.items()]
    return [heading, *listed] if results else []

"""Showing the active study and switching to another."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from grpo.common.errors import UserError
from grpo.common.files import write_text
from grpo.study import paths
from grpo.study.effective import effective_run
from grpo.study.methods import OFF_POLICY_RANK, GrpoConfig
from grpo.study.schema import PARAMS_FILE, STUDIES_FOLDER, Study, load_study, read_yaml


def list_studies() -> list[str]:
    """One line for each file in studies/; the active study is marked."""
    active = load_study().study if PARAMS_FILE.exists() else None
    lines = []
    for path in sorted(STUDIES_FOLDER.glob("*.yaml")):
        study = load_study(path)
        lines.append(f"{'*' if study.study == active else ' '} {path.stem:<12} {study.description}")
    return lines


def describe(study: Study) -> str:
    """The study's runs with what each changes; a winner that is not known yet is named by its experiment."""
    tasks = "tasks " + ", ".join(f"{name} ({settings['use']})" for name, settings in study.tasks.items())
    lines = [f"{study.study}: {study.description}", f"seeds {study.seeds}, {tasks}, engine {study.engine.name}"]
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
    return "\n".join(lines)


def _pinned_or(study: Study, experiment: str, otherwise: str) -> str:
    pinned = study.selection.pinned.get(experiment)
    return f"{experiment} ({f'pinned: {pinned}' if pinned else otherwise})"


def use(name: str, dry_run: bool) -> list[str]:
    """Make a study the active one.

    Args:
        name: a name in studies/, or the path of a study file.
        dry_run: only say what would change.

    Returns:
        lines that say what changes: values of params.yaml, and results of runs that the new study does not have.

    Raises:
        UserError: no such study, or it is not valid; params.yaml is then left as it was.
    """
    path = Path(name) if name.endswith((".yaml", ".yml")) else STUDIES_FOLDER / f"{name}.yaml"
    if not path.exists():
        known = ", ".join(sorted(p.stem for p in STUDIES_FOLDER.glob("*.yaml")))
        raise UserError(f"{path}: no such study. Choose one of {known}, or give the path of a study file.")
    study = load_study(path)
    old = _flat(read_yaml(PARAMS_FILE)) if PARAMS_FILE.exists() else {}
    new = _flat(read_yaml(path))
    lines = [
        f"  {key}: {old.get(key, 'absent')} -> {new.get(key, 'absent')}"
        for key in sorted({*old, *new})
        if old.get(key) != new.get(key)
    ]
    lines = [f"{PARAMS_FILE} {'would become' if dry_run else 'is now'} {path}", *(lines or ["  nothing changes"])]
    stale = _results_of_other_runs(study)
    if stale:
        verb = "would remove" if dry_run else "removed"
        lines.append(f"{verb} results of runs that this study does not have (DVC's cache keeps them):")
        lines += [f"  {folder}" for folder in stale]
    lines.append("`dvc repro` runs it, `dvc status` says which stages are stale.")
    if not dry_run:
        write_text(PARAMS_FILE, path.read_text(encoding="utf-8"))
        for folder in stale:
            shutil.rmtree(folder) if folder.is_dir() else folder.unlink()
    return lines


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    """Nested mappings as ``a.b.c`` keys."""
    if not isinstance(value, dict):
        return {prefix: value}
    return {k: v for key, item in value.items() for k, v in _flat(item, f"{prefix}.{key}" if prefix else str(key)).items()}


def _results_of_other_runs(study: Study) -> list[Path]:
    """Results in the workspace of runs that ``study`` does not name; they would stand in the way of its own."""
    own = {f"{name}/{arm}-{seed}" for name, e in study.experiments.items() for arm in e.arms for seed in study.seeds}
    found = [path for root in (paths.RUNS, paths.CHECKPOINTS, paths.TIMING) for path in sorted(root.glob("*/*"))]
    runs = [path for path in found if f"{path.parent.name}/{path.stem if path.suffix == '.json' else path.name}" not in own]
    winners = [root / f"{name}.json" for root in (paths.SELECT, paths.CANDIDATES) for name in study.left_out]
    return [*runs, *(path for path in winners if path.exists())]

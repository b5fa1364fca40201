"""stages.yaml: what dvc.yaml makes its stages from, computed from params.yaml and written beside it."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo.common.errors import UserError
from grpo.common.files import files_digest, remove, write_text
from grpo.common.yaml_file import read_mapping, to_yaml
from grpo.study import paths
from grpo.study.kept import in_cache

if TYPE_CHECKING:
    from grpo.study.schema import Study

COMPOSED = "composed"  # the digest of params.yaml as `grpo study use` wrote it, by which edits are noticed
HEAD = """\
# Made from params.yaml by `grpo study use`; `make repro` and `grpo study check` renew it. dvc.yaml makes its stages from it.
# Do not edit it.

"""


def stages_of(study: Study) -> dict[str, Any]:
    """The experiments with a winner, a KL or pass@k to measure, the study's files, and a row for each stage that trains."""
    return {
        "select_in": study.active_experiments,
        "kl_in": study.kl_in,
        "pass_at_k_in": study.pass_at_k_in,
        "named_files": study.named_files,
        "runs": study.runs_table(),
    }


def require_current_stages(study: Study, path: Path) -> None:
    """Raise UserError if there is a stages.yaml and it is not that of the study."""
    written, wanted = _read(path), stages_of(study)
    if written and any(written.get(key) != value for key, value in wanted.items()):
        before, now = ({**(stages.get("named_files") or {}), **(stages.get("runs") or {})} for stages in (written, wanted))
        differing = sorted(key for key in {**before, **now} if before.get(key) != now.get(key))
        which = f" ({', '.join(differing[:5])}{', …' * (len(differing) > 5)})" if differing else ""
        raise UserError(
            f"{path}: is not that of params.yaml, which was edited{which}. Run `make repro`; or `grpo study check`, which "
            "renews it, then `dvc repro`. After `dvc exp run -S …`: then `dvc exp run` without -S."
        )


def is_edited() -> bool:
    """Whether params.yaml is there and is not as `grpo study use` wrote it."""
    return paths.PARAMS.exists() and _read(paths.STAGES).get(COMPOSED) != files_digest(paths.PARAMS)


def write_stages(study: Study, composed: bool = False) -> list[str]:
    """Write stages.yaml unless it is current, and remove results of runs that the study does not have.

    ``composed``: `grpo study use` has just written params.yaml. Returns lines that say what was done.
    """
    written = _read(paths.STAGES)
    digest = files_digest(paths.PARAMS) if composed else written.get(COMPOSED)
    values = {COMPOSED: digest, **stages_of(study)}
    may_stay_empty = (paths.REPORTS / "kl", paths.REPORTS / "comments", paths.NAMED_FILES, paths.REPLICATES)  # deps of stages
    for folder in may_stay_empty:
        if not folder.exists():
            write_text(folder / ".gitkeep", "")
    for file in paths.NAMED_FILES.glob("*.json"):
        if file.stem not in values["named_files"]:  # of another study
            file.unlink()
    if values == written and not composed:
        return []
    write_text(paths.STAGES, HEAD + to_yaml(values))
    before, after = set(written.get("runs") or {}), set(values["runs"])
    return [f"{paths.STAGES}: {len(after)} stages train, {len(after - before)} of them new", *_remove_other_results(study)]


def _read(path: Path) -> dict[str, Any]:
    return read_mapping(path) if path.exists() else {}


def _remove_other_results(study: Study) -> list[str]:
    """Remove results of runs that ``study`` does not have, if DVC's cache has them; lines that say what goes and what stays.

    ``select@EXPERIMENT`` and ``tables`` depend on the whole folders, so that they would be out of date in a clone without them.
    """
    runs = {paths.run_name(name, arm, seed) for name, arm in study.arms for seed in study.seeds_of(name)}
    folders = [path for root in (paths.RUNS, paths.CHECKPOINTS, paths.TIMING) for path in sorted(root.glob("*/*/[!.]*"))]
    others = [path for path in folders if "/".join(path.parts[-3:]) not in runs]
    removed = in_cache(others)
    kept = [path for path in others if path not in removed]
    for path in removed:
        remove(path)
        for folder in path.parents[:2]:  # of the arm and of the experiment
            with suppress(OSError):  # it holds others
                folder.rmdir()
    of_others = "results of runs that this study does not have"
    headings = {
        f"removed {of_others}; DVC's cache keeps them:": removed,
        f"kept {of_others}, as DVC's cache does not have them; remove them by hand:": kept,
    }
    return [line for heading, results in headings.items() if results for line in (heading, *(f"  {path}" for path in results))]

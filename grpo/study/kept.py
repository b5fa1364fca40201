"""Results and DVC: keep those of a stage until DVC has stored them; what dvc.lock and the cache have.

DVC removes a stage's outputs before it runs the stage. If it could not store them (a full disk, a kill), it runs the stage
again, which then finds its results here. Kept results lie below ``data/state``.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from grpo.common.errors import UserError
from grpo.common.files import atomic_folder, dvc_hash, write_text
from grpo.common.yaml_file import parse_yaml
from grpo.study import paths

RESULTS = "results"  # in a state's folder: the results by their paths in the project
HASH = "output.md5"  # file with the hash that dvc.lock will have for the output


def keep_until_stored(state: Path, output: Path, results: Iterable[Path] = ()) -> None:
    """Mark a state, with links to ``results``, to be removed once DVC has stored its output; without a pipeline remove it."""
    if not paths.PIPELINE.exists():
        shutil.rmtree(state, ignore_errors=True)
        return
    with atomic_folder(state / RESULTS) as folder:
        for path in results:
            target = folder / path
            target.parent.mkdir(parents=True, exist_ok=True)
            if path.is_dir():
                shutil.copytree(path, target, symlinks=True, copy_function=link)
            else:
                link(path, target)
    write_text(state / HASH, dvc_hash(output))


def keep_until_all_stored(states: Path, output: Path) -> None:
    """Mark all kept states below a folder to be removed once DVC has stored the common output of all of them."""
    whole = dvc_hash(output)
    for mark in states.rglob(HASH):
        write_text(mark, whole)


def bring_back(state: Path, results: Path) -> bool:
    """Restore kept results if there are any and ``results``, one of them, is missing."""
    remove_stored(state)
    if results.exists() or not (state / HASH).exists():
        return False
    shutil.copytree(state / RESULTS, Path(), symlinks=True, copy_function=link, dirs_exist_ok=True)
    return True


def remove_stored(folder: Path = paths.STATE) -> None:
    """Remove the states below a folder whose outputs are in dvc.lock."""
    marks = list(folder.rglob(HASH))
    stored = paths.LOCK.read_text(encoding="utf-8") if marks and paths.LOCK.exists() else ""
    for mark in marks:
        if mark.read_text(encoding="utf-8") in stored:
            shutil.rmtree(mark.parent, ignore_errors=True)


def link(source: str | Path, target: str | Path) -> None:
    """Make a hard link, or a copy if the file system has no hard links. The file must never be written again."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def drop_former_stages() -> list[str]:
    """Remove the stages from dvc.lock that dvc.yaml and params.yaml no longer have; return their names.

    May be called from within a stage: DVC holds no lock while its command runs, and reads the file again afterwards.
    """
    from dvc.exceptions import DvcException
    from dvc.repo import Repo
    from dvc.utils.serialize import modify_yaml

    try:
        with Repo(_wait_for_lock=True) as repo, repo.lock:
            known = {getattr(stage, "name", None) for stage in repo.index.stages}
            former = [name for name in stages_in_lock() if name not in known]
            if former:
                with modify_yaml(str(paths.LOCK)) as lock:
                    for name in former:
                        del lock["stages"][name]
            return former
    except DvcException as error:
        raise UserError(f"dvc.yaml: DVC cannot read the pipeline: {error}. See `dvc dag`.") from error


def stages_in_lock() -> dict[str, Any]:
    """The stages in dvc.lock by their names; empty without the file. A UserError if the file has no stages."""
    if not paths.LOCK.exists():
        return {}
    lock = parse_yaml(paths.LOCK)
    if not isinstance(lock, dict) or not isinstance(lock.get("stages"), dict):
        raise UserError(f"{paths.LOCK}: has no stages. Run `git checkout HEAD -- {paths.LOCK}`, or make it anew: `dvc repro`.")
    return dict(lock["stages"])


def in_cache(outputs: list[Path]) -> list[Path]:
    """Select the outputs, or folders in outputs, that DVC's cache here holds completely, by their hashes in dvc.lock."""
    if not outputs:
        return []
    try:
        from dvc.exceptions import DvcException
        from dvc.repo import Repo
    except ModuleNotFoundError:  # installed without the pipeline
        return []

    try:
        with Repo() as repo:
            cache = Path(repo.cache.local.path)
        stages = stages_in_lock().values()
    except (DvcException, UserError):  # not a DVC repository, or a damaged lock file
        return []
    hashes = {out["path"]: out.get("md5", "") for stage in stages for out in stage.get("outs", [])}
    stored = {path: next((place for place in (path, *path.parents) if place.as_posix() in hashes), None) for path in outputs}
    return [path for path, out in stored.items() if out and _is_whole(cache, hashes[out.as_posix()], path.relative_to(out))]


def _is_whole(cache: Path, md5: str, part: Path = Path()) -> bool:
    """Whether a cache holds the file with this hash, or the files of the folder with this hash that are below ``part``."""
    stored = cache / md5[:2] / md5[2:]
    if not md5 or not stored.is_file():
        return False
    if not md5.endswith(".dir"):
        return True
    files = [entry["md5"] for entry in json.loads(stored.read_bytes()) if Path(entry["relpath"]).is_relative_to(part)]
    return bool(files) and all(_is_whole(cache, file) for file in files)

"""Keep the results of a stage until DVC has stored them.

DVC removes a stage's outputs before it runs the stage. If it could not store them (a full disk, a kill), it runs the stage
again, which then finds its results here. Each function works on a folder below ``data/state``.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from grpo.common.files import atomic_folder, dvc_hash, write_text
from grpo.study import paths

RESULTS = "results"  # in a state's folder: the results by their paths in the project
HASH = "output.md5"  # file with the hash that dvc.lock will have for the output


def keep_until_stored(state: Path, output: Path, results: Iterable[Path] = ()) -> None:
    """Mark a state to be removed once DVC has stored its output; without a pipeline, remove it now.

    Args:
        results: files and folders to keep in it as hard links, which take no space.
    """
    if not paths.PIPELINE.exists():
        shutil.rmtree(state, ignore_errors=True)
        return
    with atomic_folder(state / RESULTS) as folder:
        for path in results:
            target = folder / path
            target.parent.mkdir(parents=True, exist_ok=True)
            if path.is_dir():
                shutil.copytree(path, target, copy_function=link)
            else:
                link(path, target)
    write_text(state / HASH, dvc_hash(output))


def keep_until_all_stored(states: Path, output: Path) -> None:
    """Mark all kept states below a folder to be removed once DVC has stored the common output of all of them."""
    found = dvc_hash(output)
    for mark in states.rglob(HASH):
        write_text(mark, found)


def bring_back(state: Path, results: Path) -> bool:
    """Restore kept results if there are any and ``results``, one of them, is missing."""
    remove_stored(state)
    if results.exists() or not (state / HASH).exists():
        return False
    shutil.copytree(state / RESULTS, Path(), copy_function=link, dirs_exist_ok=True)
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

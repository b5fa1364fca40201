"""Former stages in dvc.lock, which DVC never takes out by itself; and which results DVC's cache can bring back."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from grpo.common.errors import UserError
from grpo.study import paths


def drop_former_stages() -> list[str]:
    """Take the stages out of dvc.lock that dvc.yaml and params.yaml no longer name, such as those of an arm that is gone.

    May be called from within a stage: while its command runs DVC holds no lock, and then reads the file anew.

    Returns:
        their names.

    Raises:
        UserError: DVC cannot read the pipeline.
    """
    from dvc.exceptions import DvcException
    from dvc.repo import Repo
    from dvc.utils.serialize import modify_yaml

    try:
        with Repo(_wait_for_lock=True) as repo, repo.lock:
            known = {getattr(stage, "name", None) for stage in repo.index.stages}
            former = [name for name in _stages() if name not in known]
            if former:
                with modify_yaml(str(paths.LOCK)) as lock:
                    for name in former:
                        del lock["stages"][name]
            return former
    except DvcException as error:
        raise UserError(f"dvc.yaml: DVC cannot read the pipeline: {error}. See `dvc dag`.") from error


def _stages() -> dict[str, Any]:
    """The stages in dvc.lock by their names."""
    from dvc.utils.serialize import load_yaml

    return dict(load_yaml(str(paths.LOCK)).get("stages", {})) if paths.LOCK.exists() else {}


def in_cache(outputs: Iterable[Path]) -> list[Path]:
    """Those of these outputs of stages that DVC's cache on this machine holds whole, as dvc.lock names them."""
    wanted = list(outputs)
    if not wanted:
        return []
    from dvc.exceptions import DvcException
    from dvc.repo import Repo

    try:
        with Repo() as repo:
            cache = Path(repo.cache.local.path)
        stages = _stages().values()
    except DvcException:  # no repository of DVC, or a damaged lock
        return []
    hashes = {out["path"]: out.get("md5", "") for stage in stages for out in stage.get("outs", [])}
    return [path for path in wanted if _is_whole(cache, hashes.get(path.as_posix(), ""))]


def _is_whole(cache: Path, md5: str) -> bool:
    """Whether a cache holds what has this hash: a file, or a folder with all its files."""
    stored = cache / md5[:2] / md5[2:]
    if not md5 or not stored.is_file():
        return False
    return not md5.endswith(".dir") or all(_is_whole(cache, entry["md5"]) for entry in json.loads(stored.read_bytes()))

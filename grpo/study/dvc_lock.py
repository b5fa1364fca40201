"""dvc.lock without what it has of former stages: DVC adds to it, and never takes out what dvc.yaml no longer names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from grpo.common.errors import UserError
from grpo.study import paths

if TYPE_CHECKING:
    from dvc.repo import Repo


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

    try:
        with Repo(_wait_for_lock=True) as repo, repo.lock:
            return drop_from(repo)
    except DvcException as error:
        raise UserError(f"dvc.yaml: DVC cannot read the pipeline: {error}. See `dvc dag`.") from error


def drop_from(repo: Repo) -> list[str]:
    """The same where the caller has opened the repository, and holds its lock."""
    from dvc.stage import PipelineStage
    from dvc.utils.serialize import load_yaml, modify_yaml

    if not paths.LOCK.exists():
        return []
    found: dict[str, Any] = load_yaml(str(paths.LOCK))
    known = {stage.name for stage in repo.index.stages if isinstance(stage, PipelineStage)}
    former = [name for name in found.get("stages", {}) if name not in known]
    if former:
        with modify_yaml(str(paths.LOCK)) as lock:
            for name in former:
                del lock["stages"][name]
    return former

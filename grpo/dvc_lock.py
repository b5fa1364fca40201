"""dvc.lock without what it has of former stages: DVC adds to it, and never takes out what dvc.yaml no longer names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from grpo import paths
from grpo.errors import UserError

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
    from dvc.utils.serialize import modify_yaml

    try:
        with Repo(_wait_for_lock=True) as repo, repo.lock:
            former = former_stages(repo)
            if former:
                with modify_yaml(str(paths.LOCK)) as lock:
                    for name in former:
                        del lock["stages"][name]
    except DvcException as error:
        raise UserError(f"dvc.yaml: DVC cannot read the pipeline: {error}. See `dvc dag`.") from error
    return former


def former_stages(repo: Repo) -> list[str]:
    """Names in dvc.lock of stages that dvc.yaml does not have."""
    from dvc.stage import PipelineStage
    from dvc.utils.serialize import load_yaml

    lock: dict[str, Any] = load_yaml(str(paths.LOCK))
    known = {stage.name for stage in repo.index.stages if isinstance(stage, PipelineStage)}
    return [name for name in lock["stages"] if name not in known]

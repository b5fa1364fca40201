"""Whose repository git and DVC work in."""

from __future__ import annotations

import os
from pathlib import Path

# Variables with which git tells its hooks and `git rebase --exec` where its repository is (`git rev-parse --local-env-vars`
# lists them, and others with settings).
_OF_A_REPOSITORY = (
    *("GIT_DIR", "GIT_WORK_TREE", "GIT_IMPLICIT_WORK_TREE", "GIT_COMMON_DIR", "GIT_INDEX_FILE", "GIT_PREFIX"),
    *("GIT_OBJECT_DIRECTORY", "GIT_ALTERNATE_OBJECT_DIRECTORIES", "GIT_GRAFT_FILE", "GIT_SHALLOW_FILE"),
)


def use_this_folders_repository() -> None:
    """Let git and DVC, in this process and its children, find the repository of the working folder.

    Started by a hook of another repository, they would take that one. The variables stay if they are all that leads to a
    repository.
    """
    here = Path.cwd()
    if any((folder / ".git").exists() for folder in (here, *here.parents)):
        for name in _OF_A_REPOSITORY:
            os.environ.pop(name, None)

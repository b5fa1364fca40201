"""`grpo init`: a project that DVC can read and that is without the package's code."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from dvc.repo import Repo

from grpo.commands.init import VERSION, init, pipeline
from grpo.common.errors import UserError
from grpo.study import paths
from grpo.study.schema import load_study

REPOSITORY = Path(__file__).parents[2]


def test_its_stages_are_the_packages_but_for_its_code_and_the_kissing_number() -> None:
    ours = Repo(str(REPOSITORY)).index.stages
    assert set(pipeline()["stages"]) == {stage.name.partition("@")[0] for stage in ours if stage.cmd} - {"kissing_number"}
    assert not [
        dep for stage in pipeline()["stages"].values() for dep in stage.get("do", stage)["deps"] if dep.startswith("grpo/")
    ]


@pytest.mark.usefixtures("workdir")
def test_a_project_is_a_repository_whose_study_all_of_dvc_can_read(monkeypatch: pytest.MonkeyPatch) -> None:
    said = init(Path("lab"), with_git=True)
    assert "make repro" in said and "git init" not in said
    monkeypatch.chdir("lab")
    study = load_study()
    assert study.study == "first" and study.active_experiments == ["rewards"] and len(study.seeds) == 3 and study.claims
    stages = {stage.name: stage for stage in Repo().index.stages}
    assert {"train@rewards-exact", "train@rewards-letters", "select@rewards", "writeup"} <= set(stages)
    assert VERSION in {dep.def_path for dep in stages["training_inputs"].deps}
    missing = {dep.def_path for stage in stages.values() for dep in stage.deps if not dep.exists}
    assert all(path.startswith(("data/", "reports/")) for path in missing), missing
    listed = subprocess.run(["git", "status", "--short", "-uall"], capture_output=True, text=True, check=True).stdout
    assert "studies/my_task.py" in listed and "data/" not in listed
    targets = subprocess.run(["make"], capture_output=True, text=True, check=True).stdout
    assert "make repro" in targets


@pytest.mark.usefixtures("workdir")
def test_without_git_it_says_what_is_left_and_nothing_is_overwritten() -> None:
    assert "git init && dvc init" in init(Path("lab"), with_git=False)
    assert not Path("lab/.git").exists() and (Path("lab") / paths.PARAMS).exists() and (Path("lab") / paths.PIPELINE).exists()
    with pytest.raises(UserError, match="lab: already exists and is not an empty folder"):
        init(Path("lab"), with_git=False)


@pytest.mark.usefixtures("workdir")
@pytest.mark.parametrize(("exists", "fails", "message"), [(False, True, "no space left"), (True, False, "no program git")])
def test_nothing_is_left_where_git_fails(
    exists: bool, fails: bool, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab, git = Path("lab"), tmp_path / "programs/git"
    git.parent.mkdir()
    if exists:
        lab.mkdir()
    if fails:
        git.write_text("#!/bin/sh\necho 'no space left' >&2; exit 1\n")
        git.chmod(0o755)
    with monkeypatch.context() as patched:
        patched.setenv("PATH", str(git.parent))
        with pytest.raises(UserError, match=message):
            init(lab, with_git=True)
    assert lab.exists() == exists and not (exists and any(lab.iterdir()))
    init(lab, with_git=True)  # at the next attempt


@pytest.mark.usefixtures("workdir")
def test_dvc_is_found_in_an_environment_that_is_not_activated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "git").symlink_to(str(shutil.which("git")))
    monkeypatch.setenv("PATH", str(tmp_path))
    init(Path("lab"), with_git=True)
    assert Path("lab/.dvc/config").exists()

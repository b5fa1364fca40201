"""Results kept in a DVC remote: who clones the repository and pulls them makes the report anew, and trains nothing."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from pipeline_parts import digests, sh
from ruamel.yaml import YAML

pytestmark = pytest.mark.nightly


def reports(folder: Path) -> dict[str, bytes]:
    """relative path -> content of every file below reports."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.glob("reports/**/*")) if path.is_file()}


def test_a_fresh_clone_with_pulled_results_makes_the_same_report(finished: Path, tmp_path: Path) -> None:
    author, storage, reader = tmp_path / "author", tmp_path / "storage", tmp_path / "reader"
    shutil.copytree(finished, author, symlinks=True)
    sh(author, "dvc", "remote", "add", "-d", "storage", str(storage))
    sh(author, "git", "commit", "-qam", "where the results are kept")
    sh(author, "dvc", "push")
    sh(tmp_path, "git", "clone", "-q", str(author), str(reader))
    runs, written = digests(author), reports(author)
    shutil.rmtree(author)  # from here on there is the remote alone

    assert sorted(path.name for path in (reader / "data").iterdir()) == [
        "README.md", "kissing_number", "question_only.prompt", "r1_zero.prompt",
    ]  # fmt: skip
    sh(reader, "dvc", "pull")
    assert digests(reader) == runs
    assert "up to date" in sh(reader, "dvc", "status").stdout
    repeated = sh(reader, "dvc", "repro").stdout
    assert "Running stage" not in repeated and "up to date" in repeated
    assert not (reader / "mlflow.db").exists()

    stages = YAML(typ="safe").load((reader / "dvc.lock").read_text())["stages"]
    outs = [out for name in ("tables", "figures", "writeup") for out in stages[name]["outs"]]
    made_by_report = [name for name in written if f"{name}/".startswith(tuple(f"{out['path']}/" for out in outs))]
    assert {"reports/writeup.md", "reports/figures/leaderboard.svg", "reports/tables/claims.md"} <= set(made_by_report)
    for name in made_by_report:
        (reader / name).unlink()
    for stage in ("tables", "figures", "writeup"):  # what `make report` does
        ran = sh(reader, "dvc", "repro", "--force", "--single-item", stage).stdout
        assert [line for line in ran.splitlines() if line.startswith("> ")] == [f"> grpo {stage}"]
    assert reports(reader) == written
    assert digests(reader) == runs
    assert sh(reader, "git", "status", "--porcelain").stdout == ""

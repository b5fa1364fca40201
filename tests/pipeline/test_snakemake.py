"""The smoke study from scratch through Snakemake: the files of `dvc repro`, byte for byte."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from pipeline_parts import digests, fresh_clone, lock, sh

pytestmark = pytest.mark.slow


def test_snakemake_from_scratch_gives_the_same_results(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    fresh_clone(tmp_path)
    start = time.perf_counter()
    sh(tmp_path, "snakemake", "--profile", "local")
    print(f"smoke study through snakemake: {time.perf_counter() - start:.0f} s")
    result = sh(tmp_path, "snakemake", "--profile", "local")
    assert "Nothing to be done" in result.stdout + result.stderr
    sh(tmp_path, "snakemake", "--profile", "local", "report_files")
    sh(tmp_path, "snakemake", "--profile", "local", "--report", "report.html", "report_files")
    shown = (tmp_path / "report.html").read_text()
    assert all(name in shown for name in ("index.html", "forest.svg", "methods.svg", "Figures over wall-clock time"))
    finished = request.getfixturevalue("finished")  # only now: meanwhile another process may be making it
    assert lock(tmp_path) == lock(finished)
    assert digests(tmp_path) == digests(finished)

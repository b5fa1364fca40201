"""A new database for each test, and `grpo mlflow_import`."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from mlflow.tracking import MlflowClient
from mlflow_parts import free_port, uri_of
from study_parts import Grpo


@pytest.fixture(scope="session")
def empty_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new database with MLflow's tables, whose making takes seconds."""
    file = tmp_path_factory.mktemp("empty") / "mlflow.db"
    MlflowClient(f"sqlite:///{file}").search_experiments()
    return file


@pytest.fixture
def folder(workdir: Path, monkeypatch: pytest.MonkeyPatch, empty_database: Path) -> Path:
    """A working folder with a database, and a tracking server that refuses connections."""
    shutil.copy(empty_database, workdir / "mlflow.db")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{free_port()}")
    return workdir


@pytest.fixture
def delivered(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder whose runs go to its database."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri_of(folder))
    return folder


@pytest.fixture
def mlflow_import(monkeypatch: pytest.MonkeyPatch, grpo: Grpo) -> Grpo:
    """``grpo mlflow_import`` into the folder's database or another place: exit code, stdout, stderr."""

    def run(*files: Path, uri: str = "") -> tuple[int, str, str]:
        with monkeypatch.context() as patch:
            patch.setenv("MLFLOW_TRACKING_URI", uri or uri_of(Path.cwd()))
            return grpo("mlflow_import", *map(str, files))

    return run

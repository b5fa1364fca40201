"""A new database for each test."""

import shutil
from pathlib import Path

import pytest
from mlflow.tracking import MlflowClient
from mlflow_parts import uri_of


@pytest.fixture(scope="session")
def empty_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new database with MLflow's tables, whose making takes seconds."""
    file = tmp_path_factory.mktemp("empty") / "mlflow.db"
    MlflowClient(f"sqlite:///{file}").search_experiments()
    return file


@pytest.fixture
def folder(workdir: Path, monkeypatch: pytest.MonkeyPatch, empty_database: Path) -> Path:
    """A working folder whose runs go to its database."""
    shutil.copy(empty_database, workdir / "mlflow.db")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri_of(workdir))
    return workdir

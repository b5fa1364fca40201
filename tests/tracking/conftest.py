"""A new database for each test, and runs that are brought to it by the test's own process."""

from __future__ import annotations

import shutil
import socket
from pathlib import Path

import pytest

from grpo.tracking.mlflow_client import MlflowRun
from grpo.tracking.mlflow_sync import Sender


@pytest.fixture(scope="session")
def empty_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new database with MLflow's tables, whose making takes seconds."""
    from mlflow.tracking import MlflowClient

    file = tmp_path_factory.mktemp("empty") / "mlflow.db"
    MlflowClient(f"sqlite:///{file}").search_experiments()
    return file


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, empty_database: Path) -> Path:
    """A working folder with a database, and a tracking server that refuses connections."""
    shutil.copy(empty_database, tmp_path / "mlflow.db")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{free.getsockname()[1]}")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def delivered(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder whose runs are brought to its database by this process: the other takes seconds to start."""
    uri = f"sqlite:///{folder}/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    sender = Sender(uri)
    monkeypatch.setattr(MlflowRun, "_start_sender", lambda run: bool(sender.look(run.folder)))
    return folder

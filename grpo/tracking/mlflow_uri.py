"""The address of MLflow, and a client for it."""

from __future__ import annotations

import logging
import os
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from grpo.common.errors import UserError, reason
from grpo.common.safe_text import hide_secrets, on_terminal, without_password
from grpo.study import paths

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

NOWHERE = "none"  # as MLFLOW_TRACKING_URI: runs are not tracked


def tracking_uri() -> str:
    """``MLFLOW_TRACKING_URI``, which may be :data:`NOWHERE`, or ``mlflow.db`` in the project's folder.

    Raises UserError: the variable has no scheme.
    """
    uri = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{paths.workspace() / 'mlflow.db'}"
    if "://" not in uri and uri not in (NOWHERE, "databricks"):
        raise UserError(
            f"MLFLOW_TRACKING_URI: {without_password(uri)} has no scheme. Write http://HOST:5000 for a server or sqlite:///FILE"
            f" for a database; {NOWHERE} tracks nothing."
        )
    return uri


def local_database(uri: str) -> Path | None:
    """The file of a SQLite database; None for other addresses."""
    return Path(uri.removeprefix("sqlite:///").partition("?")[0]).absolute() if uri.startswith("sqlite:///") else None


def failure(uri: str, error: BaseException) -> str:
    """Describe an error of MLflow in one line; only its type if the address has a password, which the text may repeat."""
    shown = without_password(uri)
    return on_terminal(f"MLflow at {shown}: {hide_secrets(reason(error)) if shown == uri else type(error).__name__}")


def client_of(uri: str) -> MlflowClient:
    """A client of MLflow, which logs nothing itself."""
    from mlflow.tracking import MlflowClient

    for name in ("mlflow", "alembic"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    if database := local_database(uri):
        with closing(sqlite3.connect(database, timeout=60.0)) as connection:
            connection.execute("PRAGMA schema_version")  # MLflow itself tries for 100 s to open a damaged database
    return MlflowClient(uri)

"""The address of MLflow, a client for it, and the artifacts beside a local database."""

from __future__ import annotations

import logging
import os
import re
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote

from grpo.common.errors import UserError
from grpo.common.safe_text import hide_secrets, without_password
from grpo.study import paths

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

DATABASE = "mlflow.db"
NOWHERE = "none"  # as MLFLOW_TRACKING_URI: runs are not tracked
LOCKED_SECONDS = 10.0  # the wait for a SQLite database that another process has locked
ARTIFACTS = "mlruns"  # folder for artifacts beside a local database
PLACES = {"experiments": "artifact_location", "runs": "artifact_uri", "logged_models": "artifact_location"}
EXPERIMENT = r"[^./\x00-\x1f\x7f-\x9f][^/\x00-\x1f\x7f-\x9f]*"  # its name, which is that of the folder of its artifacts


def tracking_uri() -> str:
    """``MLFLOW_TRACKING_URI``, which may be :data:`NOWHERE`, or a SQLite file in the project's folder.

    Raises:
        UserError: the variable has no scheme.
    """
    uri = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{paths.workspace() / DATABASE}"
    if "://" not in uri and uri not in (NOWHERE, "databricks"):
        shown = without_password(uri)
        raise UserError(
            f"MLFLOW_TRACKING_URI: {shown} has no scheme. Write http://HOST:5000 for a server or sqlite:///FILE for a database;"
            f" {NOWHERE} tracks nothing."
        )
    return uri


def local_database(uri: str) -> Path | None:
    """The file of a SQLite database; None for other addresses."""
    return Path(uri.removeprefix("sqlite:///").partition("?")[0]).absolute() if uri.startswith("sqlite:///") else None


def describe(error: BaseException) -> str:
    """Describe an error of MLflow in one line, without secrets."""
    text = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
    return hide_secrets(text.partition("\n")[0], os.environ.get("MLFLOW_TRACKING_URI", ""))


def client_of(uri: str) -> MlflowClient:
    """A client of MLflow, after one attempt to open a database: MLflow itself makes ten, which take 100 s.

    Raises:
        Exception: the database cannot be opened or written.
    """
    from mlflow.tracking import MlflowClient

    for name in ("mlflow", "alembic"):  # they print tracebacks, and each step; the run prints one warning instead
        logging.getLogger(name).setLevel(logging.CRITICAL)
    if database := local_database(uri):
        database.parent.mkdir(parents=True, exist_ok=True)
        with closing(sqlite3.connect(database, timeout=LOCKED_SECONDS)) as connection:
            connection.execute("BEGIN IMMEDIATE")
    elif re.match("postgresql|mysql|mssql|sqlite", uri):
        import sqlalchemy

        sqlalchemy.create_engine(uri, poolclass=sqlalchemy.NullPool).connect().close()
    return MlflowClient(uri)


def bring_artifacts_along(database: Path) -> None:
    """Update the paths of artifacts in a local database that was moved or copied together with them.

    MLflow stores the absolute path of each experiment and run, and has no function to change it.
    """
    with closing(sqlite3.connect(database, timeout=LOCKED_SECONDS)) as connection, connection:
        for (place,) in connection.execute("SELECT artifact_location FROM experiments").fetchall():
            name = unquote(place.rpartition("/")[2])
            here = database.parent / ARTIFACTS / name
            if place != here.as_uri() and re.fullmatch(EXPERIMENT, name) and here.exists():
                for table, column in PLACES.items():
                    connection.execute(f"UPDATE {table} SET {column} = replace({column}, ?, ?)", (place, here.as_uri()))

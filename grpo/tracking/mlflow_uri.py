"""The address of MLflow."""

from __future__ import annotations

import os
from pathlib import Path

from grpo.common.errors import UserError
from grpo.common.uris import hide_secrets, without_password
from grpo.study import paths

DATABASE = "mlflow.db"
NOWHERE = "none"  # as MLFLOW_TRACKING_URI: runs are not tracked


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

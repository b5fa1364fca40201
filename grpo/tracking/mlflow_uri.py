"""The address of MLflow."""

from __future__ import annotations

import os
import re
from pathlib import Path

from grpo.common.errors import UserError
from grpo.study import paths

DATABASE = "mlflow.db"
NOWHERE = "none"  # as MLFLOW_TRACKING_URI: runs are not tracked


def tracking_uri() -> str:
    """``MLFLOW_TRACKING_URI``, which may be :data:`NOWHERE`, or a SQLite file in the project's folder."""
    return os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{paths.workspace() / DATABASE}"


def local_database(uri: str) -> Path | None:
    """The file of a SQLite database; None for other addresses."""
    return Path(uri.removeprefix("sqlite:///").partition("?")[0]).absolute() if uri.startswith("sqlite:///") else None


def without_password(text: str) -> str:
    """Hide passwords in URIs within a text."""
    return re.sub(r"(://[^:/@\s]*):[^@/\s]*@", r"\1:***@", text)


def describe(error: BaseException) -> str:
    """Describe an error in one line, without passwords."""
    text = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
    return without_password(text.partition("\n")[0])

"""`make ui`: start MLflow's UI for the runs at MLFLOW_TRACKING_URI (sqlite:///mlflow.db), and print links to them.

The links open MLflow's view for training; its start page is for applications of language models. The port is MLFLOW_PORT, or
the first free one from 5000 on.
"""

from __future__ import annotations

import os
import socket
import sys
from typing import NoReturn
from urllib.parse import urlencode

from grpo.tracking.mlflow_send import bring_artifacts_along
from grpo.tracking.mlflow_uri import describe, local_database, without_password

DATABASE = "sqlite:///mlflow.db"
PORTS = range(5000, 5100)
# Sorted by name, each run has its own row; sorted by time, MLflow folds them under the run of their study's state.
TRAINING = urlencode({"workflowType": "machine_learning", "orderByKey": "tags.`mlflow.runName`", "orderByAsc": "true"})


def main() -> None:
    """Print links to the runs, and start MLflow's UI in place of this process unless a server shows them."""
    from mlflow.exceptions import MlflowException

    uri = os.environ.get("MLFLOW_TRACKING_URI") or DATABASE
    on_server, port = uri.startswith("http"), 0
    try:
        port = 0 if on_server else free_port(os.environ.get("MLFLOW_PORT"))
        lines = links(uri, uri if on_server else f"http://127.0.0.1:{port}")
        database = local_database(uri)
        if database:
            bring_artifacts_along(database)
    except (OSError, MlflowException) as error:
        stop(
            f"MLflow at {without_password(uri)} cannot be read: {describe(error)}\nCheck the server and MLFLOW_TRACKING_URI, or"
            " unset it to see the runs of mlflow.db in this folder."
        )
    for line in lines:
        print(line, flush=True)
    if not on_server:
        os.execvp("mlflow", ["mlflow", "ui", "--backend-store-uri", uri, "--port", str(port)])


def free_port(wanted: str | None) -> int:
    """The wanted port, or else the first free one; exit if another program uses it."""
    if wanted and not (wanted.isdecimal() and 0 < int(wanted) < 2**16):
        stop(f"MLFLOW_PORT: {wanted} is not a number from 1 to 65535. Correct it.")
    for port in [int(wanted)] if wanted else PORTS:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)):
                return port
    stop(f"MLFLOW_PORT: another program uses port {wanted or PORTS[0]}. Choose another: MLFLOW_PORT=5001 make ui")


def stop(message: str) -> NoReturn:
    """Print one message and exit with code 2."""
    print(f"error: {message}", file=sys.stderr)
    sys.exit(2)


def links(uri: str, base: str) -> list[str]:
    """Lines with links to the runs and the curves of each study."""
    from mlflow.tracking import MlflowClient

    lines = []
    for experiment in MlflowClient(uri).search_experiments():
        if experiment.name != "Default":
            page = f"{base.rstrip('/')}/#/experiments/{experiment.experiment_id}/runs?{TRAINING}"
            lines += [f"{experiment.name}: {page}", f"{experiment.name}, curves: {page}&compareRunsMode=CHART"]
    return lines


if __name__ == "__main__":
    main()

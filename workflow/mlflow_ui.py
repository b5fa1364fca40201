"""`make ui`: start MLflow's UI for the runs at MLFLOW_TRACKING_URI (sqlite:///mlflow.db), and print links to them.

It serves this machine only, whatever MLFLOW_HOST says, which is for a server. The links open MLflow's view for
training; its start page is for applications of language models. The port is MLFLOW_PORT, or the first free one from 5000 on.
"""

from __future__ import annotations

import os
import socket
import sys
from typing import NoReturn
from urllib.parse import urlencode

from grpo.common.errors import UserError
from grpo.common.safe_text import on_terminal, without_password
from grpo.tracking.mlflow_uri import NOWHERE, client_of, failure, tracking_uri

HOST = "127.0.0.1"
PORTS = range(5000, 5100)
# Sorted by name, each run has its own row; sorted by time, MLflow folds them under the run of their study's state.
TRAINING = urlencode({"workflowType": "machine_learning", "orderByKey": "tags.`mlflow.runName`", "orderByAsc": "true"})


def main() -> None:
    """Print links to the runs, and start MLflow's UI in place of this process unless a server shows them."""
    try:
        uri = tracking_uri()
    except UserError as error:
        stop(str(error))
    if uri == NOWHERE:
        stop(f"MLFLOW_TRACKING_URI is {NOWHERE}: runs are not tracked. Unset it to see the runs of mlflow.db in this folder.")
    on_server = uri.startswith("http")
    port = 0 if on_server else free_port(os.environ.get("MLFLOW_PORT"))
    try:
        lines = links(uri, uri if on_server else f"http://{HOST}:{port}")
    except Exception as error:  # of a server, a database or a disk: MLflow has many kinds
        stop(
            f"{failure(uri, error)}\nCheck the server and MLFLOW_TRACKING_URI, or unset it to see the runs of mlflow.db in this"
            " folder. A damaged one may be moved away: data/ has all results."
        )
    for line in lines:
        print(on_terminal(line), flush=True)
    if not on_server:
        # A password in the address must not be among the arguments, which all users of the machine see.
        for name in [name for name in os.environ if name.startswith("MLFLOW_")]:
            del os.environ[name]  # for a server: one opens it to the network, another turns its protection off
        os.environ |= {"MLFLOW_BACKEND_STORE_URI": uri, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
        os.execvp("mlflow", ["mlflow", "ui", "--host", HOST, "--port", str(port)])


def free_port(wanted: str | None) -> int:
    """The wanted port, or else the first free one; exit if another program uses it."""
    if wanted and not (wanted.isdecimal() and 0 < int(wanted) < 2**16):
        stop(f"MLFLOW_PORT: {wanted} is not a number from 1 to 65535. Correct it.")
    for port in [int(wanted)] if wanted else PORTS:
        with socket.socket() as probe:
            if probe.connect_ex((HOST, port)):
                return port
    stop(f"MLFLOW_PORT: another program uses port {wanted or PORTS[0]}. Choose another: MLFLOW_PORT=5001 make ui")


def stop(message: str) -> NoReturn:
    """Print one message and exit with code 2."""
    print(on_terminal(f"error: {message}"), file=sys.stderr)
    sys.exit(2)


def links(uri: str, base: str) -> list[str]:
    """Lines with links to the runs and the curves of each study."""
    lines = []
    for experiment in client_of(uri).search_experiments():
        if experiment.name != "Default":
            page = f"{without_password(base).rstrip('/')}/#/experiments/{experiment.experiment_id}/runs?{TRAINING}"
            lines += [f"{experiment.name}: {page}", f"{experiment.name}, curves: {page}&compareRunsMode=CHART"]
    return lines


if __name__ == "__main__":
    main()

"""`make ui`: MLflow's UI of the runs at MLFLOW_TRACKING_URI (sqlite:///mlflow.db), and where in it they are.

MLflow's own start page is for applications of language models; a link says that it is training that is looked at.
"""

from __future__ import annotations

import os
from urllib.parse import urlencode

DATABASE = "sqlite:///mlflow.db"
# By name, each run has a row of its own; by time, MLflow folds them under the run of their study's state.
TRAINING = urlencode({"workflowType": "machine_learning", "orderByKey": "tags.`mlflow.runName`", "orderByAsc": "true"})


def main() -> None:
    """Say where the runs are, and become MLflow's UI, unless a server shows them already."""
    uri = os.environ.get("MLFLOW_TRACKING_URI") or DATABASE
    on_server = uri.startswith("http")
    for line in links(uri, uri if on_server else "http://127.0.0.1:5000"):
        print(line, flush=True)
    if not on_server:
        os.execvp("mlflow", ["mlflow", "ui", "--backend-store-uri", uri])


def links(uri: str, base: str) -> list[str]:
    """For each study that has runs, where its runs and its curves are."""
    from mlflow.tracking import MlflowClient

    lines = []
    for experiment in MlflowClient(uri).search_experiments():
        if experiment.name != "Default":
            page = f"{base.rstrip('/')}/#/experiments/{experiment.experiment_id}/runs?{TRAINING}"
            lines += [f"{experiment.name}: {page}", f"{experiment.name}, curves: {page}&compareRunsMode=CHART"]
    return lines


if __name__ == "__main__":
    main()

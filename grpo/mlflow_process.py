"""The process that writes to MLflow, so that neither MLflow's import nor its database takes time from training.

It reads one JSON message a line from its standard input, and answers ``finish`` with one line. When the input ends, because
the process that trains has ended or was killed, it marks what is unfinished as KILLED and ends too.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import nullcontext
from typing import Any


class Recorder:
    """One MLflow run. The first error ends it; what comes after is dropped."""

    def __init__(self) -> None:
        self.client: Any = None
        self.run_id: str | None = None
        self.error: str | None = None

    def obey(self, message: dict[str, Any]) -> None:
        """Do what a message asks for: ``do`` names a method, the rest are its arguments."""
        arguments = {key: value for key, value in message.items() if key not in {"run", "do"}}
        if self.error is None:
            try:
                getattr(self, message["do"])(**arguments)
            except Exception as error:  # whatever the network, the server or the database raises
                self.error = repr(error)

    def start(self, uri: str, artifacts: str, experiment: str, name: str, params: dict[str, str], tags: dict[str, str]) -> None:
        """Make the run, and its experiment where it is new.

        Args:
            artifacts: URI of the folder for the artifacts of a new experiment in a local database.
        """
        from filelock import FileLock
        from mlflow.entities import Param
        from mlflow.tracking import MlflowClient

        local = uri.startswith("sqlite:///")
        # Processes that meet a new database at once race to make its tables; the first one does it alone.
        with FileLock(f"{uri.removeprefix('sqlite:///')}.lock") if local else nullcontext():
            self.client = MlflowClient(tracking_uri=uri)
            found = self.client.get_experiment_by_name(experiment)
            if found is None:
                experiment_id = self.client.create_experiment(experiment, artifact_location=artifacts if local else None)
            else:
                experiment_id = found.experiment_id
        self.run_id = self.client.create_run(experiment_id, run_name=name, tags=tags).info.run_id
        # One transaction for all: each costs the database a write to disk.
        self.client.log_batch(self.run_id, params=[Param(*param) for param in params.items()])

    def log(self, metrics: list[tuple[str, float, int, int]]) -> None:
        """Record (key, value, time in ms, step)."""
        from mlflow.entities import Metric

        for start in range(0, len(metrics), 1000):  # MLflow takes at most 1,000 metrics a call
            self.client.log_batch(self.run_id, metrics=[Metric(*metric) for metric in metrics[start : start + 1000]])

    def tag(self, tags: dict[str, str]) -> None:
        """Set tags."""
        from mlflow.entities import RunTag

        self.client.log_batch(self.run_id, tags=[RunTag(*tag) for tag in tags.items()])

    def artifact(self, path: str) -> None:
        """Keep a copy of a file with the run."""
        self.client.log_artifact(self.run_id, path)

    def finish(self, status: str) -> None:
        """Close the run."""
        self.client.set_terminated(self.run_id, status)


def main() -> None:
    """Obey messages until there are no more."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what MLflow prints is no answer
    import mlflow.tracking  # noqa: F401 - now, while the other process has its own imports to do

    runs: dict[int, Recorder] = {}
    for line in sys.stdin:
        message = json.loads(line)
        recorder = runs.setdefault(message["run"], Recorder())
        recorder.obey(message)
        if message["do"] == "finish":
            answers.write(json.dumps({"run_id": recorder.run_id, "error": recorder.error}) + "\n")
            answers.flush()
            del runs[message["run"]]
    for recorder in runs.values():
        recorder.obey({"do": "finish", "status": "KILLED"})


if __name__ == "__main__":
    main()

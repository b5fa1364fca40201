"""What tests ask MLflow, and a tracking server that can be killed and started again."""

import os
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

from mlflow.tracking import MlflowClient
from waiting import wait_for


def uri_of(folder: Path) -> str:
    return f"sqlite:///{folder}/mlflow.db"


def runs_at(uri: str) -> tuple[MlflowClient, list[Any]]:
    """A client, and the runs of the experiment `toy`."""
    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name("toy")
    return client, list(client.search_runs([experiment.experiment_id])) if experiment else []


def history(client: MlflowClient, run: Any, key: str) -> list[tuple[int, float]]:
    """(step, value), in their order."""
    return sorted((metric.step, metric.value) for metric in client.get_metric_history(run.info.run_id, key))


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


class Server:
    """A tracking server on a port of its own."""

    def __init__(self, folder: Path):
        self.port, self._folder, self.log = free_port(), folder, folder / "server.log"
        self.uri = f"http://127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, and wait until it answers."""
        store = ["--backend-store-uri", "sqlite:///server.db", "--artifacts-destination", "artifacts"]
        command = [Path(sys.executable).with_name("mlflow"), "server", "--port", str(self.port), *store]
        # Each of its workers, four where nothing else is said, imports MLflow for itself.
        fewer = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_WORKERS": "1"}
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                command, cwd=self._folder, env=fewer | os.environ, stdout=log, stderr=log, start_new_session=True
            )
        wait_for(self._answers)

    def _answers(self) -> bool:
        assert self._process is not None and self._process.poll() is None, self.log.read_text()
        try:
            with urllib.request.urlopen(f"{self.uri}/health", timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def kill(self) -> None:
        """End it with all its processes, at once."""
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

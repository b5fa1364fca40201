"""A Ray cluster on this machine for all asynchronous runs of a study, each of which would start five processes of Ray's own.

The fork server starts it where such a run is still to come, and names it to the processes that it forks. It ends with the fork
server. A run that comes before it is ready, or after it has died, starts a cluster for itself, as under ``dvc repro``.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from plan import PLAN

PARAMS = Path("params.yaml")
END = signal.SIGUSR1  # tells the cluster that the fork server has ended


def ask_for_token() -> None:
    """Ray's clusters ask for the token in the user's home; what connects to them has to be told so before Ray is imported."""
    if "RAY_ADDRESS" not in os.environ or (Path.home() / ".ray" / "auth_token").exists():
        os.environ.setdefault("RAY_AUTH_MODE", "token")


def is_wanted() -> bool:
    """Whether an asynchronous run is among the stages that are still to run, and nobody has named another cluster."""
    if "RAY_ADDRESS" in os.environ or not PLAN.exists():
        return False
    params = read_params()
    everywhere = bool((params.get("grpo") or {}).get("asynchronous"))
    experiments = params.get("experiments", {})
    asynchronous = {name for name, experiment in experiments.items() if everywhere or "'asynchronous': {" in str(experiment)}
    stages = [stage for stage in json.loads(PLAN.read_text()) if stage["stage"].split("@")[0] in asynchronous]
    return not all(Path(stage["stamp"]).exists() for stage in stages)


def read_params() -> dict[str, Any]:
    """The study."""
    from ruamel.yaml import YAML

    params: dict[str, Any] = YAML(typ="safe").load(PARAMS)
    return params


class Cluster:
    """A cluster that is starting, running or dead."""

    def __init__(self) -> None:
        from with_gpus import when_parent_dies

        silent = subprocess.DEVNULL
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=silent, stdout=subprocess.PIPE, stderr=silent,
            start_new_session=True, preexec_fn=lambda: when_parent_dies(END),
        )  # fmt: skip
        self._address = ""

    def environment(self) -> dict[str, str]:
        """What tells a run of it: nothing while it is not ready, nor when it has died."""
        output = self._process.stdout
        assert output is not None
        if not self._address and select.select([output], [], [], 0)[0]:
            self._address = output.readline().decode().strip()
        return {"RAY_ADDRESS": self._address} if self._address and self._process.poll() is None else {}


def main() -> None:
    """Start Ray, say where it is, and wait for the end."""
    # All of Ray but its workers is in this group, and they end with it. Ray's agents, left alone, would last for a minute more.
    signal.signal(END, lambda *_: os.killpg(0, signal.SIGKILL))
    ask_for_token()
    import ray

    import grpo.training.asynchronous  # noqa: F401 - says where Ray's sockets lie

    # Ray's own counts, of cores that Snakemake hands out: with a core for the scorer, which needs next to none, a run asks for
    # up to half as many again. Ray starts a process for each, so no more of them than may be needed.
    cores = max(2 * (os.cpu_count() or 1), 2 * read_params()["threads"] + 1)
    started = ray.init(address="local", num_cpus=cores, include_dashboard=False, log_to_driver=False)
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # they are for the runs, which may need Ray to end well
        signal.signal(signum, signal.SIG_IGN)
    print(started.address_info["gcs_address"], flush=True)
    while True:
        signal.pause()


if __name__ == "__main__":
    main()

"""MLflow as a run sees it: a folder to which it writes, and a process of its own that brings the folder to MLflow.

The folder is in ``data/state/mlflow`` until MLflow has all of it, and is the truth until then: ``run.json`` says what run it
is, ``metrics.jsonl`` has a line for each call of :meth:`MlflowRun.log`. :mod:`grpo.tracking.mlflow_sync` reads it; nothing is
sent from here. So neither MLflow's import, which takes longer than a small run does, nor its database slows training down, and
a server that fails does not fail the run.
"""

from __future__ import annotations

import fcntl
import getpass
import hashlib
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO

from grpo.common.errors import UserError
from grpo.common.files import dvc_hashes, write_json
from grpo.study import paths
from grpo.study.environment import environment_tags

DATABASE = "mlflow.db"
# What a run's folder holds: what the run writes, then what the other side does.
RUN, METRICS, STATE = "run.json", "metrics.jsonl", "study.json"
ANSWER, SYSTEM = "mlflow.json", "system.jsonl"
CHECK_SECONDS = 30.0  # how often a run sees to it that somebody brings its folder to MLflow
_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)  # the first one counts a laptop's sleep too
_BEGAN = time.time() - time.clock_gettime(_CLOCK)
ANSWER_SECONDS = 120.0  # how long its end waits for that


def tracking_uri() -> str:
    """``MLFLOW_TRACKING_URI``, or a SQLite file in the project's folder."""
    return os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{paths.workspace() / DATABASE}"


def local_database(uri: str) -> Path | None:
    """The file of a SQLite database; None where the place is another one."""
    return Path(uri.removeprefix("sqlite:///").partition("?")[0]).absolute() if uri.startswith("sqlite:///") else None


class MlflowRun:
    """One MLflow run, as a folder that :mod:`grpo.tracking.mlflow_sync` brings there.

    It carries the tag ``run_key``, by which it is known again wherever the folder is sent twice. Its file of metrics is locked
    (flock) as long as this process lives, however that ends.

    Args:
        experiment: the MLflow experiment's name; made if it does not exist.
        name: the run's name.
        params, tags: values are turned into text.
        state: of the study, as :func:`grpo.tracking.mlflow_study.study_state` gives it: it has a run of its own, of which this
            one is a child.
    """

    def __init__(
        self,
        experiment: str,
        name: str,
        params: Mapping[str, Any],
        tags: Mapping[str, Any],
        state: Mapping[str, Any] | None = None,
    ):
        self._uri, self._sender = tracking_uri(), sender()
        key = uuid.uuid4().hex
        own_tags = {**environment_tags(), **mlflow_source_tags(), **source_tags(), **tags, "run_key": key}
        self._about: dict[str, Any] = {
            "uri": without_password(self._uri),
            "experiment": experiment,
            "name": name,
            "params": _as_text(params),
            "tags": _as_text(own_tags),
            "datasets": [],
            "artifacts": [],
            "tables": [],
            "checkpoints": [],
            "gpus": os.environ.get("CUDA_VISIBLE_DEVICES"),
            "started": milliseconds(),
            "status": None,
            "ended": None,
        }
        here = f"{_file_name(experiment)}-{_file_name(name)}-{key[:12]}.{self._sender}"
        self.folder = paths.workspace() / paths.UNSENT_METRICS / here
        self._metrics: BinaryIO | None = None
        self._lost = 0
        self._trouble: OSError | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._checked = time.monotonic()
        with self._noting_trouble():
            self.folder.mkdir(parents=True)
            self._metrics = (self.folder / METRICS).open("ab", buffering=0)
            fcntl.flock(self._metrics, fcntl.LOCK_EX)
            if state is not None:
                write_json(self.folder / STATE, state)
            write_json(self.folder / RUN, self._about)  # last, as it makes the folder a run's
        if self._metrics is not None:
            self._start_sender()

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Record metrics of one step."""
        row = {"time": milliseconds(), "step": step, "metrics": {key: float(value) for key, value in metrics.items()}}
        with self._noting_trouble():
            if self._metrics is None:
                raise FileNotFoundError("there is no file to write to")
            # The first line break ends what a full disk may have left of the line before.
            line = b"\n" + json.dumps(row).encode() + b"\n"
            if self._metrics.write(line) < len(line):
                raise OSError("the disk took half a line")
            if time.monotonic() - self._checked > CHECK_SECONDS:
                self._start_sender()

    def tag(self, **tags: Any) -> None:
        """Set tags."""
        self._describe(tags=self._about["tags"] | _as_text(tags))

    def artifact(self, path: Path) -> None:
        """Have a copy of a file kept with the run, which is made when the run ends."""
        self._describe(artifacts=[*self._about["artifacts"], str(path.absolute())])

    def table(self, path: Path) -> None:
        """Have a file of JSON lines kept with the run as a table ``STEM.json``, which MLflow's UI shows, when the run ends."""
        tables = [*self._about["tables"], str(path.absolute())]
        shown = json.dumps([{"path": f"{Path(table).stem}.json", "type": "table"} for table in tables])
        self._describe(tables=tables, tags=self._about["tags"] | {"mlflow.loggedArtifacts": shown})

    def dataset(self, path: Path, digest: str, context: str) -> None:
        """Record what the run works with: the file, its rows and columns, and its digest; not its content.

        Args:
            path: JSON lines, relative to the project's folder.
            digest: at most 36 characters.
            context: ``training`` or ``validation``.
        """
        with path.open("rb") as file:
            first = file.readline()
            rows = bool(first) + sum(1 for _ in file)
        name = "/".join(path.with_suffix("").parts[1:])  # without data/: dataset/main/train
        about = {"name": name, "digest": digest, "uri": path.as_posix(), "context": context}
        self._describe(datasets=[*self._about["datasets"], about | {"rows": rows, "columns": [*json.loads(first or "{}")]}])

    def checkpoints(self, folder: Path) -> None:
        """Record the checkpoints in a folder that DVC keeps, each with the hashes by which DVC finds it; no weights."""
        kept = sorted(folder.glob("*/metadata.json"))
        whole, hashes = dvc_hashes(folder)
        models = []
        for metadata in kept:
            weights = [name for name in hashes if name.startswith(f"{metadata.parent.name}/") and name.endswith(".safetensors")]
            tags = {"dvc.path": metadata.parent.as_posix(), "dvc.folder": folder.as_posix(), "dvc.md5": whole}
            tags |= {f"dvc.md5.{Path(name).name}": hashes[name] for name in weights}
            about = json.loads(metadata.read_bytes())
            name = re.sub(r"[^\w-]+", "-", f"{self._about['name']}-{metadata.parent.name}")
            models.append({"name": name, "step": int(about["update"]), "params": _as_text(about), "tags": tags})
        self._describe(checkpoints=models)

    def finish(self, status: str = "FINISHED") -> str | None:
        """Close the run, and wait until MLflow has it.

        Returns:
            the run's id, or None where it could not be made. Where something could not be written, a warning says what and
            how to deliver it later; the run's files are whole.
        """
        told = self._describe(status=status, ended=milliseconds())
        run_id, errors = self._answer() if told else (None, [])
        if self._trouble is not None:
            lost = f"{self._lost} messages could not be kept on disk: " if self._lost else ""
            errors.append(lost + describe(self._trouble))
        if errors:
            print(_warning("; ".join(errors), self._about["uri"], self.folder), file=sys.stderr)
        else:
            shutil.rmtree(self.folder, ignore_errors=True)
        if self._metrics is not None:
            self._metrics.close()  # which lets go of its lock
        return run_id

    def _answer(self) -> tuple[str | None, list[str]]:
        """Wait for what becomes of the folder: the run's id, and what is wrong, if anything."""
        deadline = time.monotonic() + ANSWER_SECONDS
        starts = 0
        while not (answer := read_answer(self.folder))["over"]:
            if time.monotonic() > deadline or starts > 2:
                how = "ends at once" if starts > 2 else f"took longer than {ANSWER_SECONDS:.0f} s"
                return answer["run_id"], [f"the process that writes to it {how}"]
            starts += self._start_sender()
            time.sleep(0.03)
        return answer["run_id"], answer["errors"]

    def _start_sender(self) -> bool:
        """Start the process that brings folders to MLflow, unless there is one; whether it was started."""
        self._checked = time.monotonic()
        try:
            lock = lock_of_sender(self._sender)
            if is_locked(lock) or (self._process is not None and self._process.poll() is None):
                return False
            with lock.with_suffix(".log").open("a") as log:  # not this run's stderr, which may be closed earlier
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "grpo.tracking.mlflow_sync", self._sender],
                    cwd=paths.workspace(),  # an experiment of DVC may work in a folder that is removed earlier
                    env={**os.environ, "MLFLOW_TRACKING_URI": self._uri},
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=log,
                    start_new_session=True,  # Ctrl-C is for the process that trains, which then says how the run ended
                )
        except OSError as error:
            self._trouble = error
        return True

    def _describe(self, **changed: Any) -> bool:
        """Change what the folder says of the run; whether it says so now."""
        self._about |= changed
        with self._noting_trouble():
            if self._metrics is not None:
                write_json(self.folder / RUN, self._about)
                return True
        return False

    @contextmanager
    def _noting_trouble(self) -> Iterator[None]:
        """A disk that is full or read-only costs the record in MLflow, no more."""
        try:
            yield
        except OSError as error:
            self._lost += 1
            self._trouble = error


def read_answer(folder: Path) -> dict[str, Any]:
    """What the other side says of a run's folder: ``run_id``, whether it is ``over`` with it, and its ``errors``."""
    try:
        answer: dict[str, Any] = json.loads((folder / ANSWER).read_bytes())
    except (OSError, ValueError):
        return {"run_id": None, "over": False, "errors": []}
    return answer


def is_locked(path: Path) -> bool:
    """Whether a process holds the lock (flock) of a file."""
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared: those who ask at the same moment do not see each other
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def sender() -> str:
    """Which process brings the folders of this machine's runs (in Slurm: this job's) to MLflow: one for each setting of it."""
    deciding = ("MLFLOW_", "AWS_", "AZURE_", "GOOGLE_", "PG", "SLURM_JOB_ID", "HTTP", "NO_PROXY", "REQUESTS_")
    settings = sorted((key, value) for key, value in os.environ.items() if key.upper().startswith(deciding))
    about = [socket.gethostname(), sys.executable, __file__, tracking_uri(), settings]
    return hashlib.sha256(json.dumps(about).encode()).hexdigest()[:16]


def lock_of_sender(name: str) -> Path:
    """The file that this process keeps locked; its log lies beside it."""
    lock = paths.workspace() / paths.RUN_LOCKS / f"mlflow-{name}.lock"
    lock.parent.mkdir(parents=True, exist_ok=True)
    return lock


def describe(error: BaseException) -> str:
    """An error in one line."""
    return without_password(str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}")


def _warning(error: str, uri: str, folder: Path) -> str:
    """What a user has to know when MLflow could not be written."""
    lines = [f"warning: MLflow at {uri} could not be written: {error}", "  The run's own files are complete."]
    if (folder / RUN).exists():
        lines += [
            f"  What MLflow lacks is kept in {folder}",
            "  Check MLFLOW_TRACKING_URI (without it, runs go to mlflow.db here) and the server; then this delivers it:",
            f"    grpo mlflow_import {shlex.quote(str(folder))}",
        ]
    else:
        lines += ["  Check MLFLOW_TRACKING_URI, or unset it to use a local file."]
    return "\n".join(lines)


def without_password(text: str) -> str:
    """A URI, or a text with URIs in it, as others may read it."""
    return re.sub(r"(://[^:/@\s]*):[^@/\s]*@", r"\1:***@", text)


def _file_name(text: str) -> str:
    return re.sub(r"[^\w.=@-]+", "_", text)[:80]


def milliseconds() -> int:
    """Milliseconds since 1970, which never go back while this process lives, whatever becomes of the machine's clock."""
    return int(1000 * (_BEGAN + time.clock_gettime(_CLOCK)))


def _as_text(values: Mapping[str, Any]) -> dict[str, str]:
    return {key: str(value) for key, value in values.items()}


def source_tags() -> dict[str, str]:
    """The git commit the code stands at ("none": not known), and whether it was changed since ("unknown": git does not say)."""
    return _source_tags(Path.cwd())


@lru_cache
def _source_tags(folder: Path) -> dict[str, str]:
    """:func:`source_tags` of a folder, asked once."""

    def git(*args: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["git", *args], cwd=folder, capture_output=True, text=True, check=False)

    deciding = ("grpo", "params.yaml", "dvc.yaml", "constraints.txt")
    from_the_top = (f":(top){name}" for name in deciding)  # `grpo quickstart` works in a folder below
    try:
        status = git("status", "--porcelain", "--untracked-files=no", "--", *deciding, *from_the_top)
        commit = git("rev-parse", "--verify", "--quiet", "HEAD").stdout.strip()
    except FileNotFoundError:
        return {"git_commit": "none", "git_changed": "unknown"}
    if "safe.directory" in status.stderr:
        print(
            f"warning: {folder} belongs to another user, so git does not say at which commit the code stands: runs are recorded"
            f" with git_commit none. `git config --global --add safe.directory {shlex.quote(str(folder))}` lets it.",
            file=sys.stderr,
        )
    changed = "unknown" if status.returncode else str(bool(status.stdout)).lower()
    return {"git_commit": commit or "none", "git_changed": changed}


def mlflow_source_tags() -> dict[str, str]:
    """What MLflow's own columns show (commit, source, user), and the name of the DVC experiment that a run is part of."""
    commit, experiment = source_tags()["git_commit"], os.environ.get("DVC_EXP_NAME")
    program = Path(sys.argv[0])
    user = {}
    if not tracking_uri().startswith("sqlite:///"):  # a local file has one user, and may be handed on
        with suppress(OSError, KeyError):  # a container may run as a user without a name
            user = {"mlflow.user": getpass.getuser()}
    return {
        "mlflow.source.type": "LOCAL",
        "mlflow.source.name": shlex.join(["grpo" if program.name == "__main__.py" else program.name, *sys.argv[1:]]),
        **({"mlflow.source.git.commit": commit} if commit != "none" else {}),
        **user,
        **({"dvc_experiment": experiment} if experiment else {}),
    }

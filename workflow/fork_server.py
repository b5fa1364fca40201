"""A process that has imported the libraries and forks one for each stage, which then starts at once. Linux only.

A stage is two Python processes: DVC, and the command that it runs. Much of a short stage would be their imports, of torch above
all. The server holds libraries only, none of the project's own code, which each process reads as it lies on the disk. Last it
starts a Ray cluster for the study's asynchronous runs (:mod:`ray_cluster`).

Snakemake starts the server on its own machine (``onstart`` in the Snakefile). It ends with Snakemake, but not before the stages
that still run. Where it does not answer, as under ``dvc repro``, in jobs of a cluster and on other systems, a stage's processes
are started as usual; so are those of stages that want a GPU.

A request is a byte with the file for the process's output, and a line of JSON. Back come two lines: the number of the process,
and in the end its exit code, as :class:`subprocess.Popen` has it. When a client is gone, its process is killed.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import selectors
import signal
import socket
import subprocess
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NoReturn

import ray_cluster

SOCKET = Path(".stamps/fork_server")
LIBRARIES = """
    dvc.cli.parser dvc.commands.repro dvc.repo.reproduce dvc.stage.cache dvc.ignore dvc.output dvc._debug
    dvc.repo.artifacts dvc.repo.datasets dvc.repo.metrics dvc.repo.open_repo dvc.repo.params dvc.repo.plots dvc.repo.stage
    dvc.cachemgr dvc.data_cloud dvc.lock dvc.rwlock dvc.scm dvc.utils.strictyaml dvc_data.hashfile.db.local
    scmrepo.git dulwich.ignore platformdirs configobj pyparsing fsspec.implementations.memory
    numpy pydantic.main pydantic.json_schema pydantic.type_adapter pydantic.functional_serializers ruamel.yaml
    torch torch.utils.serialization tqdm typer.main safetensors.torch tokenizers tomllib packaging.specifiers
    ray ray.dag pandas tabulate jinja2 vl_convert markdown_it
"""
FOR_LORA = "peft"  # takes seconds
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def start() -> subprocess.Popen[bytes]:
    """Start the server, which ends with this process: at its end by :func:`stop`, or else as its standard input is closed."""
    from grpo.common.cpu import share_cpu_fairly

    SOCKET.parent.mkdir(exist_ok=True)
    share_cpu_fairly()  # as each `grpo` would, but OpenMP asks when torch is imported
    silent = subprocess.DEVNULL
    server = subprocess.Popen([sys.executable, __file__], stdin=subprocess.PIPE, stdout=silent, stderr=silent)
    atexit.register(stop, server)
    return server


def stop(server: subprocess.Popen[bytes]) -> None:
    """End it at once, whatever it is importing. No stage runs any more, or none is wanted to."""
    server.kill()
    server.wait()
    SOCKET.unlink(missing_ok=True)


class Forked:
    """A process that the server has forked, as its client sees it.

    Args:
        run: what Python is to run: a module's name, or the path of a script.
        arguments: of the command.
        env: its environment.
        cwd: its working folder.
        output: for what it prints.
        group: the process group that it joins, of the caller's session; 0 gives it one of its own.

    Raises:
        OSError: no server answers.
    """

    def __init__(self, run: str, arguments: list[str], env: dict[str, str], cwd: str, output: IO[Any], group: int = 0):
        request = {"run": run, "arguments": arguments, "env": env, "cwd": cwd, "group": group}
        self._server = socket.socket(socket.AF_UNIX)
        self._server.connect(str(SOCKET))
        socket.send_fds(self._server, [b"\0"], [output.fileno()])
        self._server.sendall(json.dumps(request).encode() + b"\n")
        self._lines = self._server.makefile("rb")
        self.pid = self._number()

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code, or -N where signal N has ended it.

        Raises:
            subprocess.TimeoutExpired: it goes on.
        """
        if timeout is not None and not select.select([self._server], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired("stage", timeout)
        try:
            return self._number()
        except ConnectionError:
            return -signal.SIGKILL  # it does not outlive the server

    def _number(self) -> int:
        line = self._lines.readline()
        if not line:
            raise ConnectionError("the fork server has ended")
        return int(line)


@dataclass
class Child:
    """A forked process, as the server sees it."""

    pid: int
    pidfd: int  # can be read when it has ended
    client: socket.socket  # can be read when the client is gone


def main() -> None:
    """Serve; and in each process that is forked meanwhile, run what was asked for."""
    os.close(os.pidfd_open(os.getpid()))  # a system that has no such thing shall have no server
    ray_cluster.ask_for_token()  # before Ray is imported
    for signum in SIGNALS:  # they come to all of a terminal's or job's processes, and stages shall have time for them
        signal.signal(signum, signal.SIG_IGN)
    SOCKET.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX) as listener:
        umask = os.umask(0o077)  # who may connect may run anything in this user's name
        listener.bind(str(SOCKET))
        os.umask(umask)
        listener.listen()
        request = serve(listener)
    if request is not None:
        run(request)
    SOCKET.unlink(missing_ok=True)


def serve(listener: socket.socket) -> dict[str, Any] | None:
    """Fork a process for each request, and import one library after another while there is none.

    Returns:
        the request in the process that is forked for it, and None at the server's end.
    """
    libraries, cluster = libraries_of_study(), None
    ready = selectors.DefaultSelector()
    ready.register(listener, selectors.EVENT_READ)
    ready.register(sys.stdin, selectors.EVENT_READ)
    while ready.get_map():
        events = ready.select(0 if libraries else None)
        if not events:
            with contextlib.suppress(ImportError):  # the stage that needs it will say so
                importlib.import_module(libraries.pop(0))
            if not libraries and ray_cluster.is_wanted():
                cluster = ray_cluster.Cluster()
            continue
        key = events[0][0]
        child: Child = key.data
        if key.fileobj is sys.stdin:
            ready.unregister(sys.stdin)
            ready.unregister(listener)
        elif key.fileobj is listener:
            client, _ = listener.accept()
            request = read_request(client) | {"server": os.getpid()}
            request["env"] |= cluster.environment() if cluster else {}
            gc.freeze()  # or each process would copy all of it when it looks for garbage
            pid = os.fork()
            if pid == 0:
                for held in [client, *(other.fileobj for other in ready.get_map().values() if other.data)]:
                    os.close(held) if isinstance(held, int) else held.close()
                ready.close()
                return request
            join_group(pid, request["group"])
            os.close(request["output"])
            child = Child(pid, os.pidfd_open(pid), client)
            ready.register(child.pidfd, selectors.EVENT_READ, child)
            ready.register(client, selectors.EVENT_READ, child)
            tell(client, pid)
        elif key.fileobj is child.client:
            ready.unregister(child.client)
            os.kill(child.pid, signal.SIGKILL)
        else:
            ready.unregister(child.pidfd)
            os.close(child.pidfd)
            if child.client in ready.get_map():
                ready.unregister(child.client)
            tell(child.client, os.waitstatus_to_exitcode(os.waitpid(child.pid, 0)[1]))
            child.client.close()
    return None


def libraries_of_study() -> list[str]:
    """What its stages import, the most common first."""
    return LIBRARIES.split() + [FOR_LORA] * ("lora:" in ray_cluster.PARAMS.read_text())


def read_request(client: socket.socket) -> dict[str, Any]:
    """What a client asks for, with the number of the file for the output."""
    _, fds, _, _ = socket.recv_fds(client, 1, 1)
    with client.makefile("rb") as lines:
        return {**json.loads(lines.readline()), "output": fds[0]}


def join_group(pid: int, group: int) -> None:
    """Done on both sides, as neither knows which comes first."""
    with contextlib.suppress(OSError):
        os.setpgid(pid, group)


def tell(client: socket.socket, number: int) -> None:
    """Answer a line, if the client is still there."""
    with contextlib.suppress(OSError):
        client.sendall(b"%d\n" % number)


def run(request: dict[str, Any]) -> NoReturn:
    """In a forked process: become what was asked for, and end with it."""
    from with_gpus import before_exec

    join_group(os.getpid(), request["group"])
    before_exec()
    if os.getppid() != request["server"]:
        os._exit(1)  # it ended before it could have been noticed
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    for target, source in ((0, os.open(os.devnull, os.O_RDONLY)), (1, request["output"]), (2, request["output"])):
        os.dup2(source, target)
    Path("/proc/self/comm").write_text(Path(request["run"]).stem)  # what `top` shows
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    sys.argv = [request["run"], *request["arguments"]]
    code = 0
    try:
        if request["run"].endswith(".py"):
            runpy.run_path(request["run"], run_name="__main__")
        else:
            runpy.run_module(request["run"], run_name="__main__", alter_sys=True)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    # Not by way of Python's own end, which takes all the libraries apart.
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()

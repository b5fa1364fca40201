"""Run a command with N GPUs of its own and end all its processes afterwards: ``with_gpus.py N -- COMMAND...``

Snakemake's ``--resources gpu=4`` only counts GPUs and does not assign them. Here each device has a lock file in a folder that
all clones of a user on this machine share (``locks_folder``). The command gets N locked devices in CUDA_VISIBLE_DEVICES. The
operating system releases the locks when the process ends. In jobs that Snakemake submits to Slurm, Slurm assigns the devices,
and the Snakefile asks for none here. (With ``--profile local`` in an allocation of ``salloc``, devices are locked as usual.)

A killed ``dvc`` leaves its training running, and the next attempt would run beside it. So the command gets its own process
group, which is ended with the command, and also when Snakemake dies.

When this process is told to stop (SIGTERM from Slurm, Ctrl-C, a closed terminal), it tells the command, which has time to
finish its step and save its state. The exit code is then 75: run again to continue. A second Ctrl-C ends the command at once.

Slurm sends SIGTERM to every process of a job. DVC would die of it, so it is started with SIGTERM ignored. Snakemake waits for
its running jobs, after SIGTERM as after Ctrl-C, and starts no others.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import fcntl
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    import psutil

GRACE_SECONDS = 300  # to finish a step and save; Slurm's KillWait, preemption or time limit may be shorter
SAME_REQUEST_SECONDS = 1.0  # signals within this time are one request to stop
WAIT_SECONDS = 0.2  # between two attempts to get devices
RESUME_ME = 75  # EX_TEMPFAIL of sysexits.h, as in `grpo train`
LOG_LINES_SHOWN = 20
PR_SET_PDEATHSIG = 1


class GpuError(Exception):
    """The machine does not have the GPUs that were asked for."""


def present() -> dict[str, str]:
    """The UUIDs of the devices that nvidia-smi lists, by their names in CUDA_VISIBLE_DEVICES.

    The name of a GPU is its number. Each part of a partitioned GPU (MIG) is a device, named by its UUID.
    """
    if shutil.which("nvidia-smi") is None:
        return {}
    listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False).stdout
    found: dict[str, str] = {}
    for line in listing.splitlines():
        if whole := re.match(r"GPU (\d+):.*\(UUID: (GPU-[^)]+)\)", line):
            number, found[number] = whole[1], whole[2]
        elif part := re.match(r"\s+MIG .*\(UUID: (MIG-[^)]+)\)", line):
            found.pop(number, None)
            found[part[1]] = part[1]
    return found


def devices() -> dict[str, str]:
    """The usable devices (CUDA_VISIBLE_DEVICES, or else all) by their names there, each with a name valid for all processes.

    That name is the UUID if known, as a number may mean another GPU in another allocation on this machine.
    """
    known = present()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return known
    names = [name.strip() for name in visible.split(",") if name.strip()]
    names = names[: names.index("-1")] if "-1" in names else names  # as in CUDA, the first invalid number ends the list
    # CUDA accepts the beginning of a UUID.
    return {name: known.get(name) or next((u for u in known.values() if u.startswith(name)), name) for name in names}


def locks_folder() -> Path:
    """The folder with locks, one per user and machine."""
    return Path(tempfile.gettempdir()) / f"grpo-gpus-{os.getuid()}"


def try_lock(path: Path) -> IO[str] | None:
    """Lock a file; None if another process holds the lock."""
    file = path.open("a")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    return file


@contextmanager
def hold(count: int) -> Iterator[list[str]]:
    """Wait until ``count`` devices are free and hold them; yield their names for CUDA_VISIBLE_DEVICES.

    Raises:
        GpuError: the machine has fewer devices.
    """
    offered = devices()
    # CUDA shows a process at most one part of a partitioned GPU.
    usable = {name: uuid for name, uuid in offered.items() if count == 1 or not uuid.startswith("MIG-")}
    if count > len(usable):
        parts = "; a command can use only one part of a partitioned GPU (MIG)" if len(usable) < len(offered) else ""
        raise GpuError(
            f"{count} GPU(s) asked for, but this machine offers {len(usable)} ({', '.join(usable) or 'none'}){parts}. "
            "Lower `gpus` under `resources:` in params.yaml, check CUDA_VISIBLE_DEVICES and `nvidia-smi -L`, or use Slurm."
        )
    folder = locks_folder()
    folder.mkdir(mode=0o700, exist_ok=True)
    while True:
        with ExitStack() as attempt:
            # All or none, and one process at a time: two processes that each hold a part of what they need would wait for each
            # other, and a process that waited while it holds the queue would block devices that it does not need.
            with (folder / "queue.lock").open("a") as queue:
                fcntl.flock(queue, fcntl.LOCK_EX)
                taken: list[str] = []
                for name, uuid in usable.items():
                    if len(taken) < count and (file := try_lock(folder / f"{uuid}.lock")):
                        attempt.enter_context(file)
                        taken.append(name)
            if len(taken) == count:
                yield taken
                return
        time.sleep(WAIT_SECONDS)


def environment(count: int, held: ExitStack) -> dict[str, str]:
    """The command's environment; its devices stay locked until ``held`` is closed."""
    if count == 0:
        return dict(os.environ)
    taken = held.enter_context(hold(count))
    # nvidia-smi numbers devices by their place on the bus; CUDA's default is by speed.
    return {**os.environ, "CUDA_VISIBLE_DEVICES": ",".join(taken), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


def when_parent_dies(signum: int) -> None:
    """Let the kernel send this process a signal when its parent ends, even by SIGKILL (Linux only)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signum)


def before_exec() -> None:
    """Set up the child: it ends with its parent, accepts SIGINT even if the parent ignores it (``nohup ... &``), and ignores
    SIGTERM.

    Its children ignore SIGTERM too until they change that, as `grpo` does.
    """
    when_parent_dies(signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


class Stop:
    """Signal handler that exits through every ``finally``.

    Some signals repeat a request and are ignored: a closed terminal sends SIGHUP, then Snakemake's death SIGTERM; Slurm sends
    SIGTERM before the time limit and at the limit, or at the start and the end of a preemption, and finally SIGKILL.
    """

    def __init__(self) -> None:
        self.first: float | None = None

    def __call__(self, signum: int, _frame: object) -> None:
        """Exit, unless the signal repeats a request."""
        now = time.monotonic()
        if self.first is None:
            self.first = now
        elif now - self.first < SAME_REQUEST_SECONDS or (signum == signal.SIGTERM and "SLURM_JOB_ID" in os.environ):
            return
        sys.exit(128 + signum)


def of_group(group: int) -> set[psutil.Process]:
    """The processes of a group and their descendants."""
    import psutil

    members = set()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if os.getpgid(process.pid) == group:
                members |= {process, *process.children(recursive=True)}
    return members


def tell_to_stop(command: int, log: Path | None) -> None:
    """Interrupt all processes of the command, so that DVC releases its locks.

    Once DVC has started the stage's command, which it announces as ``> COMMAND``, DVC itself is not interrupted, as it may be
    storing results of hours.
    """
    import psutil

    with contextlib.suppress(ProcessLookupError, psutil.Error):
        if log is None or not re.search(r"^> ", log.read_text(errors="replace"), flags=re.MULTILINE):
            os.killpg(command, signal.SIGINT)
            return
        for process in of_group(command):
            if process.pid != command:
                with contextlib.suppress(psutil.Error):
                    process.send_signal(signal.SIGINT)


def run(command: list[str], env: dict[str, str], log: Path | None) -> int:
    """Run the command in its own process group, and end what is left of the group afterwards.

    Returns:
        its exit code, or ``RESUME_ME`` if it was told to stop and stopped before it was done.
    """
    with log.open("w") if log else contextlib.nullcontext() as output:
        process = subprocess.Popen(
            command, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT if output else None,
            process_group=0, preexec_fn=before_exec,
        )  # fmt: skip
    try:
        return process.wait()
    except SystemExit as told:
        tell_to_stop(process.pid, log)
        try:
            return RESUME_ME if process.wait(GRACE_SECONDS) else 0
        except subprocess.TimeoutExpired:
            raise told from None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def say(message: str, log: Path | None) -> None:
    """Write a message to the end of the command's log, or to stderr without a log."""
    with log.open("a") if log else contextlib.nullcontext(sys.stderr) as output:
        print(message, file=output)


def explain_failure(command: list[str], code: int, log: Path) -> None:
    """Print the end of the log and where it is."""
    lines = log.read_text(errors="replace").splitlines()[-LOG_LINES_SHOWN:]
    text = "\n".join(f"  | {line}" for line in lines)
    print(f"Failed with exit code {code}: {' '.join(command)}\nThe end of its log:\n{text}\nFull log: {log}", file=sys.stderr)


def main(arguments: list[str]) -> int:
    """Return the exit code: the command's, 2 if it could not start, 75 if it was told to stop and can be continued."""
    parser = argparse.ArgumentParser(prog="with_gpus.py", description="Run a command with N GPUs of its own.")
    parser.add_argument("count", type=int, metavar="N")
    parser.add_argument("--log", type=Path, help="write the command's output to this file")
    parser.add_argument("--explain", action="store_true", help="when the command fails, show the end of that file on stderr")
    parser.add_argument("--stamp", type=Path, help="write this file when the command has succeeded")
    parser.add_argument("command", nargs="+", metavar="COMMAND")
    options = parser.parse_args(arguments)

    stop = Stop()
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, stop)
    when_parent_dies(signal.SIGTERM)
    if options.log:
        options.log.write_text("")
    with ExitStack() as held:
        try:
            code = run(options.command, environment(options.count, held), options.log)
        except (GpuError, OSError) as error:
            say(f"with_gpus.py: {error}", options.log)
            code = 2
    if code == 0 and options.stamp:
        options.stamp.write_text(time.strftime("%Y-%m-%d %H:%M:%S\n"))
    if code == RESUME_ME:
        say("Told to stop, and stopped. The same command continues from the saved state, if there is one.", options.log)
    if code and options.log and options.explain:
        explain_failure(options.command, code, options.log)
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

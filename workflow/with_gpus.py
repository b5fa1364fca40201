"""Run a command with N GPUs of its own, and leave nothing of it running: ``with_gpus.py N -- COMMAND...``

Snakemake's ``--resources gpu=4`` only counts: it does not say which device a job may use. Here each device is a lock file in a
folder that all of a user's clones on this machine share (``locks_folder``); the command sees the N devices whose locks it got
in CUDA_VISIBLE_DEVICES. The operating system releases the locks when the process ends, however it ends. In a job that Snakemake
has submitted to Slurm, which hands out devices itself, the Snakefile asks for none. (Not so with ``--profile local`` inside an
allocation, as of ``salloc``: its devices are shared out like those of any machine.)

A killed ``dvc`` leaves the training that it started running, and the next attempt would train beside it. So the command gets
a process group of its own, which is ended with it, and also when Snakemake dies.

When this process is told to stop (SIGTERM from Slurm, Ctrl-C, a closed terminal), so is the command, and it has time to finish
its step, save its state and end; the exit code is then 75, "run me again, I go on from there". A second Ctrl-C ends it at once.

What the others do meanwhile: Slurm sends SIGTERM to every process of the job, DVC and Snakemake too. DVC would die of it, and
so has it ignored. Snakemake waits for its running jobs, on SIGTERM as on Ctrl-C, and starts no others.
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

# Time for a step and for saving. Where Slurm's KillWait, its preemption or the rest of the time limit is shorter, that holds.
GRACE_SECONDS = 300
SAME_WISH_SECONDS = 1.0
WAIT_SECONDS = 0.2  # between two attempts to get devices
RESUME_ME = 75  # EX_TEMPFAIL of sysexits.h, as `grpo train` has it
LOG_LINES_SHOWN = 20
PR_SET_PDEATHSIG = 1


class GpuError(Exception):
    """The machine does not have what was asked for."""


def present() -> dict[str, str]:
    """The devices that nvidia-smi lists: what CUDA_VISIBLE_DEVICES calls each -> its UUID.

    A GPU has its number. Of a partitioned one (MIG) each part is a device, which CUDA knows by its UUID only.
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
    """The devices that may be used, those of CUDA_VISIBLE_DEVICES or else all: name there -> the same name for all processes.

    A number may mean another GPU in another allocation on this machine, so the UUID stands for the device where it is known.
    """
    known = present()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return known
    names = [name.strip() for name in visible.split(",") if name.strip()]
    names = names[: names.index("-1")] if "-1" in names else names  # as CUDA has it: the first wrong number ends the list
    # CUDA takes the beginning of a UUID for the whole.
    return {name: known.get(name) or next((u for u in known.values() if u.startswith(name)), name) for name in names}


def locks_folder() -> Path:
    """One folder for each user and machine, whichever clone runs, from whichever session."""
    return Path(tempfile.gettempdir()) / f"grpo-gpus-{os.getuid()}"


def try_lock(path: Path) -> IO[str] | None:
    """The locked file, or None if another process has it."""
    file = path.open("a")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    return file


@contextmanager
def hold(count: int) -> Iterator[list[str]]:
    """Wait until ``count`` devices are free, and hold them; yields their names for CUDA_VISIBLE_DEVICES.

    Raises:
        GpuError: there are not as many, free or not.
    """
    offered = devices()
    # CUDA shows a process one part of a partitioned GPU at most, however many it names.
    usable = {name: uuid for name, uuid in offered.items() if count == 1 or not uuid.startswith("MIG-")}
    if count > len(usable):
        parts = "; parts of a partitioned GPU (MIG) serve commands that want one" if len(usable) < len(offered) else ""
        raise GpuError(
            f"{count} GPU(s) asked for, but this machine offers {len(usable)} ({', '.join(usable) or 'none'}){parts}. "
            "Lower `gpus` under `resources:` in params.yaml, check CUDA_VISIBLE_DEVICES and `nvidia-smi -L`, or use Slurm."
        )
    folder = locks_folder()
    folder.mkdir(mode=0o700, exist_ok=True)
    while True:
        with ExitStack() as attempt:
            # All or none, and one process tries at a time: two that each hold a part of what they need would wait for each
            # other, and one that waited in the queue would keep others from devices that it does not want.
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
    """The command's environment; the devices in it stay locked until ``held`` is closed."""
    if count == 0:
        return dict(os.environ)
    taken = held.enter_context(hold(count))
    # nvidia-smi numbers devices by their place on the bus, CUDA by default by speed.
    return {**os.environ, "CUDA_VISIBLE_DEVICES": ",".join(taken), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


def when_parent_dies(signum: int) -> None:
    """Have this process sent a signal when its parent ends, even by SIGKILL. Only Linux can."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signum)


def before_exec() -> None:
    """Runs in the child: end with the parent, and be open to SIGINT even where the parent ignores it (``nohup ... &``).

    SIGTERM stays ignored in all that the command starts, until a program decides otherwise, as `grpo` does.
    """
    when_parent_dies(signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


class Stop:
    """Signal handler: leave by way of every ``finally``.

    Some signals only repeat a wish. A closed terminal sends SIGHUP, and Snakemake's death of it SIGTERM. Slurm sends SIGTERM
    before the time limit and again when it comes, or at the start and the end of a preemption; the end is SIGKILL.
    """

    def __init__(self) -> None:
        self.first: float | None = None

    def __call__(self, signum: int, _frame: object) -> None:
        """See the class."""
        now = time.monotonic()
        if self.first is None:
            self.first = now
        elif now - self.first < SAME_WISH_SECONDS or (signum == signal.SIGTERM and "SLURM_JOB_ID" in os.environ):
            return
        sys.exit(128 + signum)


def of_group(group: int) -> set[psutil.Process]:
    """The processes of a group, and all that they have started."""
    import psutil

    members = set()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if os.getpgid(process.pid) == group:
                members |= {process, *process.children(recursive=True)}
    return members


def tell_to_stop(command: int, log: Path | None) -> None:
    """Interrupt all that the command has started; DVC then gives back its locks.

    DVC itself only until it has started the stage's command, which it announces by ``> COMMAND``: after that it stores the
    results, which are those of hours, and would have to be made again.
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
    """Run the command in its own process group, and end whatever is left of the group afterwards.

    Returns:
        Its exit code, or ``RESUME_ME`` if it was told to stop and did without having succeeded.
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
    """Say it at the end of the command's log, or where there is none on stderr."""
    with log.open("a") if log else contextlib.nullcontext(sys.stderr) as output:
        print(message, file=output)


def explain_failure(command: list[str], code: int, log: Path) -> None:
    """Say where the log is, and show its end."""
    lines = log.read_text(errors="replace").splitlines()[-LOG_LINES_SHOWN:]
    text = "\n".join(f"  | {line}" for line in lines)
    print(f"Failed with exit code {code}: {' '.join(command)}\nThe end of its log:\n{text}\nAll of it: {log}", file=sys.stderr)


def main(arguments: list[str]) -> int:
    """Returns the exit code: the command's, 2 if it could not be run at all, 75 if it was told to stop and can be resumed."""
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
        say("Told to stop, and did. Run again, it goes on from the state it saved, if it has one.", options.log)
    if code and options.log and options.explain:
        explain_failure(options.command, code, options.log)
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

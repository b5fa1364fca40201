"""Run a command with N GPUs of its own and end all its processes afterwards: ``with_gpus.py N -- COMMAND...``

Snakemake's ``--resources gpu=4`` only counts GPUs and does not assign them. Here each GPU has a lock file in a folder that all
clones of a user on this machine share. The command gets N locked GPUs in CUDA_VISIBLE_DEVICES. The operating system releases
the locks when the process ends. In jobs that Snakemake submits to Slurm, Slurm assigns the GPUs, and N is 0.

A killed ``dvc`` leaves its training running, and the next attempt would run beside it. So the command gets its own process
group, which is ended with the command, and also when Snakemake dies.

When this process is told to stop (SIGTERM from Slurm, Ctrl-C, a closed terminal), it tells the command, which has time to
finish its step and save its state. The exit code is then 75: run again to continue. A second Ctrl-C ends the command at once.
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
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import IO

import psutil

GRACE_SECONDS = 300  # to finish a step and save; Slurm's KillWait, preemption or time limit may be shorter
SAME_REQUEST_SECONDS = 1.0  # signals within this time are one request to stop
WAIT_SECONDS = 0.2  # between two attempts to get GPUs
RESUME_ME = 75  # EX_TEMPFAIL of sysexits.h, as in `grpo train`
LOG_LINES_SHOWN = 20
PR_SET_PDEATHSIG = 1


class GpuError(Exception):
    """The machine does not have the GPUs that were asked for."""


def devices() -> dict[str, str]:
    """The usable GPUs by their names in CUDA_VISIBLE_DEVICES, each with its UUID if known.

    A number may mean another GPU in another allocation on this machine; a UUID does not.
    """
    command, listing = ["nvidia-smi", "--query-gpu=index,uuid", "--format=csv,noheader"], ""
    if shutil.which("nvidia-smi"):
        listing = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    known = dict(line.split(", ") for line in listing.splitlines() if line.count(", ") == 1)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return known
    names = [name.strip() for name in visible.split(",") if name.strip()]
    names = names[: names.index("-1")] if "-1" in names else names  # as in CUDA, the first invalid number ends the list
    return {name: known.get(name, name) for name in names}


@contextmanager
def hold(count: int) -> Iterator[dict[str, str]]:
    """Wait until ``count`` GPUs are free and hold them; yield the variables that name them. GpuError if there are too few."""
    if not count:
        yield {}
        return
    offered = devices()
    if count > len(offered):
        raise GpuError(
            f"{count} GPU(s) asked for, but this machine offers {len(offered)} ({', '.join(offered) or 'none'}). "
            "Lower `gpus` under `resources:` in params.yaml, check CUDA_VISIBLE_DEVICES and `nvidia-smi -L`, or use Slurm."
        )
    folder = Path(tempfile.gettempdir()) / f"grpo-gpus-{os.getuid()}"
    require_own(folder)
    while True:
        with ExitStack() as attempt:
            # All or none, and one process at a time: two processes that each hold a part of what they need would wait for each
            # other, and a process that waited while it holds the queue would block GPUs that it does not need.
            taken: list[str] = []
            with lock_file(folder / "queue.lock") as queue:
                fcntl.flock(queue, fcntl.LOCK_EX)
                for name, uuid in offered.items():
                    file = attempt.enter_context(lock_file(folder / f"{uuid}.lock"))
                    with contextlib.suppress(BlockingIOError):
                        if len(taken) < count:
                            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                            taken.append(name)
            if len(taken) == count:
                # nvidia-smi numbers GPUs by their place on the bus; CUDA's default is by speed.
                yield {"CUDA_VISIBLE_DEVICES": ",".join(taken), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
                return
        time.sleep(WAIT_SECONDS)


def require_own(folder: Path) -> None:
    """Make the folder unless it exists; GpuError if others could have put something into it."""
    folder.mkdir(mode=0o700, exist_ok=True)
    about = folder.lstat()
    if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.getuid() or about.st_mode & 0o077:
        raise GpuError(f"{folder}: is not a folder of yours alone. Remove it, or set TMPDIR to a folder of yours.")


def lock_file(path: Path) -> IO[str]:
    """Open a file to lock it; OSError if it is a link."""
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600), "w")


def when_parent_dies(signum: int) -> None:
    """Let the kernel send this process a signal when its parent ends, even by SIGKILL (Linux only)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signum)


def before_exec() -> None:
    """Let the child end with its parent, accept SIGINT even if the parent ignores it (``nohup ... &``), and ignore SIGTERM.

    Slurm sends SIGTERM to every process of a job, and DVC would die of it. Its children ignore it too, until they change that,
    as `grpo` does.
    """
    when_parent_dies(signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


asked_at: list[float] = []  # times of the signals that told this process to stop


def stop(signum: int, _frame: object) -> None:
    """Exit through every ``finally``, unless the signal repeats a request.

    A closed terminal sends SIGHUP, then Snakemake's death SIGTERM. Slurm sends SIGTERM before the time limit and at the limit,
    or at the start and the end of a preemption, and finally SIGKILL.
    """
    asked_at.append(time.monotonic())
    at_once = asked_at[-1] - asked_at[0] < SAME_REQUEST_SECONDS
    if len(asked_at) > 1 and (at_once or (signum == signal.SIGTERM and "SLURM_JOB_ID" in os.environ)):
        return
    sys.exit(128 + signum)


def tell_to_stop(command: int, log: Path | None) -> None:
    """Interrupt all processes of the command, so that DVC releases its locks.

    Once DVC has started the stage's command, which it announces as ``> COMMAND``, DVC itself is not interrupted, as it may be
    storing results of hours.
    """
    told = psutil.Process(command).children(recursive=True)
    if log is None or not any(line.startswith("> ") for line in log.read_text(errors="replace").splitlines()):
        told.append(psutil.Process(command))
    for process in told:
        with contextlib.suppress(psutil.Error):
            process.send_signal(signal.SIGINT)


def end_of(process: subprocess.Popen[bytes]) -> int:
    """Wait for the exit code. ``Popen.wait`` would go on waiting after a signal that comes just before it."""
    while (code := process.poll()) is None:
        time.sleep(0.05)
    return code


def run(command: list[str], env: dict[str, str], log: Path | None) -> int:
    """Run the command in its own process group, and end what is left of the group afterwards.

    Returns its exit code, or ``RESUME_ME`` if it was told to stop and stopped before it was done.
    """
    with log.open("w") if log else nullcontext() as output:
        process = subprocess.Popen(
            command, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT if output else None,
            process_group=0, preexec_fn=before_exec,
        )  # fmt: skip
    try:
        return end_of(process)
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
    with log.open("a") if log else nullcontext(sys.stderr) as output:
        print(message, file=output)


def report(code: int, options: argparse.Namespace, seconds: float) -> None:
    """Print a line about a stage that has ended: how many of all are done, its time, warnings; or the end of its log.

    Nothing about a stage that has ended well but is none of the study's work: its stamp ends with ``.off``. Characters
    that a terminal takes as commands are replaced: a log may show texts of models and of foreign files.
    """
    if code == 0 and options.stamp.suffix == ".off":
        return
    took, name = "{}:{:02}".format(*divmod(round(seconds), 60)), options.log.stem
    text = options.log.read_text(errors="replace").replace("\r", "\n")
    text = "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)
    if code == 0:
        done = len(list(options.stamp.parent.glob("*.done")))
        warned = f", with warnings (see {options.log})" if re.search(r"^warning: ", text, re.M) else ""
        print(f"{done} of {options.stages} stages: {name}, {took}{warned}")
    else:
        what = "was told to stop" if code == RESUME_ME else f"failed with exit code {code}"
        lines = [f"  | {line}" for line in text.splitlines()[-LOG_LINES_SHOWN:]]
        if re.search(r"exited with (-9|137)$", text, re.M):
            lines.append(
                "It was killed, which the system does where memory runs out. Run fewer stages at a time (snakemake --profile"
                " local --cores 1), or say in params.yaml what such a stage needs: resources.KIND.mem_mb."
            )
        print(f"{name} {what} after {took}. The end of its log:", *lines, f"Full log: {options.log}", sep="\n")


def main(arguments: list[str]) -> int:
    """Return the exit code: the command's, 2 if it could not start, 75 if it was told to stop and can be continued."""
    parser = argparse.ArgumentParser(prog="with_gpus.py", description="Run a command with N GPUs of its own.")
    parser.add_argument("count", type=int, metavar="N")
    parser.add_argument("--log", type=Path, help="write the command's output to this file, and print how it ended")
    parser.add_argument("--stamp", type=Path, help="write this file when the command has succeeded")
    parser.add_argument("--stages", type=int, help="the number of all stages, each of which has a stamp once it is done")
    parser.add_argument("command", nargs="+", metavar="COMMAND")
    options = parser.parse_args(arguments)

    began = time.monotonic()
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, stop)
    when_parent_dies(signal.SIGTERM)
    if options.log:
        options.log.write_text("")
    try:
        with hold(options.count) as gpus:
            code = run(options.command, {**os.environ, **gpus}, options.log)
    except (GpuError, OSError) as error:
        say(f"with_gpus.py: {error}", options.log)
        code = 2
    if code == 0 and options.stamp:
        options.stamp.write_text(time.strftime("%Y-%m-%d %H:%M:%S\n"))
    if code == RESUME_ME:
        say("Told to stop, and stopped. The same command continues from the saved state, if there is one.", options.log)
    if options.log:
        report(code, options, time.monotonic() - began)
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

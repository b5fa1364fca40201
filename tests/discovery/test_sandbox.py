"""Hostile and broken programs: each one ends with an explanation, and leaves no process behind."""

import os
import platform
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from ruamel.yaml import YAML
from waiting import wait_for

from grpo.common.errors import UserError
from grpo.discovery import sandbox
from grpo.discovery.sandbox import Limits, ProgramError, run_program
from grpo.discovery.sandboxed import landlock_version

QUICK = Limits(seconds=20, cpu_seconds=20, memory_mb=500, output_mb=1)
FEW = Limits(seconds=20, threads=5)
LIMITS = {
    "quick": QUICK,
    "short": Limits(seconds=1, cpu_seconds=20, memory_mb=500, output_mb=1),
    "few threads": FEW,
    "little CPU time": Limits(seconds=30, cpu_seconds=1),
}
PROGRAMS = YAML(typ="safe", pure=True).load(Path(__file__).with_name("programs.yaml"))


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    yield
    assert not programs_of(psutil.Process())


def programs_of(process: psutil.Process) -> list[psutil.Process]:
    return [child for child in process.children() if any("sandboxed.py" in word for word in child.cmdline())]


def run(program: str, limits: Limits = QUICK, **more: Any) -> Any:
    return run_program(program.encode(), limits, **more)


def failure(program: str, limits: Limits = QUICK) -> str:
    with pytest.raises(ProgramError) as caught:
        run(program, limits)
    return str(caught.value)


@pytest.mark.parametrize(("program", "points"), PROGRAMS["points"])
def test_points(program: str, points: object) -> None:
    assert repr(run(program, name="mine.py")) == repr(points)  # 1, 1.0 and True are equal


@pytest.mark.parametrize(("program", "message"), PROGRAMS["failures"])
def test_failures(program: str, message: str) -> None:
    assert message in failure(program)


NAMED = "import ctypes\nctypes.CDLL(None).prctl(15, b'Threads:\\t1', 0, 0, 0)\n"
THREADS = "import threading, time\nfor _ in range({}):\n    threading.Thread(target=time.sleep, args=(60,)).start()\n{}"


@pytest.mark.parametrize(("program", "limits", "message"), PROGRAMS["limits"])
def test_limits(program: str, limits: str, message: str) -> None:
    start = time.perf_counter()
    assert failure(program, LIMITS[limits]).startswith(message)
    assert time.perf_counter() - start < 60


def test_threads_within_the_limit() -> None:
    assert run(THREADS.format(3, "points = [[1]]"), FEW) == [[1]]
    assert run(NAMED + "points = [[list(open('/proc/self/status').readline().split())[1][:6]]]") == [["python"]]


def test_only_the_end_of_a_long_output_is_in_the_message() -> None:
    said = failure("print('first')\nprint('x' * 5000)\nprint('last', flush=False)\nimport os\nos._exit(1)")
    assert said.endswith("x last") and len(said) < 700


def test_limits_of_the_kernel() -> None:
    program = "from resource import *\npoints = [getrlimit(one) for one in (RLIMIT_NOFILE, RLIMIT_CORE, RLIMIT_STACK, 11)]"
    assert run(program) == [[64, 64], [0, 0], [8_000_000, 8_000_000], [64, 64]]  # 11: pending signals and timers


def test_the_environment_holds_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("API_KEY", "secret")
    monkeypatch.setenv("PYTHONPATH", "/secret")
    rest = {name for (name,) in run("import os\npoints = [[name] for name in os.environ]") if "NUM_THREADS" not in name}
    assert rest - {"LC_CTYPE"} == {"LANG", "LD_LIBRARY_PATH", "MALLOC_ARENA_MAX"}


def test_no_open_files_and_none_of_the_package(tmp_path: Path) -> None:
    with (tmp_path / "open").open("w") as ours:
        os.set_inheritable(ours.fileno(), True)
        descriptors, modules = run("import os, sys\npoints = [sorted(map(int, os.listdir('/dev/fd'))), [*sys.modules]]")
    assert len(descriptors) == 5 and descriptors[:3] == [0, 1, 2]  # with the result's file, and that of listdir
    assert not any(module.startswith("grpo.") or module == "numpy" for module in modules)


@pytest.mark.parametrize("kind", PROGRAMS["forbidden"])
def test_what_is_forbidden(kind: str, tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.write_text("mine", encoding="utf-8")
    mode, times = mine.stat().st_mode, mine.stat().st_mtime_ns
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.2)
        names = {"FOLDER": str(tmp_path), "PORT": str(server.getsockname()[1]), "PARENT": str(os.getpid()), "THIS": __file__}
        attempts = [re.sub("|".join(names), lambda name: names[name[0]], attempt) for attempt in PROGRAMS["forbidden"][kind]]
        assert run(tried(attempts)) == refused(attempts) or (kind == "reading" and not landlock_version())
        with pytest.raises(TimeoutError):
            server.accept()
    assert (mine.read_text(encoding="utf-8"), mine.stat().st_mode, mine.stat().st_mtime_ns) == ("mine", mode, times)
    assert [one.name for one in tmp_path.iterdir()] == ["mine"]


def tried(attempts: list[str]) -> str:
    """A program whose points are the outcomes of attempts, by number."""
    return f"""
import os, socket, subprocess, ctypes, signal, multiprocessing, sys, fcntl, resource
points = []
for number, attempt in enumerate({attempts!r}):
    try:
        eval(attempt)
    except OSError as error:
        points.append([number, "OSError"])
    else:
        points.append([number, "done"])
"""


def refused(attempts: list[str]) -> list[list[Any]]:
    """The points of :func:`tried` if the system refuses all attempts."""
    return [[number, "OSError"] for number in range(len(attempts))]


def test_the_message_says_what_is_forbidden() -> None:
    assert "no network here, starts no other processes" in failure("import subprocess\nsubprocess.run(['true'])")


@pytest.mark.parametrize("entry", [".", "lib:.", "//", "/etc", "{folder}", "{folder}/lib/..", "{folder}/lib"])
def test_an_entry_of_the_library_path_opens_no_folder(entry: str, tmp_path: Path) -> None:
    (tmp_path / "lib/folder.so").mkdir(parents=True)
    for name, target in (("all.so", tmp_path), ("one.so", tmp_path / "secret")):
        (tmp_path / "lib" / name).symlink_to(target)
    for name in ("secret", "secret.some.txt"):
        (tmp_path / name).write_text("secret", encoding="utf-8")
    paths = [tmp_path / "secret", tmp_path / "secret.some.txt", "/etc/passwd", Path(__file__).resolve()]
    attempts = [*(f"open({str(path)!r})" for path in paths), f"os.listdir({str(tmp_path)!r})", "os.listdir('/')"]
    attempts += [f"open({str(tmp_path / 'lib/one.so')!r})", f"os.listdir({str(tmp_path / 'lib/folder.so')!r})"]
    points = elsewhere(tried(attempts), tmp_path, LD_LIBRARY_PATH=entry.format(folder=tmp_path))
    assert points == str(refused(attempts)) or not landlock_version()


@pytest.mark.skipif(not landlock_version(), reason="needs Landlock")
def test_a_folder_that_a_program_could_read_all_the_same_is_refused(tmp_path: Path) -> None:
    """The project is a folder of numpy, which is open to a program; the home may be such a folder, too."""
    opened = Path(sandbox.PACKAGES) / "numpy"
    for folder, more in ((opened, {}), (tmp_path, {"HOME": str(opened)})):
        assert f"{opened} can be read" in elsewhere("points = [[1]]", folder, **more)


def elsewhere(program: str, folder: Path, **environment: str) -> str:
    """The points or the error of a program whose search runs in another folder, with other variables."""
    code = "import sys; from grpo.discovery.sandbox import *; print(run_program(sys.argv[1].encode(), Limits()))"
    path = {"PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-P", "-c", code, program]
    done = subprocess.run(command, cwd=folder, env=os.environ | path | environment, capture_output=True, text=True, check=False)
    return done.stdout.strip() or done.stderr


RAW = """
import ctypes, os
library = ctypes.CDLL(None, use_errno=True)
points = []
for number in {numbers}:
    result = library.syscall(ctypes.c_long(number), *[ctypes.c_long(0)] * 6)
    points.append([number, result, ctypes.get_errno()])
"""


def test_system_calls_that_python_does_not_make() -> None:
    """ptrace, unshare, io_uring_setup, bpf, keyctl, mount, memfd_create, setrlimit, clone3, new ones, getpid as on x32."""
    numbers = {"x86_64": [101, 272, 425, 321, 250, 165, 319, 160], "aarch64": [117, 97, 425, 280, 219, 40, 279, 164]}
    if platform.machine() in numbers:
        refused = [*numbers[platform.machine()], 435, 467, 500, 0x40000000 + 39]
        assert run(RAW.format(numbers=refused)) == [[number, -1, 38] for number in refused]


def test_the_death_signal_stays() -> None:
    program = "import ctypes\npoints = [[ctypes.CDLL(None).prctl(option, 0, 0, 0, 0) for option in (1, 3)]]"
    assert run(program) == [[-1, 1]]  # 3: PR_GET_DUMPABLE


def test_if_this_process_is_killed_its_program_ends_too() -> None:
    code = "from grpo.discovery.sandbox import *; run_program(b'import time; time.sleep(60)', Limits())"
    parent = psutil.Popen([sys.executable, "-c", code], cwd=Path(__file__).parents[2])
    status = lambda process: Path(f"/proc/{process.pid}/status").read_text()  # noqa: E731
    programs = wait_for(lambda: [one for one in programs_of(parent) if "Seccomp:\t2" in status(one)], 20)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    assert not psutil.wait_procs(programs, timeout=20)[1]


def test_a_sandbox_that_cannot_be_set_up_is_no_fault_of_the_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a system without libseccomp: the program is not run."""
    script = tmp_path / "sandboxed.py"
    script.write_text(sandbox.SCRIPT.read_text().replace("libseccomp.so.2", "libnothing.so"))
    monkeypatch.setattr(sandbox, "SCRIPT", script)
    with pytest.raises(UserError, match=r"needs Linux and libseccomp, could not be set up: .*libnothing\.so"):
        run("points = [[1]]")

"""Programs: hostile and broken ones in the sandbox; the exact verifier beside known sets, a naive check and false claims."""

import itertools
import json
import os
import platform
import random
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
from grpo.discovery.verifier import Verification, check_points, verify_program, verify_text

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


LITTLE = Limits(seconds=20, cpu_seconds=2, memory_mb=500, output_mb=1)
Points = list[list[int]]


def roots(n: int) -> Points:
    """The root system D_n: all +-e_i +- e_j, of squared norm 2 and with squared distances of 2 and more."""
    points = []
    for i, j in itertools.combinations(range(n), 2):
        for signs in itertools.product((1, -1), repeat=2):
            point = [0] * 11
            point[i], point[j] = signs
            points.append(point)
    return points


def axes(n: int, length: int = 2) -> Points:
    return [[sign * length * (i == j) for j in range(11)] for i in range(n) for sign in (1, -1)]


def naive(points: Points) -> tuple[int, int]:
    """The smallest squared distance and the largest squared norm, in Python's integers."""
    distances = [sum((a - b) ** 2 for a, b in zip(x, y, strict=True)) for x, y in itertools.combinations(points, 2)]
    return min(distances), max(sum(a * a for a in x) for x in points)


def rejected(points: object, message: str) -> Verification:
    verdict = check_points(points)
    assert (verdict.validity, verdict.combined_score) == (0.0, 0.0)
    assert message in verdict.message
    return verdict


@pytest.mark.parametrize("scale", [1, 10**8, 10**13, -(10**100)])  # 10**8: norms of opposites fit in 64 bits, distances do not
@pytest.mark.parametrize(
    ("points", "count"),
    [([[5] * 11], 1), ([[5] * 11, [-5] * 11], 2), (axes(11), 22), (roots(11), 220)],
    ids=["one", "opposites", "axes", "D11"],
)
def test_sets_known_to_be_valid_are_so_at_any_scale(points: Points, count: int, scale: int) -> None:
    scaled = [[scale * entry for entry in point] for point in points]
    assert check_points(scaled) == Verification(count, 11, 1.0, float(count), "")


def test_the_message_names_the_pair_and_the_longest_point() -> None:
    points = [*axes(11, 10), [0, 6, 0, 0, 0, 0, 0, 0, 0, 0, 0]]
    verdict = rejected(points, "Minimum squared distance 16 < maximum squared norm 100: ")
    assert "points 2 [0, 10, 0, 0, 0, 0, 0, 0, 0, 0, 0] and 22 [0, 6, 0, 0, 0, 0, 0, 0, 0, 0, 0]" in verdict.message
    assert "point 0 [10, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0] has" in verdict.message
    assert (verdict.num_points, verdict.dimension) == (23, 11)


@pytest.mark.parametrize("scale", [1, 50, 10**4, 2 * 10**8, 10**9, 2**31, 10**13, 2**63, 10**30, 10**90])
def test_as_a_naive_check(scale: int) -> None:
    rng = random.Random(scale)
    seen = set()
    for trial in range(60):
        n = rng.choice([2, 3, 4, 11])
        base = roots(n) if trial % 2 else axes(n)
        some = rng.sample(base, rng.randint(2, min(len(base), 12)))
        noise = rng.choice([0, 1, scale // 1000])
        points = [[scale * entry + rng.randint(-noise, noise) for entry in point] for point in some]
        if trial % 5 == 0:  # all but one far away and near one another
            points = [[entry + 100 * scale for entry in point] for point in points[1:]] + [[7 * scale] * 11]
        distinct = [list(point) for point in dict.fromkeys(map(tuple, points)) if any(point)]
        if len(distinct) < 2:
            continue
        least, most = naive(distinct)
        verdict = check_points(distinct)
        assert verdict.validity == (least >= most)
        seen.add(verdict.validity)
        if least < most and most < 10**150:
            assert verdict.message.startswith(f"Minimum squared distance {least} < maximum squared norm {most}: points ")
    assert seen == {0.0, 1.0}


@pytest.mark.parametrize("scale", [1, 10**13, 10**90 + 7])
def test_600_points_take_little_time(scale: int) -> None:
    rng = random.Random(0)
    points = [[100 * scale + rng.randint(0, 10**9) for _ in range(11)] for _ in range(600)]
    start = time.process_time()  # of this process alone: others may keep the machine busy
    verdict = check_points(points)
    assert time.process_time() - start < 10
    least, most = naive(points)
    assert verdict.message.startswith(f"Minimum squared distance {least} < maximum squared norm {most}: ")


@pytest.mark.parametrize(
    ("points", "message"),
    [
        (None, "The points are None, expected a list"),
        ("points" * 10**6, "The points are 'pointspoints...spointspoints', expected a list"),
        ([], "points: List should have at least 1 item"),
        ([[1] * 11, 5], "points[1]: Input should be a valid list, but it is 5"),
        ([[1] * 10], "points[0]: List should have at least 11 items after validation, not 10"),
        ([[1.0] + [0] * 10], "points[0][0]: Input should be a valid integer, but it is 1.0"),
        ([[0] * 10 + [float("nan")]], "points[0][10]: Input should be a valid integer, but it is nan"),
        ([["1"] + [0] * 10], "points[0][0]: Input should be a valid integer, but it is '1'"),
        ([[True] + [0] * 10], "points[0][0]: Input should be a valid integer, but it is True"),
        ([[1] * 11, [0] * 11], "Point 1 is the zero vector"),
        ([[0] * 11], "Point 0 is the zero vector"),
        ([*axes(11), axes(11)[3]], "Minimum squared distance 0 < maximum squared norm 4: points 3 [0, -2, 0"),
    ],
)
def test_refused(points: object, message: str) -> None:
    rejected(points, message)
    assert rejected([[1, 2], [3, 4]], "at least 11 items").dimension == 2


def test_more_points_than_can_be_are_refused_at_once() -> None:
    start = time.process_time()
    verdict = rejected([[1] * 11] * 10**5, "100000 points are more than 868, the proven upper bound")
    assert time.process_time() - start < 5 and verdict.num_points == 10**5
    rejected([[number, *[1] * 10] for number in range(868)], "Minimum squared distance 1 < ")


AXES = "[[s * 2 * (i == j) for j in range(11)] for i in range(11) for s in (1, -1)]"


TO_EVERY_PIPE = """
import os
def send(data):
    for descriptor in range(3, 1024):
        try:
            os.write(descriptor, data)
        except OSError:
            pass
"""
CLAIM = json.dumps({"num_points": 868, "dimension": 11, "validity": 1.0, "combined_score": 868.0, "message": ""})


@pytest.mark.parametrize(
    "program",
    [
        f"points = {CLAIM}",
        f"{TO_EVERY_PIPE}\nsend(b'''{{\"points\": {CLAIM}}}''')\nos._exit(0)",
        f"{TO_EVERY_PIPE}\nsend(b'{{\"points\": [[1,0],[0,1]]}}')\nos._exit(0)",
        f'{TO_EVERY_PIPE}\nsend(b\'{{"error": ""}}\')\nos._exit(0)',
        f"{TO_EVERY_PIPE}\nsend(b'[' * 100000)\nos._exit(0)",
        f"{TO_EVERY_PIPE}\nsend(bytes(range(256)))\npoints = {AXES}",
        f"{TO_EVERY_PIPE.replace('os.write(descriptor, data)', 'os.lseek(descriptor, data, 0)')}\nsend(10**5)\npoints = {AXES}",
        f"import json\njson.dumps = json.JSONEncoder.encode = lambda *a, **k: '''{CLAIM}'''\npoints = [[1]]",
        "import builtins\nbuiltins.isinstance = lambda *a: True\nbuiltins.len = lambda x: 868\npoints = [[1]]",
        "class L(list):\n    def __iter__(self): return iter([868.0])\n    def __len__(self): return 868\npoints = L([[1]])",
        "class E(Exception):\n    def __str__(self): 1 / 0\nraise E",
        "import gc, types\nfor f in gc.get_objects():\n"
        "    if isinstance(f, types.FunctionType) and f.__name__ == 'explained':\n"
        "        f.__code__ = (lambda *a: 'valid').__code__\nraise ValueError",
        "import sys\nsys._getframe(1).f_globals['listed'] = lambda *a: [[1]]\npoints = 3",
    ],
)
def test_nothing_is_valid_because_a_program_says_so(program: str) -> None:
    verdict = verify_text(program, LITTLE)
    assert (verdict.validity, verdict.combined_score) == (0.0, 0.0)
    assert verdict.message and verdict.num_points < 2 + ("[[1,0]" in program)


@pytest.mark.parametrize(
    "program",
    [
        f"import numpy as np\npoints = np.array({AXES}, dtype=object) * 10**40",
        f"print('some output')\nprint(chr(233))\npoints = lambda: {AXES}",
        f"{TO_EVERY_PIPE}\nimport json\nsend(json.dumps({{'points': {AXES}}}).encode())\nos._exit(3)",
    ],
)
def test_programs_with_22_points(program: str) -> None:
    assert verify_text(program, LITTLE) == Verification(22, 11, 1.0, 22.0, "")


def test_a_file(tmp_path: Path) -> None:
    program = tmp_path / "mine.py"
    program.write_text(f"# two lines\npoints = {AXES}\n", encoding="utf-8")
    assert verify_program(program, LITTLE).combined_score == 22
    program.write_bytes("# -*- coding: latin-1 -*-\nname = 'é'\nassert len(name) == 1\npoints = [[1]]".encode("latin-1"))
    assert "points[0]: List should have at least 11 items" in verify_program(program, LITTLE).message
    program.write_bytes(b"points = '\xff'")
    assert "SyntaxError" in verify_program(program, LITTLE).message
    assert verify_text("name = '\ud800'", LITTLE).validity == 0
    for wrong in (tmp_path / "missing.py", tmp_path):
        with pytest.raises(UserError, match=r"cannot be read.*Name a file with a Python program"):
            verify_program(wrong)

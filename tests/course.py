"""`python tests/course.py DIR [OPTIONS of pytest]`: run a course's unit tests against this package (`make test-course`).

DIR is the course's repository, or its tests folder. Nothing in it is changed: the tests run in a copy, with tests/adapters.py
in the place of the course's own. Exit code: pytest's; 2 where DIR holds no tests.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ADAPTERS = Path(__file__).with_name("adapters.py")


def run(course: Path, *options: str) -> int:
    tests = course / "tests" if (course / "tests").is_dir() else course
    if not any(tests.glob("test_*.py")):
        print(f"{tests}: holds no test_*.py. Name the folder of the course's tests: make test-course DIR=...", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copytree(tests, folder / "tests", ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ADAPTERS, folder / "tests/adapters.py")
        (folder / "tests/__init__.py").touch()  # the tests import from .adapters
        # Without the course's or this project's own settings of pytest, and in the folder that snapshots are named from.
        command = [sys.executable, "-m", "pytest", "-c", "/dev/null", "--rootdir", ".", "-rs", "-p", "no:cacheprovider"]
        return subprocess.run([*command, *options, "tests"], cwd=folder, check=False).returncode


if __name__ == "__main__":
    if len(sys.argv) < 2 or not sys.argv[1]:
        sys.exit("Name the folder of the course's tests: make test-course DIR=...")
    sys.exit(run(Path(sys.argv[1]), *sys.argv[2:]))

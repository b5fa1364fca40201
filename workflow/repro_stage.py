"""`dvc --wait-for-lock repro --single-item STAGE`, which reads and writes only the stage's own lines of dvc.lock.

DVC parses all of dvc.lock twice at every stage, and writes it by a library that keeps comments: over a second of a
core where it has 7,000 lines. Here the stage's lines are put in the place of the former ones, in DVC's own words, so that the
file has the same bytes. It is replaced at once, so that a kill leaves the former or the new one, never a part.
"""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import dvc.stage.run
from dvc import dvcfile
from dvc.cli import main
from dvc.stage.exceptions import StageCmdFailedError
from dvc.stage.run import _run as run_by_shell
from dvc.utils import strictyaml
from dvc.utils.serialize import dumps_yaml, modify_yaml, parse_yaml
from fork_server import Forked

WORDS = ["--wait-for-lock", "repro", "--single-item"]


def parse_own(text: str, path: str, typ: str = "safe", *, stage: str) -> dict[str, Any]:
    """In the place of DVC's `parse_yaml`: of dvc.lock only the one stage."""
    lines = text.splitlines(keepends=True)
    if Path(path).name != "dvc.lock" or not usual(lines):
        return parse_yaml(text, path, typ)
    return {"schema": "2.0", "stages": parse_yaml("".join(lines[own(lines, stage)]), path, typ)}


@contextmanager
def modify_own(path: str, fs: Any = None, *, stage: str) -> Iterator[dict[str, Any]]:
    """In the place of DVC's `modify_yaml`: the content of dvc.lock as far as it is the one stage, which the caller replaces."""
    file = Path(path)
    text = file.read_text(encoding="utf-8") if file.name == "dvc.lock" and file.exists() else ""
    lines = text.splitlines(keepends=True)
    if not usual(lines):
        with modify_yaml(path, fs=fs) as content:
            yield content
        return
    content = parse_own(text, path, stage=stage)
    yield content
    lines[own(lines, stage)] = dumps_yaml({"stages": content["stages"]}).splitlines(keepends=True)[1:]
    draft = file.with_suffix(".draft")
    draft.write_text("".join(lines), encoding="utf-8")
    draft.replace(file)


def usual(lines: list[str]) -> bool:
    """Whether they are those of a dvc.lock that has nothing but stages of usual names in it."""
    return [line for line in lines if not re.match(r"  [^ ?]|   ", line)] == ["schema: '2.0'\n", "stages:\n"]


def own(lines: list[str], stage: str) -> slice:
    """Where a stage's lines are among those of dvc.lock; at the end where it has none yet."""
    key = dumps_yaml({"stages": {stage: {"cmd": ""}}}).splitlines(keepends=True)[1]
    start = lines.index(key) if key in lines else len(lines)
    return slice(start, next((i for i in range(start + 1, len(lines)) if re.match(r"  \S", lines[i])), len(lines)))


def run_command(executable: str | None, command: str, **options: Any) -> None:
    """In the place of DVC's `_run`: a command of ours alone is forked too. Raises StageCmdFailedError, as DVC's does."""
    if not re.fullmatch(r"grpo( [\w./@=+-]+)*", command):
        run_by_shell(executable, command, **options)
        return
    process = Forked("grpo", command.split()[1:], options["env"], options["cwd"], sys.stdout, os.getpgrp())
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)  # the command has it too, and DVC waits for that
    try:
        code = process.wait()
    finally:
        signal.signal(signal.SIGINT, handler)
    if code:
        raise StageCmdFailedError(command, code)


if __name__ == "__main__":
    if os.environ.pop("FORK_SERVER", None):
        dvc.stage.run._run = run_command
    strictyaml.parse_yaml = partial(parse_own, stage=sys.argv[1])
    dvcfile.modify_yaml = partial(modify_own, stage=sys.argv[1])
    sys.exit(main([*WORDS, *sys.argv[1:]]))

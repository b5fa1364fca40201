"""`dvc --wait-for-lock repro --single-item STAGE`, which writes only the stage's own lines of dvc.lock.

DVC reads and writes all of dvc.lock at every stage, by a library that keeps comments: over a second of a core where it has
7,000 lines. Here the stage's lines are put in the place of the former ones, in DVC's own words, so that the file has the same
bytes. The file is replaced at once, so that a kill leaves the former or the new one, never a part.
"""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import dvc.stage.run
from dvc import dvcfile
from dvc.cli import main
from dvc.stage.exceptions import StageCmdFailedError
from dvc.stage.run import _run as run_by_shell
from dvc.utils.serialize import dumps_yaml, modify_yaml, parse_yaml
from fork_server import Forked

WORDS = ["--wait-for-lock", "repro", "--single-item"]


@contextmanager
def modify_lock(path: str, fs: Any = None) -> Iterator[dict[str, Any]]:
    """In the place of DVC's `modify_yaml`: the content of dvc.lock, of which the caller may replace stages or add some."""
    file = Path(path)
    text = file.read_text(encoding="utf-8") if file.name == "dvc.lock" and file.exists() else ""
    lines = text.splitlines(keepends=True)
    if [line for line in lines if not re.match(r"  [^ ?]|   ", line)] != ["schema: '2.0'\n", "stages:\n"]:
        with modify_yaml(path, fs=fs) as content:  # another file, none yet, or one with more than stages of usual names in it
            yield content
        return
    content = parse_yaml(text, path)
    former = dict(content["stages"])
    yield content
    for name, stage in content["stages"].items():
        if stage is not former.get(name):
            lines = with_stage(lines, dumps_yaml({"stages": {name: stage}}).splitlines(keepends=True)[1:])
    draft = file.with_suffix(".draft")
    draft.write_text("".join(lines), encoding="utf-8")
    draft.replace(file)


def with_stage(lines: list[str], stage: list[str]) -> list[str]:
    """The lines of dvc.lock with those of one stage in the place of its former ones, or at the end."""
    if stage[0] not in lines:
        return lines + stage
    start = lines.index(stage[0])
    end = next((i for i in range(start + 1, len(lines)) if re.match(r"  \S", lines[i])), len(lines))
    return lines[:start] + stage + lines[end:]


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
    dvcfile.modify_yaml = modify_lock
    sys.exit(main([*WORDS, *sys.argv[1:]]))

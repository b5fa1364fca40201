"""What tests of the fork server share."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from workflow_parts import ROOT

sys.path.insert(0, str(ROOT / "workflow"))

from fork_server import Forked

SHOW = """
import json, os, sys
print(json.dumps({
    "arguments": sys.argv, "cwd": os.getcwd(), "env": dict(os.environ), "group": os.getpgrp(), "input": sys.stdin.read(),
    "modules": sorted({name.split(".")[0] for name in sys.modules}),
}))
sys.exit(int(sys.argv[1]))
"""


def wait_for(condition: object, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.02)


def fork(script: str, *arguments: str, group: int = 0, env: dict[str, str] | None = None) -> tuple[Forked, Path]:
    log, env = Path(f"{script}.log"), {"ONLY": "this"} if env is None else env
    with log.open("w") as output:
        return Forked(f"{script}.py", list(arguments), env, str(Path.cwd()), output, group), log

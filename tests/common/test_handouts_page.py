"""docs/handouts.md: its links lead somewhere, and its commands name what is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs/handouts.md").read_text()
COMMANDS = sorted({row.split("|")[-2].strip().strip("`") for row in TEXT.splitlines() if row.count("|") == 4 and "`" in row})


def test_links_resolve() -> None:
    links = re.findall(r"\]\(([^)#]+)", TEXT)
    assert len(links) > 40
    assert [link for link in links if not (ROOT / "docs" / link).exists()] == []


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_name_what_is_there(command: str) -> None:
    match command.split():
        case ["pytest", "-k", name]:
            assert any(f"def {name}" in (ROOT / "tests" / file).read_text() for file in ("test_grpo.py", "test_sft.py"))
        case ["pytest" | "python", file, *_]:
            assert (ROOT / file).is_file()
        case ["dvc", "repro", target]:
            stage, _, key = target.partition("@")
            stages, params = (yaml.safe_load((ROOT / name).read_text()) for name in ("dvc.yaml", "params.yaml"))
            assert stage in stages["stages"]
            assert not key or key in params["experiments"] or key in params["tasks"]
        case ["make", target, *_]:
            assert f"\n{target}:" in (ROOT / "Makefile").read_text()
        case _:
            assert command == "grpo study check"

"""YAML files of users: a mistake is named by its line."""

from __future__ import annotations

from pathlib import Path

import pytest

from grpo.common.errors import UserError
from grpo.common.yaml_file import parse_yaml


@pytest.mark.parametrize("kind", ["safe", "rt"])
@pytest.mark.parametrize(
    ("text", "message"),
    [(b"a: 1\nb: 2\na: 3\n", ":3: not valid YAML (found duplicate key"), (b"a: 1\nb: \xff\n", ": not valid YAML (")],
)
def test_what_is_no_yaml_is_refused(tmp_path: Path, kind: str, text: bytes, message: str) -> None:
    path = tmp_path / "x.yaml"
    path.write_bytes(text)
    with pytest.raises(UserError) as caught:
        parse_yaml(path, kind)
    assert str(caught.value).startswith(f"{path}{message}")

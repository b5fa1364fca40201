"""The studies in studies/ for tests that need one whole: as values, or active in a folder of their own."""

from __future__ import annotations

from contextlib import chdir
from pathlib import Path
from typing import Any

from grpo.commands.study import composed_text
from grpo.study.compose import compose

ROOT = Path(__file__).parents[1]
STUDIES = sorted(path for path in (ROOT / "studies").glob("*.yaml") if path.stem != "base")  # which is no study by itself


def values_of(name: str) -> dict[str, Any]:
    """The values of a study, which the caller may change."""
    return compose(ROOT / f"studies/{name}.yaml")


def activate(name: str, folder: Path) -> Path:
    """Write ``folder``'s params.yaml as `grpo study use NAME` does; its path."""
    with chdir(ROOT):
        text = composed_text(Path(f"studies/{name}.yaml"))[0]
    (folder / "params.yaml").write_text(text)
    return folder / "params.yaml"

"""The claims that a study names: published ones and its own."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from grpo.common.yaml_file import parse_yaml
from grpo.study.claims import AnyClaim
from grpo.study.schema import Study

PUBLISHED = Path(__file__).with_name("claims.yaml")


@dataclass(frozen=True)
class Published:
    """The published claims, which are about one task."""

    task: str
    sources: dict[str, str]
    claims: list[AnyClaim]
    untested: list[dict[str, Any]]  # fields of the verdicts on claims that no study here can test


@cache
def read_published() -> Published:
    """Read claims.yaml."""
    values = parse_yaml(PUBLISHED)
    values["claims"] = TypeAdapter(list[AnyClaim]).validate_python(values["claims"])
    return Published(**values)


def claims_of(study: Study) -> list[tuple[AnyClaim, bool]]:
    """The claims about experiments that the study has, and whether a claim is its own."""
    published = [claim for claim in read_published().claims if claim.experiment in study.active_experiments]
    return [(claim, False) for claim in published] + [(claim, True) for claim in study.own_claims]

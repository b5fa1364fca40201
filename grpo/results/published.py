"""The claims that a study names, published and its own, and which of them a run knew when it began.

Nothing here imports numpy: a run that only takes over the results of an equal one reads this too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter

from grpo.common.files import read_json
from grpo.common.yaml_file import parse_yaml
from grpo.study import paths
from grpo.study.claims import AnyClaim
from grpo.study.effective import digest
from grpo.study.paths import stage_of_run
from grpo.study.schema import Study

PUBLISHED = Path(__file__).with_name("claims.yaml")
KNOWN = "claims"  # key of a run's timing.json: digests of the claims that its study named when it began


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


def digest_of(claim: AnyClaim) -> str:
    """The digest of a claim's test; another wording leaves it as it is."""
    return digest(claim.test())


def known_claims(study: Study) -> list[str]:
    """The digests of all claims that the study now names, in alphabetical order.

    A run keeps all, not those about its experiment alone: an equal run of another experiment may take over its results.
    """
    return sorted({digest_of(claim) for claim, _ in claims_of(study)})


def written(claim: AnyClaim, runs: Sequence[str]) -> Literal["before", "after", "unknown"]:
    """Whether a claim was written before these runs began, or after one of them.

    Args:
        runs: names of the claim's runs. Runs of older versions do not say what they knew.
    """
    known = [read_json(paths.run_timing(run), made_by=stage_of_run(run)).get(KNOWN) for run in runs]
    if not known or any(of_run is None for of_run in known):
        return "unknown"
    return "before" if all(digest_of(claim) in (of_run or ()) for of_run in known) else "after"

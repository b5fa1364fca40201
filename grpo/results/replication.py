"""What fresh seeds say: the verdicts and winners of a study's replicates, in reports/replication.json."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from grpo.common.files import read_json, write_json
from grpo.results.verdicts import AGREES, DECIDED, NOT_TESTED, Verdict, VerdictName
from grpo.study import paths
from grpo.study.effective import digest
from grpo.study.schema import Study

# What changes no result, so that a replicate stays one of the study.
WITHOUT_EFFECT = {"description", "file", "folder", "resources", "gpu_memory_gib", "claims", "kissing_number"}
Agreement = Literal["same", "undecided", "turned round", "not tried"]
SAME: Agreement = "same"
UNDECIDED: Agreement = "undecided"
TURNED: Agreement = "turned round"
NOT_TRIED: Agreement = "not tried"


@dataclass(frozen=True)
class Replicate:
    """The verdicts and winners of a study with other seeds."""

    name: str  # such as ``seeds 100, 101, 102``
    verdicts: dict[str, VerdictName]  # by the digest of a claim's test
    measured: dict[str, str]  # likewise, the numbers in words
    statements: dict[str, str]
    # By experiment: ``winner``, ``value``, ``low``, ``high``, and whether the leader is ``told``.
    winners: dict[str, dict[str, Any]]


def study_digest(study: Study) -> str:
    """The digest of the settings that decide a study's results."""
    values = study.model_dump(mode="json", exclude=WITHOUT_EFFECT)
    return digest(values | {"select_in": study.active_experiments, "kl_in": study.kl_in})  # as in reports that are committed


def write_replication(study: Study, replicates: list[Replicate]) -> None:
    """Write reports/replication.json."""
    write_json(paths.REPLICATION, {"study": study_digest(study), "replicates": [asdict(one) for one in replicates]})


def read_replication(study: Study) -> list[Replicate]:
    """Read the replicates in reports/replication.json; none without the file, or if they are of a study with other settings."""
    if not paths.REPLICATION.exists():
        return []
    values = read_json(paths.REPLICATION, made_by="replicate", keys=("study", "replicates"))
    return [Replicate(**one) for one in values["replicates"] if values["study"] == study_digest(study)]


def agreement(here: VerdictName, there: VerdictName | None) -> Agreement:
    """Compare a study's verdict on a claim with a replicate's.

    Both decide: the same if both agree with the claim or neither does, for ``no difference`` and ``disagrees`` both say that it
    does not hold; else turned round.
    """
    if there in (None, NOT_TESTED) or here == NOT_TESTED:
        return NOT_TRIED
    if here in DECIDED and there in DECIDED:
        return SAME if (here == AGREES) == (there == AGREES) else TURNED
    return SAME if here == there else UNDECIDED


def fresh(verdict: Verdict, replicates: list[Replicate]) -> Agreement:
    """What the replicates say of a verdict: the worst of them."""
    found = {agreement(verdict.verdict, one.verdicts.get(verdict.test)) for one in replicates}
    return next((worst for worst in (TURNED, UNDECIDED, SAME) if worst in found), NOT_TRIED)

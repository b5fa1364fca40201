"""What a study found: read and computed once, for all parts of the report."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from grpo.reporting.discussion import Numbers, numbers_of
from grpo.reporting.provenance import stages_in_lock
from grpo.reporting.what_it_would_take import contents, not_a_matter_of_seeds, undecided
from grpo.results.claims import read_verdicts, shown
from grpo.results.findings import ExperimentResult, Verdict
from grpo.results.runs import Run, by_arm, read_baseline, read_best_of_n, read_runs
from grpo.results.selection import read_result
from grpo.study.schema import Study
from grpo.study.settings import ReportPiece

Values = dict[str, Any]


@dataclass(frozen=True)
class Record:
    """A study's results."""

    study: Study
    runs: dict[str, list[Run]]  # by experiment, in the study's order
    results: dict[str, ExperimentResult]  # likewise
    claims: list[Verdict] = field(default_factory=list)  # on all claims, also those about experiments that are left out
    lock: Values = field(default_factory=dict)  # the stages of dvc.lock; empty if DVC did not make the results

    @cached_property
    def numbers(self) -> dict[str, Numbers]:
        """:func:`grpo.reporting.discussion.numbers_of` each experiment."""
        return {name: numbers_of(self.study, runs, self.results[name]) for name, runs in self.runs.items()}

    @cached_property
    def baseline(self) -> Values:
        """Zero-shot metrics by prompt."""
        return read_baseline(self.study)

    @cached_property
    def sampled(self) -> Values:
        """Estimates from several samples by prompt; empty if the study leaves them out."""
        return read_best_of_n(self.study)

    @cached_property
    def unknown(self) -> Values:
        """What it would take to decide what is undecided (:mod:`grpo.reporting.what_it_would_take`)."""
        return contents(undecided(self.study), not_a_matter_of_seeds(self.study))

    @property
    def verdicts(self) -> list[Verdict]:
        """The verdicts on claims about experiments of this study."""
        return shown(self.claims, self.study)

    @property
    def counted(self) -> Counter[str]:
        """Number of these by verdict."""
        return Counter(verdict.verdict for verdict in self.verdicts)

    @property
    def all_runs(self) -> list[Run]:
        """The runs of all experiments."""
        return [run for runs in self.runs.values() for run in runs]

    def runs_with(self, *pieces: ReportPiece) -> list[Run]:
        """The runs of the experiments that name one of these pieces under ``report:``."""
        return [run for piece in pieces for name in self.study.with_report(piece) for run in self.runs[name]]

    @property
    def one_process(self) -> list[Run]:
        """The runs with which asynchronous ones are compared: the colocated experiment's first arm; none if it is left out."""
        return next(iter(by_arm(self.runs_with("colocated")).values()), [])


def read_record(study: Study, by_dvc: bool) -> Record:
    """Read a study's results.

    Args:
        by_dvc: whether DVC's stages made the results, so that dvc.lock has their hashes.

    Raises:
        UserError: a result file is missing or damaged.
    """
    return Record(
        study,
        {name: read_runs(study, name) for name in study.made},
        {name: read_result(study, name) for name in study.made},
        read_verdicts(),
        stages_in_lock() if by_dvc else {},
    )

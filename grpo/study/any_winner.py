"""Check that an experiment's arms can run whichever arms of earlier experiments win: a study is not refused half-way."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from grpo.common.errors import UserError
from grpo.study.effective import takes_over
from grpo.study.methods import OFF_POLICY_RANK, GrpoConfig, RunConfig, apply_overrides, resolved
from grpo.study.schema import Study

# Values that no check reads. Configurations that differ in these only are tried once; there are six times as many.
NOT_CHECKED = {"learning_rate", "use_std_normalization", "length_normalization"}


class _Start(NamedTuple):
    """A configuration on which an experiment may build, and the arms that must win for it, with their values."""

    config: RunConfig
    won: tuple[tuple[str, dict[str, Any]], ...] = ()


def require_any_winner(study: Study) -> None:
    """Apply each arm to each combination of earlier winners; a pinned winner stands alone.

    Raises:
        UserError: an arm's values do not fit what it would take over; names the arm and the winners.
    """
    for name in study.active_experiments:
        for start in _starts(study, name):
            for arm in study.experiments[name].arms:
                for _ in _after(study, name, arm, start):
                    pass


def _starts(study: Study, experiment: str) -> list[_Start]:
    starts = [_Start(study.defaults(study.experiments[experiment].method))]
    for name in study.needed_selections(experiment):
        arms = [study.selection.pinned[name]] if name in study.selection.pinned else study.experiments[name].arms
        found: dict[str, _Start] = {}
        for start in starts:
            takes = takes_over(study.experiments[name], start.config)
            for after in (each for arm in arms for each in _after(study, name, arm, start)) if takes else (start,):
                found.setdefault(repr(after.config.model_dump(exclude=NOT_CHECKED)), after)
        starts = list(found.values())
    return starts


def _after(study: Study, experiment: str, arm: str, start: _Start) -> Iterator[_Start]:
    """What ``start`` becomes under an arm; with ``off_policy_rank`` under each arm of the sweep that may have the rank."""
    entry = study.experiments[experiment]
    values, path = entry.arms[arm], f"experiments.{experiment}.arms.{arm}"
    ranked: list[dict[str, Any]] = [{}]
    if OFF_POLICY_RANK in values and entry.builds_on is not None:
        ranked = []
        for swept in study.experiments[entry.builds_on].arms.values():
            config = apply_overrides(start.config, swept, path)
            if isinstance(config, GrpoConfig) and config.updates_per_rollout_batch > 1:
                ranked.append(resolved(start.config, swept, path))
                ranked[-1].pop("learning_rate", None)  # an arm's factor would apply to it
    for taken in ranked:
        try:
            config = apply_overrides(start.config, taken | values, path)
        except UserError as error:
            winners = [name for name, own in start.won if any(key in str(error) for key in own)] or [n for n, _ in start.won]
            raise UserError(
                f"{error} It is so if {' and '.join(winners)} should win: change one of these arms, or choose a winner by "
                "`selection.pinned`."
            ) from error
        yield _Start(config, (*start.won, (f"{experiment}/{arm}", taken | values)))

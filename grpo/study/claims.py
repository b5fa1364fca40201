"""Claims as data: what a study is to test, published or its own.

A claim is one of two kinds, told apart by a key that only this kind has. :mod:`grpo.results.verdicts` has the rule of each.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from difflib import get_close_matches
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, Tag, model_validator

from grpo.common.errors import UserError
from grpo.common.metrics import METRICS
from grpo.study.config import Experiment, Section, require_known, setting_of

REWARD = "answer_reward"
OLD_TASK = "val/old_task_reward"
DIFFERENCES = (REWARD, OLD_TASK)  # a claim about another metric is about a ratio
# Metrics that the `kl` stage measures of a run's kept checkpoints.
KEPT = (OLD_TASK, "kl/per_token", "kl/forward_per_token", "kl/per_sequence", "kl/forward_per_sequence")
PLACES = ("leader", "first", "last")  # stand for an experiment's arms: the highest one, the first and the last in params.yaml


class Requires(Section):
    """What must hold for a claim to be tested."""

    learns: bool = False  # the leader ends above its start
    response_tokens: NonNegativeInt = 0  # mean length of the untrained model's responses
    best_rate_inside: list[str] = []  # arms whose best learning rate is neither the lowest nor the highest that was tried


class Claim(Section):
    """What all kinds have."""

    KIND: ClassVar[str] = ""
    ARMS: ClassVar[tuple[str, str]] = ("", "")  # the keys that name the two arms
    id: str = ""
    experiment: str = ""  # may be left out if only one experiment has these arms
    statement: str = Field("", max_length=300)
    horizon: NonNegativeInt = 0  # the step from which on it is meant: shorter runs do not test it
    requires: Requires = Requires()
    by_design: str | None = None  # why model or task show it anyway; of a published claim it counts for pretrained models
    reported: dict[str, Any] = {}  # by source

    def arms(self) -> list[tuple[str, str]]:
        """The experiment and the name of each arm that the claim is about; an arm may be given as EXPERIMENT/ARM."""
        named = [getattr(self, key).rpartition("/") for key in self.ARMS]
        return [(experiment or self.experiment, arm) for experiment, _, arm in named]

    def experiments(self) -> list[str]:
        """The experiments that the claim is about."""
        return sorted({self.experiment, *(experiment for experiment, _ in self.arms())})

    def in_words(self) -> str:
        """Describe the claim, for one without a statement."""
        raise NotImplementedError


class Beats(Claim):
    """Of two arms the first has more, by at least a margin."""

    KIND = "beats"
    ARMS = ("arm", "beats")
    arm: str
    beats: str
    metric: str = REWARD  # or a metric of each training step, such as token_entropy; or one of KEPT
    by: NonNegativeFloat  # a difference of rewards; for other metrics the ratio of their levels
    # Of rewards: before training, at the end, or at the last step although the arms still climb (which compares speeds).
    at: Literal["start", "end", "last_step", "throughout", "late", "peak"] = "end"

    def check(self) -> None:
        if self.metric == REWARD and self.at not in ("start", "end", "last_step"):
            raise UserError(f"at: {self.at} is for metrics of training steps; of {REWARD} choose start, end or last_step")
        if self.metric != REWARD and self.at == "last_step":
            raise UserError(f"at: last_step is for {REWARD}; of {self.metric} choose start, throughout, late, end or peak")
        if self.metric in KEPT and self.at != "end":
            raise UserError(f"at: {self.metric} is measured of few checkpoints: leave `at` out, and the last one counts")
        if self.metric not in DIFFERENCES and self.by < 1:
            raise UserError(f"by: for {self.metric} a ratio of 1 or more, not {self.by:g}")
        if self.metric in DIFFERENCES and self.by >= 1:
            other = "" if self.metric == OLD_TASK else ", or add `metric:` for a ratio of levels"
            raise UserError(f"by: rewards differ by less than {self.by:g}: lower it{other}")

    def in_words(self) -> str:
        if self.metric == REWARD:
            place = {"start": "starts", "end": "ends", "last_step": "is at the last step"}[self.at]
            return f"{self.arm} {place} above {self.beats} by at least {self.by:g}"
        more = f"{self.by:g} above" if self.metric == OLD_TASK else f"{self.by:g} times"
        return f"{self.metric} of {self.arm} is at least {more} that of {self.beats} ({self.at})"


class NotBelow(Claim):
    """An arm costs nothing against another: it ends at most a margin below it."""

    KIND = "not below"
    ARMS = ("arm", "not_below")
    metric: ClassVar[str] = REWARD
    at: ClassVar[str] = "end"
    arm: str
    not_below: str
    by: Annotated[PositiveFloat, Field(lt=1)]

    @model_validator(mode="before")
    @classmethod
    def _rewards_only(cls, values: Any) -> Any:
        if given := [key for key in ("metric", "at") if isinstance(values, Mapping) and key in values]:
            raise ValueError(f"not_below compares rewards at the end: leave out {', '.join(given)}, or use beats")
        return values

    def in_words(self) -> str:
        return f"{self.arm} ends at most {self.by:g} below {self.not_below}"


TAG = "kind "  # so that the name of a kind in an error is not taken for a key
KEYS = {"beats": Beats, "not_below": NotBelow}


def _kind(values: Any) -> str | None:
    if isinstance(values, Claim):
        return next(TAG + key for key, kind in KEYS.items() if type(values) is kind)
    keys = [key for key in KEYS if isinstance(values, Mapping) and key in values]
    return TAG + keys[0] if len(keys) == 1 else None


AnyClaim = Annotated[
    Annotated[Beats, Tag(TAG + "beats")] | Annotated[NotBelow, Tag(TAG + "not_below")],
    Discriminator(
        _kind,
        custom_error_type="kind_of_claim",
        custom_error_message=f"a claim has one of the keys {', '.join(KEYS)}, which says of which kind it is",
    ),
]


def own_claims(claims: list[AnyClaim], experiments: Mapping[str, Experiment]) -> list[AnyClaim]:
    """Complete a study's own claims: each with experiment, id and statement; UserError if one names what is not there."""
    own: list[AnyClaim] = []
    for number, claim in enumerate(claims):
        where = f"claims.{number}"
        name = claim.experiment or _only_experiment(where, claim, experiments)
        statement = claim.statement or claim.in_words()
        complete = claim.model_copy(update={"experiment": name, "statement": statement, "id": claim.id or f"own-{number + 1}"})
        for experiment, arm in (*complete.arms(), (name, "")):
            require_known(where, "no experiment", experiment, [key for key, entry in experiments.items() if entry.arms])
            if arm:
                require_known(where, f"{experiment} has no arm", arm, [*names(experiments[experiment].arms), *PLACES])
        if complete.id in [other.id for other in own]:
            raise UserError(f"{where}.id: {complete.id} is the id of two claims. Rename one.")
        own.append(complete)
    return own


def unknown_metrics(claims: list[AnyClaim]) -> list[str]:
    """Say which claims are about a metric that no run logs, unless the study's own code logs it."""
    known, found = (REWARD, *KEPT, *(metric.name for metric in METRICS)), []
    for number, claim in enumerate(claims):
        if isinstance(claim, Beats) and claim.metric not in known:
            near = ", ".join(get_close_matches(claim.metric, known, n=3, cutoff=0.5)) or "none is near"
            found.append(f"claims.{number}.metric: no run logs {claim.metric!r}. Near: {near} (docs/results.md, Columns).")
    return found


def names(arms: Collection[str]) -> list[str]:
    """The names by which claims may call arms: their own, and those of settings, for the arm with a setting's best rate."""
    return list(dict.fromkeys([*arms, *map(setting_of, arms)]))


def _only_experiment(where: str, claim: Claim, experiments: Mapping[str, Experiment]) -> str:
    """The one experiment that has all arms that the claim names without an experiment."""
    wanted = [arm for experiment, arm in claim.arms() if not experiment and arm not in PLACES]
    holding = [name for name, entry in experiments.items() if entry.arms and {*wanted} <= {*names(entry.arms)}]
    if not wanted and (given := [experiment for experiment, _ in claim.arms() if experiment]):
        return given[0]
    some = [name for name, entry in experiments.items() if {*wanted} & {*names(entry.arms)}]
    if len(likely := holding or some) == 1:  # of `some` the caller says which arms it has
        return likely[0]
    have = f"{', '.join(holding)} have" if holding else "no experiment has"
    raise UserError(f"{where}: {have} the arms {', '.join(wanted) or '(none named)'}: add `experiment:` with the one meant.")

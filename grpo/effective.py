"""The effective configuration of a run: defaults <- winners of earlier experiments <- the arm's own values."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from pydantic import BaseModel

from grpo.errors import UserError
from grpo.study import BUILDS_ON, GrpoConfig, Study, apply_overrides


def require_experiment(study: Study, name: str) -> None:
    """Raise UserError if the study has no experiment of this name."""
    if name not in study.experiments:
        raise UserError(f"{name}: no such experiment in params.yaml (known: {', '.join(study.experiments)}).")


class EffectiveRun(BaseModel):
    """The configuration one run is trained with, and where each of its values came from."""

    experiment: str
    arm: str
    seed: int
    config: GrpoConfig
    sources: dict[str, str]

    @property
    def name(self) -> str:
        """``EXPERIMENT/ARM-SEED``: the run's folder below data/runs, data/checkpoints and data/timing."""
        return f"{self.experiment}/{self.arm}-{self.seed}"


def effective_run(study: Study, experiment: str, arm: str, seed: int, winners: list[dict[str, Any]]) -> EffectiveRun:
    """Defaults <- winners so far <- the arm's own values.

    Args:
        winners: the contents of the selection files of the experiments before this one, first to last; each holds
            ``experiment``, ``winner`` and ``overrides``.

    Raises:
        UserError: no such experiment, arm or seed in the study, or a combination that GRPO refuses.
    """
    require_experiment(study, experiment)
    arms = study.experiments[experiment].arms
    if arm not in arms:
        raise UserError(f"experiments.{experiment}.arms: no arm {arm!r} (known: {', '.join(arms)}).")
    if seed not in study.seeds:
        raise UserError(f"seeds: {seed} is not among {study.seeds}. Add it to params.yaml, or choose one of these.")
    layers = [(f"winner of {w['experiment']} ({w['winner']})", w["overrides"]) for w in winners]
    layers.append((f"arm {arm}", arms[arm]))
    config = study.grpo
    sources = {key: "study" if key in study.grpo.model_fields_set else "default" for key in GrpoConfig.model_fields}
    try:
        for source, overrides in layers:
            config = apply_overrides(config, overrides, f"experiments.{experiment}.arms.{arm} ({source})")
            sources.update(dict.fromkeys(overrides, source))
    except ValueError as error:
        raise UserError(f"params.yaml: {error}.") from error
    return EffectiveRun(experiment=experiment, arm=arm, seed=seed, config=config, sources=sources)


def chain(experiment: str) -> list[str]:
    """The experiments whose winners ``experiment`` builds on, first to last."""
    before: list[str] = []
    previous = BUILDS_ON[experiment]
    while previous is not None:
        before.insert(0, previous)
        previous = BUILDS_ON[previous]
    return before


def digest(value: Any) -> str:
    """SHA-256 (first 16 hex digits) of a JSON-able value in canonical form."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()[:16]

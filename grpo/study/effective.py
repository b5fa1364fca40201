"""The effective configuration of a run (defaults <- winners of earlier experiments <- the arm's own values), and its inputs."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from grpo.common.errors import UserError
from grpo.study import paths
from grpo.study.methods import OFF_POLICY_RANK, Config, GrpoConfig, RunConfig, apply_overrides, resolved
from grpo.study.schema import Study
from grpo.study.settings import Method


def require_experiment(study: Study, name: str) -> None:
    """Raise UserError if the study has no experiment of this name, or leaves it out."""
    if name not in study.experiments:
        raise UserError(f"{name}: no such experiment in params.yaml (known: {', '.join(study.experiments)}).")
    if name in study.left_out:
        raise UserError(f"experiments.{name}.arms: left out of this study. Give it arms, and run `grpo study runs`.")


class EffectiveRun(BaseModel):
    """The configuration one run is trained with, and where each of its values came from.

    ``overrides`` are the arm's own values, those taken from a sweep included; ``before`` the selections it was made with.
    """

    experiment: str
    method: Method
    task: str
    arm: str
    seed: int
    config: RunConfig
    sources: dict[str, str]
    overrides: dict[str, Any]
    before: list[dict[str, Any]]

    @property
    def name(self) -> str:
        """The run's name, as :func:`grpo.study.paths.run_name` gives it."""
        return paths.run_name(self.experiment, self.arm, self.seed)

    @property
    def model(self) -> Path:
        """The checkpoint that the run starts from."""
        start = self.config.start_from if isinstance(self.config, GrpoConfig) else None
        if start is not None:
            experiment, arm, checkpoint = start.split("/")
            return paths.CHECKPOINTS / paths.run_name(experiment, arm, self.seed) / checkpoint
        return paths.model(self.task)

    @property
    def train(self) -> Path:
        """The file with the run's problems, or with its examples where it is supervised fine-tuning."""
        return paths.sft_examples(self.task) if self.method == "sft" else paths.train(self.task)

    @property
    def validation(self) -> Path:
        """The file with the problems that the run is evaluated on."""
        return paths.validation(self.task)


def effective_run(study: Study, experiment: str, arm: str, seed: int, selections: list[dict[str, Any]]) -> EffectiveRun:
    """Defaults <- winners so far <- the arm's own values.

    Args:
        selections: as :func:`grpo.results.selection.read_selections` gives them: of each experiment in
            :meth:`Study.needed_selections` the ``experiment``, ``winner`` and ``overrides``, and ``off_policy_ranking`` where
            an experiment goes on with its ranking. Empty to see an arm's own values only.

    Raises:
        UserError: no such experiment, arm or seed in the study, or a combination that the method refuses.
    """
    require_experiment(study, experiment)
    entry = study.experiments[experiment]
    arms = entry.arms
    if arm not in arms:
        raise UserError(f"experiments.{experiment}.arms: no arm {arm!r} (known: {', '.join(arms)}).")
    if seed not in study.seeds:
        raise UserError(f"seeds: {seed} is not among {study.seeds}. Add it to params.yaml, or choose one of these.")
    config = study.defaults(entry.method)
    sources = {key: "study" if key in config.model_fields_set else "default" for key in type(config).model_fields}
    for winner in (s for s in selections if s["experiment"] in study.needed_selections(experiment)):
        won = study.experiments[winner["experiment"]]
        on_policy = isinstance(config, GrpoConfig) and config.updates_per_rollout_batch == 1
        if won.passes_on != "winner" or (won.off_policy_only and on_policy):
            continue
        source = f"winner of {winner['experiment']} ({winner['winner']})"
        config = _apply(config, winner["overrides"], f"experiments.{experiment}.arms.{arm} ({source})")
        sources.update(dict.fromkeys(winner["overrides"], source))
    own = resolved(config, arms[arm], f"experiments.{experiment}.arms.{arm}")
    taken: dict[str, Any] = {}
    if OFF_POLICY_RANK in arms[arm] and selections:
        taken, source = _of_rank(experiment, arms[arm][OFF_POLICY_RANK], selections[-1])
        sources.update(dict.fromkeys(taken, source))
    sources.update(dict.fromkeys(own, f"arm {arm}"))
    overrides = {**taken, **own}
    config = _apply(config, overrides, f"experiments.{experiment}.arms.{arm} (arm {arm})")
    return EffectiveRun(
        experiment=experiment,
        method=entry.method,
        task=entry.task,
        arm=arm,
        seed=seed,
        config=config,
        sources=sources,
        overrides=overrides,
        before=selections,
    )


def _apply(config: Config, overrides: dict[str, Any], path: str) -> Config:
    try:
        return apply_overrides(config, overrides, path)
    except ValueError as error:
        raise UserError(f"params.yaml: {error}.") from error


def _of_rank(experiment: str, rank: int, selection: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """The values of the sweep's ``rank``-th best off-policy arm, and their source in words."""
    sweep, ranking = selection["experiment"], selection["off_policy_ranking"]
    if rank > len(ranking):
        raise UserError(
            f"experiments.{experiment}: an arm asks for off_policy_rank {rank}, but {sweep} has only {len(ranking)} off-policy "
            f"arms. Add arms to {sweep}, or lower the rank."
        )
    return ranking[rank - 1]["overrides"], f"rank {rank} of {sweep} ({ranking[rank - 1]['arm']})"


def digest(value: Any) -> str:
    """SHA-256 (first 16 hex digits) of a JSON-able value in canonical form."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()[:16]

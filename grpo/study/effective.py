"""The effective configuration of a run: defaults, then winners of earlier experiments, then the arm's own values.

They are computed when the winners are known.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo.common.errors import UserError, reason
from grpo.common.files import damaged, read_json, require_keys
from grpo.common.yaml_file import parse_yaml
from grpo.study import paths
from grpo.study.config import OFF_POLICY_RANK, GrpoConfig, Method, RunConfig, apply_overrides, require_known, resolved
from grpo.study.schema import Study


def require_experiment(study: Study, name: str) -> None:
    """Raise UserError unless the study makes this experiment."""
    require_known("params.yaml: experiments", "no experiment", name, study.experiments)
    if name in study.left_out:
        raise UserError(f"experiments.{name}.arms: left out of this study. Give it arms.")


@dataclass(frozen=True)
class EffectiveRun:
    """The configuration of one run."""

    experiment: str
    method: Method
    task: str
    arm: str
    seed: int
    base: Path  # the checkpoint of the base model
    config: RunConfig
    sources: dict[str, str]  # where each value of `config` comes from
    overrides: dict[str, Any]  # the arm's own values, with those that it takes from a sweep
    before: list[dict[str, Any]]  # the selections of earlier experiments that the configuration uses

    @property
    def name(self) -> str:
        """EXPERIMENT/ARM/SEED."""
        return paths.run_name(self.experiment, self.arm, self.seed)

    @property
    def model(self) -> Path:
        """The checkpoint that the run starts from."""
        start = self.config.start_from if isinstance(self.config, GrpoConfig) else None
        if start is not None:
            experiment, arm, checkpoint = start.split("/")
            return paths.CHECKPOINTS / paths.run_name(experiment, arm, self.seed) / checkpoint
        return self.base

    @property
    def train(self) -> Path:
        """The file with the run's problems; for supervised fine-tuning with its examples."""
        return paths.sft_examples(self.task) if self.method == "sft" else paths.train(self.task)

    @property
    def validation(self) -> Path:
        """The file with the validation problems."""
        return paths.validation(self.task)


def effective_run(study: Study, experiment: str, arm: str, seed: int, selections: list[dict[str, Any]]) -> EffectiveRun:
    """Compute a run's configuration: defaults, then earlier winners, then the arm's own values.

    ``selections``: from :func:`read_selections`: for each experiment in :meth:`Study.needed_selections` its ``experiment``,
    ``winner`` and ``overrides``, and ``off_policy_ranking`` if the next experiment uses the ranking. Empty: only defaults and
    the arm's own values.
    """
    require_experiment(study, experiment)
    entry = study.experiments[experiment]
    path = f"params.yaml: experiments.{experiment}.arms"
    require_known(path, "no arm", arm, entry.arms)
    path, values = f"{path}.{arm}", entry.arms[arm]
    if seed not in (seeds := study.seeds_of(experiment)):
        raise UserError(f"seeds: {seed} is not among {experiment}'s {seeds}. Choose one of these, or add it to params.yaml.")
    config = study.defaults(entry.method)
    sources = {key: "study" if key in config.model_fields_set else "default" for key in type(config).model_fields}
    for winner in (s for s in selections if s["experiment"] in study.needed_selections(experiment)):
        won, on_policy = study.experiments[winner["experiment"]], getattr(config, "updates_per_rollout_batch", 0) == 1
        if won.passes_on == "winner" and not (won.off_policy_only and on_policy):
            source = f"winner of {winner['experiment']} ({winner['winner']})"
            config = apply_overrides(config, winner["overrides"], f"{path} ({source})")
            sources.update(dict.fromkeys(winner["overrides"], source))
    taken: dict[str, Any] = {}
    if OFF_POLICY_RANK in values and selections:
        sweep, ranking, rank = selections[-1]["experiment"], selections[-1]["off_policy_ranking"], values[OFF_POLICY_RANK]
        if rank > len(ranking):
            few = f"off_policy_rank {rank}, but {sweep} has only {len(ranking)} off-policy arms"
            raise UserError(f"experiments.{experiment}: an arm asks for {few}. Add arms to {sweep}, or lower the rank.")
        taken = ranking[rank - 1]["overrides"]
        sources.update(dict.fromkeys(taken, f"rank {rank} of {sweep} ({ranking[rank - 1]['arm']})"))
    arm_values = resolved(apply_overrides(config, taken, path), values, path)
    sources.update(dict.fromkeys(arm_values, f"arm {arm}"))
    overrides = {**taken, **arm_values}
    config = apply_overrides(config, overrides, f"{path} (arm {arm})")
    base = base_model(study, entry.task, seed)
    return EffectiveRun(experiment, entry.method, entry.task, arm, seed, base, config, sources, overrides, before=selections)


def base_model(study: Study, task: str, seed: int) -> Path:
    """The checkpoint that a task's runs of this seed start from: the task's, or the seed's own (``one_per_seed``)."""
    return paths.model(task) / f"seed-{seed}" if seed in seeds_with_a_base(study, task) else paths.model(task)


def seeds_with_a_base(study: Study, task: str) -> list[int]:
    """The seeds for which a base model of their own is pretrained: none, or all but the first, which has the task's."""
    return study.seeds[1:] if getattr(study.models[task], "one_per_seed", False) else []


def read_selections(study: Study, experiment: str) -> list[dict[str, Any]]:
    """Read the winners on which a run of ``experiment`` builds, first to last; UserError if their file is missing."""
    needed = study.needed_selections(experiment)
    if not needed:
        return []
    path, keys = paths.SELECT / f"{needed[-1]}.json", ("experiment", "winner", "overrides", "before")
    last = read_json(path, made_by=f"select@{needed[-1]}", keys=keys)
    return [*last.pop("before"), last]


def read_run_config(name: str) -> dict[str, Any]:
    """Read a run's config.yaml; UserError if it is missing or damaged."""
    path, made_by = paths.RUNS / name / "config.yaml", paths.stage_of_run(name)
    if not path.exists():
        raise UserError(f"{path}: no such file. Run `dvc repro {made_by}` to make it.")
    try:
        config: dict[str, Any] = parse_yaml(path)
    except UserError as error:
        raise damaged(path, reason(error), made_by) from error
    require_keys(path, config, ("identity", "overrides", "before"), made_by)
    return config


def digest(value: Any) -> str:
    """SHA-256 (first 16 hex digits) of a JSON-able value in canonical form."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()[:16]

"""A study (params.yaml) as typed, validated values.

Nothing here imports torch, so that a mistake in params.yaml is told within a second, before anything runs.
Numbers follow YAML 1.2 (``1e-5`` is a number), as in DVC's own reader.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, ValidationError, model_validator

from grpo.common.errors import UserError
from grpo.common.files import parse_yaml
from grpo.study.compose import STUDIES_FOLDER, compose
from grpo.study.experiments import (
    ASYNCHRONOUS,
    BUILDS_ON,
    EXPERIMENTS,
    KEYWORD,
    RANKED_BY,
    SFT,
    SFT_INITIALIZATION,
    method_of,
    needed_experiments,
)
from grpo.study.methods import (
    OFF_POLICY_RANK,
    ExpertIterationConfig,
    GrpoConfig,
    RunConfig,
    Section,
    SftConfig,
    apply_overrides,
    evaluation_steps,
    explain,
)
from grpo.study.sections import (
    ArithmeticTask,
    Divergence,
    Engine,
    Evaluation,
    Experiment,
    GeneratedTraces,
    Keyword,
    KissingNumber,
    Learner,
    Model,
    Resources,
    Selection,
    SftDataset,
    StageKind,
    Task,
    WorkedSolutions,
)

PARAMS_FILE = Path("params.yaml")
TOKENS_ON_CPU = 4096  # of a packed row, as in studies/base.yaml
MORE_EVALUATIONS = {
    "grpo": "raise n_grpo_steps, lower evaluation.every",
    "sft": "raise n_sft_steps, lower evaluate_every",
    "expert_iteration": "raise n_ei_steps",
}


class Study(Section):
    """All of params.yaml."""

    study: str
    description: str
    folder: str = "studies"  # where the study's own modules lie, relative to the project
    seeds: list[NonNegativeInt] = Field(min_length=1)
    threads: PositiveInt
    task: Task
    model: Model
    sft_dataset: SftDataset
    keyword: Keyword
    kissing_number: KissingNumber | None  # null: no search is made, and the report says nothing of it
    gpu_memory_gib: PositiveFloat | None = None  # of each GPU that the study is meant for; `grpo doctor` counts with it
    engine: Engine
    learner: Learner
    grpo: GrpoConfig
    sft: SftConfig
    expert_iteration: ExpertIterationConfig
    evaluation: Evaluation
    selection: Selection
    divergence: Divergence | None  # null: no run is ever stopped
    checkpoints: list[Literal["last", "best"]] = Field(min_length=1)
    save_state_every: PositiveInt  # steps; expert iteration, whose steps are long, saves after each
    select_in: list[str] = Field(min_length=1)  # the experiments with arms; DVC makes select@EXPERIMENT by it
    experiments: dict[str, Experiment]
    resources: dict[StageKind, Resources]

    def last_k(self, experiment: str) -> int:
        """By the mean of how many last evaluations a run of ``experiment`` counts."""
        return self.experiments[experiment].last_k or self.selection.last_k

    @property
    def made(self) -> list[str]:
        """The experiments that the study makes, in the order in which they build on one another."""
        return [name for name in EXPERIMENTS if name in self.experiments and self.experiments[name].arms]

    @property
    def left_out(self) -> list[str]:
        """The experiments without arms, which the study leaves out."""
        return [name for name in EXPERIMENTS if name in self.experiments and not self.experiments[name].arms]

    def on_cpu(self) -> Study:
        """The study with what it would compute on a GPU on the CPU instead, as the keyword task's tiny model is."""
        engine, learner = self.engine, self.learner
        if engine.device != "cpu":
            engine = Engine(name="transformers", max_batch_size=engine.max_batch_size)
        if learner.device != "cpu":
            learner = Learner(max_tokens_per_microbatch=TOKENS_ON_CPU)
        return self.model_copy(update={"engine": engine, "learner": learner})

    @model_validator(mode="after")
    def _experiments_resolve(self) -> Study:
        expected = set(EXPERIMENTS)
        if set(self.experiments) != expected:
            missing, unknown = expected - set(self.experiments), set(self.experiments) - expected
            found = [f"missing {', '.join(sorted(missing))}"] if missing else []
            found += [f"unknown {', '.join(sorted(unknown))} (known: {', '.join(EXPERIMENTS)})"] if unknown else []
            raise ValueError(f"experiments: {'; '.join(found)}")
        self._check_left_out()
        if len(set(self.seeds)) != len(self.seeds):
            raise ValueError(f"seeds: {self.seeds} names a seed twice")
        if self.learner.processes > 1 and self.engine.name == "vllm":
            raise ValueError(
                f"learner.processes: {self.learner.processes} processes cannot share one with vLLM in it: "
                "set it to 1, or engine.name to transformers"
            )
        for name, experiment in self.experiments.items():
            for arm, overrides in experiment.arms.items():
                self._check_arm(name, arm, overrides)
        for name, arm in self.selection.pinned.items():
            if name not in self.experiments:
                raise ValueError(f"selection.pinned.{name}: no such experiment (known: {', '.join(self.experiments)})")
            if arm not in self.experiments[name].arms:
                known = ", ".join(self.experiments[name].arms) or "none, it is left out"
                raise ValueError(f"selection.pinned.{name}: no arm {arm!r} (known: {known})")
        return self

    def _check_left_out(self) -> None:
        """What is left out stands in no list, and nothing that the study makes builds on it."""
        if sorted(self.select_in) != sorted(self.made):
            wrong = [f"{name} has no arms: take it out" for name in self.select_in if name in self.left_out]
            wrong += [f"{name} is no experiment: take it out" for name in self.select_in if name not in self.experiments]
            wrong += [f"{name} has arms: add it, or give it `arms: {{}}`" for name in self.made if name not in self.select_in]
            raise ValueError(f"select_in: must name each experiment with arms once; {'; '.join(wrong) or 'one stands twice'}")
        for name in self.made:
            lacking = [needed for needed in needed_experiments(name) if needed in self.left_out]
            if lacking:
                raise ValueError(
                    f"experiments.{lacking[0]}.arms: left out, but {name} builds on it: give it arms (and add it to "
                    f"select_in), or leave {name} out too"
                )

    @model_validator(mode="after")
    def _resources_suffice(self) -> Study:
        kinds = get_args(StageKind)
        if set(self.resources) != set(kinds):
            raise ValueError(f"resources: needs exactly {', '.join(kinds[:-1])} and {kinds[-1]}")
        if self.resources["keyword"].gpus:
            raise ValueError("resources.keyword.gpus: the keyword task's model computes on the CPU: set it to 0")
        # The models of the `model` stages and of the keyword task are pretrained and trained on the CPU in every study.
        sampling, training = self.engine.device == "cpu", "cpu" in (self.engine.device, self.learner.device)
        on_cpu = {"model": True, "keyword": True, "evaluate": sampling}
        on_cpu |= dict.fromkeys(("train", "colocate", "asynchronous"), training)
        for kind, resources in self.resources.items():
            if on_cpu.get(kind) and resources.cpus < self.threads:
                raise ValueError(
                    f"resources.{kind}.cpus ({resources.cpus}): these stages compute on the CPU with {self.threads} threads: "
                    "reserve as many, or lower `threads`"
                )
        return self

    @model_validator(mode="after")
    def _evaluations_suffice(self) -> Study:
        """No run has fewer evaluations after its start than it counts by, whichever arms win before it."""
        for name, experiment in self.experiments.items():
            for arm in experiment.arms:
                counts = {len(evaluation_steps(c, self.evaluation.every)) - 1: c for c in self._possible_configs(name, arm)}
                fewest, wanted = min(counts), self.last_k(name)
                if fewest < wanted:
                    steps, remedy = counts[fewest].n_steps, MORE_EVALUATIONS[method_of(name)]
                    raise ValueError(
                        f"experiments.{name}.arms.{arm}: a run of {steps} steps is evaluated {fewest} time{'s' * (fewest > 1)} "
                        f"after its start, but {wanted} evaluations are to count (last_k): {remedy}, or give {name} a last_k "
                        f"of {fewest}"
                    )
        return self

    def _possible_configs(self, experiment: str, arm: str) -> list[RunConfig]:
        """An arm's configuration for each number of steps that it may have; all else is its own or the study's."""
        own = {k: v for k, v in self.experiments[experiment].arms[arm].items() if k != OFF_POLICY_RANK}
        config: RunConfig = apply_overrides(getattr(self, method_of(experiment)), own, experiment)
        if not isinstance(config, GrpoConfig):  # such a run builds on no winner
            return [config]
        possible: set[int | None] = {self.grpo.n_grpo_steps}
        for before in BUILDS_ON[experiment]:
            possible = _replaced(possible, self._steps_of_winner(before))
        possible = _replaced(possible, self._steps_of_arm(experiment, arm))
        return [config.model_copy(update={"n_grpo_steps": steps}) for steps in possible]

    def _steps_of_winner(self, experiment: str) -> set[int | None]:
        """What an experiment's winner may make of ``n_grpo_steps``; None: nothing."""
        pinned = self.selection.pinned.get(experiment)
        arms = [pinned] if pinned else self.experiments[experiment].arms
        return {steps for arm in arms for steps in self._steps_of_arm(experiment, arm)}

    def _steps_of_arm(self, experiment: str, arm: str) -> set[int | None]:
        """What an arm may make of ``n_grpo_steps``, by its own values or by those of the sweep's arm that it asks for."""
        own = self.experiments[experiment].arms[arm]
        if "n_grpo_steps" in own or OFF_POLICY_RANK not in own:
            return {own.get("n_grpo_steps")}
        sweep = RANKED_BY[experiment]
        return {steps for ranked in self.experiments[sweep].arms for steps in self._steps_of_arm(sweep, ranked)}

    @model_validator(mode="after")
    def _data_suffice(self) -> Study:
        generated = isinstance(self.task, ArithmeticTask)
        if isinstance(self.task, ArithmeticTask) and self.task.train_size < self.grpo.n_prompts_per_rollout_batch:
            raise ValueError(
                f"task.train_size ({self.task.train_size}) is smaller than the {self.grpo.n_prompts_per_rollout_batch} "
                "questions of one rollout batch (grpo.rollout_batch_size / grpo.group_size): raise it"
            )
        if isinstance(self.sft_dataset, GeneratedTraces) and not generated:
            raise ValueError(
                f"sft_dataset.source: traces can be generated for the arithmetic task only, not for {self.task.name}: "
                "use source solutions, jsonl or hub"
            )
        if isinstance(self.sft_dataset, WorkedSolutions) and generated:
            raise ValueError("sft_dataset.source: the arithmetic task has no file with solutions: use source generated")
        return self

    def _check_arm(self, experiment: str, arm: str, overrides: dict[str, Any]) -> None:
        """Its name is one that a file can have, and its values are ones that its method accepts."""
        path = f"experiments.{experiment}.arms.{arm}"
        if not re.fullmatch(r"[A-Za-z0-9_]+(-[A-Za-z0-9_]+)*", arm):
            raise ValueError(f"{path}: an arm's name may hold letters, digits, '_' and '-' only")
        self._check_rank(path, experiment, overrides)
        own = {k: v for k, v in overrides.items() if k != OFF_POLICY_RANK}
        config = apply_overrides(getattr(self, method_of(experiment)), own, path)
        if (config.prompt == "keyword") != (experiment == KEYWORD):
            only = "must be keyword" if experiment == KEYWORD else f"keyword is for {KEYWORD} only"
            raise ValueError(f"{path}: prompt: {only}")
        if isinstance(config, GrpoConfig) and (config.asynchronous is not None) != (experiment == ASYNCHRONOUS):
            who = "every arm needs it" if experiment == ASYNCHRONOUS else f"only arms of {ASYNCHRONOUS} can have it"
            raise ValueError(f"{path}: asynchronous: {who}")
        if isinstance(config, GrpoConfig) and config.start_from is not None:
            self._check_start(f"{path}.start_from", experiment, config.start_from)

    def _check_start(self, path: str, experiment: str, start: str) -> None:
        """A run may start from a checkpoint that an arm of the SFT experiment keeps."""
        if experiment != SFT_INITIALIZATION:
            raise ValueError(f"{path}: only the arms of {SFT_INITIALIZATION} can have it")
        arms = self.experiments[SFT].arms
        known = [f"{SFT}/{arm}/{kind}" for arm, values in arms.items() for kind in self._checkpoints_of(values)]
        if start not in known:
            raise ValueError(
                f"{path}: {start!r} is no checkpoint that {SFT} keeps (known: {', '.join(known)}); keep_steps keeps more"
            )

    def _checkpoints_of(self, sft_arm: dict[str, Any]) -> list[str]:
        steps = apply_overrides(self.sft, sft_arm, SFT).keep_steps
        return [*(f"step-{step}" for step in steps), *self.checkpoints]

    def _check_rank(self, path: str, experiment: str, overrides: dict[str, Any]) -> None:
        """An arm may take its values from the sweep before, if there is one, and from as many arms as that hands on."""
        if OFF_POLICY_RANK not in overrides:
            return
        rank = overrides[OFF_POLICY_RANK]
        if experiment not in RANKED_BY:
            raise ValueError(f"{path}.{OFF_POLICY_RANK}: only the arms of {' and '.join(RANKED_BY)} can have it")
        few = self.selection.best_few
        if not isinstance(rank, int) or isinstance(rank, bool) or not 1 <= rank <= few:
            raise ValueError(f"{path}.{OFF_POLICY_RANK}: {rank!r} is no whole number from 1 to selection.best_few ({few})")


def _replaced(steps: set[int | None], by: set[int | None]) -> set[int | None]:
    """The values that stay where nothing takes their place, and those that do."""
    return (by - {None}) | (steps if None in by else set())


# ------------------------------------------------------------------------------------------------------------- reading


def read_yaml(path: Path) -> Any:
    """Parse a YAML 1.2 file.

    Raises:
        UserError: the file is missing or is not YAML in UTF-8; the message names file, line and remedy.
    """
    if not path.exists():
        raise UserError(f"{path}: no such file. Run this in the project's folder, or choose a study: `grpo study use mini`.")
    return parse_yaml(path)


def load_study(path: Path = PARAMS_FILE) -> Study:
    """Read and validate a study: params.yaml as it stands, a study file with what it extends.

    Raises:
        UserError: one line for each wrong key, with its path in the file and what was expected.
    """
    return validated(read_yaml(path) if path.name == PARAMS_FILE.name else compose(path), path)


def validated(values: Any, path: Path) -> Study:
    """The study that ``values`` make; ``path``, for messages, is where they come from.

    Raises:
        UserError: as :func:`load_study`.
    """
    if not isinstance(values, dict):
        raise UserError(f"{path}: expected a mapping of sections at the top. Compare with {STUDIES_FOLDER}/base.yaml.")
    try:
        return Study.model_validate(values)
    except ValidationError as error:
        raise UserError("\n".join(explain(path, item) for item in error.errors())) from error

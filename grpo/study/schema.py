"""A study (params.yaml) as typed, validated values.

Nothing here imports torch, so that a mistake in params.yaml is told within a second, before anything runs.
Numbers follow YAML 1.2 (``1e-5`` is a number), as in DVC's own reader.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, ValidationError, model_validator

from grpo.common.errors import UserError
from grpo.common.imports import search_in
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
    Method,
    Model,
    Resources,
    Selection,
    SftDataset,
    Task,
    WorkedSolutions,
)

PARAMS_FILE = Path("params.yaml")
STUDIES_FOLDER = Path("studies")
TOKENS_ON_CPU = 4096  # of a packed row, as in studies/mini.yaml
MORE_EVALUATIONS = {
    "grpo": "raise n_grpo_steps, lower evaluation.every",
    "sft": "raise n_sft_steps, lower evaluate_every",
    "expert_iteration": "raise n_ei_steps",
}


class Study(Section):
    """All of params.yaml."""

    study: str
    description: str
    folder: str = "studies"  # where modules of the study's own lie, which it names by import paths
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
    resources: dict[str, Resources]

    def last_k(self, experiment: str) -> int:
        """By the mean of how many last evaluations a run of ``experiment`` counts."""
        return self.experiments[experiment].last_k or self.selection.last_k

    @property
    def made(self) -> list[str]:
        """The experiments that the study makes, in the order in which they build on one another."""
        return [name for name, experiment in self.experiments.items() if experiment.arms]

    @property
    def left_out(self) -> list[str]:
        """The experiments without arms, which the study leaves out."""
        return [name for name, experiment in self.experiments.items() if not experiment.arms]

    def needed_selections(self, experiment: str) -> list[str]:
        """The experiments whose selection must be known before a run of ``experiment`` can start, first to last.

        A run depends on the file of the last one, which holds the others too.
        """
        before = self.experiments[experiment].builds_on
        return [*self.needed_selections(before), before] if before else []

    def needed_experiments(self, experiment: str) -> list[str]:
        """The experiments that a study cannot leave out if it makes ``experiment``: what its runs build on or start from."""
        starts = (arm.get("start_from") for arm in self.experiments[experiment].arms.values())
        return self.needed_selections(experiment) + sorted({str(start).split("/")[0] for start in starts if start})

    def with_report(self, piece: str) -> list[str]:
        """The experiments that the study makes whose entry names a piece of the report."""
        return [name for name in self.made if piece in self.experiments[name].report]

    def title(self, experiment: str) -> str:
        """What the report calls an experiment."""
        return self.experiments[experiment].title or experiment

    def defaults(self, method: Method) -> RunConfig:
        """The hyperparameters of a method's runs that no winner and no arm changes."""
        config: RunConfig = getattr(self, method)
        return config

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
        self._check_chain()
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

    def _check_chain(self) -> None:
        """What an experiment builds on stands before it, and what it reserves and is trained on is there."""
        before: list[str] = []
        for name, experiment in self.experiments.items():
            on = experiment.builds_on
            if on is not None and on not in before:
                where = (
                    "stands after it: move it up"
                    if on in self.experiments
                    else f"is no experiment (known: {', '.join(before)})"
                )
                raise ValueError(f"experiments.{name}.builds_on: {on} {where}")
            if on is not None and self.experiments[on].method != experiment.method:
                raise ValueError(
                    f"experiments.{name}.builds_on: {on} is trained by {self.experiments[on].method}, whose values "
                    f"{experiment.method} has not: build on another, or on none"
                )
            if experiment.resources not in self.resources:
                raise ValueError(
                    f"experiments.{name}.resources: no {experiment.resources!r} under resources (known: "
                    f"{', '.join(self.resources)})"
                )
            before.append(name)

    def _check_left_out(self) -> None:
        """What is left out stands in no list, and nothing that the study makes builds on it."""
        if sorted(self.select_in) != sorted(self.made):
            wrong = [f"{name} has no arms: take it out" for name in self.select_in if name in self.left_out]
            wrong += [f"{name} is no experiment: take it out" for name in self.select_in if name not in self.experiments]
            wrong += [f"{name} has arms: add it, or give it `arms: {{}}`" for name in self.made if name not in self.select_in]
            raise ValueError(f"select_in: must name each experiment with arms once; {'; '.join(wrong) or 'one stands twice'}")
        for name in self.made:
            lacking = [needed for needed in self.needed_experiments(name) if needed in self.left_out]
            if lacking:
                raise ValueError(
                    f"experiments.{lacking[0]}.arms: left out, but {name} builds on it: give it arms (and add it to "
                    f"select_in), or leave {name} out too"
                )

    @model_validator(mode="after")
    def _resources_suffice(self) -> Study:
        missing = [kind for kind in ("small", "model", "evaluate") if kind not in self.resources]
        if missing:
            raise ValueError(f"resources: needs {', '.join(missing)}, for the stages that train no run")
        # The models of the `model` stages are pretrained on the CPU in every study.
        sampling, training = self.engine.device == "cpu", "cpu" in (self.engine.device, self.learner.device)
        on_cpu = {"model": True, "evaluate": sampling}
        for experiment in self.experiments.values():
            on_cpu[experiment.resources] = on_cpu.get(experiment.resources, False) or training
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
                    steps, remedy = counts[fewest].n_steps, MORE_EVALUATIONS[experiment.method]
                    raise ValueError(
                        f"experiments.{name}.arms.{arm}: a run of {steps} steps is evaluated {fewest} time{'s' * (fewest > 1)} "
                        f"after its start, but {wanted} evaluations are to count (last_k): {remedy}, or give {name} a last_k "
                        f"of {fewest}"
                    )
        return self

    def _possible_configs(self, experiment: str, arm: str) -> list[RunConfig]:
        """An arm's configuration for each number of steps that it may have; all else is its own or the study's."""
        own = {k: v for k, v in self.experiments[experiment].arms[arm].items() if k != OFF_POLICY_RANK}
        config = apply_overrides(self.defaults(self.experiments[experiment].method), own, experiment)
        if not isinstance(config, GrpoConfig):  # such a run builds on no winner
            return [config]
        possible: set[int | None] = {self.grpo.n_grpo_steps}
        for before in self.needed_selections(experiment):
            possible = _replaced(possible, self._steps_of_winner(before))
        possible = _replaced(possible, self._steps_of_arm(experiment, arm))
        return [config.model_copy(update={"n_grpo_steps": steps}) for steps in possible]

    def _steps_of_winner(self, experiment: str) -> set[int | None]:
        """What an experiment's winner may make of ``n_grpo_steps``; None: nothing."""
        if self.experiments[experiment].passes_on != "winner":
            return {None}
        pinned = self.selection.pinned.get(experiment)
        arms = [pinned] if pinned else self.experiments[experiment].arms
        return {steps for arm in arms for steps in self._steps_of_arm(experiment, arm)}

    def _steps_of_arm(self, experiment: str, arm: str) -> set[int | None]:
        """What an arm may make of ``n_grpo_steps``, by its own values or by those of the sweep's arm that it asks for."""
        own = self.experiments[experiment].arms[arm]
        if "n_grpo_steps" in own or OFF_POLICY_RANK not in own:
            return {own.get("n_grpo_steps")}
        sweep = self.experiments[experiment].builds_on
        assert sweep is not None  # as _check_rank has seen to
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
        entry = self.experiments[experiment]
        config = apply_overrides(self.defaults(entry.method), own, path)
        if (config.prompt == "keyword") != (entry.task == "keyword"):
            raise ValueError(f"{path}: prompt: {config.prompt} is no prompt of the task {entry.task}")
        if isinstance(config, GrpoConfig) and config.start_from is not None:
            self._check_start(f"{path}.start_from", config.start_from)

    def _check_start(self, path: str, start: str) -> None:
        """A run may start from a checkpoint that an arm of supervised fine-tuning keeps."""
        known = [
            f"{name}/{arm}/{kind}"
            for name, experiment in self.experiments.items()
            if experiment.method == "sft"
            for arm, values in experiment.arms.items()
            for kind in self._checkpoints_of(values)
        ]
        if start not in known:
            raise ValueError(
                f"{path}: {start!r} is no checkpoint that an arm of supervised fine-tuning keeps (known: {', '.join(known)}); "
                "keep_steps keeps more"
            )

    def _checkpoints_of(self, sft_arm: dict[str, Any]) -> list[str]:
        steps = apply_overrides(self.sft, sft_arm, "sft").keep_steps
        return [*(f"step-{step}" for step in steps), *self.checkpoints]

    def _check_rank(self, path: str, experiment: str, overrides: dict[str, Any]) -> None:
        """An arm may take its values from the sweep before, if there is one, and from as many arms as that hands on."""
        if OFF_POLICY_RANK not in overrides:
            return
        rank = overrides[OFF_POLICY_RANK]
        if self.experiments[experiment].builds_on is None:
            raise ValueError(f"{path}.{OFF_POLICY_RANK}: {experiment} builds on no sweep whose arms could be ranked")
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
    from ruamel.yaml import YAML, YAMLError

    if not path.exists():
        raise UserError(f"{path}: no such file. Run this in the project's folder, or choose a study: `grpo study use mini`.")
    try:
        return YAML(typ="safe").load(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise UserError(f"{path}:{line}: not UTF-8 text ({error.reason}). Mend that line.") from error
    except (YAMLError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        raise UserError(f"{where}: not valid YAML ({getattr(error, 'problem', None) or error}). Mend that line.") from error


def load_study(path: Path = PARAMS_FILE) -> Study:
    """Read and validate a study.

    Raises:
        UserError: one line for each wrong key, with its path in the file and what was expected.
    """
    values = read_yaml(path)
    if not isinstance(values, dict):
        raise UserError(f"{path}: expected a mapping of sections at the top. Compare with {STUDIES_FOLDER}/mini.yaml.")
    folder = values.get("folder", Study.model_fields["folder"].default)
    if isinstance(folder, str):
        search_in(Path(folder))
    try:
        return Study.model_validate(values)
    except ValidationError as error:
        raise UserError("\n".join(explain(path, item) for item in error.errors())) from error

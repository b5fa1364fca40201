"""A study (params.yaml) as typed, validated values.

Nothing here imports torch, so that a mistake in params.yaml is reported within a second, before anything runs.
Numbers follow YAML 1.2 (``1e-5`` is a number), as in DVC's own reader.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt, ValidationError, model_validator

from grpo.common.errors import UserError
from grpo.common.imports import search_in
from grpo.common.yaml_file import parse_yaml
from grpo.study import paths
from grpo.study.compose import STUDIES_FOLDER, compose
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
    resolved,
)
from grpo.study.runs_table import runs_table
from grpo.study.settings import (
    MAIN,
    AlsoEvaluated,
    Divergence,
    EngineSettings,
    Evaluation,
    Experiment,
    KissingNumber,
    LearnerSettings,
    Method,
    Model,
    Resources,
    SampledTraces,
    Selection,
    SftDataset,
)
from grpo.tasks.task import Split, Task, make_task

PARAMS_FILE = paths.PARAMS
TOKENS_ON_CPU = 4096  # of a packed row, as in studies/base.yaml
MORE_EVALUATIONS = {
    "grpo": "raise n_grpo_steps, lower evaluation.every",
    "sft": "raise n_sft_steps, lower evaluate_every",
    "expert_iteration": "raise n_ei_steps",
}


LONGEST_NAME = 100  # characters; a file is named by an experiment, an arm and a seed, and may have 255
Seed = Annotated[int, Field(ge=0, lt=2**63)]  # as torch takes it


def check_name(where: str, what: str, name: str, dash: bool = True) -> None:
    """Raise ValueError unless files can be named by ``name``, the name of ``what``, which stands at ``where``."""
    if len(name) > LONGEST_NAME:
        raise ValueError(f"{where}: the name of {what} may have {LONGEST_NAME} characters, not {len(name)}")
    if not re.fullmatch(r"[A-Za-z0-9_]+(-[A-Za-z0-9_]+)*" if dash else r"[A-Za-z0-9_]+", name):
        allowed = "letters, digits, '_' and '-'" if dash else "letters, digits and '_'"
        raise ValueError(f"{where}: the name of {what} may hold {allowed} only")


class Study(Section):
    """All of params.yaml."""

    study: str = Field(max_length=LONGEST_NAME)
    description: str
    folder: str = "studies"  # where modules and data of the study's own lie, by the path from the project's folder
    file: str | None = None  # the study file that it was composed from, likewise
    seeds: list[Seed] = Field(min_length=1)
    seeds_in_one_stage: bool = False  # an arm's seeds are trained one after another in one process; else side by side
    threads: PositiveInt
    tasks: dict[str, dict[str, Any]]  # `use` and what the task's constructor takes; see grpo.tasks.task.make_task
    models: dict[str, Model]  # what each task's runs start from
    sft_datasets: dict[str, SftDataset]  # for tasks that are fine-tuned for
    kissing_number: KissingNumber | None  # null: no search is made, and the report says nothing of it
    gpu_memory_gib: PositiveFloat | None = None  # of each GPU that the study is meant for; `grpo doctor` counts with it
    engine: EngineSettings
    learner: LearnerSettings
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
    runs: dict[str, dict[str, Any]] | None = None  # what `grpo study use` makes of the rest; DVC makes train@KEY by it

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

    def task(self, name: str) -> Task:
        """The task of this name.

        Raises:
            UserError: there is none, or its settings are not such as it takes.
        """
        if name not in self.tasks:
            raise UserError(f"tasks: no task {name!r} (known: {', '.join(self.tasks)}). Correct the name, or add it.")
        return make_task(self.tasks[name], f"tasks.{name}")

    def also_evaluated(self, task: str) -> dict[str, AlsoEvaluated]:
        """The further sets on which runs of a task are evaluated."""
        return self.evaluation.also if task == MAIN else {}

    def also_task(self, name: str) -> Task:
        """The task of a further evaluation set."""
        return make_task(self.evaluation.also[name].task, f"evaluation.also.{name}")

    def trained_in(self, name: str) -> list[str]:
        """The formats in which runs ask a task's questions."""
        entries = [entry for entry in self.experiments.values() if entry.task == name]
        return sorted({arm.get("prompt", self.defaults(e.method).prompt) for e in entries for arm in e.arms.values()})

    def asked_in(self, name: str) -> list[str]:
        """The formats in which the study asks a task's questions of its own model."""
        formats = {*self.trained_in(name)}
        if name in self.sft_datasets:
            formats.add(self.sft_datasets[name].prompt)
        if name == MAIN:
            formats |= {*self.evaluation.zero_shot_prompts, *self.evaluation.best_of_n.prompts}
        return sorted(formats)

    def for_task(self, name: str) -> Study:
        """The study as runs of a task see it: on the CPU, where the task's model says so."""
        if self.models[name].device != "cpu":
            return self
        engine, learner = self.engine, self.learner
        if engine.device != "cpu":
            engine = EngineSettings(name="transformers", max_batch_size=engine.max_batch_size)
        if learner.device != "cpu":
            learner = LearnerSettings(max_tokens_per_microbatch=TOKENS_ON_CPU)
        return self.model_copy(update={"engine": engine, "learner": learner})

    def needed_problems(self, name: str) -> dict[Split, dict[str, int]]:
        """How many problems of each split the settings ask for, each by its place in params.yaml."""
        train = {"grpo.rollout_batch_size / grpo.group_size": self.grpo.n_prompts_per_rollout_batch}
        if name != MAIN:
            return {"train": train}
        evaluation = self.evaluation
        asked = {f"evaluation.{key}": getattr(evaluation, key) for key in ("problems", "zero_shot_problems")}
        sampled = {"evaluation.best_of_n.problems": evaluation.best_of_n.problems} if evaluation.best_of_n.prompts else {}
        return {"train": train, "validation": asked | sampled}

    @model_validator(mode="after")
    def _tasks_resolve(self) -> Study:
        """Each task can be made and has a model, and what is asked of it is asked in one of its formats."""
        if MAIN not in self.tasks:
            raise ValueError(f"tasks: needs an entry {MAIN!r} (there are: {', '.join(self.tasks) or 'none'})")
        if self.models.keys() != self.tasks.keys():
            raise ValueError(f"models: needs an entry for each of `tasks:`, which are {', '.join(self.tasks)}")
        if unknown := self.sft_datasets.keys() - self.tasks.keys():
            raise ValueError(f"sft_datasets: {', '.join(sorted(unknown))}: no such task (known: {', '.join(self.tasks)})")
        for name in self.tasks:
            check_name(f"tasks.{name}", "a task", name, dash=False)
            try:
                self.task(name)
            except UserError as error:
                raise ValueError(str(error).rstrip(".")) from error
        for name, settings in self.sft_datasets.items():
            self._check_formats(f"sft_datasets.{name}.prompt", name, [settings.prompt])
            if isinstance(settings, SampledTraces):
                self._check_formats(f"sft_datasets.{name}.asked_in", name, [settings.asked_in])
        self._check_formats("evaluation.zero_shot_prompts", MAIN, self.evaluation.zero_shot_prompts)
        self._check_formats("evaluation.best_of_n.prompts", MAIN, self.evaluation.best_of_n.prompts)
        return self

    def _check_formats(self, where: str, task: str, formats: list[str]) -> None:
        known = self.task(task).formats
        for name in formats:
            if name not in known:
                raise ValueError(f"{where}: {name!r} is no format of the task {task} (known: {', '.join(known)})")

    @model_validator(mode="after")
    def _further_sets_resolve(self) -> Study:
        """Each can be made, and asked in the formats that runs are trained in."""
        for name in self.evaluation.also:
            where = f"evaluation.also.{name}"
            check_name(where, "a set", name, dash=False)
            try:
                known = self.also_task(name).formats
            except UserError as error:
                raise ValueError(str(error).rstrip(".")) from error
            if lacking := [prompt for prompt in self.trained_in(MAIN) if prompt not in known]:
                raise ValueError(
                    f"{where}: runs ask in the format {lacking[0]}, which its task has not (known: {', '.join(known)})"
                )
        return self

    @model_validator(mode="after")
    def _experiments_resolve(self) -> Study:
        self._check_chain()
        self._check_left_out()
        if len(set(self.seeds)) != len(self.seeds):
            raise ValueError(f"seeds: {self.seeds} names a seed twice")
        for name, experiment in self.experiments.items():
            check_name(f"experiments.{name}", "an experiment", name)
            self._check_task(name, experiment)
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
            differing = ", ".join(sorted({*self.select_in} ^ {*self.made})) or "one stands twice"
            raise ValueError(
                f"select_in: must name each experiment with arms once ({differing}): `grpo study runs` writes it anew"
            )
        for name in self.made:
            lacking = [needed for needed in self.needed_experiments(name) if needed in self.left_out]
            if lacking:
                raise ValueError(
                    f"experiments.{lacking[0]}.arms: left out, but {name} builds on it: give it arms, or leave "
                    f"{name} out too, and run `grpo study runs`"
                )

    @model_validator(mode="after")
    def _runs_match(self) -> Study:
        """The table is the one that the experiments make."""
        if self.seeds_in_one_stage and self.learner.processes > 1:
            raise ValueError("seeds_in_one_stage: not with learner.processes above 1. Set it to false")
        table = runs_table(self)
        if self.runs is not None and self.runs != table:
            differing = sorted(key for key in {**table, **self.runs} if table.get(key) != self.runs.get(key))
            raise ValueError(
                f"runs: not what experiments, seeds and tasks ask for ({', '.join(differing)}): run `grpo study runs`, which "
                "writes it anew"
            )
        return self

    @model_validator(mode="after")
    def _resources_suffice(self) -> Study:
        missing = [kind for kind in ("small", "model", "evaluate") if kind not in self.resources]
        if missing:
            raise ValueError(f"resources: needs {', '.join(missing)}, for the stages that train no run")
        # Models are pretrained on the CPU in every study; copying one takes no more than a core.
        pretrains = any(model.source == "pretrain" for model in self.models.values())
        on_cpu = {"model": pretrains, "evaluate": self.engine.device == "cpu"}
        for name in self.made:
            experiment = self.experiments[name]
            own = self.for_task(experiment.task)
            computes = "cpu" in (own.engine.device, own.learner.device)
            on_cpu[experiment.resources] = on_cpu.get(experiment.resources, False) or computes
            moved = own.engine.device == own.learner.device == "cpu" and {self.engine.device, self.learner.device} != {"cpu"}
            if moved and self.resources[experiment.resources].gpus:
                raise ValueError(
                    f"resources.{experiment.resources}.gpus: the runs of {name} compute on the CPU: set it to 0, or name other "
                    f"resources in experiments.{name}"
                )
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
        """An arm's configuration for each number of steps that it may have, its own or that of an arm which may win before."""
        defaults = self.defaults(self.experiments[experiment].method)
        own = self.experiments[experiment].arms[arm]
        config = apply_overrides(defaults, resolved(defaults, own, experiment), experiment)
        if not isinstance(config, GrpoConfig) or "n_grpo_steps" in own:
            return [config]
        steps = {config.n_grpo_steps}
        for name in self.needed_selections(experiment):
            entry, pinned = self.experiments[name], self.selection.pinned.get(name)
            if entry.passes_on == "winner" or OFF_POLICY_RANK in own:
                arms = [values for candidate, values in entry.arms.items() if pinned in (None, candidate)]
                steps = {values.get("n_grpo_steps", n) for values in arms for n in steps}
        return [config.model_copy(update={"n_grpo_steps": n}) for n in steps]

    def _check_task(self, name: str, experiment: Experiment) -> None:
        """It is one of the study's, and where it is fine-tuned for there is something to fine-tune on."""
        if experiment.arms and experiment.task not in self.tasks:
            raise ValueError(f"experiments.{name}.task: no task {experiment.task!r} (known: {', '.join(self.tasks)})")
        if experiment.arms and experiment.method == "sft" and experiment.task not in self.sft_datasets:
            raise ValueError(f"experiments.{name}: there are no examples to fine-tune on: add sft_datasets.{experiment.task}")

    def _check_arm(self, experiment: str, arm: str, overrides: dict[str, Any]) -> None:
        """Its name is one that a file can have, and its values are ones that its method accepts."""
        path = f"experiments.{experiment}.arms.{arm}"
        check_name(path, "an arm", arm)
        self._check_rank(path, experiment, overrides)
        entry = self.experiments[experiment]
        defaults = self.defaults(entry.method)
        config = apply_overrides(defaults, resolved(defaults, overrides, path), path)
        self._check_formats(f"{path}: prompt", entry.task, [config.prompt])
        for what in ("lora", "asynchronous"):
            if getattr(config, what, None) is not None and self.for_task(entry.task).learner.fully_shard:
                raise ValueError(
                    f"{path}.{what}: not with learner.fully_shard. Set that to false, or leave {experiment} out "
                    "(`experiments: {without: [...]}`)"
                )
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
    folder = values.get("folder", Study.model_fields["folder"].default)
    if isinstance(folder, str):
        if folder != Study.model_fields["folder"].default and not Path(folder).is_dir():
            raise UserError(
                f"{path}: folder: there is no folder {folder}, where the study's own modules and data lie. Put it there, or "
                "make the study the active one from where it is now: `grpo study use FILE`."
            )
        search_in(Path(folder))
    try:
        return Study.model_validate(values)
    except ValidationError as error:
        raise UserError("\n".join(explain(path, item, values) for item in error.errors())) from error

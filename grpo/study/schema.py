"""A study (params.yaml) as typed, validated values.

Nothing here imports torch, so that an error in params.yaml is reported within a second. Numbers follow YAML 1.2 (``1e-5`` is a
number), as in DVC.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt, ValidationError

from grpo.common.errors import UserError
from grpo.common.imports import is_import_path, search_in
from grpo.common.yaml_file import read_mapping
from grpo.study import paths
from grpo.study.claims import AnyClaim, own_claims, unknown_metrics
from grpo.study.compose import BEST_PROMPT, CONTROLS, CONTROLS_IN, STUDIES_FOLDER, compose
from grpo.study.config import (
    MAIN,
    OFF_POLICY_RANK,
    OMIT,
    Divergence,
    EngineSettings,
    Evaluation,
    Experiment,
    ExpertIterationConfig,
    GrpoConfig,
    KissingNumber,
    LearnerSettings,
    LocalModel,
    Method,
    Model,
    Resources,
    RewardName,
    RunConfig,
    SampledTraces,
    Section,
    Selection,
    SftConfig,
    SftDataset,
    apply_overrides,
    explain,
    require_known,
)
from grpo.study.stages import require_current_stages
from grpo.tasks.rows import file_of
from grpo.tasks.sft_dataset import JsonlTraces
from grpo.tasks.task import SHIPPED_REWARDS, Split, Task, make_task

ALL_SEEDS = "all"  # the seed of a stage that trains all of an arm's, one after another
TOKENS_ON_CPU = 4096  # max_tokens_per_microbatch on a CPU, as in studies/base.yaml
LONGEST_NAME = 100  # characters; file names have an experiment, an arm and a seed, and may have 255
# Names that no experiment may have, as the pipeline itself has a file of this name where each experiment has its own.
RESERVED_NAMES = {
    *("best_of_n", "claims", "contrasts", "kissing_number", "math_baseline", "overview", "rates", "sft_examples"),
    *("settings", "pass_at_k", "software", "zero_shot"),
}
RESERVED_SUFFIXES = ("rates", "sets", "leaderboard", "training", "kl")  # EXPERIMENT-rates and others are files of EXPERIMENT
Seed = Annotated[int, Field(ge=0, lt=2**63)]  # torch's range


def check_name(where: str, what: str, name: str, dash: bool = True) -> None:
    """Raise UserError unless ``name``, the name of ``what`` at the key ``where``, can be a file name."""
    if len(name) > LONGEST_NAME:
        raise UserError(f"{where}: the name of {what} may have {LONGEST_NAME} characters, not {len(name)}.")
    if not re.fullmatch(r"[A-Za-z0-9_]+(-[A-Za-z0-9_]+)*" if dash else r"[A-Za-z0-9_]+", name):
        allowed = "letters, digits, '_' and '-'" if dash else "letters, digits and '_'"
        raise UserError(f"{where}: the name of {what} may hold {allowed} only.")


class Study(Section):
    """All of params.yaml."""

    study: str = Field(max_length=LONGEST_NAME)
    description: str
    heading: Annotated[str, OMIT] = Field("", max_length=80)  # of the report; by default the study's name
    # Sentences: what pretraining, data and construction planted; one about an experiment as {EXPERIMENT: sentence}.
    by_design: list[str | dict[str, str]] = Field(default_factory=list)
    folder: str = STUDIES_FOLDER.as_posix()  # folder with the study's own modules and data, relative to the project's folder
    file: str | None = None  # the study file that it was composed from, relative to the project's folder
    seeds: list[Seed] = Field(min_length=1, max_length=1000)
    seeds_in_one_stage: bool = False  # train an arm's seeds one after another in one process; else one stage per seed
    threads: PositiveInt
    tasks: dict[str, dict[str, Any]]  # `use` and the arguments of the task's constructor; see grpo.tasks.task.make_task
    models: dict[str, Model]  # the model that each task's runs start from
    sft_datasets: dict[str, SftDataset]  # examples of the tasks with supervised fine-tuning
    kissing_number: KissingNumber | None  # null: no search, and nothing about it in the report
    gpu_memory_gib: PositiveFloat | None = None  # memory of each GPU; `grpo doctor` checks that the study fits
    engine: EngineSettings
    learner: LearnerSettings
    grpo: GrpoConfig
    sft: SftConfig
    expert_iteration: ExpertIterationConfig
    evaluation: Evaluation
    selection: Selection
    divergence: Divergence | None  # null: no run is stopped
    checkpoints: list[Literal["last", "best"]] = Field(min_length=1)
    save_state_every: PositiveInt  # steps; expert iteration saves after each of its (long) steps
    experiments: dict[str, Experiment]
    claims: list[AnyClaim] = []  # the study's own, beside the published ones
    controls: Annotated[list[str], OMIT] = Field(default_factory=list)  # names of CONTROLS, and best_prompt
    resources: dict[str, Resources]

    def seeds_of(self, experiment: str) -> list[int]:
        """The seeds of an experiment's arms."""
        return self.seeds[: self.experiments[experiment].seeds]

    def runs_alone(self, experiment: str, seed: int) -> bool:
        """Whether nothing shares the cores of this run, so that its seconds can be compared with those of other runs."""
        entry = self.experiments[experiment]
        return self.resources[entry.resources].gpus > 0 or self.resources_of(experiment, seed) == entry.timed

    def resources_of(self, experiment: str, seed: int | str) -> str:
        """The entry of ``resources`` that a scheduler reserves for a run, or for a stage of all seeds."""
        entry = self.experiments[experiment]
        return entry.timed if entry.timed and seed == self.seeds[0] else entry.resources

    def is_in_one_stage(self, experiment: str) -> bool:
        """Whether a stage trains all seeds of an arm, one after another."""
        entry = self.experiments[experiment]
        return entry.one_stage or (self.seeds_in_one_stage and entry.timed in (None, entry.resources))

    def runs_table(self) -> dict[str, dict[str, Any]]:
        """Build `runs:` of stages.yaml, a row for each training stage; the row KEY is DVC's stage ``train@KEY``.

        A row has ``experiment``, ``task``; ``arm`` (of an experiment in one stage all arms, with spaces between); ``values``
        (the part of params.yaml with what these arms change); ``seed`` (one of ``seeds``, or ``all``); ``folder`` (of the
        results below data/runs, data/checkpoints and data/timing); ``model`` and ``train`` (folders below data/ with the
        checkpoint to start from and the problems or examples); ``after`` (the selection that the experiment builds on, or the
        pinned versions if it builds on none); and ``resources`` (what a scheduler reserves). UserError if two arms have one
        key, such as the arm low-1 of lr and the arm 1 of lr-low.
        """
        rows: dict[str, dict[str, Any]] = {}
        for name in self.active_experiments:
            entry = self.experiments[name]
            after = paths.SELECT / f"{entry.builds_on}.json" if entry.builds_on else paths.PINNED_SOFTWARE
            train = "sft_dataset" if entry.method == "sft" else "dataset"
            together = self.is_in_one_stage(name)
            for arm in [""] if entry.one_stage else entry.arms:
                for seed in [ALL_SEEDS] if together else self.seeds_of(name):
                    of_seed = [] if seed == ALL_SEEDS else [str(seed)]
                    where = [name, *([arm] if arm else []), *of_seed]
                    start = str(entry.arms.get(arm, {}).get("start_from") or "").split("/")[:2]
                    model = ["checkpoints", *start, *of_seed] if start[0] else ["model", entry.task]
                    key, values = "-".join(where), ".".join(["experiments", name, "arms", *([arm] if arm else [])])
                    if key in rows:
                        raise UserError(f"{rows[key]['values']} and {values}: both would be train@{key}. Rename one.")
                    rows[key] = {
                        "experiment": name,
                        "arm": arm or " ".join(entry.arms),
                        "values": values,
                        "seed": seed,
                        "folder": "/".join(where),
                        "task": entry.task,
                        "model": "/".join(model),
                        "train": f"{train}/{entry.task}",
                        "after": after.as_posix(),
                        "resources": self.resources_of(name, seed),
                    }
        return rows

    @property
    def named_files(self) -> dict[str, str]:
        """The files and folders that no stage makes and a task's stages read: ``TASK-NUMBER`` -> path."""
        files: dict[str, str] = {}
        for task in self.tasks:
            traces = self.sft_datasets.get(task)
            sources = (self.models[task], traces, getattr(traces, "model", None))
            local = [source.path for source in sources if isinstance(source, LocalModel | JsonlTraces)]
            of_task = dict.fromkeys(file_of(name).as_posix() for name in [*self.task(task).own_files, *local])
            files |= {f"{task}-{number}": file for number, file in enumerate(of_task)}
        return files

    @property
    def arms(self) -> list[tuple[str, str]]:
        """The experiment and the name of each arm."""
        return [(name, arm) for name, experiment in self.experiments.items() for arm in experiment.arms]

    @property
    def active_experiments(self) -> list[str]:
        """The experiments with arms, each after the one that it builds on."""
        return [name for name, experiment in self.experiments.items() if experiment.arms]

    @property
    def left_out(self) -> list[str]:
        """The experiments without arms."""
        return [name for name, experiment in self.experiments.items() if not experiment.arms]

    @property
    def kl_in(self) -> list[str]:
        """The experiments in which a run keeps checkpoints on its way (``keep_steps``): a GRPO run, or with an old task any."""
        found = []
        for name in self.active_experiments:
            entry = self.experiments[name]
            kept = self.defaults(entry.method).keep_steps
            if entry.method == "grpo" or self.evaluation.old_task:
                found += [name] * any(arm.get("keep_steps", kept) for arm in entry.arms.values())
        return found

    @property
    def pass_at_k_in(self) -> list[str]:
        """The experiments with checkpoints to sample (``evaluation.best_of_n.checkpoints``)."""
        return list(dict.fromkeys(name.partition("/")[0] for name in self.evaluation.best_of_n.checkpoints))

    @property
    def stages_off(self) -> set[str]:
        """The stages that the study leaves out. Each writes a note in place of results, as later stages depend on those."""
        wanted = {"kissing_number": self.kissing_number is not None, "best_of_n": self.evaluation.best_of_n.prompts}
        return {stage for stage, wants in wanted.items() if not wants}

    @property
    def metric(self) -> RewardName:
        """What runs, arms and checkpoints are compared by (`evaluation.metric`)."""
        if self.evaluation.metric is not None:
            return self.evaluation.metric
        has_own = self.grpo.reward is not None and self.grpo.reward not in SHIPPED_REWARDS
        return "reward" if has_own and self._one_reward() else "answer_reward"

    def _one_reward(self) -> bool:
        """Whether all runs are trained on the same reward."""
        arms = [(entry.method, arm) for entry in self.experiments.values() for arm in entry.arms.values()]
        return all(method == "grpo" and arm.get("reward", self.grpo.reward) == self.grpo.reward for method, arm in arms)

    def _logs_own_metrics(self) -> bool:
        """Whether a task or a loss is the user's own code, which may log metrics of its own."""
        arms = [arm for entry in self.experiments.values() for arm in entry.arms.values()]
        losses = [self.grpo.loss_type, *(arm.get("loss_type", "") for arm in arms)]
        return any(map(is_import_path, [*losses, *(str(task.get("use", "")) for task in self.tasks.values())]))

    @property
    def own_claims(self) -> list[AnyClaim]:
        """The study's own claims, each with its experiment, id and statement."""
        return own_claims(self.claims, self.experiments)

    def needed_selections(self, experiment: str) -> list[str]:
        """The experiments whose winners must be known before a run of ``experiment`` can start, first to last."""
        before = self.experiments[experiment].builds_on
        return [*self.needed_selections(before), before] if before else []

    def title(self, experiment: str) -> str:
        """The experiment's title in the report."""
        return self.experiments[experiment].title or experiment

    def defaults(self, method: Method) -> RunConfig:
        """The study's hyperparameters of a method, before winners and arms."""
        config: RunConfig = getattr(self, method)
        return config

    def task(self, name: str) -> Task:
        """Make the task of this name; UserError if there is none, or its settings are wrong."""
        require_known("tasks", "no task", name, self.tasks)
        return make_task(self.tasks[name], f"tasks.{name}")

    def prompt_formats(self, name: str) -> list[str]:
        """The prompt formats in which the study asks its own model a task's questions."""
        entries = [entry for entry in self.experiments.values() if entry.task == name]
        formats = {arm.get("prompt", self.defaults(e.method).prompt) for e in entries for arm in e.arms.values()}
        if name in self.sft_datasets:
            formats.add(self.sft_datasets[name].prompt)
        if name == MAIN:
            formats |= {*self.evaluation.zero_shot_prompts, *self.evaluation.best_of_n.prompts}
        if (old := self.evaluation.old_task) and old.task == name:
            formats.add(old.prompt)
        return sorted(formats)

    def for_task(self, name: str) -> Study:
        """The study for runs of a task: on the CPU if the task's model says so."""
        if self.models[name].device != "cpu":
            return self
        engine, learner = self.engine, self.learner
        if engine.device != "cpu":
            engine = EngineSettings(name="transformers", max_batch_size=engine.max_batch_size)
        if learner.device != "cpu":
            learner = LearnerSettings(max_tokens_per_microbatch=TOKENS_ON_CPU)
        return self.model_copy(update={"engine": engine, "learner": learner})

    def needed_problems(self, name: str) -> dict[Split, dict[str, int]]:
        """The number of problems that settings need, by split and key in params.yaml."""
        train = {"grpo.rollout_batch_size / grpo.group_size": self.grpo.n_prompts_per_rollout_batch}
        if name != MAIN:
            return {"train": train}
        evaluation = self.evaluation
        evaluated = {f"evaluation.{key}": getattr(evaluation, key) for key in ("last_problems", "zero_shot_problems")}
        sampled = {"evaluation.best_of_n.problems": evaluation.best_of_n.problems} if evaluation.best_of_n.prompts else {}
        return {"train": train, "validation": evaluated | sampled}

    def check(self) -> None:
        """Check that names refer to something and that values of different sections fit together."""
        if not self.study.isprintable() or self.study.startswith(".") or Path(self.study).name != self.study or not self.study:
            raise UserError(f"study: {self.study!r} is not the name of a file: no '/', and no '.' at its beginning. Change it.")
        self._check_tasks()
        if len(set(self.seeds)) != len(self.seeds):
            raise UserError(f"seeds: {self.seeds} names a seed twice.")
        if self.seeds_in_one_stage and self.learner.processes > 1:
            raise UserError("seeds_in_one_stage: not with learner.processes above 1. Set it to false.")
        for key in ("device", "dtype") if self.engine.name == "transformers" else ():
            if (of_engine := getattr(self.engine, key)) != (of_learner := getattr(self.learner, key)):
                shared = f"with engine.name transformers runs sample from the learner's model, in learner.{key} ({of_learner})"
                raise UserError(f"engine.{key} ({of_engine}): {shared}. Set both to the same.")
        if self.evaluation.temperature == 0.0 and self.kl_in:
            no_kl = f"0 draws no samples to estimate the KL of {self.kl_in[0]}"
            raise UserError(f"evaluation.temperature: {no_kl}. Set it above 0, or drop `keep_steps`.")
        self._check_chain()
        arms = ["/".join(names) for names in self.arms]
        for name in self.evaluation.best_of_n.checkpoints:
            require_known("evaluation.best_of_n.checkpoints", "no arm", name, arms)
            if "last" not in self.checkpoints:
                raise UserError("evaluation.best_of_n.checkpoints: no run keeps its last one. Add last to `checkpoints`.")
        for name in self.controls:
            require_known("controls", "no control", name, [*CONTROLS, BEST_PROMPT])
            if name in CONTROLS and f"{CONTROLS_IN}/{name}" not in arms:
                raise UserError(f"controls: {name} has no arm in experiments.{CONTROLS_IN}. `grpo study use` adds it.")
        for name in self.selection.pinned:
            require_known("selection.pinned", "no experiment", name, self.experiments)
            for arm in self.selection.pinned_arms(name):
                require_known(f"selection.pinned.{name}", "no arm", arm, self.experiments[name].arms)
        for name, experiment in self.experiments.items():
            for arm, values in experiment.arms.items():
                self._check_arm(name, arm, values)
            wrong = {
                "learner.processes above 1": self.learner.processes > 1,
                "timed other than resources": experiment.timed not in (None, experiment.resources),
                "an arm with start_from": any(arm.get("start_from") for arm in experiment.arms.values()),
            }
            if experiment.one_stage and (given := [what for what, is_given in wrong.items() if is_given]):
                raise UserError(f"experiments.{name}.one_stage: not with {', '.join(given)}. Leave it out.")
        own_claims(self.claims, self.experiments)
        if not self._logs_own_metrics() and (unknown := unknown_metrics(self.claims)):
            raise UserError(unknown[0])
        if self.evaluation.metric == "reward" and not self._one_reward():
            raise UserError("evaluation.metric: arms differ in their reward, so reward compares none: choose answer_reward.")
        self._check_resources()
        self.runs_table()

    def _check_tasks(self) -> None:
        """Check that each task can be made, has a model, and is used with its own prompt formats."""
        require_known("tasks", "no entry", MAIN, self.tasks)
        if self.models.keys() != self.tasks.keys():
            raise UserError(f"models: needs an entry for each of `tasks:`, which are {', '.join(self.tasks)}.")
        for name in self.tasks:
            check_name(f"tasks.{name}", "a task", name, dash=False)
            self.task(name)
        for name, settings in self.sft_datasets.items():
            require_known("sft_datasets", "no task", name, self.tasks)
            self._check_formats(f"sft_datasets.{name}.prompt", name, [settings.prompt])
            if isinstance(settings, SampledTraces):
                self._check_formats(f"sft_datasets.{name}.asked_in", name, [settings.asked_in])
        self._check_formats("evaluation.zero_shot_prompts", MAIN, self.evaluation.zero_shot_prompts)
        self._check_formats("evaluation.best_of_n.prompts", MAIN, self.evaluation.best_of_n.prompts)
        if old := self.evaluation.old_task:
            require_known("evaluation.old_task.task", "no task", old.task, self.tasks)
            self._check_formats("evaluation.old_task.prompt", old.task, [old.prompt])

    def _check_formats(self, where: str, task: str, formats: list[str]) -> None:
        for name in formats:
            require_known(where, f"the task {task} has no format", name, self.task(task).formats)

    def _check_chain(self) -> None:
        """Check that each experiment builds on an earlier one with arms and the same method, and that what it names exists."""
        for number, (name, experiment) in enumerate(self.experiments.items()):
            where, on = f"experiments.{name}", experiment.builds_on
            check_name(where, "an experiment", name)
            table_of, _, which = name.rpartition("-")
            if name in RESERVED_NAMES or (which in RESERVED_SUFFIXES and table_of in self.experiments):
                raise UserError(f"{where}: the pipeline has files of its own with this name. Choose another one.")
            require_known(f"{where}.resources", "no resources", experiment.resources, self.resources)
            if experiment.timed is not None:
                require_known(f"{where}.timed", "no resources", experiment.timed, self.resources)
            if on is not None:
                require_known(f"{where}.builds_on", "no experiment before this one is named", on, [*self.experiments][:number])
                if self.experiments[on].method != experiment.method:
                    other = f"{on} uses the method {self.experiments[on].method}, not {experiment.method}"
                    raise UserError(f"{where}.builds_on: {other}: build on another experiment or on none.")
            if experiment.arms:
                require_known(f"{where}.task", "no task", experiment.task, self.tasks)
            if experiment.arms and experiment.method == "sft" and experiment.task not in self.sft_datasets:
                raise UserError(f"{where}: no examples for fine-tuning: add sft_datasets.{experiment.task}.")
        if not self.active_experiments:
            raise UserError("experiments: none has arms. Give one some.")
        for name in self.active_experiments:
            starts = (arm.get("start_from") for arm in self.experiments[name].arms.values())
            chain = self.needed_selections(name)
            for needed in chain + sorted({str(start).split("/")[0] for start in starts if start}):
                if needed in self.left_out:
                    alone = f", or run it from the study's values: experiments.{name}.builds_on: null" * (needed in chain)
                    left_out = f"experiments.{needed}.arms: left out, but {name} builds on it"
                    raise UserError(f"{left_out}. Leave {name} out too{alone}.")

    def _check_arm(self, experiment: str, arm: str, values: dict[str, Any]) -> None:
        """Check that the arm's name can be a file name, that the method accepts its values, and that they fit the study."""
        path, entry = f"experiments.{experiment}.arms.{arm}", self.experiments[experiment]
        check_name(path, "an arm", arm)
        if OFF_POLICY_RANK in values:
            rank, few = values[OFF_POLICY_RANK], self.selection.best_few
            if entry.builds_on is None:
                raise UserError(f"{path}.{OFF_POLICY_RANK}: {experiment} builds on no sweep: set builds_on, or remove this.")
            if type(rank) is not int or not 1 <= rank <= few:
                raise UserError(f"{path}.{OFF_POLICY_RANK}: {rank!r} is no whole number from 1 to selection.best_few ({few}).")
        config = apply_overrides(self.defaults(entry.method), values, path)
        self._check_formats(f"{path}: prompt", entry.task, [config.prompt])
        learner = self.for_task(entry.task).learner
        clashes = {"lora": learner.fully_shard and "fully_shard", "asynchronous": learner.processes > 1 and "processes"}
        for what, key in clashes.items():
            if key and getattr(config, what, None) is not None:
                remedy = f"Leave that out, or {experiment} (`experiments: {{without: [...]}}`)"
                raise UserError(f"{path}.{what}: not with learner.{key}. {remedy}.")
        if isinstance(config, GrpoConfig) and config.start_from is not None:
            what = "fine-tuning (see its keep_steps) keeps no checkpoint"
            require_known(f"{path}.start_from", what, config.start_from, self._kept_checkpoints())
            start = config.start_from.split("/")[0]
            if len(self.seeds_of(start)) < (seeds := len(self.seeds_of(experiment))):
                raise UserError(f"{path}.start_from: {start} has fewer seeds: raise experiments.{start}.seeds to {seeds}.")

    def _kept_checkpoints(self) -> list[str]:
        """The checkpoints of supervised fine-tuning from which GRPO may start."""
        return [
            f"{name}/{arm}/{kind}"
            for name, experiment in self.experiments.items()
            if experiment.method == "sft"
            for arm, values in experiment.arms.items()
            for kind in (*(f"step-{step}" for step in apply_overrides(self.sft, values, arm).keep_steps), *self.checkpoints)
        ]

    def _check_resources(self) -> None:
        """Check that stages which compute on the CPU have a core for each thread."""
        for kind in ("small", "model", "evaluate"):
            require_known("resources", "stages that train no run need", kind, self.resources)
        # Models are always pretrained on the CPU; copying one takes a single core.
        pretrains = any(model.source == "pretrain" for model in self.models.values())
        on_cpu = {kind for kind, computes in (("model", pretrains), ("evaluate", self.engine.device == "cpu")) if computes}
        for experiment in (self.experiments[name] for name in self.active_experiments):
            study = self.for_task(experiment.task)
            if "cpu" in (study.engine.device, study.learner.device):
                on_cpu |= {experiment.resources, experiment.timed or experiment.resources}
        for kind, resources in self.resources.items():
            if kind in on_cpu and resources.cpus < self.threads:
                threads = f"these stages compute on the CPU with {self.threads} threads"
                raise UserError(f"resources.{kind}.cpus ({resources.cpus}): {threads}: reserve as many, or lower `threads`.")


def load_study(path: Path = paths.PARAMS) -> Study:
    """Read and validate a study: params.yaml with a current stages.yaml, or a study file with the files that it extends."""
    if path.name != paths.PARAMS.name:
        return validated(compose(path), path)
    study = validated(read_mapping(path), path)
    require_current_stages(study, path.with_name(paths.STAGES.name))
    return study


def validated(values: dict[str, Any], path: Path) -> Study:
    """Validate ``values`` as a study; messages name ``path``."""
    folder = values.get("folder", STUDIES_FOLDER.as_posix())
    if isinstance(folder, str):
        folders = [Path(place) for place in folder.split(os.pathsep)]  # `grpo run` has several
        if not all(place.is_dir() for place in folders) and folder != STUDIES_FOLDER.as_posix():
            remedy = "Restore it, or run `grpo study use FILE` with the study's file in its new place"
            raise UserError(f"{path}: folder: no folder {folder} with the study's own modules and data. {remedy}.")
        if values.get("file") is not None and paths.project_in(folders[0]):
            raise UserError(f"{path}: folder: {folder} contains the project, so its stages would depend on their own results.")
        with_package = [paths.shipped("studies")] if folder == STUDIES_FOLDER.as_posix() else []
        search_in(*folders, *with_package)  # an installed package's studies have modules too
    try:
        return Study.model_validate(values)
    except ValidationError as error:
        raise UserError("\n".join(f"{path}: {line}" for line in explain(error, values))) from error

"""What a study may say about fine-tuning, expert iteration and the keyword task, and which files their runs use."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML
from study_parts import (
    ASYNCHRONOUS,
    EXPERIMENTS,
    EXPERT_ITERATION,
    KEYWORD,
    SFT,
    SFT_INITIALIZATION,
    STUDIES,
    Edit,
    edited,
    method_of,
    new_arm,
    refused,
    shard_learner,
    values_of,
)

from grpo.common.errors import UserError
from grpo.common.imports import call_with
from grpo.study.effective import effective_run
from grpo.study.methods import ExpertIterationConfig, GrpoConfig, SftConfig, evaluation_steps
from grpo.study.schema import Study, load_study

ROOT = Path(__file__).parents[2]

# ------------------------------------------------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("section", "value", "message"),
    [
        ("models", {"hidden_size": "x"}, "models.main.hidden_size: input should be a valid integer, but it is 'x'."),
        ("models", {"hidden_size": 30}, "models.main: hidden_size 30 must be a multiple of 2 x num_attention_heads"),
        ("models", {"hub": 1}, "models.main.hub: unknown key."),
        ("models", {"source": "hub"}, "models.main.repo: missing."),
        ("models", {"source": "web"}, "models.main: input tag 'web' found using 'source' does not match any of"),
        ("tasks", {"problems": {"train": [1]}}, "tasks.main: unknown: problems."),
    ],
)
def test_a_mistake_is_told_by_its_place_in_the_file(tmp_path: Path, section: str, value: dict[str, Any], message: str) -> None:
    """Also within a union, whose members' names pydantic puts among the keys."""
    assert message in refused(tmp_path, lambda values: values[section]["main"].update(value))


LONG = "a" * 300


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda v: v["grpo"].update(learning_rate=math.inf), "grpo.learning_rate: input should be a finite number"),
        (lambda v: v["sft"].update(learning_rate=math.nan), "sft.learning_rate: input should be a finite number"),
        (lambda v: v["models"]["main"].update(learning_rate=math.inf), "models.main.learning_rate: input should be a finite"),
        (lambda v: v["evaluation"].update(temperature=math.inf), "evaluation.temperature: input should be a finite number"),
        (new_arm("grpo_lora", learning_rate_times=math.inf), "learning_rate: input should be a finite number, but it is inf."),
        (new_arm("grpo_learning_rate", learning_rate=math.inf), "arms.extra: learning_rate: input should be a finite number"),
        (lambda v: v.update(seeds=[2**63]), "seeds.0: input should be less than 9223372036854775808"),
        (lambda v: v["grpo"].update(advantage_eps=10**400), "grpo.advantage_eps: input should be a valid number, but"),
        (new_arm("grpo_learning_rate", LONG), f"arms.{LONG}: the name of an arm may have 100 characters, not 300."),
        (new_arm("grpo_learning_rate", "a/b"), "arms.a/b: the name of an arm may hold letters, digits, '_' and '-' only."),
        (lambda v: v.update(study=LONG), "study: string should have at most 100 characters, but it is 'aaa"),
        (
            lambda v: (v["tasks"].update({LONG: v["tasks"]["main"]}), v["models"].update({LONG: v["models"]["main"]})),
            f"tasks.{LONG}: the name of a task may have 100 characters, not 300.",
        ),
        (
            lambda v: (v["experiments"].update({LONG: {"arms": {"x": {}}}}), v["select_in"].append(LONG)),
            f"experiments.{LONG}: the name of an experiment may have 100 characters, not 300.",
        ),
    ],
)  # fmt: skip
def test_what_no_optimizer_and_no_file_takes_is_refused_when_it_is_read(tmp_path: Path, edit: Edit, message: str) -> None:
    values = values_of("mini")
    edit(values)
    YAML().dump(values, tmp_path / "params.yaml")  # JSON has no word for infinity that YAML reads
    with pytest.raises(UserError) as caught:
        load_study(tmp_path / "params.yaml")
    assert message in str(caught.value) and len(str(caught.value)) < 1000


def test_names_of_a_hundred_characters_can_be_files(tmp_path: Path) -> None:
    """An experiment, an arm and the largest seed stand in one file's name, beside what says what the file is."""
    study = edited(tmp_path, lambda v: (v.update(seeds=[2**63 - 1]), new_arm("grpo_learning_rate", "a" * 100)(v)))
    (tmp_path / f".{'e' * 100}@{'a' * 100}-{study.seeds[0]}.old.draft.lock").touch()


def test_an_argument_that_may_be_of_several_types(tmp_path: Path) -> None:
    def takes(which: list[int] | str) -> None: ...

    with pytest.raises(UserError, match=r"^tasks\.main\.which\.1: input should be a valid integer, but it is 'x'\."):
        call_with(takes, {"which": [1, "x"]}, "tasks.main")


# ---------------------------------------------------------------------------------------------------------- start_from


@pytest.mark.parametrize("experiment", [name for name in EXPERIMENTS if name != KEYWORD])
def test_any_grpo_arm_may_start_from_a_checkpoint_of_fine_tuning(tmp_path: Path, experiment: str) -> None:
    arm = new_arm(experiment, start_from=f"{SFT}/all/last")
    if method_of(experiment) == "grpo":
        study = edited(tmp_path, arm)
        assert effective_run(study, experiment, "extra", 0, []).model == Path(f"data/checkpoints/{SFT}/all/0/last")
        assert SFT in study.needed_experiments(experiment)
    else:
        assert f"experiments.{experiment}.arms.extra: start_from: unknown key" in refused(tmp_path, arm)


def test_any_grpo_arm_may_be_asynchronous(tmp_path: Path) -> None:
    study = edited(tmp_path, new_arm("grpo_baselines", asynchronous={"max_policy_lag": 2}))
    config = effective_run(study, "grpo_baselines", "extra", 0, []).config
    assert isinstance(config, GrpoConfig) and config.asynchronous is not None and config.asynchronous.max_policy_lag == 2


def test_an_asynchronous_setting_is_refused_with_its_path(tmp_path: Path) -> None:
    message = refused(tmp_path, new_arm(ASYNCHRONOUS, asynchronous={"max_policy_lag": 3, "replay_max_age": 2}))
    assert "arms.extra" in message and "replay_max_age (2) would drop new rollouts" in message
    message = refused(tmp_path, new_arm(ASYNCHRONOUS, asynchronous={}, measure_kl=True))
    assert "measure_kl needs rollouts of the current policy" in message


def sft_arms(values: dict[str, Any]) -> None:
    """Two arms, of which one keeps what it has after steps 4 and 9, and no arm that starts from others."""
    values["experiments"][SFT]["arms"] = {"few": {"examples": 8}, "all": {"keep_steps": [4, 9]}}
    values["experiments"][SFT_INITIALIZATION]["arms"] = {"base": {}}


@pytest.mark.parametrize("kept", [["last", "best"], ["last"], ["best"]])
def test_a_start_is_one_of_the_checkpoints_that_are_kept(tmp_path: Path, kept: list[str]) -> None:
    def edit(start: Any) -> Edit:
        def change(values: dict[str, Any]) -> None:
            sft_arms(values)
            values["checkpoints"] = kept
            values["experiments"][SFT_INITIALIZATION]["arms"]["extra"] = {"start_from": start}

        return change

    known = [f"{SFT}/few/{kind}" for kind in kept]
    known += [f"{SFT}/all/{kind}" for kind in ("step-4", "step-9", *kept)]
    for start in known:
        study = edited(tmp_path, edit(start))
        assert study.experiments[SFT_INITIALIZATION].arms["extra"] == {"start_from": start}
    wrong = [
        f"{SFT}/few/step-4",
        f"{SFT}/all/step-5",
        f"{SFT}/none/last",
        f"{EXPERT_ITERATION}/all/last",
        "last",
        "",
        *(f"{SFT}/all/{kind}" for kind in {"last", "best"} - set(kept)),
    ]
    for start in wrong:
        message = refused(tmp_path, edit(start))
        assert (
            f"experiments.{SFT_INITIALIZATION}.arms.extra.start_from: no arm of supervised fine-tuning keeps the checkpoint "
            f"{start!r} (known: "
        ) in message
        assert f"(known: {', '.join(known)}; keep_steps keeps more)" in message


def test_steps_that_all_arms_keep_stand_in_the_section(tmp_path: Path) -> None:
    def edit(values: dict[str, Any]) -> None:
        values["experiments"][SFT]["arms"] = {"few": {"examples": 8}, "all": {"keep_steps": []}}
        values["sft"]["keep_steps"] = [2]
        values["experiments"][SFT_INITIALIZATION]["arms"] = {"base": {"start_from": f"{SFT}/few/step-2"}}

    edited(tmp_path, edit)

    def other(values: dict[str, Any]) -> None:
        edit(values)
        values["experiments"][SFT_INITIALIZATION]["arms"] = {"base": {"start_from": f"{SFT}/all/step-2"}}

    assert "keeps the checkpoint" in refused(tmp_path, other)


@pytest.mark.parametrize(("steps", "late"), [([31], [31]), ([1, 30, 31, 99], [31, 99])])
def test_steps_after_the_last_cannot_be_kept(tmp_path: Path, steps: list[int], late: list[int]) -> None:
    def edit(values: dict[str, Any]) -> None:
        values["sft"]["n_sft_steps"] = 30
        values["experiments"][SFT]["arms"]["extra"] = {"keep_steps": steps}

    message = refused(tmp_path, edit)
    assert f"experiments.{SFT}.arms.extra: " in message
    assert f"keep_steps: {late} come after the last step, n_sft_steps (30)" in message
    assert SftConfig(n_sft_steps=30, keep_steps=[1, 30]).keep_steps == [1, 30]


# --------------------------------------------------------------------------------------------------------------- prompts


@pytest.mark.parametrize("experiment", [name for name in EXPERIMENTS if name != KEYWORD])
def test_the_keyword_prompt_is_for_its_experiment_only(tmp_path: Path, experiment: str) -> None:
    message = refused(tmp_path, new_arm(experiment, prompt="keyword"))
    assert f"experiments.{experiment}.arms.extra: prompt: the task main has no format 'keyword'" in message


@pytest.mark.parametrize("overrides", [{}, {"prompt": "r1_zero"}])
def test_the_keyword_experiment_needs_its_prompt(tmp_path: Path, overrides: dict[str, Any]) -> None:
    message = refused(tmp_path, new_arm(KEYWORD, **overrides))
    assert f"experiments.{KEYWORD}.arms.extra: prompt: the task keyword has no format 'r1_zero'" in message


# --------------------------------------------------------------------------------------------------- methods and last_k


@pytest.mark.parametrize(
    ("experiment", "overrides", "key"),
    [
        (SFT, {"group_size": 4}, "group_size"),
        (SFT, {"loss_type": "grpo_clip"}, "loss_type"),
        (SFT, {"n_grpo_steps": 4}, "n_grpo_steps"),
        (EXPERT_ITERATION, {"filtered": True}, "filtered"),
        (EXPERT_ITERATION, {"rollout_batch_size": 64}, "rollout_batch_size"),
        ("grpo_learning_rate", {"ei_batch_size": 64}, "ei_batch_size"),
        ("grpo_learning_rate", {"examples": 64}, "examples"),
    ],
)
def test_an_arm_changes_what_its_method_has(tmp_path: Path, experiment: str, overrides: dict[str, Any], key: str) -> None:
    assert f"experiments.{experiment}.arms.extra: {key}: unknown key" in refused(tmp_path, new_arm(experiment, **overrides))


@pytest.mark.parametrize(
    ("experiment", "overrides", "told"),
    [
        (SFT, {"train_batch_size": 10, "gradient_accumulation_steps": 3}, "train_batch_size (10) must be divisible by"),
        (EXPERT_ITERATION, {"train_batch_size": 10, "gradient_accumulation_steps": 4}, "train_batch_size (10)"),
        (EXPERT_ITERATION, {"sampling_min_tokens": 99, "sampling_max_tokens": 9}, "sampling_min_tokens (99) must not exceed"),
        (SFT, {"examples": 0}, "examples"),
        (SFT, {"n_sft_steps": 1.5}, "n_sft_steps"),
    ],
)
def test_values_that_do_not_fit_are_refused(tmp_path: Path, experiment: str, overrides: dict[str, Any], told: str) -> None:
    message = refused(tmp_path, new_arm(experiment, **overrides))
    assert f"experiments.{experiment}.arms.extra: " in message and told in message


def test_an_experiments_last_k_comes_before_the_studys(tmp_path: Path) -> None:
    def edit(values: dict[str, Any]) -> None:
        values["selection"]["last_k"] = 2
        for name, experiment in values["experiments"].items():
            experiment.pop("last_k", None)
            if name in (SFT, "leaderboard"):
                experiment["last_k"] = {SFT: 3, "leaderboard": 1}[name]

    study = edited(tmp_path, edit)
    assert {name: study.last_k(name) for name in EXPERIMENTS} == dict.fromkeys(EXPERIMENTS, 2) | {SFT: 3, "leaderboard": 1}

    def nothing(values: dict[str, Any]) -> None:
        values["experiments"][SFT]["last_k"] = 0

    assert f"experiments.{SFT}.last_k" in refused(tmp_path, nothing)


# ------------------------------------------------------------------------------------------------------- what a run uses


def test_each_kind_of_run_has_its_model_and_its_data(mini_study: Study) -> None:
    base, problems = "data/model/main", ("data/dataset/main/train.jsonl", "data/dataset/main/validation.jsonl")
    words = tuple(f"data/dataset/keyword/{split}.jsonl" for split in ("train", "validation"))
    expected = {
        ("grpo_learning_rate", "3e-4"): (base, *problems),
        (SFT, "all"): (base, "data/sft_dataset/main/train.jsonl", problems[1]),
        (EXPERT_ITERATION, next(iter(mini_study.experiments[EXPERT_ITERATION].arms))): (base, *problems),
        (SFT_INITIALIZATION, "base"): (base, *problems),
        (SFT_INITIALIZATION, "sft_final"): (f"data/checkpoints/{SFT}/all/SEED/last", *problems),
        (KEYWORD, next(iter(mini_study.experiments[KEYWORD].arms))): ("data/model/keyword", *words),
    }
    study = mini_study.model_copy(update={"seeds": [0, 7]})
    for seed in study.seeds:  # a run starts from the checkpoint of its own seed
        for (experiment, arm), files in expected.items():
            run = effective_run(study, experiment, arm, seed, [])
            found = tuple(path.as_posix() for path in (run.model, run.train, run.validation))
            assert found == (files[0].replace("SEED", str(seed)), *files[1:])


@pytest.mark.parametrize("experiment", list(EXPERIMENTS))
def test_an_experiments_method_decides_the_configuration(mini_study: Study, experiment: str) -> None:
    kinds = {SFT: SftConfig, EXPERT_ITERATION: ExpertIterationConfig}
    arm = next(iter(mini_study.experiments[experiment].arms))
    run = effective_run(mini_study, experiment, arm, 0, [])
    assert type(run.config) is kinds.get(experiment, GrpoConfig)
    assert set(run.sources) == set(type(run.config).model_fields)
    assert {key for key, source in run.sources.items() if source == f"arm {arm}"} == set(run.overrides)


@pytest.mark.parametrize("every", [[], [4, 2], [2, 2], [0, 2]])
def test_first_evaluations_are_named_once_in_rising_order(tmp_path: Path, every: list[int]) -> None:
    def edit(values: dict[str, Any]) -> None:
        values["evaluation"]["every"] = every

    assert "evaluation.every" in refused(tmp_path, edit)


def test_each_method_is_evaluated_at_its_own_steps() -> None:
    assert evaluation_steps(GrpoConfig(n_grpo_steps=10), 4) == [0, 4, 8, 10]
    assert evaluation_steps(GrpoConfig(n_grpo_steps=3), 4) == [0, 3]
    assert evaluation_steps(GrpoConfig(n_grpo_steps=20), [1, 2, 8]) == [0, 1, 2, 8, 16, 20]
    assert evaluation_steps(GrpoConfig(n_grpo_steps=5), [1, 2, 8]) == [0, 1, 2, 5]
    assert evaluation_steps(SftConfig(n_sft_steps=6, evaluate_every=3), [1, 2]) == [0, 3, 6]
    assert evaluation_steps(SftConfig(n_sft_steps=7, evaluate_every=3), 4) == [0, 3, 6, 7]
    assert evaluation_steps(ExpertIterationConfig(n_ei_steps=3), 4) == [0, 1, 2, 3]


# ------------------------------------------------------------------------------------------------------------- resources


@pytest.mark.parametrize("kind", ["model", "train_on_cpu", "evaluate", "train", "colocate", "asynchronous"])
def test_a_stage_that_computes_on_the_cpu_has_a_core_for_each_thread(tmp_path: Path, kind: str) -> None:
    def edit(values: dict[str, Any]) -> None:
        values["threads"] = 3
        for name, resources in values["resources"].items():
            resources["cpus"] = 2 if name == kind else 3
        values["resources"]["small"]["cpus"] = 1

    message = refused(tmp_path, edit)
    assert f"resources.{kind}.cpus (2): these stages compute on the CPU with 3 threads: reserve as many" in message

    def on_gpu(values: dict[str, Any]) -> None:
        edit(values)
        values["engine"] |= {"name": "vllm", "device": "cuda:0"}
        values["learner"]["device"] = "cuda:0"

    if kind in ("model", "train_on_cpu"):
        assert f"resources.{kind}.cpus (2)" in refused(tmp_path, on_gpu)
    else:
        assert edited(tmp_path, on_gpu).resources[kind].cpus == 2


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        ({"sleep_level": 2}, "engine: sleep_level 2: vLLM can only sleep on a GPU: set it to 0, or device to cuda:0"),
        ({"device": "cuda:1"}, "engine: device 'cuda:1': vLLM takes the first GPU that it sees: set it to cuda:0"),
    ],
)
def test_an_engine_that_cannot_run_there_is_refused_when_the_study_is_read(
    tmp_path: Path, engine: dict[str, Any], message: str
) -> None:
    assert message in refused(tmp_path, lambda values: values["engine"].update({"name": "vllm", "device": "cpu", **engine}))


def test_a_stage_that_copies_a_model_needs_no_core_for_each_thread(tmp_path: Path) -> None:
    def edit(values: dict[str, Any]) -> None:
        values["threads"] = 2
        for name, resources in values["resources"].items():
            resources["cpus"] = 1 if name == "model" else 2
        values["models"] = {task: {"source": "local", "path": "my-model"} for task in values["models"]}

    assert edited(tmp_path, edit).resources["model"].cpus == 1

    def one_pretrained(values: dict[str, Any]) -> None:
        pretrained = values["models"]["keyword"]
        edit(values)
        values["models"]["keyword"] = pretrained

    assert "resources.model.cpus (1)" in refused(tmp_path, one_pretrained)


def test_runs_that_are_on_the_cpu_in_a_study_for_gpus_reserve_none(tmp_path: Path) -> None:
    def reserve(values: dict[str, Any]) -> None:
        values["resources"]["train_on_cpu"]["gpus"] = 1

    def for_gpus(values: dict[str, Any]) -> None:
        reserve(values)
        values["learner"]["device"] = "cuda:0"

    assert (
        edited(tmp_path, reserve).resources["train_on_cpu"].gpus == 1
    )  # of no use, but it may be wanted, as in our Slurm tests
    message = refused(tmp_path, for_gpus)
    assert "resources.train_on_cpu.gpus: the runs of grpo_keyword_inclusion compute on the CPU: set it to 0" in message
    assert (
        "resources: no 'train_on_cpu' under resources (known: small, model, traces, evaluate, train, asynchronous, colocate)"
        in refused(tmp_path, lambda values: values["resources"].pop("train_on_cpu"))
    )
    assert load_study(ROOT / "studies" / "mini.yaml").experiments[KEYWORD].resources == "train_on_cpu"


def test_a_small_model_computes_on_the_cpu_in_a_study_for_gpus(mini_study: Study) -> None:
    for_gpus = load_study(ROOT / "studies" / "math-24gb.yaml")
    study = for_gpus.for_task("keyword")
    assert (study.engine.name, study.engine.device, study.engine.sleep_level) == ("transformers", "cpu", 0)
    assert (study.learner.device, study.learner.dtype, study.learner.optimizer) == ("cpu", "float32", "adamw")
    assert for_gpus.for_task("main") == for_gpus
    assert mini_study.for_task("keyword") == mini_study


@pytest.mark.parametrize(
    ("learner", "told"),
    [
        ({"processes": 1}, "fully_shard: processes is 1: set it to 2 or more"),
        ({"optimizer": "adamw_8bit"}, "fully_shard: optimizer is adamw_8bit: set it to adamw"),
        ({"offload_reference": True}, "fully_shard: offload_reference is on: set it to false"),
        ({"compile": True}, "fully_shard: compile is on: set it to false"),
    ],
)
def test_what_cannot_be_sharded_is_refused_with_the_remedy(tmp_path: Path, learner: dict[str, Any], told: str) -> None:
    def edit(values: dict[str, Any]) -> None:
        shard_learner(values)
        values["learner"] |= learner

    assert told in refused(tmp_path, edit) and len(refused(tmp_path, edit).splitlines()) == 1


@pytest.mark.parametrize("changes", [{"lora": {"rank": 1}}, {"asynchronous": {"max_policy_lag": 1}, "measure_kl": False}])
def test_adapters_and_actors_are_not_sharded(tmp_path: Path, changes: dict[str, Any]) -> None:
    def edit(values: dict[str, Any]) -> None:
        shard_learner(values)
        new_arm("grpo_baselines", **changes)(values)

    message = refused(tmp_path, edit)
    assert f"experiments.grpo_baselines.arms.extra.{next(iter(changes))}: not with learner.fully_shard." in message
    assert "leave grpo_baselines out" in message and len(message.splitlines()) == 1


def test_a_run_that_is_not_sharded_is_recorded_as_before_any_was(tmp_path: Path, mini_study: Study) -> None:
    assert "fully_shard" not in mini_study.learner.model_dump()
    assert edited(tmp_path, shard_learner).learner.model_dump()["fully_shard"] is True


# ------------------------------------------------------------------------------------------------ evaluations that count


def counting(last_k: int, **sections: dict[str, Any]) -> Edit:
    """Every experiment counts by so many last evaluations; values of sections change."""

    def edit(values: dict[str, Any]) -> None:
        values["selection"]["last_k"] = last_k
        for experiment in values["experiments"].values():
            experiment.pop("last_k", None)
        for name, changes in sections.items():
            values[name] |= changes

    return edit


@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.stem)
def test_runs_of_every_study_have_the_evaluations_that_they_count_by(path: Path) -> None:
    study = load_study(path)
    for experiment, content in study.experiments.items():
        for arm in content.arms:
            config = effective_run(study, experiment, arm, study.seeds[0], []).config
            after_the_start = evaluation_steps(config, study.evaluation.every)[1:]
            assert len(after_the_start) >= study.last_k(experiment), (experiment, arm)
    broad = [arm["n_grpo_steps"] for arm in study.experiments["grpo_off_policy_sweep_broad"].arms.values()]
    assert all(steps < 50 for steps in broad)  # the handout's rule


@pytest.mark.parametrize(
    ("edit", "told"),
    [
        (new_arm("grpo_baselines", n_grpo_steps=1), "grpo_baselines.arms.extra: a run of 1 steps is evaluated 1 time "),
        (
            counting(4, sft={"evaluate_every": 1}, evaluation={"every": 32}),
            "grpo_learning_rate.arms.1e-4: a run of 64 steps is evaluated 2 times ",
        ),
        (
            counting(4),
            "sft_experiment.arms.examples_128: a run of 24 steps is evaluated 3 times after its start, fewer than last_k (4)",
        ),
        (counting(6, sft={"evaluate_every": 1}), "arms.questions_32-rollouts_4-epochs_1: a run of 4 steps is evaluated 4 "),
        (counting(2, sft={"evaluate_every": 24}), "sft_experiment.arms.examples_128: a run of 24 steps is evaluated 1 time "),
    ],
)
def test_a_run_with_fewer_evaluations_than_it_counts_by_is_refused(tmp_path: Path, edit: Edit, told: str) -> None:
    message = refused(tmp_path, edit)
    assert "params.yaml: experiments." in message and told in message
    assert len(message.splitlines()) == 1


def test_the_refusal_names_the_remedy_of_the_method(tmp_path: Path) -> None:
    message = refused(tmp_path, new_arm("grpo_baselines", n_grpo_steps=1))
    assert message.endswith(
        "after its start, fewer than last_k (3): raise n_grpo_steps, lower evaluation.every, or give "
        "grpo_baselines a last_k of 1."
    )
    message = refused(tmp_path, new_arm(SFT, evaluate_every=24))
    assert message.endswith("raise n_sft_steps, lower evaluate_every, or give sft_experiment a last_k of 1.")
    message = refused(tmp_path, counting(6, sft={"evaluate_every": 1}))
    assert message.endswith("raise n_ei_steps, or give expert_iteration_experiment a last_k of 4.")


def test_steps_that_may_come_from_an_earlier_winner_count_too(tmp_path: Path) -> None:
    """An arm of one step counts by one evaluation in its own experiment; those after it, which may start from it, by three."""

    def short_winner(values: dict[str, Any]) -> None:
        values["experiments"]["grpo_baselines"]["last_k"] = 1
        values["experiments"]["grpo_baselines"]["arms"]["no_baseline"]["n_grpo_steps"] = 1

    message = refused(tmp_path, short_winner)
    assert "experiments.grpo_length_normalization.arms.masked_mean: a run of 1 steps is evaluated 1 time" in message

    def pinned(values: dict[str, Any]) -> None:
        short_winner(values)
        values["selection"]["pinned"] = {"grpo_baselines": "reinforce_with_baseline"}

    assert edited(tmp_path, pinned).selection.pinned  # then it cannot win

    def own_steps_again(values: dict[str, Any]) -> None:
        """The arms of the next experiment say themselves how long they train, and hand that on."""
        short_winner(values)
        for arm in values["experiments"]["grpo_length_normalization"]["arms"].values():
            arm["n_grpo_steps"] = 16

    assert edited(tmp_path, own_steps_again).grpo.n_grpo_steps == 64

    def ranked(values: dict[str, Any]) -> None:
        """The sweep's short arms hand their steps on with the rest of their values."""
        values["experiments"]["grpo_off_policy_sweep_broad"]["last_k"] = 1
        for arm in values["experiments"]["grpo_off_policy_sweep_broad"]["arms"].values():
            arm["n_grpo_steps"] = 1
        del values["experiments"]["grpo_off_policy_sweep_focused"]["arms"]["best_2"]["n_grpo_steps"]

    message = refused(tmp_path, ranked)
    assert "experiments.grpo_off_policy_sweep_focused.arms.best_2: a run of 1 steps is evaluated 1 time" in message

"""Mistakes in params.yaml: each is told in one message by its place, with what was expected."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from study_parts import (
    ASYNCHRONOUS,
    BROAD,
    EXPERIMENTS,
    EXPERT_ITERATION,
    FOCUSED,
    KEYWORD,
    REMOVED,
    ROOT,
    SFT,
    SFT_INITIALIZATION,
    Edit,
    Grpo,
    all_of,
    edited,
    in_two_processes,
    new_arm,
    put,
    refused,
    shard_learner,
    values_of,
)

from grpo.common.errors import UserError
from grpo.common.imports import call_with
from grpo.study.schema import RESERVED_NAMES, RESERVED_SUFFIXES

LONG = "a" * 300
NO_FILE_NAMES = ("", "..", "../../evil", "/etc/evil", "a/", "a\nb", "a\0b")


def entry(name: str, **values: Any) -> Edit:
    """An edit that adds an experiment."""
    return put(f"experiments.{name}", {"arms": {"x": {}}} | values)


def claim(**values: Any) -> Edit:
    """An edit that makes a claim with a margin of .05."""
    return put("claims", [{"by": 0.05} | values])


def evaluated_on(problems: int, last: int, selecting: int) -> Edit:
    """An edit of the numbers of problems of a run's evaluations."""
    counts = {"problems": problems, "last_problems": last, "selection_problems": selecting}
    return all_of(*(put(f"evaluation.{key}", value) for key, value in counts.items()))


NO_FACTOR = ".learning_rate_times: expected a number above 0, and no learning_rate beside it, but it is"
NO_RANK = "is no whole number from 1 to selection.best_few (2)"
ON_GPU = put("learner.device", "cuda:0")
# The edit, and how the message begins after the file's name.
MISTAKES: list[tuple[Edit, str]] = [
    # Types, ranges and keys, also within a union, whose members' names pydantic puts among the keys.
    (put("models.main.hidden_size", 30), "models.main: hidden_size 30 must be a multiple of 2 x num_attention_heads"),
    (put("models.main.source", "web"), "models.main: input tag 'web' found using 'source' does not match any of"),
    (put("grpo.advantage_eps", 10**400), "grpo.advantage_eps: input should be a valid number, but"),
    (put("seeds", [1, 1]), "seeds: [1, 1] names a seed twice."),
    (put("seeds", [*range(1001)]), "seeds: "),
    (put("grpo.objective", "dapo"), "grpo.objective: only allowed in study files and arms."),
    (put("kissing_number", {"strategy": "hybrid"}), "kissing_number: a strategy needs a limit"),
    (put("kissing_number", {"calls": 9}), "kissing_number: a strategy needs a limit"),
    (put("kissing_number", {"strategy": "hybrid", "calls": 9}), "kissing_number: a strategy needs a model"),
    (put("kissing_number", {"model": "a/b"}), "kissing_number: a strategy needs a model"),
    (put("evaluation.every", [4, 2]), "evaluation: every: [4, 2] must list each step once, in rising order."),
    (put("evaluation.best_of_n.n", [400]), "evaluation.best_of_n: n: 400 cannot be chosen from samples (16)"),
    # Names
    (new_arm(SFT, LONG), f"experiments.{SFT}.arms.{LONG}: the name of an arm may have 100 characters, not 300."),
    (new_arm(SFT, "a/b"), f"experiments.{SFT}.arms.a/b: the name of an arm may hold letters, digits, '_' and '-' only."),
    # Names that meet, or that are no part of a path
    (
        all_of(entry("lr", arms={"low-1": {}}), entry("lr-low", arms={"1": {}})),
        "experiments.lr.arms.low-1 and experiments.lr-low.arms.1: both would be train@lr-low-1.",
    ),
    (
        all_of(entry("a", arms={"b-c": {}}), entry("a-b", arms={"c": {}}), put("seeds_in_one_stage", False)),
        "experiments.a.arms.b-c and experiments.a-b.arms.c: both would be train@a-b-c-0. Rename one.",
    ),
    (entry("software"), "experiments.software: the pipeline has files of its own with this name."),
    (entry(f"{SFT}-rates"), f"experiments.{SFT}-rates: the pipeline has files of its own with this name."),
    *((put("study", name), f"study: {name!r} is not the name of a file: ") for name in NO_FILE_NAMES),
    (entry(LONG), f"experiments.{LONG}: the name of an experiment may have 100 characters, not 300."),
    (
        lambda v: (v["tasks"].update({LONG: v["tasks"]["main"]}), v["models"].update({LONG: v["models"]["main"]})),
        f"tasks.{LONG}: the name of a task may have 100 characters, not 300.",
    ),
    (put("study", ".mini"), "study: '.mini' is not the name of a file: "),
    (
        lambda v: (v["tasks"].update({"a-b": v["tasks"]["main"]}), v["models"].update({"a-b": v["models"]["main"]})),
        "tasks.a-b: the name of a task may hold letters, digits and '_' only.",
    ),
    # Tasks and their formats
    (put("tasks.main.problems", {"train": [1]}), "tasks.main: got an unexpected keyword argument 'problems'. Arithmetic"),
    (put("tasks.main", {"use": "json:dumps"}), "tasks.main.use: json:dumps is no subclass of grpo.tasks.Task."),
    (put("tasks.main", {"use": "sudoku"}), "tasks.main.use: expected one of arithmetic, math, gsm8k, keyword, dataset,"),
    (put("tasks.main", {"use": "math"}), "tasks.main: missing a required argument: 'source'. Math takes source, "),
    (put("tasks", {}), "tasks: no entry 'main' (known: none)."),
    (put("models.keyword", REMOVED), "models: needs an entry for each of `tasks:`, which are main, keyword."),
    (put("sft_datasets.x", {"source": "task", "prompt": "r1_zero"}), "sft_datasets: no task 'x' (known: main, keyword)."),
    (put("sft_datasets.main.prompt", "x"), "sft_datasets.main.prompt: the task main has no format 'x' (known: r1_zero, "),
    (put("sft_datasets.main", REMOVED), f"experiments.{SFT}: no examples for fine-tuning: add sft_datasets.main."),
    (put("evaluation.zero_shot_prompts", ["x"]), "evaluation.zero_shot_prompts: the task main has no format 'x'"),
    (put("evaluation.best_of_n.prompts", ["x"]), "evaluation.best_of_n.prompts: the task main has no format 'x'"),
    # Experiments
    (put("experiments.grpo_baselines.builds_on", "leaderboard"), "experiments.grpo_baselines.builds_on: no experiment before"),
    (put("experiments.grpo_baselines.builds_on", SFT), "experiments.grpo_baselines.builds_on: sft_experiment uses the method"),
    (put("experiments.grpo_baselines.task", "x"), "experiments.grpo_baselines.task: no task 'x' (known: main, keyword)."),
    (
        all_of(put("seeds", [3, 4, 5]), put(f"experiments.{SFT}.seeds", 2), put(f"experiments.{SFT_INITIALIZATION}.seeds", 3)),
        f"experiments.{SFT_INITIALIZATION}.arms.sft_early.start_from: {SFT} has fewer seeds: raise "
        f"experiments.{SFT}.seeds to 3.",
    ),
    (put("experiments.grpo_lora.timed", "no_such"), "experiments.grpo_lora.timed: no resources 'no_such' (known: small, "),
    (put("selection.pinned", {"x": "y"}), "selection.pinned: no experiment 'x' (known: "),
    (put("selection.pinned", {"grpo_lora": "y"}), "selection.pinned.grpo_lora: no arm 'y' (known: "),
    (put("selection.best_few", 1), f"experiments.{FOCUSED}.arms.best_2.off_policy_rank: 2 is no whole number from 1"),
    (lambda v: [of.update(arms={}) for of in v["experiments"].values()], "experiments: none has arms. Give one some."),
    (
        put(f"experiments.{SFT}.arms", {}),
        f"experiments.{SFT}.arms: left out, but {SFT_INITIALIZATION} builds on it. Leave {SFT_INITIALIZATION} out too.",
    ),
    (
        all_of(put("controls", ["format_only"]), entry("controls", arms={"random_reward": {}})),
        "controls: format_only has no arm in experiments.controls. `grpo study use` adds it.",
    ),
    # Problems of the last evaluation, and of those that select
    (evaluated_on(9, 8, 4), "evaluation: last_problems (8) must be at least problems (9): raise it."),
    (evaluated_on(8, 8, 8), "evaluation: selection_problems (8) leaves none of last_problems (8) to judge: lower it."),
    (put("evaluation.temperature", 0), "evaluation: temperature 0: all samples of best_of_n would be equal"),
    (
        all_of(put("checkpoints", ["best"]), put("evaluation.best_of_n.checkpoints", ["grpo_lora/full"])),
        "evaluation.best_of_n.checkpoints: no run keeps its last one. Add last to `checkpoints`.",
    ),
    (
        all_of(put("evaluation.metric", "reward"), new_arm("grpo_baselines", reward="json:dumps")),
        "evaluation.metric: arms differ in their reward, so reward compares none: choose answer_reward.",
    ),
    # Claims
    (
        all_of(entry("a", arms={"x": {}, "y": {}}), entry("b", arms={"x": {}, "y": {}}), claim(arm="x", beats="y")),
        "claims.0: a, b have the arms x, y: add `experiment:` with the one meant.",
    ),
    (
        claim(arm="full", beats="rank_1", metric="token_entropy", by=2, at="last_step"),
        "claims.0: at: last_step is for answer_reward; of token_entropy choose",
    ),
    *(
        (claim(arm="full", beats="rank_1", metric=metric, by=by, at="late"), f"claims.0: at: {metric} is measured of few")
        for metric, by in (("val/old_task_reward", 0.05), ("kl/per_token", 2))
    ),
    (claim(arm="full", beats="rank_1", metric="qqqq", by=2), "claims.0.metric: no run logs 'qqqq'. Near: none is near ("),
    (claim(arm="full", not_below="rank_1", by=1), "claims.0.by: input should be less than 1"),
    (claim(arm="whole", beats="plain"), "claims.0: no experiment has the arms whole, plain"),
    (claim(arm="full", beats="plain"), "claims.0: grpo_lora has no arm 'plain' (known: full, rank_1"),
    (claim(experiment="lora", arm="full", beats="rank_1"), "claims.0: no experiment 'lora'"),
    (claim(arm="full", above="rank_1"), "claims.0: a claim has one of the keys beats, not_below"),
    (claim(arm="full", beats="rank_1", margin=1), "claims.0.margin: unknown key"),
    (
        put("claims", 2 * [{"arm": "full", "beats": "rank_1", "by": 0.05, "id": "lora"}]),
        "claims.1.id: lora is the id of two claims. Rename one.",
    ),
    (
        claim(arm="full", beats="rank_1", metric="token_entropy"),
        "claims.0: by: for token_entropy a ratio of 1 or more",
    ),
    (
        claim(arm="full", beats="rank_1", at="late"),
        "claims.0: at: late is for metrics of training steps",
    ),
    (
        claim(arm="full", beats="rank_1", metric="token_entopy", by=2),
        "claims.0.metric: no run logs 'token_entopy'. Near: token_entropy",
    ),
    (claim(arm="full", beats="rank_1", by=1.25), "claims.0: by: rewards differ by less than 1.25: lower it, or add `metric:`"),
    (
        claim(arm="full", beats="rank_1", by=1.25, metric="val/old_task_reward"),
        "claims.0: by: rewards differ by less than 1.25: lower it.",
    ),
    (
        claim(arm="full", not_below="rank_1", metric="token_entropy"),
        "claims.0: not_below compares rewards at the end: leave out metric, or use beats",
    ),
    # Hardware
    (put("learner.dtype", "bfloat16"), "engine.dtype (float32): with engine.name transformers runs sample from the"),
    (ON_GPU, "engine.device (cpu): with engine.name transformers runs sample from the learner's model, in learner.device"),
    (
        all_of(put("evaluation.temperature", 0), put("evaluation.best_of_n.prompts", [])),
        "evaluation.temperature: 0 draws no samples to estimate the KL of grpo_kl_divergence.",
    ),
    (put("engine.sleep_level", 2), "engine: sleep_level 2: vLLM can only sleep on a GPU: set it to 0, or device to cuda:0"),
    (all_of(put("engine.name", "vllm"), put("engine.device", "cuda:1")), "engine: device 'cuda:1': vLLM takes the first GPU"),
    (put("learner.processes", 2), "seeds_in_one_stage: not with learner.processes above 1."),
    (all_of(in_two_processes, ON_GPU), "learner: device 'cuda:0' is one GPU for 2 processes: use device cuda."),
    (put("learner.fully_shard", True), "learner: fully_shard: processes is 1: set it to 2 or more."),
    *(
        (all_of(shard_learner, put(f"learner.{key}", value)), f"learner: fully_shard: {key} is {told}")
        for key, value, told in (
            ("optimizer", "adamw_8bit", "adamw_8bit: set it to adamw"),
            ("compile", True, "on: set it to false"),
        )
    ),
    *(
        (
            all_of(shard_learner, new_arm("grpo_baselines", **{key: {}})),
            f"experiments.grpo_baselines.arms.extra.{key}: not with learner.{clash}. Leave that out, or",
        )
        for key, clash in (("lora", "fully_shard"), ("asynchronous", "processes"))
    ),
    (put("resources.small", REMOVED), "resources: stages that train no run need 'small' (known: model, "),
    (put("resources.train_on_cpu", REMOVED), f"experiments.{KEYWORD}.resources: no resources 'train_on_cpu' (known: "),
]


# The experiment, an arm's values, and how the message begins after the arm's name.
MISTAKES_OF_ARMS: list[tuple[str, dict[str, Any], str]] = [
    (SFT, {"start_from": f"{SFT}/all/last"}, ": start_from: unknown key. Check its spelling and its place"),
    ("grpo_lora", {"group_sizes": 8}, ": group_sizes: unknown key. Did you mean group_size?"),
    (
        "grpo_lora",
        {"beta": 0.1},
        ": beta: unknown key. Here: grpo.kl_coefficient.",
    ),
    ("grpo_learning_rate", {"ei_batch_size": 64}, ": ei_batch_size: unknown key"),
    ("grpo_lora", {"prompt": "keyword"}, ": prompt: the task main has no format 'keyword'"),
    (KEYWORD, {}, ": prompt: the task keyword has no format 'r1_zero'"),
    ("grpo_lora", {"start_from": "last"}, ".start_from: fine-tuning (see its keep_steps) keeps no checkpoint 'last'"),
    # The rate
    ("grpo_lora", {"learning_rate_times": math.inf}, ": learning_rate: input should be a finite number, but it is inf."),
    ("grpo_lora", {"learning_rate_times": 0}, f"{NO_FACTOR} 0."),
    ("grpo_lora", {"learning_rate_times": 2, "learning_rate": 1e-3}, f"{NO_FACTOR} 2."),
    (EXPERT_ITERATION, {"warmup_steps": 1}, ": lr_scheduler_type, warmup_steps: expert iteration's updates are not known"),
    ("grpo_lora", {"n_grpo_steps": 9, "warmup_steps": 9}, ": warmup_steps (9) must be less than the run's 9 updates"),
    # The rank in a sweep
    (FOCUSED, {"off_policy_rank": None}, f".off_policy_rank: None {NO_RANK}"),
    (FOCUSED, {"off_policy_rank": 0}, f".off_policy_rank: 0 {NO_RANK}"),
    (FOCUSED, {"off_policy_rank": True}, f".off_policy_rank: True {NO_RANK}"),
    ("grpo_learning_rate", {"off_policy_rank": 1}, ".off_policy_rank: grpo_learning_rate builds on no sweep: set builds_on"),
    (FOCUSED, {"off_policy_rank": 1, "n_x": 3}, ": n_x: unknown key"),
    # Sizes
    (BROAD, {"train_batch_size": 4, "gradient_accumulation_steps": 4}, ": train_batch_size (4) must be at least group_size"),
    (EXPERT_ITERATION, {"sampling_min_tokens": 9, "sampling_max_tokens": 8}, ": sampling_min_tokens (9) must not exceed"),
    ("grpo_lora", {"dynamic_sampling_rounds": 1, "group_size": 1}, ": dynamic_sampling_rounds: in a group of one"),
    (SFT, {"keep_steps": [1, 24, 25, 99]}, ": keep_steps: [25, 99] come after the last step, n_sft_steps (24)"),
    # Asynchronous runs
    (ASYNCHRONOUS, {"asynchronous": {}, "dynamic_sampling_rounds": 1}, ": dynamic_sampling_rounds: not in an asynchronous run"),
    (ASYNCHRONOUS, {"asynchronous": {"max_policy_lag": 3, "replay_max_age": 2}}, ": asynchronous: replay_max_age (2)"),
]


@pytest.mark.parametrize(("edit", "message"), MISTAKES)
def test_a_mistake_is_told_by_its_place(edit: Edit, message: str) -> None:
    assert refused(edit).startswith(message)


@pytest.mark.parametrize(("experiment", "values", "message"), MISTAKES_OF_ARMS)
def test_a_mistake_in_an_arm_is_told_by_its_name(experiment: str, values: dict[str, Any], message: str) -> None:
    assert refused(new_arm(experiment, **values)).startswith(f"experiments.{experiment}.arms.extra{message}")


def test_an_argument_that_may_be_of_several_types() -> None:
    def takes(which: list[int] | str) -> None: ...

    with pytest.raises(UserError, match=r"^tasks\.main\.which\.1: input should be a valid integer, but it is 'x'\."):
        call_with(takes, {"which": [1, "x"]}, "tasks.main")


def sft_arms(values: dict[str, Any]) -> None:
    """Two arms, of which one keeps what it has after steps 4 and 9, and no arm that starts from others."""
    values["experiments"][SFT]["arms"] = {"few": {"examples": 8}, "all": {"keep_steps": [4, 9]}}
    values["experiments"][SFT_INITIALIZATION]["arms"] = {"base": {}}


@pytest.mark.parametrize(("kept", "of_all"), [(["last", "best"], []), (["last"], [2])])
def test_a_start_is_one_of_the_checkpoints_that_are_kept(kept: list[str], of_all: list[int]) -> None:
    """Steps in the section `sft` are kept by all arms that name none."""

    def start_from(checkpoint: str) -> Edit:
        start = new_arm(SFT_INITIALIZATION, start_from=checkpoint)
        return all_of(sft_arms, put("checkpoints", kept), put("sft.keep_steps", of_all), start)

    known = [f"{SFT}/few/{kind}" for kind in (*(f"step-{step}" for step in of_all), *kept)]
    known += [f"{SFT}/all/{kind}" for kind in ("step-4", "step-9", *kept)]
    for checkpoint in known:
        edited(start_from(checkpoint))
    wrong = {
        f"{SFT}/few/step-4",
        f"{SFT}/all/step-2",
        f"{SFT}/none/last",
        f"{EXPERT_ITERATION}/all/last",
        "",
        f"{SFT}/all/best",
    }
    for checkpoint in wrong - {*known}:
        assert f"keeps no checkpoint {checkpoint!r} (known: {', '.join(known)})" in refused(start_from(checkpoint))


def test_a_start_may_have_more_seeds_than_what_begins_there() -> None:
    edited(put("seeds", [3, 4, 5]), put(f"experiments.{SFT}.seeds", 3), put(f"experiments.{SFT_INITIALIZATION}.seeds", 2))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"beats": "rank_1", "at": "start"}, "full starts above rank_1 by at least 0.05"),
        ({"beats": "rank_1"}, "full ends above rank_1 by at least 0.05"),
        ({"beats": "rank_1", "at": "last_step"}, "full is at the last step above rank_1 by at least 0.05"),
        (
            {"beats": "last", "metric": "val/old_task_reward"},
            "val/old_task_reward of full is at least 0.05 above that of last (end)",
        ),
        ({"not_below": "rank_1"}, "full ends at most 0.05 below rank_1"),
    ],
)
def test_a_claim_without_a_statement_is_put_into_words(values: dict[str, Any], words: str) -> None:
    named = edited(claim(arm="full", **values), entry("lr-rates"), entry("software_2")).own_claims[0]
    assert (named.experiment, named.id, named.statement) == ("grpo_lora", "own-1", words)


def test_no_experiment_has_the_name_of_a_file_that_the_report_writes_beside_those_of_experiments() -> None:
    beside = {"figures": "svg", "timing": "svg", "tables": "md", "metrics": "json"}
    found = {path.stem for folder, ending in beside.items() for path in (ROOT / "reports" / folder).glob(f"*.{ending}")}
    own = {name + ending for name in EXPERIMENTS for ending in ("", *(f"-{which}" for which in RESERVED_SUFFIXES))}
    assert found - own <= RESERVED_NAMES


def test_several_mistakes_are_all_told() -> None:
    lines = refused(put("grpo.group_size", 0), put("sft.examples", "x"), put("x", 1)).splitlines()
    assert [line.removeprefix("params.yaml: ").split(": ")[0] for line in lines] == ["grpo.group_size", "sft.examples", "x"]


# ------------------------------------------------------------------------------------------------- the data of a task

TRAIN = {"problem": "1 + 1?", "level": "Level 1", "subject": "algebra", "answer": "2"}


@pytest.mark.parametrize(
    ("changes", "rows", "told"),
    [
        ({}, {"validation": [TRAIN]}, r"Set `tasks\.main\.drop_overlap: true` to leave them out"),
        ({"expected": {"train": 2, "validation": 1}}, {}, r"^error: tasks\.main\.expected\.train: 2 .* `tasks\.main\.source`"),
        ({}, {"train": []}, r"^error: train\.jsonl: has no rows\. .* `tasks\.main\.source\.train`"),
        ({}, {"train": [{"level": "Level 1"}]}, r"train\.jsonl:1: no column 'problem' .* Check `tasks\.main\.source\.train`"),
        ({}, {"train": None}, r"train\.jsonl: no such file\. Correct `tasks\.main\.source\.train` in params\.yaml"),
        ({"levels": 3}, {}, r"params\.yaml: tasks\.main: got an unexpected keyword argument 'levels'"),
    ],
)
def test_a_task_names_its_own_entry(
    workdir: Path, grpo: Grpo, changes: dict[str, Any], rows: dict[str, Any], told: str
) -> None:
    files = {"train": [TRAIN], "validation": [TRAIN | {"problem": "1 + 2?"}]} | rows
    for split, lines in files.items():
        if lines is not None:
            Path(f"{split}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    values = values_of("smoke")
    source = {split: f"{split}.jsonl" for split in files}
    values["tasks"]["main"] = {"use": "math", "source": source, **changes}
    Path("params.yaml").write_text(json.dumps(values))
    code, _, error = grpo("dataset", "main")
    assert code == 2 and re.search(told, error), error


def test_a_class_of_ones_own_is_told_where_it_says_what_becomes_of_an_overlap(
    workdir: Path, monkeypatch: pytest.MonkeyPatch, grpo: Grpo
) -> None:
    monkeypatch.syspath_prepend(workdir)
    Path("twice_the_same.py").write_text(
        "from grpo.tasks import Problem, Task, formats\n\n\n"
        "class Twice(Task):\n"
        '    formats = {"r1_zero": formats.R1_ZERO, "question_only": formats.QUESTION_ONLY}\n\n'
        "    def problems(self, split):\n"
        '        return [Problem(split, "1 + 1?", "2")]\n'
    )
    values = values_of("smoke")
    values["tasks"]["main"] = {"use": "twice_the_same:Twice"}
    Path("params.yaml").write_text(json.dumps(values))
    code, _, error = grpo("dataset", "main")
    assert code == 2 and "Set `drop_overlap = True` in the class Twice to leave them out" in error

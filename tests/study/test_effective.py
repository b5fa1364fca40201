"""A run's effective configuration, model and data, the rules for arms and resources, and dvc.yaml against the experiments."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from study_parts import (
    BROAD,
    BUILDS_ON,
    CLIP_ABLATION,
    EXPERIMENTS,
    FOCUSED,
    KEYWORD,
    ROOT,
    SFT,
    SFT_INITIALIZATION,
    STUDIES,
    Edit,
    activate,
    all_of,
    edited,
    method_of,
    new_arm,
    put,
    refused,
    study_named,
    values_of,
    with_values,
)

from grpo.common.errors import UserError
from grpo.common.files import write_text
from grpo.common.yaml_file import parse_yaml, to_yaml
from grpo.study import paths
from grpo.study import software as software_module
from grpo.study.config import EvaluationSteps, ExpertIterationConfig, GrpoConfig, RunConfig, SftConfig
from grpo.study.effective import effective_run
from grpo.study.schema import Study, load_study
from grpo.study.software import PACKAGES, software
from grpo.study.stages import stages_of, write_stages
from grpo.training.run import run_identity

START = f"{SFT}/all/last"
LONG = 24  # twice those of the sweep


def winner(experiment: str, arm: str, **overrides: Any) -> dict[str, Any]:
    return {"experiment": experiment, "winner": arm, "overrides": overrides}


def ranked(experiment: str, arm: str, overrides: dict[str, Any], *ranking: tuple[str, dict[str, Any]]) -> dict[str, Any]:
    listed = [{"arm": name, "overrides": values} for name, values in ranking]
    return winner(experiment, arm, **overrides) | {"off_policy_ranking": listed}


ON_POLICY = [
    winner("grpo_learning_rate", "1e-3", learning_rate=1e-3),
    winner("grpo_baselines", "no_baseline", loss_type="no_baseline"),
    winner("grpo_length_normalization", "masked_normalize", length_normalization="masked_normalize"),
    winner("grpo_group_standard_deviation", "without_std", use_std_normalization=False),
]
TWO_UPDATES = {"n_grpo_steps": 12, "epochs_per_rollout_batch": 2, "train_batch_size": 64, "loss_type": "grpo_clip"}
FOUR_UPDATES = {"n_grpo_steps": 12, "epochs_per_rollout_batch": 1, "train_batch_size": 16, "loss_type": "grpo_clip"}
BROAD_RESULT = ranked(
    BROAD,
    "epochs_1-batch_64",
    {"n_grpo_steps": 12, "loss_type": "grpo_clip"},
    ("epochs_2-batch_64", TWO_UPDATES),
    ("epochs_1-batch_16", FOUR_UPDATES),
)
ON_POLICY_WON = ranked(FOCUSED, "on_policy", {"epochs_per_rollout_batch": 1, "train_batch_size": 64})
OFF_POLICY_WON = ranked(
    FOCUSED, "best_1", TWO_UPDATES | {"n_grpo_steps": LONG}, ("best_1", TWO_UPDATES | {"n_grpo_steps": LONG})
)
NO_CLIP_WON = winner(CLIP_ABLATION, "grpo_no_clip", **TWO_UPDATES | {"n_grpo_steps": LONG, "loss_type": "grpo_no_clip"})


# ------------------------------------------------------------------------------------------------------------ values


def test_without_winners_an_arm_changes_the_studys_values_only(mini_study: Study) -> None:
    run = effective_run(mini_study, "grpo_learning_rate", "1e-4", 0, [])
    assert run.config == mini_study.grpo.model_copy(update={"learning_rate": 1e-4})
    assert (run.name, run.overrides) == ("grpo_learning_rate/1e-4/0", {"learning_rate": 1e-4})
    named = {key: "study" if key in values_of("mini")["grpo"] else "default" for key in GrpoConfig.model_fields}
    assert run.sources == named | {"learning_rate": "arm 1e-4"} and {*named.values()} == {"study", "default"}


def test_winners_come_on_the_defaults_and_the_arm_on_both() -> None:
    of_no_effect = winner("grpo_lora", "full", max_grad_norm=0.5)  # the sweep does not build on it
    sixteen = {"n_grpo_steps": 32, "epochs_per_rollout_batch": 4, "train_batch_size": 16, "loss_type": "grpo_clip"}
    study = edited(new_arm(BROAD, "sixteen", **sixteen))
    run = effective_run(study, BROAD, "sixteen", 0, [*ON_POLICY, of_no_effect])
    changed = {
        "learning_rate": (1e-3, "winner of grpo_learning_rate (1e-3)"),
        "length_normalization": ("masked_normalize", "winner of grpo_length_normalization (masked_normalize)"),
        "use_std_normalization": (False, "winner of grpo_group_standard_deviation (without_std)"),
        "n_grpo_steps": (32, "arm sixteen"),
        "epochs_per_rollout_batch": (4, "arm sixteen"),
        "train_batch_size": (16, "arm sixteen"),
        "loss_type": ("grpo_clip", "arm sixteen"),  # and not the winner's no_baseline
    }
    assert run.config == study.grpo.model_copy(update={key: value for key, (value, _) in changed.items()})
    assert {key: run.sources[key] for key in changed} == {key: source for key, (_, source) in changed.items()}
    assert all(source in {"study", "default"} for key, source in run.sources.items() if key not in changed)
    assert run.overrides == sixteen
    assert run.config.updates_per_rollout_batch == 16


# --------------------------------------------------------------------------------------------------------- off-policy


def test_an_arm_takes_the_values_of_its_rank_and_its_own_on_top(mini_study: Study) -> None:
    run = effective_run(mini_study, FOCUSED, "best_2", 0, [*ON_POLICY, BROAD_RESULT])
    assert run.overrides == FOUR_UPDATES | {"n_grpo_steps": LONG}
    assert {key: getattr(run.config, key) for key in run.overrides} == run.overrides
    assert run.config.updates_per_rollout_batch == 4
    source = "rank 2 of grpo_off_policy_sweep_broad (epochs_1-batch_16)"
    assert {key: run.sources[key] for key in FOUR_UPDATES} == dict.fromkeys(FOUR_UPDATES, source) | {
        "n_grpo_steps": "arm best_2"
    }
    assert run.sources["learning_rate"] == "winner of grpo_learning_rate (1e-3)"
    first = effective_run(mini_study, FOCUSED, "best_1", 0, [*ON_POLICY, BROAD_RESULT])
    assert first.overrides == TWO_UPDATES | {"n_grpo_steps": LONG}


def test_the_sweeps_winner_itself_is_not_built_on(mini_study: Study) -> None:
    """It is a short run; the focused sweep goes on from the ranking only."""
    run = effective_run(mini_study, FOCUSED, "on_policy", 0, [*ON_POLICY, BROAD_RESULT])
    assert (run.config.n_grpo_steps, run.config.loss_type) == (mini_study.grpo.n_grpo_steps, "no_baseline")
    assert run.overrides == {"epochs_per_rollout_batch": 1, "train_batch_size": 64}


def test_a_rank_beyond_the_ranking_is_refused(mini_study: Study) -> None:
    short = ranked(BROAD, "epochs_1-batch_64", {}, ("epochs_2-batch_64", TWO_UPDATES))
    effective_run(mini_study, FOCUSED, "best_1", 0, [*ON_POLICY, short])
    with pytest.raises(UserError, match=rf"experiments\.{FOCUSED}: .*off_policy_rank 2, but {BROAD} has only 1 off-policy"):
        effective_run(mini_study, FOCUSED, "best_2", 0, [*ON_POLICY, short])


@pytest.mark.parametrize("experiment", [name for name, before in BUILDS_ON.items() if CLIP_ABLATION in before])
def test_the_clip_ablation_counts_off_policy_only(mini_study: Study, experiment: str) -> None:
    arm = next(iter(mini_study.experiments[experiment].arms))
    on = effective_run(mini_study, experiment, arm, 0, [*ON_POLICY, ON_POLICY_WON, NO_CLIP_WON])
    assert (on.config.loss_type, on.sources["loss_type"]) == ("no_baseline", "winner of grpo_baselines (no_baseline)")
    assert on.config.updates_per_rollout_batch == 1
    off = effective_run(mini_study, experiment, arm, 0, [*ON_POLICY, OFF_POLICY_WON, NO_CLIP_WON])
    assert (off.config.loss_type, off.sources["loss_type"]) == (
        "grpo_no_clip",
        "winner of grpo_off_policy_clip_ablation (grpo_no_clip)",
    )
    assert off.config.updates_per_rollout_batch == 2


# ------------------------------------------------------------------------------------------- combinations that do not fit


def test_an_arm_that_does_not_fit_the_winners_is_named(mini_study: Study) -> None:
    """Each is valid by itself, and so are the winner's values."""
    alone = winner("grpo_learning_rate", "single", group_size=1, loss_type="no_baseline")
    effective_run(edited(new_arm("grpo_baselines", loss_type="no_baseline")), "grpo_baselines", "extra", 0, [alone])
    message = r"experiments\.grpo_baselines\.arms\.reinforce_with_baseline \(arm reinforce_with_baseline\): group_size 1"
    with pytest.raises(UserError, match=message):
        effective_run(mini_study, "grpo_baselines", "reinforce_with_baseline", 0, [alone])


def test_a_winner_that_does_not_fit_those_before_is_named(mini_study: Study) -> None:
    selections = [
        winner("grpo_learning_rate", "parts", gradient_accumulation_steps=64),
        winner("grpo_baselines", "small", train_batch_size=16),
    ]
    message = r"experiments\.grpo_length_normalization\.arms\.masked_mean \(winner of grpo_baselines \(small\)\): .*16.*64"
    with pytest.raises(UserError, match=message):
        effective_run(mini_study, "grpo_length_normalization", "masked_mean", 0, selections)


def test_a_rate_may_be_so_many_times_that_of_the_winners() -> None:
    study = edited(put("grpo.learning_rate", 3e-4), new_arm("grpo_lora", learning_rate_times=0.3))
    assert effective_run(study, "grpo_lora", "extra", 0, []).config.learning_rate == 9e-5  # of the study's own
    run = effective_run(study, "grpo_lora", "extra", 0, ON_POLICY)
    assert (run.config.learning_rate, run.overrides) == (3e-4, {"learning_rate": 3e-4})
    assert run.sources["learning_rate"] == "arm extra"
    study = edited(new_arm("grpo_lora", learning_rate_times=3.333))
    assert effective_run(study, "grpo_lora", "extra", 0, ON_POLICY).config.learning_rate == 3.33e-3  # three digits
    for times, steps in ((0.4, 3), (0.6, 4), (0.01, 1)):  # 2.8, 4.2 and .07 steps
        study = edited(put("grpo.n_grpo_steps", 7), new_arm("grpo_lora", n_grpo_steps_times=times))
        assert effective_run(study, "grpo_lora", "extra", 0, []).config.n_grpo_steps == steps


@pytest.mark.parametrize(
    "path", [path for path in STUDIES if path.stem.startswith(("math", "gsm8k"))], ids=lambda path: path.stem
)
def test_no_study_of_a_real_model_inherits_a_rate_that_the_small_one_needs(path: Path) -> None:
    mini, study = study_named("mini"), study_named(path.stem)

    def rates(of: Study) -> set[tuple[str, str, float]]:
        arms = ((name, arm, values) for name in of.active_experiments for arm, values in of.experiments[name].arms.items())
        return {(name, arm, values["learning_rate"]) for name, arm, values in arms if "learning_rate" in values}

    own_sweep_or_own_model = {"grpo_learning_rate", "grpo_keyword_inclusion"}
    assert {name for name, *_ in rates(mini) & rates(study)} <= own_sweep_or_own_model


@pytest.mark.parametrize("name", ["math-h100", "math-24gb", "math-2xh100", "math-7b-8xh100", "gsm8k"])
def test_a_real_study_says_that_one_rate_carries_all_its_arms(name: str) -> None:
    study = study_named(name)
    carried = {
        "off-policy": {BROAD, FOCUSED, CLIP_ABLATION},
        "colocated": {"grpo_colocate"},
        "asynchronous": {"grpo_async_offpolicy"},
    }
    (said,) = [text for text in study.by_design if "One learning rate" in text]
    assert all(kind in said for kind, of in carried.items() if of & {*study.active_experiments})
    for one in set().union(*carried.values()) & {*study.active_experiments}:
        assert not any(key.startswith("learning_rate") for arm in study.experiments[one].arms.values() for key in arm), one


@pytest.mark.parametrize(
    ("name", "times"), [("mini", 0.5), *((name, 0.3) for name in ("math-h100", "math-24gb", "math-2xh100", "math-7b-8xh100"))]
)
def test_the_last_checkpoint_of_fine_tuning_is_trained_at_two_rates(name: str, times: float) -> None:
    """Those of the winners before and less; a handout's question is whether it gains, which a rate too high would answer no."""
    study = study_named(name)
    arms = [arm for arm, values in study.experiments[SFT_INITIALIZATION].arms.items() if values.get("start_from") == START]
    rates = {effective_run(study, SFT_INITIALIZATION, arm, 0, ON_POLICY[:1]).config.learning_rate for arm in arms}
    assert sorted(rates) == pytest.approx([times * 1e-3, 1e-3])


# ------------------------------------------------------------------------------------------------- what a study may say


def stages_of_dvc(folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What DVC makes of the project's dvc.yaml and a folder's params.yaml, by name."""
    from dvc.repo import Repo

    monkeypatch.setenv("DVC_SITE_CACHE_DIR", str(folder / "site"))
    shutil.copy(ROOT / "dvc.yaml", folder)
    write_stages(load_study())
    with Repo.init(no_scm=True) as repo:
        return {stage.addressing: stage for stage in repo.index.stages}


def test_the_first_seed_of_a_timed_arm_has_a_stage_and_resources_of_its_own(workdir: Path) -> None:
    study = edited(
        put("seeds", [7, 8, 9]),
        put("experiments.grpo_lora", {"title": "Timed", "timed": "alone", "seeds": 2, "arms": {"full": {}}}),
        put("experiments.grpo_baselines.seeds", 2),
    )
    assert (study.seeds_of("grpo_lora"), study.seeds_of("grpo_learning_rate")) == ([7, 8], [7, 8, 9])
    rows = study.runs_table()
    found = {key: (row["seed"], row["resources"]) for key, row in rows.items() if row["experiment"] == "grpo_lora"}
    assert found == {"grpo_lora-full-7": (7, "alone"), "grpo_lora-full-8": (8, "train")}
    alone = {seed: study.runs_alone("grpo_lora", seed) for seed in study.seeds_of("grpo_lora")}
    assert alone == {7: True, 8: False} and not study.runs_alone("grpo_baselines", 7)
    assert rows["grpo_baselines-reinforce_with_baseline"]["seed"] == "all"
    with pytest.raises(UserError, match=r"seeds: 9 is not among grpo_baselines's \[7, 8\]"):
        effective_run(study, "grpo_baselines", "reinforce_with_baseline", 9, [])
    # Who looks for the stage of a run finds the one in the table.
    assert paths.stage_of_run("grpo_lora/full/8") == "train@grpo_lora-full-8"  # without a stages.yaml
    write_text(workdir / "stages.yaml", to_yaml(stages_of(study)))
    stages = {f"train@{key}" for key in rows}
    runs = [
        (name, arm, seed)
        for name in study.active_experiments
        for arm in study.experiments[name].arms
        for seed in study.seeds_of(name)
    ]
    assert {paths.stage_of_run("/".join(map(str, run))) for run in runs} == stages
    assert paths.stage_of_run("grpo_lora/full/8") == "train@grpo_lora-full-8"


def test_each_seed_may_have_a_base_of_its_own(workdir: Path) -> None:
    """The task's is that of the first seed, which stages without seeds take."""
    shared, own = (
        edited(put("seeds", [7, 8]), put("models.main.one_per_seed", per_seed), new_arm(SFT_INITIALIZATION, start_from=START))
        for per_seed in (False, True)
    )

    def base(study: Study, experiment: str, arm: str, seed: int) -> str:
        return effective_run(study, experiment, arm, seed, []).model.as_posix()

    for arm in own.experiments["grpo_learning_rate"].arms:
        assert [base(shared, "grpo_learning_rate", arm, seed) for seed in (7, 8)] == ["data/model/main"] * 2
        assert [base(own, "grpo_learning_rate", arm, s) for s in (7, 8)] == ["data/model/main", "data/model/main/seed-8"]
    of_words = next(iter(own.experiments[KEYWORD].arms))
    assert base(own, KEYWORD, of_words, 8) == "data/model/keyword"
    assert base(own, SFT_INITIALIZATION, "extra", 8) == f"data/checkpoints/{SFT}/all/8/last"  # it started from base 8
    together, apart = (own.model_copy(update={"seeds_in_one_stage": one}).runs_table() for one in (True, False))
    row = apart[f"{SFT_INITIALIZATION}-extra-8"]
    assert (row["model"], row["seed"]) == (f"checkpoints/{SFT}/all/8", 8) and row["folder"] == f"{SFT_INITIALIZATION}/extra/8"
    assert row["values"] == together[f"{SFT_INITIALIZATION}-extra"]["values"]


@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.stem)
def test_dvc_makes_the_stages_of_what_a_study_makes_and_no_others(
    path: Path, workdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = study_named(path.stem)
    activate(path.stem, workdir)
    stages = stages_of_dvc(workdir, monkeypatch)
    expected = set()
    for name in study.active_experiments:
        entry, seeds = study.experiments[name], [""]
        if not entry.one_stage and not (study.seeds_in_one_stage and entry.timed is None):
            seeds = [f"-{seed}" for seed in study.seeds_of(name)]
        arms = [""] if entry.one_stage else [f"-{arm}" for arm in entry.arms]
        expected |= {f"train@{name}{arm}{seed}" for arm in arms for seed in seeds}
    assert {name for name in stages if name.startswith("train@")} == expected
    for key, row in study.runs_table().items():
        stage = stages[f"train@{key}"]
        assert stage.cmd == f"grpo train {row['experiment']} {row['arm']} --seed {row['seed']}"
        assert stage.meta == {"resources": row["resources"]} and row["after"] in map(str, stage.deps)
    assert {name.removeprefix("select@") for name in stages if name.startswith("select@")} == set(study.active_experiments)


def test_dvc_names_everything_that_a_run_depends_on(mini_study: Study, workdir: Path) -> None:
    stages = parse_yaml(ROOT / "dvc.yaml")["stages"]
    expected: set[str] = set()
    for experiment in EXPERIMENTS:
        method = method_of(experiment)
        study = mini_study
        run = effective_run(study, experiment, next(iter(study.experiments[experiment].arms)), 0, [])
        identity = run_identity(study, run)
        assert identity["method"] == method
        # The engine's share of memory, whoever samples, stands in the section grpo; the method follows from the experiment.
        elsewhere = {"task", "model", "train", "validation", "seed", "method", "gpu_memory_utilization", "software"}
        sections = {method if key == "config" else key for key in set(identity) - elsewhere}
        expected |= sections | {"grpo"}
        # What a run reads lies in what its stage names; a run that starts from another's weights is in the test above.
        row = next(
            row for row in study.runs_table().values() if row["experiment"] == experiment and run.arm in row["arm"].split()
        )
        deps = [f"data/{row['model']}", f"data/{row['train']}/train.jsonl", f"data/dataset/{row['task']}"]
        for read in (run.model, run.train, run.validation):
            assert any(read == Path(dep) or Path(dep) in read.parents for dep in deps), (experiment, read)
    assert set(stages["training_inputs"]["params"]) == expected | {"experiments", "tasks", "seeds"}
    assert stages["training_inputs"]["outs"] == ["data/training_inputs"]
    assert "${folder}" in stages["training_inputs"]["deps"]


def test_a_runs_identity_changes_with_each_file_that_it_reads_and_with_the_software(
    mini_study: Study, workdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = effective_run(mini_study, "grpo_learning_rate", next(iter(mini_study.experiments["grpo_learning_rate"].arms)), 0, [])
    files = {"model": run.model / "model.safetensors", "train": run.train, "validation": run.validation}
    for file in files.values():
        write_text(file, "before")
    before = run_identity(mini_study, run)
    for name, file in files.items():
        write_text(file, "after")
        after = run_identity(mini_study, run)
        assert {key for key in after if after[key] != before[key]} == {name}
        write_text(file, "before")
    assert run_identity(mini_study, run) == before and before["software"] == software(PACKAGES)
    monkeypatch.setattr(software_module, "version", lambda name: "9.9")
    after = run_identity(mini_study, run)
    assert {key for key in after if after[key] != before[key]} == {"software"}


@pytest.mark.parametrize(
    ("prompt", "file", "template", "date"),
    [
        ("chat", "chat_template.jinja", "{{ strftime_now('%d %b %Y') }}", {"chat_date": "2024-07-26"}),
        ("chat", "chat_template.jinja", "{{ messages[0]['content'] }}", {}),
        ("chat", "tokenizer_config.json", """{"chat_template": "{{ strftime_now('%Y') }}"}""", {"chat_date": "2024-07-26"}),
        ("chat", "additional_chat_templates/tools.jinja", "{{ strftime_now('%d %b %Y') }}", {}),  # not the default
        ("r1_zero", "chat_template.jinja", "{{ strftime_now('%d %b %Y') }}", {}),
    ],
)
def test_the_date_in_a_runs_chats_is_recorded(
    mini_study: Study, workdir: Path, prompt: str, file: str, template: str, date: dict[str, str]
) -> None:
    run = effective_run(mini_study, "grpo_learning_rate", next(iter(mini_study.experiments["grpo_learning_rate"].arms)), 0, [])
    run = replace(run, config=run.config.model_copy(update={"prompt": prompt}))
    for empty in (run.model / "model.safetensors", run.train, run.validation):
        write_text(empty, "")
    write_text(run.model / file, template)
    identity = run_identity(mini_study, run)
    assert {key: value for key, value in identity.items() if key == "chat_date"} == date


# ------------------------------------------------------------------------------------------------------- what a run uses


STEPS: list[tuple[RunConfig, int | list[int], list[int]]] = [
    (GrpoConfig(n_grpo_steps=10), 4, [0, 4, 8, 10]),
    (GrpoConfig(n_grpo_steps=8), 4, [0, 4, 8]),
    (GrpoConfig(n_grpo_steps=20), [1, 2, 8], [0, 1, 2, 8, 16, 20]),
    (GrpoConfig(n_grpo_steps=5), [1, 2, 8], [0, 1, 2, 5]),
    (GrpoConfig(n_grpo_steps=25), [3, 7, 10], [0, 3, 7, 10, 20, 25]),
    (SftConfig(n_sft_steps=7, evaluate_every=3), 4, [0, 3, 6, 7]),
    (ExpertIterationConfig(n_ei_steps=3), 4, [0, 1, 2, 3]),
]


@pytest.mark.parametrize(("config", "every", "expected"), STEPS)
def test_steps_of_evaluations(config: RunConfig, every: int | list[int], expected: list[int]) -> None:
    steps = EvaluationSteps(config, every)
    assert [step for step in range(config.n_steps + 30) if step in steps] == expected
    assert steps.middle == expected[len(expected) // 2]


def test_a_run_without_an_end_is_checked_at_once() -> None:
    """Its evaluations in a list would fill 8 TB."""
    steps = EvaluationSteps(GrpoConfig(n_grpo_steps=10**12), [1, 2])
    assert (steps.middle, 10**12 - 2 in steps) == (5 * 10**11, True)


# ------------------------------------------------------------------------------------------------------------- resources


def threads(number: int, **cpus: int) -> Edit:
    """An edit: so many threads, and as many CPUs for each stage that is not named with another number."""

    def edit(values: dict[str, Any]) -> None:
        values["threads"] = number
        for name, resources in values["resources"].items():
            resources["cpus"] = cpus.get(name, number)

    return edit


@pytest.mark.parametrize("kind", ["model", "train_on_cpu", "evaluate", "train", "alone", "of_first_seeds"])
def test_a_stage_that_computes_on_the_cpu_has_a_core_for_each_thread(kind: str) -> None:
    timed = put("experiments.grpo_lora.timed", "of_first_seeds")
    own = put("resources.of_first_seeds", {"gpus": 0, "cpus": 3, "mem_mb": 2000, "runtime_min": 9})
    edit = all_of(own, timed, threads(3, small=1, **{kind: 2}))
    message = f"resources.{kind}.cpus (2): these stages compute on the CPU with 3 threads: reserve as many"
    assert message in refused(edit)
    on_gpu = put("engine.name", "vllm"), put("engine.device", "cuda:0"), put("learner.device", "cuda:0")
    if kind in ("model", "train_on_cpu"):
        assert message in refused(edit, *on_gpu)
    else:
        assert edited(edit, *on_gpu).resources[kind].cpus == 2


def test_a_stage_that_copies_a_model_needs_no_core_for_each_thread() -> None:
    local = {"source": "local", "path": "my-model"}
    edits = threads(2, model=1), put("models.main", local), put("resources.train_on_cpu.gpus", 1)  # of no use, but allowed
    assert "resources.model.cpus (1)" in refused(*edits)  # the other model is pretrained
    assert edited(*edits, put("models.keyword", local)).resources["model"].cpus == 1


def test_a_small_model_computes_on_the_cpu_in_a_study_for_gpus(mini_study: Study) -> None:
    for_gpus = study_named("math-24gb")
    study = for_gpus.for_task("keyword")
    assert (study.engine.name, study.engine.device, study.engine.sleep_level) == ("transformers", "cpu", 0)
    assert (study.learner.device, study.learner.dtype, study.learner.optimizer) == ("cpu", "float32", "adamw")
    few_at_once = with_values(for_gpus, {"engine.max_batch_size": 7})
    assert few_at_once.for_task("keyword").engine.max_batch_size == 7
    assert for_gpus.for_task("main") == for_gpus
    assert mini_study.for_task("keyword") == mini_study


def test_the_study_with_one_instance_samples_where_its_learner_trains() -> None:
    """Its engine is another one than its parent's, whose device and sleep it keeps unless it says otherwise."""
    study = study_named("math-one-instance")
    assert (study.engine.name, study.engine.device, study.engine.dtype) == ("transformers", "cuda:0", "bfloat16")
    assert (study.learner.device, study.learner.dtype, study.engine.sleep_level) == ("cuda:0", "bfloat16", 0)


# ------------------------------------------------------------------------------------------------ evaluations that count


@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.stem)
def test_the_broad_sweep_of_every_study_is_short(path: Path) -> None:
    """The handout's rule."""
    broad = study_named(path.stem).experiments[BROAD].arms
    assert all(arm["n_grpo_steps"] < 50 for arm in broad.values())


@pytest.mark.parametrize(
    ("of_all", "of_an_arm", "method", "metric"),
    [
        (None, None, "grpo", "answer_reward"),
        ("json:dumps", None, "grpo", "reward"),
        ("json:dumps", "json:dumps", "grpo", "reward"),
        ("json:dumps", "json:loads", "grpo", "answer_reward"),
        (None, "json:dumps", "grpo", "answer_reward"),
        ("json:dumps", None, "sft", "answer_reward"),  # which has no reward
    ],
)
def test_runs_are_compared_by_an_own_reward_only_if_all_have_it(
    of_all: str | None, of_an_arm: str | None, method: str, metric: str
) -> None:
    arm = {} if of_an_arm is None else {"reward": of_an_arm}
    entry = study_named("mini").experiments["grpo_baselines"].model_copy(update={"arms": {"a": arm}, "method": method})
    study = with_values(study_named("mini"), {"grpo.reward": of_all, "experiments": {"e": entry}})
    assert study.metric == metric
    by_hand = with_values(study, {"evaluation.metric": "answer_reward"})
    assert by_hand.metric == "answer_reward"

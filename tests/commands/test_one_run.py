"""`grpo run`: its numbers are those of the stage with the same values, and a mistake leaves nothing behind."""

from __future__ import annotations

import csv
import json
import re
import shutil
from collections.abc import Iterator
from contextlib import chdir
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML
from study_parts import ROOT, Grpo

from grpo.commands import stages
from grpo.commands.one_run import RunOptions, _batch_of_few, composed, given_values, one_run, study_and_problems
from grpo.common.errors import UserError
from grpo.common.files import files_digest
from grpo.models.checkpoint import load_tokenizer
from grpo.study.compose import compose
from grpo.study.schema import validated
from grpo.tasks.build import check_local_data
from grpo.tracking.mlflow_uri import NOWHERE

LETTERS = '''
import os

from grpo.tasks import Format, Problem, Task

asked = 0


class Letters(Task):
    """A response is right where it has a T; in the batch that STOP_AT names the process ends as by a kill."""

    formats = {"plain": Format("{question}")}

    def problems(self, split):
        return [Problem(f"{split}/{i}", f"Mia has {i} {split} apples.", str(i)) for i in range(12)]

    def verify(self, answers, problems):
        global asked
        asked += 1
        if asked == int(os.environ.get("STOP_AT", 0)):
            raise SystemExit
        return [float("T" in answer) for answer in answers]
'''
REWARD = """
def negative(completion_ids, **columns):
    return [-10.0 - len(set(ids)) for ids in completion_ids]
"""
STUDY = """
extends: base
description: Three steps.
tasks: {main: {use: "letters_of_a_run:Letters"}, keyword: null}
models: {main: {source: local, path: model}, keyword: null}
sft_datasets: {}
grpo: {n_grpo_steps: 3, rollout_batch_size: 16, group_size: 4, train_batch_size: 8, gradient_accumulation_steps: 2,
  sampling_max_tokens: 12, prompt: plain, reward: "reward_of_a_run:negative"}
evaluation: {every: 1, problems: 8, last_problems: 12, selection_problems: 4, max_tokens: 12, zero_shot_problems: 12,
  zero_shot_prompts: [plain], best_of_n: {prompts: [], problems: 2}}
save_state_every: 1
experiments: {only: [grpo_learning_rate], grpo_learning_rate: {arms: {high: {learning_rate: 1e-2}}}}
"""
HIGH = RunOptions(None, None, ("grpo.learning_rate=1e-2",), 1, "three_steps.yaml")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, fresh_model: Any, tokenizer: Any) -> Iterator[Path]:
    """A folder with a task, a reward, a study and a model of one's own, and the run HIGH in runs/try."""
    from grpo.models.checkpoint import save_checkpoint

    folder = tmp_path_factory.mktemp("lab")
    (folder / "letters_of_a_run.py").write_text(LETTERS)
    (folder / "reward_of_a_run.py").write_text(REWARD)
    (folder / "three_steps.yaml").write_text(STUDY)
    (folder / "model").mkdir()
    save_checkpoint(folder / "model", fresh_model, tokenizer)
    with pytest.MonkeyPatch.context() as patch, chdir(folder):
        patch.setenv("MLFLOW_TRACKING_URI", NOWHERE)
        one_run(HIGH, Path("runs/try"), resume=False)
        yield folder


@pytest.fixture
def lab(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder, as the working folder."""
    monkeypatch.chdir(folder)
    return folder


def results(folder: Path) -> dict[str, bytes]:
    """The run's results by file name, but for its times."""
    files = [file for file in sorted(folder.iterdir()) if file.suffix in {".csv", ".json", ".jsonl"}]
    files += [folder / f"checkpoints/{kind}/model.safetensors" for kind in ("last", "best")]
    return {str(file.relative_to(folder)): file.read_bytes() for file in files if file.name != "timing.json"}


def test_its_results_are_those_of_the_stage_with_the_same_values(lab: Path) -> None:
    stage = lab / "stage"
    stage.mkdir()
    values = compose(Path("three_steps.yaml")) | {"folder": str(lab), "file": None, "seeds": [1]}
    (stage / "params.yaml").write_text(json.dumps(values))
    with chdir(stage):
        stages.dataset("main")
        stages.model("main")
        stages.train("grpo_learning_rate", ["high"], "1")
    of_stage = stage / "data/runs/grpo_learning_rate/high/1"
    (of_stage / "checkpoints").symlink_to(stage / "data/checkpoints/grpo_learning_rate/high/1")
    assert results(of_stage) == results(lab / "runs/try")
    configs = [YAML(typ="safe").load(folder / "config.yaml") for folder in (of_stage, lab / "runs/try")]
    assert configs[0]["identity"] == configs[1]["identity"]
    assert (lab / "runs/try/curves.png").read_bytes().startswith(b"\x89PNG")
    assert not list(lab.rglob("mlflow*"))  # nothing is tracked


def test_an_own_reward_is_what_is_shown_kept_and_judged(lab: Path, grpo: Grpo) -> None:
    """Also where it is far from 0 to 1."""
    out = lab / "runs/try"
    steps = list(csv.DictReader((out / "history.csv").read_text().splitlines()))
    assert any(float(row["gradient_norm"]) > 0 for row in steps)  # there is something to learn
    rows = list(csv.DictReader((out / "validation.csv").read_text().splitlines()))
    rewards = {int(row["step"]): float(row["val/reward"]) for row in rows}
    assert all(-30 < reward < -10 for reward in rewards.values()) and len(set(rewards.values())) > 1
    best = max((step for step in rewards if step), key=lambda step: rewards[step])
    metrics = json.loads((out / "metrics.json").read_text())
    kept = json.loads((out / "checkpoints/best/metadata.json").read_text())
    assert (metrics["best/step"], metrics["best/reward"]) == (kept["step"], kept["reward"]) == (best, rewards[best])
    assert metrics["val/reward_low"] < metrics["val/reward"] < metrics["val/reward_high"]
    outcomes = [json.loads(line) for line in (out / "outcomes.jsonl").read_text().splitlines()]
    assert {one["step"]: sum(one["reward"]) / len(one["reward"]) for one in outcomes} == pytest.approx(rewards)
    code, printed, _ = grpo("run", "--resume", "--out", "runs/try")  # of a finished run
    assert code == 0 and f"validation reward: {rewards[0]:.2f} (step 0)" in printed and "answer reward" not in printed


def test_its_checkpoint_can_be_published_and_loaded(lab: Path, grpo: Grpo, monkeypatch: pytest.MonkeyPatch) -> None:
    """`grpo publish` in the run's folder, by the code that the card gives."""
    monkeypatch.chdir("runs/try")
    code, _, error = grpo("publish", "try/grpo/1", "--kind", "last", "--out", "shared")
    assert code == 0, error
    weights = "checkpoints/last/model.safetensors"
    assert Path("shared/model.safetensors").read_bytes() == Path(weights).read_bytes()
    assert not Path("shared/metadata.json").exists()  # it names folders of this machine
    card = Path("shared/README.md").read_text()
    assert "3: **this checkpoint**" in card and str(lab) not in card
    loaded: dict[str, Any] = {}
    with chdir("shared"):
        exec(card.partition("```python\n")[2].partition("```")[0], loaded)
    theirs, ours = loaded["tokenizer"], load_tokenizer(Path("shared"))
    assert tuple(theirs("Mia has 3 apples.")["input_ids"]) == ours.prompt_ids("Mia has 3 apples.")
    assert loaded["model"](**theirs("Mia has", return_tensors="pt")).logits.isfinite().all()
    assert (theirs.eos_token_id, loaded["model"].generation_config.eos_token_id) == (ours.eos_token_id,) * 2


def test_links_in_a_strangers_run_are_refused(lab: Path, grpo: Grpo) -> None:
    shutil.copytree("runs/try", "strangers/try", symlinks=True)
    Path("precious").write_text("precious")
    link = Path("strangers/try/data/runs/try/grpo/1/notes.txt")
    for place in (link, Path("strangers/try/figure.png")):
        place.symlink_to(lab / "precious")
        code, _, said = grpo("run", "--resume", "--out", "strangers/try")
        assert code == 2 and said.startswith(f"error: --out strangers/try: {place.name} is a symbolic link to a file elsewhere")
        place.unlink()
    assert grpo("run", "--resume", "--out", "strangers/try")[0] == 0


def test_a_killed_run_ends_as_one_that_was_not(lab: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="--resume"):
        one_run(HIGH, Path("runs/try"), resume=False)
    others = {"learning_rate=2e-2": "learning_rate: 0.01 -> 0.02", "warmup_steps=1": "warmup_steps: None -> 1"}
    for setting, change in others.items():
        with pytest.raises(UserError, match=re.escape(f"(grpo.{change})")):
            one_run(HIGH._replace(settings=(*HIGH.settings, f"grpo.{setting}")), Path("runs/try"), resume=True)

    import letters_of_a_run

    for stop_at in ("1", "6"):  # evaluations and rollouts in turns: before a state is saved; the rollouts of the third step
        letters_of_a_run.asked = 0
        monkeypatch.setenv("STOP_AT", stop_at)
        with pytest.raises(UserError, match=r"letters_of_a_run\.py:.* ends the program"):
            one_run(HIGH, Path("runs/killed"), resume=False)
    rows_of_now = Path("runs/killed/validation.csv")
    assert rows_of_now.is_symlink()  # to those that the run was writing
    monkeypatch.delenv("STOP_AT")
    one_run(RunOptions(), Path("runs/killed"), resume=True)  # its folder has all values
    assert not rows_of_now.is_symlink()
    assert results(lab / "runs/killed") == results(lab / "runs/try")
    assert json.loads(Path("runs/killed/timing.json").read_text())["resumed_after"] == [2]
    assert files_digest(lab / "runs/killed/data/model") == files_digest(lab / "runs/try/data/model")


def test_settings_are_yaml_and_lie_over_one_another() -> None:
    settings = ["grpo.learning_rate=1e-5", "grpo.lora.rank=2", "grpo.lora.targets=[q_proj]", "divergence=null"]
    assert given_values([*settings, "tasks.main.source.hub=a/b", "grpo.loss_options.high=0.3"]) == {
        "grpo": {"learning_rate": 1e-5, "lora": {"rank": 2, "targets": ["q_proj"]}, "loss_options": {"high": 0.3}},
        "divergence": None,
        "tasks": {"main": {"source": {"hub": "a/b"}}},
    }


@pytest.mark.parametrize(
    ("asked", "out", "message"),
    [
        ({"model": "nowhere"}, "try", "--model nowhere: no such folder"),
        (
            {"model": "a/b@main"},
            "try",
            "--model a/b@main: no such folder. Give a folder in Hugging Face format, a GGUF file, or",
        ),
        ({"model": "no.gguf"}, "try", "--model no.gguf: no such folder"),
        ({"model": None}, "try", "--model, --task: one is missing."),
        ({"task": "one.jsonl"}, "try", "--task one.jsonl: has a single row, and training"),
        ({"settings": ["grpo.lora={rank: 2"]}, "try", "expected KEY=VALUE"),
        ({"task": "maths"}, "try", "no such task. Use arithmetic, math"),
        ({"task": "none.jsonl"}, "try", "no such file"),
        ({"task": "other.jsonl"}, "try", "tasks.main.answer=COLUMN, one of question, reply"),
        ({"settings": ["learning_rate=1e-5"]}, "try", "no such key. Keys begin with tasks.main., models.main., grpo., "),
        ({"settings": ["beta=0.04"]}, "try", "--set beta=0.04: no such key. Here: grpo.kl_coefficient ("),
        ({"settings": ["grpo.objective=dap"]}, "try", "--set grpo.objective: no objective 'dap'"),
        ({"settings": ["grpo.learning_rate"]}, "try", "expected KEY=VALUE"),
        ({"settings": ["grpo.learning_rate=-1"]}, "try", "grpo.learning_rate: input should be greater than 0"),
        ({"settings": ["grpo.rollout_batch_size=512"]}, "try", "64 problems are asked for"),
        ({}, "model", "already exists and holds no run"),
        ({"model": None, "task": None}, "try", "holds no run to continue"),
    ],
)
def test_a_mistake_leaves_nothing_behind(asked: dict[str, Any], out: str, message: str, lab: Path) -> None:
    rows = [json.dumps({"question": f"{n} + {n}?", "answer": n + n}) for n in range(20)]
    (lab / "sums.jsonl").write_text("\n".join(rows))
    (lab / "one.jsonl").write_text(rows[0])
    (lab / "other.jsonl").write_text('{"question": "1", "reply": "1"}\n' * 2)
    before = sorted(lab.rglob("*"))
    with pytest.raises(UserError) as error:
        options = RunOptions("model", "sums.jsonl")._replace(**asked)
        one_run(options, lab / out, resume=options.task is None)
    assert message in str(error.value)
    assert sorted(lab.rglob("*")) == before


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("grpo.reward=letters_of_a_run:none", "has nothing named 'none'"),
        ("grpo.loss_options={no: 1}", "It takes no options"),
        ("tasks.main.use=ends_at_once:Letters", r"ends_at_once.py:\d+ ends the program"),  # with the exit code of success
        ("tasks.main.use=divides:Letters", r"tasks.main, Letters.problems: \S+divides.py:\d+: ZeroDivisionError: "),
    ],
)
def test_wrong_own_code_is_reported_before_the_model_is_made(setting: str, message: str, lab: Path, grpo: Grpo) -> None:
    """The model's folder is wrong too, and would be reported if it was looked for first."""
    (lab / "ends_at_once.py").write_text(LETTERS.replace("[Problem(", "quit() or [Problem("))
    (lab / "divides.py").write_text(LETTERS.replace("[Problem(", "1 / 0 or [Problem("))
    options = ("run", "--study", "three_steps.yaml", "--set", "models.main.path=nowhere", "--out", "try")
    code, _, error = grpo(*options, "--set", setting)
    assert code == 2 and re.search(message, error) and "nowhere" not in error
    assert not (lab / "try").exists()
    code, _, error = grpo(*options)
    assert code == 2 and "nowhere" in error


def test_an_address_of_mlflow_without_a_scheme_is_refused(lab: Path, grpo: Grpo, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "me:secret@host:5000")
    code, _, error = grpo("run", "--study", "three_steps.yaml", "--out", "try")
    assert code == 2 and "MLFLOW_TRACKING_URI: host:5000 has no scheme" in error and "secret" not in error


def test_a_file_of_rows_becomes_a_task_and_its_validation_set(lab: Path) -> None:
    file = lab / "problems.jsonl"
    rows: list[dict[str, Any]] = [{"problem": f"{n} + 1?", "answer": n + 1, "source": "mine"} for n in range(25)]
    rows[0] |= {"rare": "not in all rows", "level": "a reward has one already"}
    file.write_text("\n".join(map(json.dumps, rows)))
    values = composed(RunOptions("model", "problems.jsonl"), Path("try"))
    assert values["tasks"]["main"] == {
        "use": "dataset",
        "question": "problem",
        "answer": "answer",
        "files": {"train": f"{file}[:90%]", "validation": f"{file}[90%:]"},
        "drop_overlap": True,
        "columns": ["source"],
    }
    counts = ("problems", "last_problems", "selection_problems")
    assert [values["evaluation"][key] for key in counts] == [3, 3, 0]
    # 22 rows to train on, where a step asks 32 questions 8 times, 2 responses at a time
    batch = ("rollout_batch_size", "train_batch_size", "gradient_accumulation_steps")
    assert [values["grpo"][key] for key in batch] == [176, 176, 88]
    study = validated(values, Path("--set"))
    check_local_data(study.task("main"), study.needed_problems("main"))
    settings = ["tasks.main.answer=problem", "tasks.main.verify=exact", "evaluation.problems=2"]
    settings += ["evaluation.selection_problems=1", "grpo.rollout_batch_size=512"]
    own = composed(RunOptions("model", "problems.jsonl", settings), Path("try"))
    assert [own["grpo"][key] for key in batch] == [512, 256, 128]
    study = validated(own, Path("--set"))
    with pytest.raises(UserError, match="64 problems are asked for, but the train split has 22"):
        check_local_data(study.task("main"), study.needed_problems("main"))
    assert own["tasks"]["main"]["answer"] == "problem"
    assert [own["evaluation"][key] for key in counts] == [2, 3, 1]


@pytest.mark.parametrize(("rows", "accumulation"), [(7, 7), (9, 3), (11, 11), (12, None)])
def test_a_batch_of_few_rows_is_cut_as_finely_as_it_must_be(rows: int, accumulation: int | None) -> None:
    """Of 24 responses 12 at a time: of 14 there are 2, of 18 there are 6, and 24 stay as they are."""
    sizes = {"rollout_batch_size": 24, "train_batch_size": 24, "group_size": 2, "gradient_accumulation_steps": 2}
    few = {"rollout_batch_size": 2 * rows, "train_batch_size": 2 * rows, "gradient_accumulation_steps": accumulation}
    assert _batch_of_few(sizes, rows) == (few if accumulation else {})


def test_a_model_may_be_on_the_hub_or_one_file_and_a_task_that_of_another_study(lab: Path) -> None:
    revision = "0123456789abcdef0123456789abcdef01234567"
    hub = composed(RunOptions(f"some.one/a-model@{revision}", "gsm8k", ["tasks.main.drop_overlap=true"]), Path("try"))
    assert hub["models"]["main"] == {"source": "hub", "repo": "some.one/a-model", "revision": revision}
    assert hub["tasks"]["main"] == compose(ROOT / "studies/gsm8k.yaml")["tasks"]["main"] | {"drop_overlap": True}
    (lab / "small.gguf").touch()
    one_file = composed(RunOptions("small.gguf", "letters_of_a_run:Letters"), Path("try"))["models"]["main"]
    assert one_file == {"source": "local", "path": str(lab), "gguf_file": "small.gguf"}


def test_a_class_is_evaluated_on_the_problems_that_it_has(lab: Path) -> None:
    """It has 12 validation problems, and `base` asks for 1,024 and 2,048."""
    values = composed(RunOptions("model", "letters_of_a_run:Letters", ["evaluation.problems=8"]), Path("try"))
    assert [values["evaluation"][key] for key in ("problems", "last_problems", "selection_problems")] == [8, 12, 0]


def test_modules_in_studies_are_found_and_claims_are_left_out(lab: Path) -> None:
    """Claims are about a study's arms, which a single run does not have."""
    (lab / "studies").mkdir()
    (lab / "studies/in_studies.py").write_text("def reward(completions, **columns):\n    return [1.0] * len(completions)\n")
    claims = "claims: [{arm: high, beats: low, by: 0.05}]\n"
    (lab / "claims.yaml").write_text(STUDY.replace("1e-2}}", "1e-2}, low: {}}") + claims)
    options = HIGH._replace(study="claims.yaml", settings=("grpo.reward=in_studies:reward",))
    study = validated(composed(options, Path("try")), Path("--set"))
    assert not study.claims and study.grpo.reward == "in_studies:reward"


def test_a_checkpoint_is_evaluated_on_a_file_without_a_study(lab: Path, grpo: Grpo) -> None:
    """All rows are asked, with a verifier, a format and a reward of one's own."""
    rows = [json.dumps({"question": f"Mia has {n} apples.", "answer": "T"}) for n in range(6)]
    (lab / "held_out.jsonl").write_text("\n".join(rows))
    (lab / "mine_of_a_run.py").write_text(
        "def has_t(answers, problems):\n    return [float(p.ground_truth in a) for a, p in zip(answers, problems)]\n\n"
        "def reward(completions, answer_reward, **columns):\n    return [2 * right for right in answer_reward]\n"
    )
    settings = ("tasks.main.verify=mine_of_a_run:has_t", "grpo.reward=mine_of_a_run:reward", "grpo.prompt=question_only")
    given = [word for one in (*settings, "evaluation.max_tokens=12") for word in ("--set", one)]
    code, out, error = grpo("evaluate", "model", "--task", "held_out.jsonl", "--out", "found", *given)
    assert code == 0, error
    records = [json.loads(line) for line in Path("found/question_only.jsonl").read_text().splitlines()]
    assert len(records) == 6 and all(one["reward"] == 2 * one["answer_reward"] for one in records)
    assert out.startswith("question_only: reward ")
    code, _, error = grpo("evaluate", "model", "--task", "held_out.jsonl", "--out", "found", "--problems", "7")
    assert code == 2 and "held_out.jsonl holds 6 problems" in error
    on_gpu, _, _ = study_and_problems(Path("model"), "held_out.jsonl", [], None, "math-24gb")
    assert (on_gpu.engine.name, on_gpu.engine.device, on_gpu.evaluation.max_tokens) == ("vllm", "cuda:0", 1024)
    code, _, error = grpo("evaluate", "model", "--task", "main", "--out", "found", "--study", "math-24gb")
    assert code == 2 and "--set, --study: the values are those of params.yaml." in error

"""The `kl` stage: estimates beside the exact divergence, means and intervals, and which checkpoints are measured."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from study_parts import changed, entry
from training_parts import NoMlflow

from grpo.common.errors import UserError
from grpo.common.files import write_json
from grpo.common.records import Problem, write_records
from grpo.evaluation import evaluator
from grpo.evaluation.best_of_n import measure_pass_at_k
from grpo.evaluation.kl import kept_checkpoints, measure_kl, summary
from grpo.models.checkpoint import load_model, save_checkpoint
from grpo.study import paths
from grpo.study.schema import Study
from grpo.study.settings import LocalModel, OldTask
from grpo.tasks.formats import QUESTION_ONLY

NAME, ARM, SEEDS = "grpo_learning_rate", "kept", [3, 4]
FORWARD = ("forward_per_token", "forward_per_sequence")
ESTIMATES = ("per_token", "per_token_low_variance", "per_sequence", "per_sequence_low_variance", *FORWARD)


@pytest.fixture
def study(mini_study: Study, model: Any, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Study:
    """A project with two runs, of which each has kept its start at step 2 and another model at step 10."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(evaluator, "MlflowRun", lambda *_: NoMlflow())
    start = paths.model("main")
    save_checkpoint(start, model, tokenizer)
    write_records(paths.validation("main"), [Problem(f"p/{i}", f"Mia has {i} apples.", str(i)) for i in range(600)])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(parameter.numel()))
    for seed in SEEDS:
        run = paths.CHECKPOINTS / NAME / ARM / str(seed)
        shutil.copytree(start, run / "step-2")
        save_checkpoint(run / "step-10", model, tokenizer)
        for step in (2, 10):
            about = {"step": step, "prompt": "question_only", "start": start.as_posix()}
            write_json(run / f"step-{step}/metadata.json", about)
    return changed(
        mini_study,
        seeds=SEEDS,
        threads=1,
        models=mini_study.models | {"main": LocalModel(source="local", path="unused")},
        evaluation={"problems": 600, "last_problems": 600, "selection_problems": 300, "max_tokens": 1},
        experiments={NAME: entry(NAME, arms={ARM: {"keep_steps": [2, 10]}, "other": {}})},
    )


def test_estimates_are_near_the_exact_divergence(study: Study, tokenizer: Any) -> None:
    """Responses of one token, so that the divergence of the two next-token distributions is the response's."""
    for seed in SEEDS:
        (paths.CHECKPOINTS / NAME / "other" / str(seed)).mkdir(parents=True)  # keeps none
    steps = measure_kl(study, NAME)["arms"]
    assert [*steps] == [ARM] and [found["step"] for found in steps[ARM]] == [0, 2, 10]
    *same, far = steps[ARM]
    assert all(found[name] == {"value": 0.0, "low": 0.0, "high": 0.0} for found in same for name in ESTIMATES)

    start, policy = (load_model(f) for f in (paths.model("main"), paths.CHECKPOINTS / NAME / ARM / "3/step-10"))
    exact, exact_forward = [], []
    with torch.no_grad():
        for i in range(600):
            ids = torch.tensor([QUESTION_ONLY.encode(tokenizer, QUESTION_ONLY.prompt(f"Mia has {i} apples."))])
            log_p, log_q = (each(input_ids=ids).logits[0, -1].double().log_softmax(-1) for each in (policy, start))
            exact.append((log_p.exp() * (log_p - log_q)).sum().item())
            exact_forward.append((log_q.exp() * (log_q - log_p)).sum().item())
    assert min(np.mean(exact), np.mean(exact_forward)) > 0.05
    records = [json.loads(line) for line in (paths.KL / f"{NAME}.jsonl").read_text().splitlines()]
    mine = [record for record in records if record["run"] == f"{NAME}/{ARM}/3" and record["step"] == 10]
    for column, name in (("sampled", "per_sequence"), ("low_variance", "per_sequence_low_variance")):
        drawn = np.array([record[column] for record in mine])
        assert abs(drawn.mean() - np.mean(exact)) < 4 * drawn.std() / len(drawn) ** 0.5
        assert far[name]["value"] == pytest.approx(drawn.mean())  # both runs have the same weights
        assert far["by_run"][f"{NAME}/{ARM}/4"][name] == pytest.approx(drawn.mean())
    assert far["per_token"] == pytest.approx(far["per_sequence"])
    forward = np.array([record["forward"] for record in mine])
    assert abs(forward.mean() - np.mean(exact_forward)) < 4 * forward.std() / len(forward) ** 0.5
    assert [far[name]["value"] for name in FORWARD] == pytest.approx([forward.mean()] * 2)


def test_it_is_measured_again_with_the_same_result(study: Study) -> None:
    study = changed(study, evaluation={"problems": 8, "max_tokens": 12})
    (paths.CHECKPOINTS / NAME / "other").mkdir()
    shutil.copytree(paths.CHECKPOINTS / NAME / ARM / "3", paths.CHECKPOINTS / NAME / "other/3")
    write_json(paths.CHECKPOINTS / NAME / "other/4/metadata.json", {"same_as": f"{NAME}/{ARM}/4"})
    found = measure_kl(study, NAME)["arms"]
    written = (paths.KL / f"{NAME}.jsonl").read_bytes()
    assert measure_kl(study, NAME)["arms"] == found
    assert (paths.KL / f"{NAME}.jsonl").read_bytes() == written
    assert json.loads((paths.KL_REPORTS / f"{NAME}.json").read_text())["arms"] == found
    assert found["other"][-1]["per_token"] == found[ARM][-1]["per_token"]  # of the run that it was taken over from


def test_checkpoints_also_answer_the_old_task_and_the_rest_stays_as_it_is(study: Study) -> None:
    """The old task's answers are numbers of the questions, so the first checkpoint, which is the start, has its reward."""
    short = {"problems": 8, "max_tokens": 12, "old_task": OldTask(task="keyword", prompt="keyword")}
    (paths.CHECKPOINTS / NAME / "other/3").mkdir(parents=True)
    (paths.CHECKPOINTS / NAME / "other/4").mkdir()
    without = measure_kl(changed(study, evaluation=short | {"old_task": None}), NAME)["arms"][ARM]
    write_records(paths.validation("keyword"), [Problem(f"k/{i}", word, word) for i, word in enumerate("aeioustnrlbc")])
    found = measure_kl(changed(study, evaluation=short), NAME)["arms"][ARM]
    rewards = [step.pop("old_task_reward") for step in found]
    by_run = [[of.pop("old_task_reward") for of in step["by_run"].values()] for step in found]
    assert found == without
    records = [json.loads(line) for line in (paths.KL / f"{NAME}.jsonl").read_text().splitlines()]
    old = [record for record in records if record["problem"].startswith("k/")]
    assert len(old) == 8 * len(SEEDS) * 3 and {*old[0]} == {"run", "step", "problem", "old_task_reward"}
    for place, step in enumerate((0, 2, 10)):
        of_step = [record["old_task_reward"] for record in old if record["step"] == step]
        assert rewards[place]["value"] == pytest.approx(np.mean(of_step)) == pytest.approx(np.mean(by_run[place]))
    assert rewards[0] == rewards[1]


def test_a_missing_run_and_one_without_checkpoints_are_told(study: Study) -> None:
    with pytest.raises(UserError, match=r"other/3: no such folder. Run `dvc repro train@"):
        measure_kl(study, NAME)
    for folder in [*paths.CHECKPOINTS.glob(f"{NAME}/{ARM}/*/step-*")]:
        shutil.rmtree(folder)
    for seed in SEEDS:
        (paths.CHECKPOINTS / NAME / "other" / str(seed)).mkdir(parents=True)
    with pytest.raises(UserError, match=r"keep no checkpoints to measure. Give an arm `keep_steps`"):
        measure_kl(study, NAME)
    assert not paths.KL.exists() and not paths.KL_REPORTS.exists()
    assert [*kept_checkpoints(f"{NAME}/{ARM}/3")] == []


def test_base_middle_and_end_are_sampled_on_the_same_problems(study: Study) -> None:
    """The kept checkpoint nearest to the middle is the start itself, so its samples are those of the base."""
    for seed in SEEDS:
        last = paths.CHECKPOINTS / NAME / ARM / str(seed) / "last"
        shutil.copytree(last.with_name("step-10"), last)
        write_json(last / "metadata.json", {"step": 10, "prompt": "question_only", "start": paths.model("main").as_posix()})
    asked = study.evaluation.best_of_n.model_copy(
        update={"problems": 6, "samples": 4, "n": [1, 4], "checkpoints": [f"{NAME}/{ARM}"]}
    )
    study = changed(study, evaluation={"best_of_n": asked, "max_tokens": 8})
    found = measure_pass_at_k(study, NAME)[ARM]
    records = [json.loads(line) for line in (paths.PASS_AT_K / f"{NAME}.jsonl").read_text().splitlines()]
    assert [(one["run"][-1], one["place"], one["step"]) for one in records] == [
        (str(seed), place, step) for seed in SEEDS for place, step in (("base", 0), ("middle", 2), ("end", 10))
    ]
    assert all(len(one["right"]) == 6 and max(one["right"]) <= 4 for one in records)
    assert records[0]["right"] == records[1]["right"]
    assert found == json.loads((paths.PASS_AT_K_REPORTS / f"{NAME}.json").read_text())["arms"][ARM]
    assert [*found["places"]["middle"]["k"]] == ["1", "4"] and found["base_ahead_from"] is None


def records_of(runs: dict[str, list[tuple[int, float]]]) -> list[dict[str, Any]]:
    """Records of one step: for each run the tokens and the KL of its responses."""
    return [
        {"run": f"e/a/{run}", "step": 1, "problem": i, "tokens": n, "answer_reward": 1.0, "sampled": -kl, "low_variance": kl}
        | {"forward": 2 * kl, "forward_tokens": n + 1}
        for run, responses in runs.items()
        for i, (n, kl) in enumerate(responses)
    ]


def test_means_by_hand() -> None:
    """A response counts by its tokens per token, and once per response; runs count alike."""
    (found,) = summary(records_of({"0": [(1, 1.0), (3, 2.0)], "1": [(2, 0.0), (2, 6.0)]}))["a"]
    assert found["by_run"]["e/a/0"] == {
        "answer_reward": 1.0,
        "per_token": -0.75,
        "per_sequence": -1.5,
        "per_token_low_variance": 0.75,
        "per_sequence_low_variance": 1.5,
        "forward_per_token": 1.0,  # (2 + 4) / (2 + 4)
        "forward_per_sequence": 3.0,
    }
    assert found["forward_per_token"]["value"] == pytest.approx((1.0 + 12 / 6) / 2)
    assert found["per_token_low_variance"]["value"] == pytest.approx((3 / 4 + 6 / 4) / 2)
    assert found["per_sequence"]["value"] == pytest.approx(-(1.5 + 3.0) / 2)


def test_the_interval_of_a_ratio_is_that_of_a_bootstrap() -> None:
    """Of one run, whose long responses have more KL: resampled responses are an independent way to the standard error."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(1, 60, 400)
    kl = rng.gamma(1.0, 0.01 * tokens)
    (found,) = summary(records_of({"0": list(zip(tokens.tolist(), kl.tolist(), strict=True))}))["a"]
    drawn = rng.integers(0, 400, (4000, 400))
    error = (kl[drawn].sum(axis=1) / tokens[drawn].sum(axis=1)).std()
    half = (found["per_token_low_variance"]["high"] - found["per_token_low_variance"]["low"]) / 2
    assert found["per_token_low_variance"]["value"] == pytest.approx(kl.sum() / tokens.sum())
    assert half == pytest.approx(1.966 * error, rel=0.05)

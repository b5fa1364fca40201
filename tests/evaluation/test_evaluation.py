"""Evaluation of a checkpoint: chunks, records, examples, files; and the handouts' scripts and evaluate_vllm."""

import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
from study_parts import activate, changed

from grpo import evaluate_vllm, question_only_reward_fn
from grpo.commands import stages
from grpo.common.errors import UserError
from grpo.common.records import Problem, Rollout, write_records
from grpo.evaluation import best_of_n, evaluator
from grpo.evaluation import evaluate as module
from grpo.evaluation.evaluate import evaluate, lengths_by_outcome, log_generations, summarize
from grpo.evaluation.evaluator import CheckpointEvaluator, evaluate_checkpoint, examples_to_read
from grpo.models.checkpoint import load_model
from grpo.results.intervals import wilson_interval
from grpo.rollout.engine import SamplingParams
from grpo.rollout.sampling import Sampler
from grpo.rollout.transformers_engine import TransformersEngine
from grpo.study import paths
from grpo.study.schema import Study
from grpo.tasks.arithmetic import Arithmetic
from grpo.tasks.dataset import entry_of_file
from grpo.tasks.formats import R1_ZERO
from grpo.tasks.rewards import score_by_task
from grpo.tasks.task import ScoredBatch

PARAMS = SamplingParams(max_tokens=8)
SCORE = partial(score_by_task, Arithmetic(1, 1, levels=1, seed=0), "r1_zero")


@pytest.fixture
def problems() -> list[Problem]:
    return [Problem(f"p{i}", f"Mia has {i} apples. How many?", str(i), level=1 + i % 2) for i in range(10)]


def test_chunks_keep_the_order_of_problems_and_draw_different_samples(
    model: Any, tokenizer: Any, problems: list[Problem], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of three problems of two samples, the second of which is late."""
    monkeypatch.setattr(module, "SEQUENCES_PER_CHUNK", 6)

    def second_is_late(rollouts: Sequence[Rollout]) -> ScoredBatch:
        return ScoredBatch(SCORE(rollouts).rewards, [i == 1 for i in range(len(rollouts))])

    sampler = Sampler(TransformersEngine(model, tokenizer), tokenizer, R1_ZERO, second_is_late)
    groups = evaluate(sampler, problems, PARAMS, seed=3, n=2)
    assert [[r.problem for r in group] for group in groups] == [[p, p] for p in problems]
    assert [[r.timed_out for r in group] for group in groups[:3]] == [[False, True], [False, False], [False, False]]
    assert summarize([r for group in groups for r in group])["grader_timeouts"] == 4  # one a chunk
    assert capsys.readouterr().err.count("warning: 1 answers took the grader too long and count as wrong\n") == 4
    assert [len(group) for group in evaluate(sampler, problems[:2], PARAMS, seed=3, n=7)] == [7, 7]  # more than in a chunk
    same_question = evaluate(sampler, [Problem(f"p{i}", "How many?", "1") for i in range(6)], PARAMS, seed=3, n=2)
    assert len({r.completion.token_ids for group in same_question for r in group}) == 12


def _records(n: int, kind: str, answer: str | None) -> list[dict[str, Any]]:
    record = {"level": 1, "subject": "algebra", "prompt": "What?", "response": "text", "answer": answer, "ground_truth": "5"}
    record |= {"category": f"format {kind[0]}, answer {kind[1]}", "finish_reason": "stop", "response_length": 3}
    return [record | {"problem": f"{kind}-{i}"} for i in range(n)]


def test_the_page_to_read_shows_ten_of_each_outcome_from_all_over() -> None:
    records = _records(40, "11", "5") + _records(12, "10", "4") + _records(3, "00", None)
    page = examples_to_read("r1_zero", records)
    assert [page.count(f"{kind}-") for kind in ("11", "10", "00")] == [10, 10, 3]
    assert "11-36" in page  # not the first ten only
    assert "format 0, answer 0: 3 of 55, 3 shown" in page and "Ground truth `5`; no answer could be read; 3 tokens" in page
    assert page.count("no answer could be read") == 3 and page.count("read `4`") == 10
    assert "````text\nWhat?⟶text\n````" in page and "- [ ] the parser is at fault" in page


def _rewards(answer: float, form: float = 1.0) -> dict[str, float]:
    return {"format_reward": form, "answer_reward": answer, "reward": answer / 2}


def test_generations_are_logged_with_all_that_is_known_of_them() -> None:
    rewards = [_rewards(1.0), _rewards(0.0), _rewards(0.0, 0.0), _rewards(1.0)]
    records, summary = log_generations(
        ["a", "b", "c", "d"], ["w", "x", "y", "z"], ["1", "2", "3", "4"], rewards, [0.5, 0.25, 1.0, 0.25], [3, 10, 20, 8]
    )
    texts, measured = {"prompt": "b", "response": "x", "ground_truth": "2"}, {"token_entropy": 0.25, "response_length": 10}
    assert records[1] == texts | _rewards(0.0) | measured
    assert [(record["prompt"], record["response"]) for record in records] == list(zip("abcd", "wxyz", strict=True))
    by_outcome = {"response_length_correct": (3 + 8) / 2, "response_length_incorrect": (10 + 20) / 2}
    assert summary == {"token_entropy": 0.5, "response_length": 10.25} | by_outcome
    with pytest.raises(ValueError, match="zip"):  # there must be as many of each
        log_generations(["a", "b"], ["x"], ["1"], rewards[:1], [0.5], [3])


def test_lengths_of_correct_and_incorrect_responses_by_hand() -> None:
    """NaN for a kind that there is not; a part of the reward is not correct."""
    for rewards, lengths in (([1.0, 0.5], [2.0, 9.0]), ([0.5], [math.nan, 9.0]), ([1.0], [2.0, math.nan])):
        found = lengths_by_outcome([_rewards(each) for each in rewards], [9 if each < 1.0 else 2 for each in rewards])
        assert [*found.values()] == pytest.approx(lengths, nan_ok=True)


@pytest.fixture
def project(mini_study: Study, model: Any, tokenizer: Any, tmp_path: Path) -> Path:
    """A project folder with a study, an untrained model and 3,000 problems, which is several chunks."""
    from grpo.models.checkpoint import save_checkpoint

    activate("mini", tmp_path)
    save_checkpoint(tmp_path / "data/model/main", model, tokenizer)
    many = [Problem(f"p{i}", f"Mia has {i} apples. How many?", str(i), level=1) for i in range(3000)]
    write_records(tmp_path / "data/dataset/main/validation.jsonl", many)
    return tmp_path


def test_a_killed_stage_starts_again(project: Path, mini_study: Study, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stage's folder is written at its end only."""
    monkeypatch.chdir(project)
    mini_study = changed(mini_study, evaluation={"zero_shot_problems": 8})
    whole = evaluator.evaluate_checkpoint

    def killed_at_the_second(evaluator: Any, problems: Any, prompt: str, folder: Path) -> dict[str, Any]:
        if prompt == mini_study.evaluation.zero_shot_prompts[1]:
            raise KeyboardInterrupt
        return whole(evaluator, problems, prompt, folder)

    monkeypatch.setattr(evaluator, "evaluate_checkpoint", killed_at_the_second)
    with pytest.raises(KeyboardInterrupt):
        evaluator.run_math_baseline(mini_study)
    assert not (project / "data/math_baseline").exists()
    monkeypatch.setattr(evaluator, "evaluate_checkpoint", whole)
    evaluator.run_math_baseline(mini_study)
    assert len(list((project / "data/math_baseline").glob("*.jsonl"))) == 2


def test_the_base_model_answers_a_file_of_gsm8ks_rows(
    project: Path, mini_study: Study, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tokenizer: Any
) -> None:
    """NLPDL's problem 1 (a): data/gsm8k/test.jsonl. Questions that leave a response no room are left out, and said so."""
    monkeypatch.chdir(project)
    solution = "He has 40 + 2 = <<40+2=42>>42 coins.\n#### 42"
    rows = [{"question": f"Tom has {n} coins. How many?", "answer": solution} for n in (1, 2)]
    context, response = load_model(project / "data/model/main").config.max_position_embeddings, mini_study.evaluation.max_tokens
    tokens = {n: len(tokenizer.prompt_ids(R1_ZERO.prompt("Tom has 3 coins. " * n))) for n in range(1, 400)}
    full = next(n for n, length in tokens.items() if length + response > context)
    assert tokens[full] <= context  # it fits, but for its response
    rows += [{"question": "Tom has 3 coins. " * n, "answer": solution} for n in (full, 400)]
    file = project / "test.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    metrics = evaluator.evaluate_file(
        mini_study, file, Path("here"), mini_study.evaluation.zero_shot_prompts, evaluate_checkpoint
    )
    assert "2 of 4 questions are too long for the model's context and are left out" in capsys.readouterr().out
    assert list(metrics) == ["r1_zero", "question_only"] and {values["problems"] for values in metrics.values()} == {2}
    assert json.loads(Path("here/metrics.json").read_text()) == metrics
    written = [json.loads(line) for line in Path("here/r1_zero.jsonl").read_text().splitlines()]
    assert [one["ground_truth"] for one in written] == ["42", "42"] and "Tom has 1 coins" in written[0]["prompt"]
    assert "answer 0" in Path("here/r1_zero_examples.md").read_text() and not paths.BASELINE_METRICS.exists()
    file.write_text(json.dumps(rows[-1]))
    with pytest.raises(UserError, match=r"context of \d+ tokens is too short .*; 1 of 1 prompts are too long"):
        evaluator.evaluate_file(mini_study, file, Path("here"), ["r1_zero"], evaluate_checkpoint)
    assert "left out" not in capsys.readouterr().out
    file.write_text("".join(json.dumps(row) + "\n" for row in (rows[0], {"question": "Why?", "answer": "42"})))
    with pytest.raises(UserError, match="no short answer after '####'"):
        evaluator.evaluate_file(mini_study, file, Path("here"), mini_study.evaluation.zero_shot_prompts, evaluate_checkpoint)


MATHS_ROW = {"problem": "What is $1+1$?", "level": "Level 3", "subject": "Prealgebra", "answer": "2"}


@pytest.mark.parametrize(
    ("row", "use"),
    [
        (MATHS_ROW, "math"),
        ({"prompt": "1+1", "ground_truth": "2"}, "dataset"),
        ({"question": "1+1", "answer": "#### 2"}, "gsm8k"),
    ],
)
def test_a_file_is_read_by_its_columns_for_one_answer_and_for_several(
    row: dict[str, str], use: str, project: Path, mini_study: Study, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MATH's validation.jsonl of the courses, GSM8K's rows, or any columns with the usual names."""
    monkeypatch.chdir(project)
    file = project / "validation.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for _ in range(3)))
    assert entry_of_file(file)["use"] == use
    sampling = mini_study.evaluation.best_of_n.model_copy(update={"problems": 2, "samples": 2, "n": [1, 2], "prompts": []})
    prompts = ["question_only"]
    study = changed(mini_study, evaluation={"best_of_n": sampling, "zero_shot_prompts": prompts})
    found = [
        evaluator.evaluate_file(study, file, Path(folder), prompts, measure)["question_only"]
        for folder, measure in (("one", evaluate_checkpoint), ("few", best_of_n.sample_checkpoint))
    ]
    assert (found[0]["problems"], found[1]["problems"]) == (3, 2) and {*found[1]["n"]} == {"1", "2"}
    written = [json.loads(line) for line in Path("few/question_only.jsonl").read_text().splitlines()]
    assert [one["ground_truth"] for one in written] == ["2", "2"] and not paths.BEST_OF_N_METRICS.exists()
    monkeypatch.setattr(stages, "load_study", lambda: study)
    stages.best_of_n(file)  # also where the study itself has no such samples
    folder = paths.EVALUATIONS / f"{project.name}-validation-best_of_n"
    assert (folder / "question_only.jsonl").read_text().count("\n") == 2 and not paths.BEST_OF_N_METRICS.exists()
    file.write_text('{"q": "1+1", "answer": "2"}\n')
    with pytest.raises(UserError, match=r"no column for the question\. Call one so: question; there are q, answer\."):
        entry_of_file(file)


def test_parts_of_rewards(project: Path, mini_study: Study, problems: list[Problem], monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of ten have the full reward, one the form only, one nothing, and six a partial reward."""
    whole, form_only, nothing = (1.0, 1.0), (1.0, 0.0), (0.0, 0.0)
    part = [(1.0, 0.5), (1.0, 0.25), (0.5, 0.5), (0.5, 0.0), (0.0, 0.25), (0.9, 1.0)]
    parts = [whole, whole, form_only, nothing, *part]

    def partly(task: Any, prompt: str, rollouts: Sequence[Rollout]) -> ScoredBatch:
        return ScoredBatch([_rewards(answer, form) for form, answer in parts], [False] * len(rollouts))

    monkeypatch.chdir(project)
    monkeypatch.setattr("grpo.tasks.rewards.score_by_task", partly)
    evaluator = CheckpointEvaluator(mini_study, Path("data/model/main"))
    metrics = evaluate_checkpoint(evaluator, problems, "question_only", project / "out")
    outcomes = {"format 1, answer 1": 2, "format 1, answer 0": 1, "format 0, answer 0": 1, "other rewards": 6}
    assert metrics["categories"] == outcomes
    assert metrics["answer_reward"] == metrics["accuracy"]["value"] == pytest.approx(0.45)
    assert (metrics["accuracy"]["low"], metrics["accuracy"]["high"]) == wilson_interval(4.5, 10)
    assert {level: of["problems"] for level, of in metrics["accuracy_by_level"].items()} == {"1": 5, "2": 5}
    assert metrics["accuracy_by_subject"] == {"not stated": metrics["accuracy"]}
    records = [json.loads(line) for line in (project / "out/question_only.jsonl").read_text().splitlines()]
    assert [(r["format_reward"], r["answer_reward"]) for r in records] == parts
    assert "## other rewards: 6 of 10, 6 shown" in (project / "out/question_only_examples.md").read_text()
    on_form = changed(mini_study, grpo={"reward": "format_reward"})  # its runs are trained on this, and compared by answers
    evaluator = CheckpointEvaluator(on_form, Path("data/model/main"))
    again = evaluate_checkpoint(evaluator, problems, "question_only", project / "again")
    assert again["reward"] == metrics["reward"] == pytest.approx(0.45 / 2)
    compared = CheckpointEvaluator(changed(on_form, evaluation={"metric": "reward"}), Path("data/model/main"))
    assert evaluate_checkpoint(compared, problems, "question_only", project / "form")["reward"] == pytest.approx(0.69)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("data/model/main --out out --prompt haiku", "prompt haiku: no such format (known of Arithmetic: r1_zero,"),
        ("data/model/main --out out --problems 3001", "3001: data/dataset/main/validation.jsonl holds 3000 problems"),
        ("data/model/main --problems 8 --out params.yaml", "File exists: 'params.yaml'"),
    ],
)
def test_mistakes_are_told_first(
    project: Path, arguments: str, message: str, grpo: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(project)
    code, _, told = grpo("evaluate", *arguments.split())
    assert code == 2 and message in told and "Traceback" not in told
    assert not (project / "out").exists()


ANSWERS = {"1 + 1?": r"\boxed{2}", "1 + 2?": r"\boxed{4}", "1 + 3?": "four"}


def test_four_arguments_evaluate_and_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reward function knows the ground truths, because the handout's four arguments do not include them."""
    monkeypatch.chdir(tmp_path)
    truths = dict(zip(ANSWERS, "234", strict=True))

    def reward(response: str, prompt: str) -> dict[str, float]:
        return question_only_reward_fn(response, truths[prompt])

    def generate(prompts: list[str], params: Any) -> list[Any]:
        assert params == "sampling parameters"
        return [SimpleNamespace(outputs=[SimpleNamespace(text=ANSWERS[prompt])]) for prompt in prompts]

    model = SimpleNamespace(generate=generate)
    records = evaluate_vllm(model, reward, list(ANSWERS), "sampling parameters")
    assert [(record["prompt"], record["response"]) for record in records] == list(ANSWERS.items())
    assert [(record["format_reward"], record["reward"]) for record in records] == [(1, 1), (1, 0), (0, 0)]
    assert [json.loads(line) for line in Path("data/evaluate_vllm.jsonl").read_text().splitlines()] == records
    metrics = json.loads(Path("data/evaluate_vllm_metrics.json").read_text())
    assert list(metrics.pop("categories").values()) == [1, 1, 1]
    assert metrics == pytest.approx({"format_reward": 2 / 3, "answer_reward": 1 / 3, "reward": 1 / 3})
    given = evaluate_vllm(model, question_only_reward_fn, list(ANSWERS), "sampling parameters", ["2", "3", "4"])
    assert [record.pop("ground_truth") for record in given] == ["2", "3", "4"]
    assert given == records


ROOT = Path(__file__).parents[2]


def script(name: str, path: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, name, *arguments]
    return subprocess.run(command, cwd=ROOT, env=os.environ | {"PATH": path}, capture_output=True, text=True, check=False)


def test_figures_are_shown_when_the_stage_is_up_to_date(tmp_path: Path) -> None:
    """A command that does nothing stands for DVC with nothing to do."""
    dvc = tmp_path / "dvc"
    dvc.write_text("#!/bin/sh\n")
    dvc.chmod(0o755)
    baseline, sampled = (json.loads((ROOT / f"reports/{stage}.json").read_text()) for stage in ("math_baseline", "best_of_n"))
    shown = script("zero_shot.py", str(tmp_path)).stdout
    assert all(f"{prompt}: answer reward {values['accuracy']['value']:.3f} (" in shown for prompt, values in baseline.items())
    shown = script("best_of_n.py", str(tmp_path)).stdout
    for prompt, values in sampled.items():
        assert all(f"{prompt}, N = {n}: pass {kinds['pass']['value']:.3f} (" in shown for n, kinds in values["n"].items())


def test_the_numbers_of_gsm8k_are_those_of_its_table() -> None:
    """Of SmolLM2 before training, with Wilson's interval by hand."""
    folder = ROOT / "reports/smollm2-gsm8k"
    said = json.loads((folder / "metrics.json").read_text())["r1_zero"]
    table = pd.read_csv(folder / "r1_zero.csv")
    assert [*table["problem"]] == [f"gsm8k/test/{n}" for n in range(1319)]
    kinds = table.groupby(["format_reward", "answer_reward"]).size().to_dict()
    assert {tuple(map(float, re.findall(r"\d", name))): count for name, count in said["categories"].items()} == kinds
    right, z = table["answer_reward"].sum(), 1.959963984540054
    middle, half = right + z * z / 2, z * math.sqrt(right * (1 - right / 1319) + z * z / 4)
    assert (said["low"], said["high"]) == pytest.approx(
        [(middle + sign * half) / (1319 + z * z) for sign in (-1, 1)], abs=1e-12
    )
    page = (folder / "README.md").read_text()
    for column in ("closes_think", "opens_answer", "ends_with_truth", "cut_off"):
        assert re.search(rf"\b{table[column].sum():,}\b", page), column


def test_without_the_environment_there_is_one_message() -> None:
    done = script("zero_shot.py", "/nowhere")
    assert done.returncode == 2 and done.stderr.startswith("dvc is not on PATH.") and "Traceback" not in done.stderr

"""Measures of checkpoints: KL estimates beside the exact divergence; pass@N, Best@N, majority vote beside all subsets."""

import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from study_parts import changed, entry
from training_parts import NoMlflow

from grpo.common.errors import UserError
from grpo.common.files import write_json, write_text
from grpo.common.records import Completion, Problem, Rollout, write_records
from grpo.evaluation import best_of_n, evaluator
from grpo.evaluation.best_of_n import measure_pass_at_k
from grpo.evaluation.kl import kept_checkpoints, measure_kl, summary
from grpo.models.checkpoint import load_model, save_checkpoint
from grpo.study import paths
from grpo.study.config import BestOfN, LocalModel, OldTask
from grpo.study.schema import Study
from grpo.tasks.formats import QUESTION_ONLY
from grpo.tasks.rewards import votes_of

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


def test_it_is_measured_again_with_the_same_result(study: Study, tokenizer: Any) -> None:
    for file in Path().rglob("model.safetensors"):  # responses end early, each elsewhere
        weights = load_file(file)
        weights["model.embed_tokens.weight"][tokenizer.eos_token_id] *= 40
        save_file(weights, file)
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
    records = [json.loads(line) for line in written.splitlines()]
    own = {record["problem"]: record["tokens"] for record in records if record["step"] == 0}
    assert all(record["forward_tokens"] == own[record["problem"]] for record in records)  # of the start's own responses
    assert any(record["tokens"] != own[record["problem"]] for record in records if record["step"] == 10)


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
        for folder, step in ((last, 10), (last.with_name("step-9"), 9)):
            shutil.copytree(last.with_name("step-10"), folder)
            about = {"step": step, "prompt": "question_only", "start": paths.model("main").as_posix()}
            write_json(folder / "metadata.json", about)
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
    lows = [found[name]["low"] for name in ("per_token", "per_token_low_variance", "per_sequence_low_variance")]
    assert lows[0] < -1.5 and lows[1:] == [0.0, 0.0]  # two runs say little, but no divergence is negative
    (tenth,) = summary(records_of({"9": [(1, 1.0)], "10": [(1, 3.0)]}))["a"]
    assert {run: of["per_sequence_low_variance"] for run, of in tenth["by_run"].items()} == {"e/a/9": 1.0, "e/a/10": 3.0}


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


SAMPLES = 6


def over_subsets(n: int, value) -> float:  # type: ignore[no-untyped-def]
    """Mean of ``value(subset)`` over all subsets of ``n`` of the samples."""
    return float(np.mean([value(list(subset)) for subset in itertools.combinations(range(SAMPLES), n)]))


samples = st.lists(st.tuples(st.booleans(), st.integers(-3, 0), st.integers(-1, 2)), min_size=SAMPLES, max_size=SAMPLES)


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(samples=samples, n=st.integers(1, SAMPLES))
def test_estimators_equal_the_mean_over_all_subsets(samples: list[tuple[bool, int, int]], n: int) -> None:
    right, scores, votes = (np.array([list(column)]) for column in zip(*samples, strict=True))
    right, scores = right.astype(float), scores.astype(float)

    def best(subset: list[int]) -> float:
        top = max(scores[0, i] for i in subset)
        return float(np.mean([right[0, i] for i in subset if scores[0, i] == top]))

    def majority(subset: list[int]) -> float:
        counts = {vote: sum(votes[0, i] == vote for i in subset) for vote in set(votes[0, subset]) if vote >= 0}
        if not counts:
            return 0.0
        tied = [vote for vote, count in counts.items() if count == max(counts.values())]
        return float(np.mean([right[0, votes[0] == vote].mean() for vote in tied]))

    assert best_of_n.pass_at_n(right, n)[0] == pytest.approx(over_subsets(n, lambda subset: right[0, subset].max()))
    assert best_of_n.best_at_n(right, scores, n)[0] == pytest.approx(over_subsets(n, best))
    assert best_of_n.majority_at_n(right, votes, n)[0] == pytest.approx(over_subsets(n, majority))


def test_random_subsets_come_close_to_all_of_them() -> None:
    """16 choose 8 subsets are too many to enumerate; for two answers the exact value is a hypergeometric sum."""
    from math import comb

    right = np.array([[1.0] * 9 + [0.0] * 7])
    votes = np.array([[0] * 9 + [1] * 7])
    exact = sum(comb(9, k) * comb(7, 8 - k) * (1.0 if k > 4 else 0.5 if k == 4 else 0.0) for k in range(1, 9)) / comb(16, 8)
    assert best_of_n.majority_at_n(right, votes, 8)[0] == pytest.approx(exact, abs=0.03)  # three standard errors of 2,000 draws


def test_ranking_quality_is_a_mean_over_problems_of_medians_over_samples() -> None:
    """Of three pairs of a right and a wrong sample 2, 1.5 (a tie counts half) and 3 are in order. Two problems are unmixed."""
    right = np.array([[1.0, 1.0, 1.0, 0.0], [1.0, 0.0, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0], [0.0] * 4, [1.0] * 4])
    scores = np.array([[-1.0, -2.0, -9.0, -4.0], [-2.0, -2.0, -1.0, -3.0], [-1.0, -3.0, -2.0, -9.0], *[[-1.0] * 4] * 2])
    lengths = np.array([[4.0, 6.0, 8.0, 9.0], [7.0, 1.0, 2.0, 3.0], [5.0] * 4, *[[1.0] * 4] * 2])
    formed = np.array([[0.0, 1.0, 1.0, 1.0], *[[1.0] * 4] * 4])
    found = best_of_n.ranking_quality(right, scores, lengths, formed)
    assert (found["never_solved"], found["always_solved"], found["mixed"]) == pytest.approx((1 / 5, 1 / 5, 3 / 5))
    assert found["outranks"] == pytest.approx((2 / 3 + 1 / 2 + 1) / 3)
    assert found["score_difference"] == pytest.approx(((-2 + 4) + (-2 + 2) + (-1 + 3)) / 3)
    assert found["length_difference"] == pytest.approx(((6 - 9) + (7 - 2) + 0) / 3)
    assert found["share_right"] == pytest.approx((3 / 4 + 1 / 4 + 1 / 4) / 3)
    assert found["top_right"] == pytest.approx(2 / 3)  # the second one's best is wrong, and has the form
    assert found["top_wrong_form"] == pytest.approx(1 / 3)
    assert "outranks" not in best_of_n.ranking_quality(right[3:], scores[3:], lengths[3:], formed[3:])


def test_votes_go_to_equal_answers_however_they_are_spelt() -> None:
    assert votes_of([["1/2", None, "0.5", "3", r"\frac12", ""], ["7", "7"]]) == [[0, -1, 0, 2, 0, -1], [0, 0]]


def _rollout(text: str, log_probs: tuple[float, ...], reward: float | None = None, form: float = 1.0) -> Rollout:
    reward = float("{5}" in text) if reward is None else reward
    completion = Completion(tuple(range(len(log_probs))), text, log_probs, "stop")
    scores = {"reward": reward, "format_reward": form, "answer_reward": reward}
    return Rollout(Problem("p", "q", "5"), (1,), completion, scores)


def test_estimates_of_a_prompt() -> None:
    sure_and_right = [_rollout(r"\boxed{5}", (-0.1, -0.1)), _rollout(r"\boxed{4}", (-0.5, -0.3))]
    sure_and_wrong = [_rollout(r"\boxed{5}", (-0.9,)), _rollout(r"\boxed{4}", (-0.2, -0.2, -0.2))]
    found = best_of_n.estimates(
        BestOfN(problems=2, prompts=["question_only"], samples=2, n=[1, 2]), QUESTION_ONLY, [sure_and_right, sure_and_wrong]
    )
    values = {n: {kind: estimate["value"] for kind, estimate in kinds.items()} for n, kinds in found["n"].items()}
    assert values == {"1": {"pass": 0.5, "best": 0.5, "majority": 0.5}, "2": {"pass": 1.0, "best": 0.5, "majority": 0.5}}
    assert found["ranking"]["outranks"] == 0.5
    assert best_of_n.mean_log_prob(sure_and_right[1]) == pytest.approx(-0.4)
    assert best_of_n.mean_log_prob(_rollout("", ())) == 0.0


def test_zero_shot_answers_serve_for_n_of_one(mini_study: Study, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_text(
        paths.BASELINE / "r1_zero.jsonl", "".join(f'{{"problem": "{i}", "answer_reward": {float(i == 1)}}}\n' for i in range(4))
    )
    sampled = {kind: {"value": 0.3, "low": 0.2, "high": 0.4, "problems": 4} for kind in ("pass", "best", "majority")}
    metrics = {"samples": 2, "n": {"1": sampled, "2": sampled}}

    def found(zero_shot: int, prompt: str = "r1_zero") -> dict[str, dict[str, float]]:
        asked = BestOfN(problems=4, prompts=[prompt], samples=2, n=[1, 2])
        evaluation = {"zero_shot_problems": zero_shot, "zero_shot_prompts": ["r1_zero"], "best_of_n": asked}
        n = best_of_n.with_zero_shot(changed(mini_study, evaluation=evaluation), prompt, metrics)["n"]
        return {number: {kind: one["value"] for kind, one in kinds.items()} for number, kinds in n.items()}

    as_sampled = {"pass": 0.3, "best": 0.3, "majority": 0.3}
    assert found(4) == {"1": {"pass": 0.25, "best": 0.25, "majority": 0.25}, "2": as_sampled}  # one of four is right
    assert found(8) == found(4, "question_only") == {"1": as_sampled, "2": as_sampled}
    del metrics["n"]["1"]  # type: ignore[attr-defined]  # where it is not asked for
    assert found(4) == {"2": as_sampled}


def test_a_sample_with_part_of_the_reward_is_not_right() -> None:
    """It counts as wrong in every estimate."""

    def group(part: float) -> list[Rollout]:
        in_part = [_rollout(rf"\boxed{{{5 - i}}}", (-0.1 * i,), part) for i in (1, 2)]
        return [_rollout(r"\boxed{5}", (0.0,)), *in_part, _rollout("none", (-0.3,), 0.0, form=part)]

    asked = BestOfN(problems=2, prompts=["question_only"], samples=4, n=[1, 2, 4])
    found, expected = (best_of_n.estimates(asked, QUESTION_ONLY, [group(part), group(part)]) for part in (0.6, 0.0))
    assert found == expected
    assert found["n"]["2"]["pass"]["value"] == pytest.approx(0.5)  # 3 of 6 pairs hold the right one


def test_pass_at_k_of_checkpoints_by_hand() -> None:
    """Of four samples the base solves each problem once, and the end half of the problems always: at k = 4 it is behind."""
    of_base, of_end = [1] * 40, [4] * 20 + [0] * 20
    records = [
        {"run": f"e/a/{seed}", "place": place, "step": step, "right": right}
        for seed in (0, 1, 2)
        for place, step, right in (("base", 0, of_base), ("end", 8, of_end))
    ]
    found = best_of_n.pass_at_k_of([*records, {"run": "e/a/0", "place": "middle", "step": 4, "right": of_end}], 4, [1, 2, 4])
    values = {place: [one["value"] for one in of["k"].values()] for place, of in found["places"].items()}
    assert values == {"base": pytest.approx([0.25, 0.5, 1.0]), "end": pytest.approx([0.5] * 3)}  # two runs lack the middle
    above = found["places"]["end"]["k"]["4"]["above_base"]
    assert above["value"] == pytest.approx(-0.5) and above["high"] < 0 < found["places"]["end"]["k"]["1"]["above_base"]["low"]
    assert (found["base_ahead_from"], found["runs"], found["problems"]) == (4, 3, 40)
    for record in records:  # the base is at 1/2, 5/6 and 1, and the end at 0.45, which at k = 1 may be chance
        record["right"] = [2] * 40 if record["place"] == "base" else [4] * 18 + [0] * 22
    assert best_of_n.pass_at_k_of(records, 4, [1, 2, 4])["base_ahead_from"] == 2

"""pass@N, Best@N and majority vote against enumeration of all subsets, and the stage's parts."""

import itertools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from study_parts import changed

from grpo.common.files import write_text
from grpo.common.records import Completion, Problem, Rollout
from grpo.evaluation import best_of_n
from grpo.study import paths
from grpo.study.schema import Study
from grpo.study.settings import BestOfN
from grpo.tasks.formats import QUESTION_ONLY
from grpo.tasks.rewards import votes_of

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

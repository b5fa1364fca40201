"""Intervals against published values, and picking an experiment's winner from run folders."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from grpo.errors import UserError
from grpo.evaluation.statistics import clustered_standard_error, mean_over_problems, paired_bootstrap, wilson_interval
from grpo.selection import mean_of_last, read_winners, select
from grpo.study import Experiment, Study

EXPERIMENT = "grpo_learning_rate"


@pytest.mark.parametrize(
    ("successes", "n", "low", "high"),
    [
        (8, 10, 0.4902, 0.9433),
        (0, 10, 0.0, 0.2775),
        (10, 10, 0.7225, 1.0),
        (5, 10, 0.2366, 0.7634),
        # Newcombe 1998, Statistics in Medicine 17:857, Table I, method 3
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_wilson_interval(successes: int, n: int, low: float, high: float) -> None:
    assert wilson_interval(successes, n) == pytest.approx((low, high), abs=5e-5)


@pytest.mark.parametrize("n", [1, 2, 7, 100, 5000])
def test_wilson_interval_holds_the_share_and_is_symmetric(n: int) -> None:
    for successes in {0, 1, n // 2, n}:
        low, high = wilson_interval(successes, n)
        assert 0.0 <= low <= successes / n + 1e-12 and successes / n - 1e-12 <= high <= 1.0
        assert (1 - high, 1 - low) == pytest.approx(wilson_interval(n - successes, n), abs=1e-12)


def test_wilson_interval_with_another_level() -> None:
    # p = 1/2 and n = 4: center 1/2, half width sqrt(1/16 + 1/64) / 1.25 = .223607
    assert wilson_interval(2, 4, z=1.0) == pytest.approx((0.276393, 0.723607), abs=1e-6)


@pytest.mark.parametrize("n", [0, -3])
def test_no_observations_have_no_interval(n: int) -> None:
    with pytest.raises(ValueError, match="at least one"):
        wilson_interval(0, n)


# ------------------------------------------------------------------------------------------------------------- selection


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def study(mini_study: Study) -> Study:
    """Three arms, one seed, the last two evaluations count, 100 validation problems."""
    return mini_study.model_copy(
        update={
            "seeds": [0],
            "experiments": {EXPERIMENT: Experiment(arms={name: {"learning_rate": r} for name, r in RATES.items()})},
            "selection": mini_study.selection.model_copy(update={"last_k": 2, "pinned": {}}),
            "evaluation": mini_study.evaluation.model_copy(update={"problems": 100}),
        }
    )


RATES = {"low": 1e-5, "middle": 1e-4, "high": 1e-3}


def write_run(arm: str, rewards: list[float], seed: int = 0) -> None:
    folder = Path(f"data/runs/{EXPERIMENT}/{arm}-{seed}")
    folder.mkdir(parents=True)
    rows = [f"{5 * i},{5 * i},0.5,{reward}" for i, reward in enumerate(rewards)]
    (folder / "validation.csv").write_text("\n".join(["step,update,val/reward,val/answer_reward", *rows]) + "\n")
    (folder / "config.yaml").write_text(f"run: {EXPERIMENT}/{arm}-{seed}\nidentity: id-{arm}-{seed}\n")


def test_the_best_mean_of_the_last_evaluations_wins(study: Study) -> None:
    write_run("low", [0.1, 0.9, 0.2, 0.3])
    write_run("middle", [0.1, 0.2, 0.4, 0.5])
    write_run("high", [0.1, 0.2, 0.6, 0.2])  # best at one time, and in the mean of all but the last
    result = select(study, EXPERIMENT)
    assert result["winner"] == "middle"
    assert result["value"] == pytest.approx(0.45)
    # Wilson's interval of 45 of 100
    assert (result["low"], result["high"]) == pytest.approx((0.3561, 0.5476), abs=5e-5)
    assert result["overrides"] == {"learning_rate": 1e-4}
    assert result["pinned"] is False
    assert (result["metric"], result["last_k"]) == ("val/answer_reward", 2)
    assert "highest" in result["reason"]
    assert [c["arm"] for c in result["candidates"]] == ["low", "middle", "high"]
    assert [c["value"] for c in result["candidates"]] == pytest.approx([0.25, 0.45, 0.4])
    assert result["candidates"][0]["runs"] == [
        {"run": f"{EXPERIMENT}/low-0", "seed": 0, "identity": "id-low-0", "value": pytest.approx(0.25)}
    ]
    json.dumps(result)  # it is written as JSON


def test_the_untrained_evaluation_never_counts(study: Study) -> None:
    write_run("low", [0.9, 0.1])  # one evaluation after training, although two are wanted
    write_run("middle", [0.0, 0.2])
    write_run("high", [0.0, 0.1])
    assert select(study, EXPERIMENT)["winner"] == "middle"
    assert mean_of_last(Path(f"data/runs/{EXPERIMENT}/low-0"), 5) == pytest.approx(0.1)


@pytest.mark.parametrize(("last_k", "mean"), [(1, 0.8), (2, 0.6), (3, 0.4), (9, 0.4)])
def test_mean_of_the_last_k(last_k: int, mean: float) -> None:
    write_run("low", [1.0, 0.0, 0.4, 0.8])
    assert mean_of_last(Path(f"data/runs/{EXPERIMENT}/low-0"), last_k) == pytest.approx(mean)


def test_an_arm_counts_by_the_mean_over_its_seeds(study: Study) -> None:
    for arm, pair in {"low": (0.9, 0.1), "middle": (0.6, 0.6), "high": (0.5, 0.5)}.items():
        for seed, value in zip((3, 8), pair, strict=True):
            write_run(arm, [0.0, value, value], seed)
    result = select(study.model_copy(update={"seeds": [3, 8]}), EXPERIMENT)
    assert result["winner"] == "middle"
    assert [c["value"] for c in result["candidates"]] == pytest.approx([0.5, 0.6, 0.5])
    assert [run["run"] for run in result["candidates"][0]["runs"]] == [f"{EXPERIMENT}/low-3", f"{EXPERIMENT}/low-8"]


def test_of_equal_arms_the_earlier_wins_and_the_reason_says_so(study: Study) -> None:
    write_run("low", [0.0, 0.1, 0.1])
    write_run("middle", [0.0, 0.25, 0.5])
    write_run("high", [0.0, 0.5, 0.25])
    result = select(study, EXPERIMENT)
    assert result["winner"] == "middle"
    assert re.search(r"equal to high\b.*earlier", result["reason"])
    assert "low" not in result["reason"]


def pinned_to(study: Study, arm: str) -> Study:
    return study.model_copy(update={"selection": study.selection.model_copy(update={"pinned": {EXPERIMENT: arm}})})


def test_a_pinned_arm_wins_and_the_reason_names_the_better_one(study: Study) -> None:
    write_run("low", [0.0, 0.1, 0.1])
    write_run("middle", [0.0, 0.5, 0.5])
    write_run("high", [0.0, 0.2, 0.2])
    result = select(pinned_to(study, "high"), EXPERIMENT)
    assert (result["winner"], result["pinned"], result["value"]) == ("high", True, pytest.approx(0.2))
    assert result["overrides"] == {"learning_rate": 1e-3}
    assert re.search(r"pinned.*middle.*0\.500", result["reason"])
    result = select(pinned_to(study, "middle"), EXPERIMENT)
    assert (result["winner"], result["pinned"]) == ("middle", True)
    assert re.search("pinned.*best", result["reason"])


def test_a_missing_run_is_named_with_its_stage(study: Study) -> None:
    write_run("low", [0.0, 0.1])
    write_run("high", [0.0, 0.1])
    with pytest.raises(UserError, match=r"middle-0: holds no finished run.*dvc repro grpo_learning_rate@middle-0"):
        select(study, EXPERIMENT)


def test_winners_of_the_experiments_before_are_read() -> None:
    assert read_winners("grpo_learning_rate") == []
    with pytest.raises(UserError, match=r"grpo_learning_rate\.json.*select@grpo_learning_rate"):
        read_winners("grpo_baselines")
    winner: dict[str, Any] = {"experiment": EXPERIMENT, "winner": "low", "overrides": {"learning_rate": 1e-5}}
    Path("reports/select").mkdir(parents=True)
    Path(f"reports/select/{EXPERIMENT}.json").write_text(json.dumps(winner))
    assert read_winners("grpo_baselines") == [winner]


# ------------------------------------------------------------------------------------------- clusters and paired scores


def test_clustered_standard_error_of_equal_clusters_is_that_of_their_means() -> None:
    values, clusters = [1.0, 0.0, 1.0, 1.0, 0.0, 0.0], ["a", "a", "b", "b", "c", "c"]
    means = [0.5, 1.0, 0.0]
    expected = (sum((m - 0.5) ** 2 for m in means) / 2 / 3) ** 0.5
    assert clustered_standard_error(values, clusters) == pytest.approx(expected)
    # Each observation its own cluster: the ordinary standard error of a mean.
    alone = (sum((v - 0.5) ** 2 for v in values) / 5 / 6) ** 0.5
    assert clustered_standard_error(values, range(6)) == pytest.approx(alone)


def test_copies_of_a_sample_say_nothing_new() -> None:
    """Sixteen equal samples of each problem have the standard error of one sample of each."""
    once = [1.0, 0.0, 0.0, 1.0, 1.0]
    many = [value for value in once for _ in range(16)]
    clusters = [problem for problem in range(5) for _ in range(16)]
    assert clustered_standard_error(many, clusters) == pytest.approx(clustered_standard_error(once, range(5)))
    assert clustered_standard_error(many, clusters) > 3 * clustered_standard_error(many, range(80))
    with pytest.raises(ValueError, match="two clusters"):
        clustered_standard_error([1.0, 0.0], ["a", "a"])


def test_mean_over_problems_covers_the_truth_as_often_as_it_says() -> None:
    generator = np.random.default_rng(0)
    hits = 0
    for _ in range(400):
        found = mean_over_problems(generator.beta(2, 3, size=60))
        hits += found["low"] <= 0.4 <= found["high"]
    assert 0.92 <= hits / 400 <= 0.98
    assert mean_over_problems([1.0, 1.0]) == {"value": 1.0, "low": 1.0, "high": 1.0, "problems": 2}


def test_paired_bootstrap_uses_that_the_problems_are_the_same() -> None:
    """Policies that differ on few problems: the paired interval is that of the differences, far below the unpaired one."""
    generator = np.random.default_rng(1)
    first = (generator.random(400) < 0.5).astype(float)
    second = first.copy()
    second[np.flatnonzero(first == 0)[:20]] = 1.0
    found = paired_bootstrap(first, second)
    assert found["value"] == pytest.approx(0.05)
    error = (0.05 * 0.95 / 400) ** 0.5
    assert (found["low"], found["high"]) == pytest.approx((0.05 - 1.96 * error, 0.05 + 1.96 * error), abs=0.004)
    assert found["p"] < 0.001
    assert paired_bootstrap(second, first)["value"] == pytest.approx(-0.05)
    assert paired_bootstrap(first, second) == found  # seeded
    same = paired_bootstrap(first, first)
    assert (same["value"], same["low"], same["high"], same["p"]) == (0.0, 0.0, 0.0, 1.0)
    with pytest.raises(ValueError, match="3 and 2"):
        paired_bootstrap([1, 0, 1], [1, 0])


def test_paired_bootstrap_rejects_a_true_null_hypothesis_as_often_as_it_says() -> None:
    generator = np.random.default_rng(2)
    p = [paired_bootstrap(*(generator.random((2, 100)) < 0.5).astype(float), resamples=400, seed=i)["p"] for i in range(300)]
    assert 0.02 <= np.mean(np.array(p) < 0.05) <= 0.09

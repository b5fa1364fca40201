"""A study's claims: which are judged, and under which conditions; verdicts of several studies together, and their file."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import report_parts
from pydantic import TypeAdapter
from report_parts import each, run, solved, write_run
from scipy import stats
from study_parts import ROOT, study_named, with_values

from grpo.common.errors import UserError
from grpo.common.metrics import UNITS
from grpo.results import claims as judging
from grpo.results.claims import read_published
from grpo.results.intervals import difference_of, mean_of_pairs
from grpo.results.pairs import Pairs, read_pairs, write_pairs
from grpo.results.runs import Arm, Run, evidence_of, has_collapsed
from grpo.results.verdicts import DECIDED, DOES_NOT_HOLD, HOLDS, NOT_TESTED, OPEN, SAME, Verdict, decide_by, is_ratio, judge
from grpo.study import paths
from grpo.study.claims import AnyClaim, Beats, own_claims
from grpo.study.schema import Study, load_study
from grpo.tasks.arithmetic import Arithmetic

pytestmark = pytest.mark.usefixtures("workdir")
PROBLEMS, SEEDS = 200, [0, 1, 2, 3, 4]
RATES, BASELINES, LORA, PROMPTS = "grpo_learning_rate", "grpo_baselines", "grpo_lora", "grpo_prompt_ablation"
ENDS = {  # final rewards of arms; all others end at .6
    "1e-4": 0.3,
    "6e-4": 0.8,
    "no_baseline-rate_half": 0.7,
    "rank_1-rate_2": 0.61,
    "rank_1-rate_5": 0.2,
}
GROUPS = {"rollout_batch_size": 64, "group_size": 8}
LOW_RANK = ENDS | {"rank_1-rate_same": 0.1, "rank_1-rate_2": 0.2, "rank_1-rate_5": 0.1}


@pytest.fixture(scope="module")
def study(mini_study: Study) -> Study:
    """The default study with four of its experiments."""
    names = (RATES, BASELINES, LORA, PROMPTS)
    kept = {name: mini_study.experiments[name].model_copy(update={"seeds": None}) for name in names}
    found: Study = with_values(mini_study, {"seeds": SEEDS, "experiments": kept, "claims": []})
    return found


def made_up(experiment: str, arm: str, seed: int, *rewards: float, steps: int = 64, **values: Any) -> Run:
    outcomes, every = [solved(reward, PROBLEMS) for reward in rewards], steps // (len(rewards) - 1)
    entropy = 0.5 - 0.1 * (seed % 2)
    return run(arm, outcomes, seed, experiment, every=every, steps=steps, values=values, token_entropy=entropy)


@pytest.fixture
def write(study: Study) -> Callable[..., None]:
    """Write all runs: one problem of 200 more or less for each seed, so that no two arms have identical results."""

    def write(ends: dict[str, float] = ENDS, steps: int = 64) -> None:
        for experiment, entry in study.experiments.items():
            for place, (arm, values) in enumerate(entry.arms.items()):
                for seed in SEEDS:
                    end = ends.get(arm, ends.get("others", 0.6)) + (seed - 2 + place % 3) / PROBLEMS
                    rate = values.get("learning_rate_times", 1)
                    middle = 0.8 if arm == "3e-3" else end
                    write_run(made_up(experiment, arm, seed, 0.1, middle, end, steps=steps, learning_rate=rate))

    return write


def judge_claims(study: Study) -> list[Verdict]:
    return judging.judge_claims(study, {name: evidence_of(study, name) for name in study.active_experiments})


def by_id(verdicts: list[Verdict]) -> dict[str, Verdict]:
    return {verdict.id: verdict for verdict in verdicts}


@pytest.mark.parametrize(("end", "collapsed"), [(0.04, True), (0.07, False)])
def test_a_fall_between_evaluations_is_judged_by_groups(end: float, collapsed: bool) -> None:
    """Half of 8 groups at the best of 48 steps: Wilson's lower end at .05 / 48 is .123; of 64 rollouts it were .313."""
    made = made_up("e", "a", 0, 0.0, end, steps=48, rollout_batch_size=64, group_size=8)
    made.history["train/answer_reward"] = [0.5, *[end] * 47]
    assert has_collapsed(made) is collapsed


@pytest.mark.parametrize(("evaluations", "collapsed"), [(2, True), (30, False)])
def test_a_fall_counts_by_how_often_chance_could_have_shown_it(evaluations: int, collapsed: bool) -> None:
    """From 6 of 20 problems to 1: p = .021, less than .05 / 2 and more than .05 / 30."""
    made = run("a", [solved(0.3, 20), *[solved(0.05, 20)] * (evaluations - 1)])
    assert has_collapsed(made) is collapsed


@pytest.mark.parametrize(
    ("rewards", "options", "collapsed"),
    [
        ([0.0, 0.6, 0.3], {}, False),  # half of its best is not below half
        ([0.0, 0.6, 0.29], {}, True),
        ([each(-1.0), each(-3.0)], {}, False),  # below nothing there is no half
        ([0.0, 0.1], {"steps": 8, "train/answer_reward": 0.9}, False),  # of no groups: as of SFT
        ([0.0, 0.1], {"steps": 8, "train/answer_reward": float("nan"), "values": GROUPS}, False),  # not measured
        ([0.0, 0.1], {"steps": 8, "train/answer_reward": 0.9, "values": GROUPS}, True),
    ],
)
def test_what_has_collapsed(rewards: list[Any], options: dict[str, Any], collapsed: bool) -> None:
    made = run("a", rewards, **options)
    assert has_collapsed(made) is collapsed
    if "train/answer_reward" in options:  # an own reward may have any size
        history = made.history.rename(columns={"train/answer_reward": "train/reward"})
        assert not has_collapsed(replace(made, metric="reward", history=history))


# ---------------------------------------------------------------------------------------------------- published claims


def test_claims_about_the_studys_experiments_are_judged(study: Study, write: Callable[..., None]) -> None:
    write(ENDS | {"3e-3": 0.0})
    found = by_id(judge_claims(study))
    named = read_published()
    assert [*found] == [
        *(claim.id for claim in named.claims if claim.experiment in study.experiments),
        *(entry["id"] for entry in named.untested if entry["experiment"] in study.experiments),
    ]
    expected = {
        "learning-rate-too-low": HOLDS,  # .8 against .3
        "learning-rate-too-high": HOLDS,  # from .8 to 0 in all seeds
        "baseline-helps": DOES_NOT_HOLD,  # .6 against the .7 of the better of two rates
        "lora-rank-1": HOLDS,
        "prompt-final": SAME,
        "prompt": SAME,
        "lora-learning-rate": NOT_TESTED,
    }
    assert {name: found[name].verdict for name in expected} == expected
    low = found["learning-rate-too-low"]
    assert low.interval is not None and low.interval["value"] == pytest.approx(0.51) and low.kind == "beats"
    assert asdict(low)["reported"] == {"snider-2025": "1e-6: no improvement; best 3e-5", "garg-2026": low.reported["garg-2026"]}
    assert "no_baseline-rate_half 0.7" in found["baseline-helps"].measured


def test_what_a_generated_model_shows_by_design_is_marked_as_that(study: Study, write: Callable[..., None]) -> None:
    write()
    assert {verdict.id for verdict in judge_claims(study) if verdict.by_design} == {"prompt"}
    of_hub = judge_claims(with_values(study, {"models.main.source": "hub"}))
    assert not any(verdict.by_design for verdict in of_hub)
    own = claims({"arm": "6e-4", "beats": "1e-4", "by": 0.05, "by_design": "as asked"})
    of_hub = judge_claims(with_values(study, {"models.main.source": "hub", "claims": own_claims(own, study.experiments)}))
    assert [verdict.by_design for verdict in of_hub if verdict.by_design] == ["as asked"], "what its author says stays"


def test_short_runs_test_no_claim_about_later_steps(study: Study, write: Callable[..., None]) -> None:
    write(ENDS | {"3e-3": 0.0}, steps=24)
    late = by_id(judge_claims(study))["baseline-helps"]
    assert late.verdict == NOT_TESTED and "step 48 and later, and the runs took 24" in late.reason and late.interval


@pytest.mark.parametrize(
    ("ends", "claim", "reason"),
    [
        ({"1e-4": 0.9}, "learning-rate-too-low", "is both arms"),  # where the lowest rate leads, nothing lower was tried
        ({"others": 0.1}, "baseline-helps", "nothing was learned"),
        (LOW_RANK | {"rank_1-rate_same": 0.6}, "lora-rank-1", "is the lowest or the highest"),
        (LOW_RANK | {"rank_1-rate_5": 0.6}, "lora-rank-1", "is the lowest or the highest"),
    ],
)
def test_what_the_runs_do_not_test(
    study: Study, write: Callable[..., None], ends: dict[str, float], claim: str, reason: str
) -> None:
    write(ends)
    found = by_id(judge_claims(study))[claim]
    assert found.verdict == NOT_TESTED and reason in found.reason


def test_claims_belong_to_a_task(study: Study, write: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Published claims about MATH do not apply to another task, unless it stands for MATH; own claims are about any task."""
    write()
    own = with_values(study, {"claims": own_claims(claims({"arm": "6e-4", "beats": "1e-4", "by": 0.05}), study.experiments)})
    monkeypatch.setattr(Arithmetic, "stands_for", "")
    found = judge_claims(own)
    assert {verdict.verdict for verdict in found if not verdict.own} == {NOT_TESTED}
    assert [verdict.verdict for verdict in found if verdict.own] == [HOLDS]


@pytest.mark.parametrize("name", ["mini", "math-2xh100", "objectives"])
def test_the_studies_have_the_arms_that_published_claims_name(name: str) -> None:
    """They pass the check for own claims; sources, ids and experiments are known."""
    study, named = study_named(name), read_published()
    about = [claim for claim in named.claims if claim.experiment in study.active_experiments]
    assert own_claims(about, study.experiments) and len({claim.id for claim in named.claims}) == len(named.claims)
    cited = {source for claim in named.claims for source in claim.reported} | {s for e in named.untested for s in e["reported"]}
    assert cited == set(named.sources)


# ---------------------------------------------------------------------------------------------------------- own claims


@pytest.mark.parametrize("path", sorted((ROOT / "studies/literature").glob("*.yaml")), ids=lambda path: path.stem)
def test_each_claim_of_a_paper_can_hold_and_can_fail_with_the_seeds_of_its_study(path: Path) -> None:
    """Five bases whose differences spread by 0.07 (the median of mini's), 0.3 to either side of the margin."""
    study = load_study(path)
    spread = 0.07 * np.array([-1.2, -0.6, 0.0, 0.6, 1.2])[: len(study.seeds), None]
    for claim in study.own_claims:
        ratio = is_ratio(claim)
        margin = np.log(claim.by) if ratio else claim.by if isinstance(claim, Beats) else -claim.by
        assert not ratio or claim.metric in UNITS, f"{claim.metric} is not logged"
        at = [np.broadcast_to(margin + side + spread, (len(study.seeds), 1 if ratio else 384)) for side in (0.3, -0.3)]
        held, failed = (decide_by(claim, [Pairs("a", "b", study.seeds, of, np.empty((5, 0)))]).verdict for of in at)
        assert held == HOLDS and failed in DECIDED and failed != HOLDS, claim.statement


def claims(*values: dict[str, Any]) -> Any:
    return TypeAdapter(list[AnyClaim]).validate_python(list(values))


def test_an_own_claim_finds_its_experiment_and_says_what_it_tests(study: Study, write: Callable[..., None]) -> None:
    write()
    own = claims(
        {"arm": "6e-4", "beats": "1e-4", "by": 0.05},
        {"arm": f"{LORA}/full", "not_below": f"{PROMPTS}/question_only", "by": 0.05},
    )
    first, second = (verdict for verdict in judge_claims(with_values(study, {"claims": own})) if verdict.own)
    assert (first.id, first.experiment, first.verdict) == ("own-1", RATES, HOLDS) and not first.reported
    assert "6e-4" in first.statement and "1e-4" in first.statement
    assert second.experiment == LORA and second.verdict == HOLDS and f"{LORA}/full" in second.measured


def test_replicates_decide_with_the_study(study: Study, write: Callable[..., None]) -> None:
    """The study's runs again on other problems; a replicate that does not test a claim, or of an arm alone, adds nothing."""
    write()
    evidence = {name: evidence_of(study, name) for name in study.active_experiments}
    alone = by_id(judging.judge_claims(study, evidence))
    assert alone["baseline-helps"].together is None
    other = {
        name: replace(pairs, problems="others") for name, of in alone.items() if (pairs := of.pairs) and name != "prompt-final"
    }
    found = by_id(judging.judge_claims(study, evidence, [other, {}]))
    assert found["prompt-final"].together is None and found["lora-rank-1"].together is not None
    assert {name: replace(of, together=None) for name, of in found.items()} == alone
    for name, of in found.items():
        assert (of.together is None) == (name not in other)
        if of.together and of.interval:
            assert (of.together["studies"], of.together["seeds"]) == (2, 10)
            assert of.together["interval"]["value"] == pytest.approx(of.interval["value"])
            assert of.together["could_see"] < (of.could_see or 0)


# ----------------------------------------------------------------------------------------------------- several studies together


BEATS: AnyClaim = TypeAdapter(AnyClaim).validate_python({"arm": "a", "beats": "b", "by": 0.05, "at": "last_step"})
MORE: AnyClaim = TypeAdapter(AnyClaim).validate_python({"arm": "a", "beats": "b", "by": 1.25, "metric": "m", "at": "late"})


def paired(problems: str, *differences: float, of: int = 100) -> Pairs:
    """Runs that differ by so much in each problem: only the runs vary, and one problem as if it differed."""
    table = np.repeat(np.array(differences)[:, None], of, axis=1)
    return Pairs("a", "b", [*range(len(differences))], table, np.empty((len(differences), 0)), problems)


@pytest.mark.parametrize(
    ("studies", "alone", "expected"),
    [
        ([(0.0, 0.1, 0.2, 0.3), (0.1, 0.2, 0.0, 0.3), (0.0, 0.1, 0.2, 0.3)], OPEN, HOLDS),
        ([(-0.1, 0.1, 0.06, -0.06), (0.1, -0.1, 0.03, -0.03), (-0.05, 0.05, 0.06, -0.06)], OPEN, SAME),
        ([(-0.3, -0.1, -0.2, 0.1)] * 4, OPEN, DOES_NOT_HOLD),
        ([(0.2, 0.2, 0.21), (-0.2, -0.2, -0.21)], None, OPEN),  # each is sure, and they contradict each other
        ([(0.2, 0.2, 0.21), (0.2, 0.21, 0.2), (-0.2, -0.2, -0.21)], None, OPEN),
    ],
)
def test_studies_decide_together_unless_they_contradict_each_other(
    studies: list[tuple[float, ...]], alone: str | None, expected: str
) -> None:
    pairs = [paired(str(number), *of) for number, of in enumerate(studies)]
    found = decide_by(BEATS, pairs)
    assert found.verdict == expected
    assert found.interval is not None and found.interval["value"] == pytest.approx(np.mean(studies))
    assert alone is None or {decide_by(BEATS, [of]).verdict for of in pairs} == {alone}


def test_the_interval_of_several_studies_by_hand() -> None:
    """Runs of equal problems: the t interval over all of them, and each study's problems by the square of its share of runs."""
    first, second = (0.1, 0.2, 0.3), (0.12, 0.25)
    found = mean_of_pairs([paired("x", *first).differences, paired("y", *second, of=50).differences])
    variance = stats.sem([*first, *second]) ** 2 + 0.6**2 / 99 / 100 + 0.4**2 / 49 / 50
    assert found.value == pytest.approx(np.mean([*first, *second])) and found.se == pytest.approx(np.sqrt(variance))
    far = mean_of_pairs(
        [paired(key, *(at + noise for noise in (-0.01, 0, 0.01))).differences for key, at in (("x", 0), ("y", 1))]
    )
    assert far.df == 1 and far.se == pytest.approx(0.5, rel=0.01)  # of the two studies' means, 0 and 1


def test_studies_of_the_same_problems_are_one_study_with_more_runs() -> None:
    rng = np.random.default_rng(0)
    table = rng.choice([-1.0, 0.0, 1.0], (5, 80), p=[0.1, 0.7, 0.2])
    halves = [replace(paired("x", 0, 0), differences=table[:2]), replace(paired("x", 0, 0, 0), differences=table[2:])]
    interval = difference_of(np.zeros_like(table), table).ends()
    assert decide_by(BEATS, halves).interval == pytest.approx(interval)
    assert decide_by(BEATS, [halves[0], replace(halves[1], problems="y")]).interval != pytest.approx(interval, abs=1e-4)


def arms(*ends: float, middle: float | None = None) -> list[Arm]:
    """Two arms; the first ends so, and the second at .5 to .6."""

    def of(name: str, ends: tuple[float, ...]) -> Arm:
        runs = [
            report_parts.run(name, [0.1, end if middle is None else middle, end], seed, steps=64, every=32, m=(0.5 + end) * 2)
            for seed, end in enumerate(ends)
        ]
        return Arm("e", name, runs, [])

    return [of("a", ends), of("b", tuple(0.5 + 0.05 * place for place in range(len(ends))))]


@pytest.mark.parametrize("claim", [BEATS, MORE, BEATS.model_copy(update={"at": "end"})])
def test_verdicts_are_the_same_from_the_file(claim: AnyClaim, tmp_path: Path) -> None:
    for ends in ((0.7, 0.83, 0.9), (0.52, 0.55, 0.59), (0.2, 0.1, 0.3)):
        found = judge(claim, *arms(*ends))
        assert found.pairs is not None
        write_pairs(tmp_path / "pairs.csv", {"x": found.pairs, "y": paired("p", 1 / 3, -0.1)})
        read = read_pairs(tmp_path / "pairs.csv")
        again = decide_by(claim, [read["x"]])
        assert replace(again, measured=found.measured) == found
        assert (read["y"].problems, read["y"].seeds) == ("p", [0, 1]) and read["y"].differences[0, 0] == 1 / 3


def test_the_committed_pairs_give_the_verdicts_of_the_committed_record() -> None:
    pairs, record = read_pairs(ROOT / paths.PAIRS), json.loads((ROOT / paths.RECORD).read_text())
    claims = {claim.id: claim for claim in read_published().claims}
    judged = {one["id"]: one for one in record["claims"] if one["id"] in pairs}
    assert len(judged) > 10
    for name, one in judged.items():
        found = decide_by(claims[name], [pairs[name]])
        assert (found.verdict, found.interval) == (one["verdict"], pytest.approx(one["interval"]))


def test_all_studies_together_wait_too_until_the_difference_stops_moving() -> None:
    claim = BEATS.model_copy(update={"at": "end"})
    found = judge(claim, *arms(0.2, 0.1, 0.3, middle=0.1)).pairs
    assert found is not None and found.moved.mean(axis=1) == pytest.approx([-0.3, -0.45, -0.3])  # .1, 0 and .2 less .4 to .5
    climbing = [replace(found, moved=np.full((3, 100), 0.1), problems=name) for name in "xyz"]
    assert decide_by(claim, climbing).verdict == NOT_TESTED
    assert decide_by(claim, [replace(one, moved=-one.moved) for one in climbing]).verdict == DOES_NOT_HOLD


@pytest.mark.parametrize(
    ("old", "new"),
    [
        *(("0.1 0.1", "0.1 x"), (",0.1 0.1", ","), ("differences", "d"), (",0,0.1 0.1", ",0,inf 1"), ("0.1 0.1", "0.1")),
        ("0.5", "nan"),
    ],
)
def test_a_damaged_file_is_named(old: str, new: str, tmp_path: Path) -> None:
    path = tmp_path / "pairs.csv"
    write_pairs(path, {"x": replace(paired("p", 0.1, 0.2, of=2), moved=np.full((2, 1), 0.5))})
    text = path.read_text().replace("0.10000000000000001", "0.1")
    assert old in text
    path.write_text(text.replace(old, new))
    with pytest.raises(UserError, match=r"pairs\.csv: damaged"):
        read_pairs(path)

"""A study's claims: which are judged, and under which conditions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import TypeAdapter
from report_parts import run, solved, write_run
from study_parts import ROOT, study_named, with_values

from grpo.common.errors import UserError
from grpo.common.metrics import UNITS
from grpo.results import claims as judging
from grpo.results.claims import read_published
from grpo.results.evidence import evidence_of, has_collapsed
from grpo.results.pairs import Pairs
from grpo.results.runs import Run
from grpo.results.verdicts import DECIDED, DOES_NOT_HOLD, HOLDS, NOT_TESTED, SAME, Verdict, decide_by, ratio_of
from grpo.study.claims import AnyClaim, Beats, own_claims
from grpo.study.schema import Study, load_study, validated
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


def test_short_runs_test_no_claim_about_later_steps(study: Study, write: Callable[..., None]) -> None:
    write(ENDS | {"3e-3": 0.0}, steps=24)
    late = by_id(judge_claims(study))["baseline-helps"]
    assert late.verdict == NOT_TESTED and "step 48 and later, and the runs took 24" in late.reason and late.interval


def test_the_shortest_run_counts_for_the_step_from_which_a_claim_is_meant(study: Study, write: Callable[..., None]) -> None:
    write()
    own = claims({"arm": "6e-4", "beats": "1e-4", "metric": "token_entropy", "by": 1.25, "at": "late", "horizon": 48})
    with_own = with_values(study, {"claims": own_claims(own, study.experiments)})
    assert [found.verdict for found in judge_claims(with_own) if found.own] == [SAME]
    write_run(made_up(RATES, "1e-4", 0, 0.1, 0.6, 0.6, steps=24))
    assert [found.verdict for found in judge_claims(with_own) if found.own] == [NOT_TESTED]


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


def test_a_claim_about_long_responses_is_not_tested_by_short_ones(study: Study, write: Callable[..., None]) -> None:
    write()
    own = [
        {"arm": "6e-4", "beats": "1e-4", "by": 0.05, "requires": {"response_tokens": tokens}, "experiment": RATES}
        for tokens in (20, 21)
    ]
    verdicts = judge_claims(with_values(study, {"claims": own_claims(claims(*own), study.experiments)}))
    found = [verdict for verdict in verdicts if verdict.own]
    assert [verdict.verdict for verdict in found] == [HOLDS, NOT_TESTED] and "21 tokens or more" in found[1].reason


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
        ratio = ratio_of(claim)
        margin = np.log(claim.by) if ratio else claim.by if isinstance(claim, Beats) else -claim.by
        assert ratio is None or ratio.metric in UNITS, f"{ratio.metric} is not logged"
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


@pytest.mark.parametrize(
    ("claim", "message"),
    [
        ({"arm": "whole", "beats": "plain", "by": 0.05}, r"claims\.0: no experiment has the arms whole, plain"),
        ({"arm": "full", "beats": "plain", "by": 0.05}, r"claims\.0: grpo_lora has no arm 'plain' .*known: full, rank_1"),
        (
            {"experiment": LORA, "arm": "full", "beats": "plain", "by": 0.05},
            "grpo_lora has no arm 'plain' .*known: full, rank_1",
        ),
        ({"experiment": "lora", "arm": "full", "beats": "rank_1", "by": 0.05}, "no experiment 'lora'"),
        ({"arm": "full", "above": "rank_1", "by": 0.05}, r"claims\.0: a claim has one of the keys beats, not_below"),
        ({"arm": "full", "beats": "rank_1", "by": 0.05, "margin": 1}, "margin: unknown key"),
        ({"arm": "full", "beats": "rank_1", "by": 0.05, "metric": "token_entropy"}, "a ratio of 1 or more, not 0.05"),
        ({"arm": "full", "beats": "rank_1", "by": 0.05, "at": "late"}, "choose start, end or last_step"),
    ],
)
def test_a_mistake_in_an_own_claim_is_one_line(mini_study: Study, claim: dict[str, Any], message: str) -> None:
    values = mini_study.model_dump(mode="json") | {"claims": [claim]}
    with pytest.raises(UserError, match=message) as error:
        validated(values, Path("params.yaml"))
    assert len(str(error.value).splitlines()) == 1


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

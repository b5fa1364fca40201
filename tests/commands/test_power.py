"""What a study can see: against simulated studies, judged by the real rule, and against the committed report's intervals."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
from pydantic import TypeAdapter
from scipy import stats
from study_parts import ROOT, with_values

from grpo.commands.estimate import plan
from grpo.commands.power import OVER_PROBLEMS, power_table, precision
from grpo.common.files import write_json
from grpo.results.pairs import Pairs, write_pairs
from grpo.results.verdicts import DOES_NOT_HOLD, HOLDS, SAME, decide_by, smallest_seen
from grpo.study import paths
from grpo.study.claims import AnyClaim
from grpo.study.schema import Study

CLAIM: AnyClaim = TypeAdapter(AnyClaim).validate_python({"arm": "a", "beats": "b", "by": 0.05, "at": "last_step"})
MANY = 1000


@pytest.mark.parametrize(("sd", "seeds", "problems"), [(0.07, 5, 384), (0.02, 3, 64), (0.1, 15, 64)])
def test_simulated_studies_find_the_stated_difference_and_rarely_err(sd: float, seeds: int, problems: int) -> None:
    """At the margin any decision is an error, at most 5%; at the stated distance from it 80% are found."""
    rng, smallest = np.random.default_rng(1), smallest_seen(*precision((sd, 0.05), seeds, problems))

    def verdicts(truth: float) -> list[str]:
        found = []
        for _ in range(MANY):
            over_seeds, over_problems = rng.normal(truth, sd, (seeds, 1)), rng.normal(0, math.sqrt(0.05), problems)
            pairs = Pairs("a", "b", [*range(seeds)], over_seeds + over_problems, np.empty((seeds, 0)))
            found.append(decide_by(CLAIM, [pairs]).verdict)
        return found

    error = 3 * math.sqrt(0.05 * 0.95 / MANY)  # of the simulation
    null = verdicts(0.05)
    assert sum(one in (HOLDS, DOES_NOT_HOLD, SAME) for one in null) / MANY <= 0.05 + error
    no_difference = verdicts(0.0)
    assert sum(one == HOLDS for one in no_difference) / MANY <= 0.025
    for truth, verdict in ((0.05 + smallest, {HOLDS}), (0.05 - smallest, {DOES_NOT_HOLD, SAME})):
        assert sum(one in verdict for one in verdicts(truth)) / MANY >= 0.8 - 2 * error


def test_predicted_half_widths_are_those_of_the_committed_report() -> None:
    """By each pair's own spread between seeds. By one spread for all it would be 12 of 33: they differ fifteenfold."""
    ratios = []
    for entry in json.loads((ROOT / paths.RECORD).read_text())["experiments"].values():
        (leader,) = [arm for arm in entry["arms"] if not arm["below"]]
        for arm in entry["arms"]:
            if arm is not leader and len(arm["by_run"]) > 1:
                sd = float(np.subtract(arm["by_run"], leader["by_run"]).std(ddof=1))
                se, df = precision((sd, OVER_PROBLEMS), len(arm["by_run"]), arm["problems"])
                ratios.append(stats.t.ppf(0.975, df) * se / (arm["below"]["high"] - arm["below"]["low"]) * 2)
    assert len(ratios) > 20 and np.mean(np.abs(np.array(ratios) - 1) <= 0.25) >= 0.9


@pytest.mark.usefixtures("workdir")
def test_the_plan_says_what_each_claim_can_see_and_where_only_one_answer_is_possible(mini_study: Study) -> None:
    def rows(study: Study) -> dict[str, dict[str, Any]]:
        return {row["claim"] or row["experiment"]: row for row in plan(study, None, None)["power"]}

    found = rows(mini_study)
    assert found["std-normalization"]["seeds"] == 5 and not found["std-normalization"]["measured"]
    assert found["one-step-behind"]["seeds"] == 3 and found["one-step-behind"]["sees"] > found["std-normalization"]["sees"]
    assert found["std-entropy"]["ratio"] and found["std-entropy"]["margin"] == pytest.approx(1.25)
    assert found["prompt"]["note"] == "by design" and found["prompt"]["problems"] == 128
    enough = found["std-normalization"]["seeds_for_margin"]
    at, before = (smallest_seen(*precision((0.07, OVER_PROBLEMS), seeds, 384)) for seeds in (enough, enough - 1))
    assert at <= 0.05 < before
    short = rows(with_values(mini_study, {"grpo.n_grpo_steps": 8, "seeds": [0]}))
    assert "only *not tested*: it is about step 48, and the runs take 8" in short["std-normalization"]["note"]
    assert "needs two seeds" in short["std-entropy"]["note"] and "borrow" not in short["std-entropy"]["note"]
    write_json(paths.RECORD, {"study": mini_study.study, "experiments": {}})
    differences = np.array([[0.1, 0.3], [0.2, 0.2], [0.6, 0.4]])  # means .2, .2 and .5
    write_pairs(paths.PAIRS, {"std-normalization": Pairs("a", "b", [0, 1, 2], differences, np.empty((3, 0)))})
    measured = rows(mini_study)["std-normalization"]
    assert measured["measured"] and measured["spread"] == pytest.approx(np.std([0.2, 0.2, 0.5], ddof=1))
    assert power_table([measured])[0].endswith("0.173")
    assert "0.070*" in power_table([found["std-normalization"]])[0]

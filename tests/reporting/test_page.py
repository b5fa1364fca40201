"""What the page computes of its own: the chain of winners, places on a scale, text that stays in its place, what is kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from grpo.reporting import rollouts
from grpo.reporting.curves import number
from grpo.reporting.forest import forest, forest_rows
from grpo.reporting.page import chains, embedded, placed, to_html


def experiment(name: str, builds_on: str | None = None) -> dict[str, Any]:
    return {"name": name, "builds_on": [builds_on, builds_on] if builds_on else []}


def names(chain: list[dict[str, Any]]) -> list[Any]:
    return [(entry["experiment"]["name"], [names(branch) for branch in entry["branches"]]) for entry in chain]


def test_a_chain_is_a_list_until_it_parts() -> None:
    links = [("a", None), ("b", "a"), ("c", "b"), ("d", "b"), ("e", "d"), ("alone", None)]
    found = [names(chain) for chain in chains([experiment(*link) for link in links])]
    assert found == [[("a", []), ("b", [[("c", [])], [("d", []), ("e", [])]])], [("alone", [])]]


def test_intervals_and_published_values_share_one_scale_with_zero() -> None:
    rows = [
        {"value": 0.5, "low": 0.0, "high": 1.0, "published": [-1.0]},
        {"value": 0.1, "low": 0.1, "high": 0.1, "published": []},
    ]
    first, second = placed(rows)
    assert first["zero"] == second["zero"] == first["from"] == 50.0  # from -1 to 1, with margins of equal width
    assert first["at"] == pytest.approx(50 + first["width"] / 2, abs=0.02)
    assert first["published_at"][0][1] == pytest.approx(50 - first["width"], abs=0.02)
    assert second["width"] == 0 and first["zero"] < second["at"] < first["at"]


def test_a_claim_with_several_differences_has_as_many_rows_and_reports_once() -> None:
    both = [
        {"arm": "a", "against": "b", "difference": {"value": 0.1, "low": 0.0, "high": 0.2}},
        {"arm": "a", "against": "c", "difference": {"value": 0.3, "low": 0.2, "high": 0.4}},
    ]
    claim = {"statement": "s", "experiment": "e", "verdict": "agrees", "reported": {"x": "yes"}, "published": {"x": 0.2}}
    rows = forest_rows([claim | {"contrasts": both}, claim | {"contrasts": []}])
    assert [(row["between"], row["value"], row["reported"]) for row in rows] == [
        ("a above b", 0.1, {"x": "yes"}),
        ("a above c", 0.3, {}),
    ]


def test_no_text_ends_the_script_that_holds_it_and_none_is_taken_for_html() -> None:
    hostile = "</script><script>alert(1)</script><!--"
    assert "<" not in embedded({"response": hostile}) and json.loads(embedded({"response": hostile})) == {"response": hostile}
    html = to_html(f"# title\n\n{hostile}\n\n| a |\n|---|\n| b<br>c |\n", figures=())
    assert "<script" not in html and "title" not in html and "b<br>c" in html
    with pytest.raises(ValueError, match="not JSON compliant"):
        embedded({"value": float("nan")})


def test_a_figure_is_drawn_by_the_page_or_stands_there_already() -> None:
    text = '# t\n\n![own](../figures/own.svg)\n\n![a "b"](timing/other.svg)\n'
    assert to_html(text, figures={"timing/other"}).strip() == (
        '<div class="figure" data-figure="timing/other" role="img" aria-label="a &quot;b&quot;"></div>'
    )


def test_a_statement_with_several_differences_is_said_once_in_the_forest() -> None:
    row = {
        "statement": "s",
        "between": "a above b",
        "value": 0.1,
        "low": 0.0,
        "high": 0.2,
        "verdict": "agrees",
        "published": [0.5],
    }
    spec = forest([row, row | {"between": "a above c"}, row | {"statement": "t"}])
    names = spec["layer"][1]["encoding"]["y"]["axis"]["labelExpr"]
    assert names == '[["s", "(a above b)"], ["(a above c)"], ["t", "(a above b)"]][datum.value]'
    assert [(mark["place"], mark["value"]) for mark in spec["datasets"]["published"]] == [(0, 0.5), (1, 0.5), (2, 0.5)]


def test_numbers_keep_six_digits() -> None:
    values = [0.123456789, 24.0, float("nan"), float("inf"), None, 1234567.8]
    assert [number(value) for value in values] == [0.123457, 24, None, None, None, 1234570]


def test_samples_beyond_the_room_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each prompt is held once; a run is left out whole."""
    monkeypatch.chdir(tmp_path)
    rewards = dict.fromkeys(("format_reward", "answer_reward", "reward", "token_entropy"), 1.0)
    for run, response in (("e/a/0", "short"), ("e/b/0", "x" * 500), ("e/c/0", "short")):
        record = {"step": 0, "problem": "p", "prompt": "q" * 90, "response": response, "ground_truth": "1"} | rewards
        (tmp_path / "data/runs" / run).mkdir(parents=True)
        (tmp_path / "data/runs" / run / "rollouts.jsonl").write_text(json.dumps(record) + "\n")
    monkeypatch.setattr(rollouts, "MOST_SAMPLES", 200)
    found = rollouts.browsable(["e/a/0", "e/b/0", "e/c/0"])
    assert found["prompts"] == ["q" * 90] and found["left_out"] == ["e/b/0"]
    assert found["problems"] == [("p", "1")]
    row = dict(zip(found["columns"], found["runs"]["e/c/0"][0], strict=True))
    assert row == {"problem": 0, "prompt": 0, "step": 0, "response": "short"} | rewards


def test_rewards_of_problems_survive_their_encoding() -> None:
    class Seed:
        arm = "a"

        def __init__(self, outcomes: list[list[float]]):
            self.outcomes = np.array(outcomes)
            self.validation = {"step": [0, 8, 16]}

    found = rollouts.outcomes_of([Seed([[0, 1, 0], [1, 1, 0], [1, 1, 1]]), Seed([[0, 1, 1], [0, 1, 0]])])["a"]  # type: ignore[list-item]
    assert found == {"steps": [0, 8], "levels": [0, 0.5, 1], "rows": ["021", "120"]}  # the second ended early

"""Functions of the page: chain of winners, embedding of figures and text, room for samples."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import numpy as np
import pytest

from grpo.reporting import rollouts
from grpo.reporting.charts import INK, panels, save_figure
from grpo.reporting.page import embedded, inlined, to_html
from grpo.reporting.rollouts import number
from grpo.reporting.sentences import templates
from grpo.results.findings import NOT_TESTED, VerdictName


def test_a_chain_is_a_list_until_it_parts() -> None:
    links = {"a": None, "b": "a", "c": "b", "d": "b", "e": "d"}
    values = {
        "results": {name: {"winner": f"of {name}", "tied": ()} for name in links},
        "numbers": {name: {"title": name} for name in links},
        "followers": {name: [other for other in links if links[other] == name] for name in links},
    }
    html = templates(autoescape=True).get_template("macros.j2").make_module(values).chain("a")  # type: ignore[attr-defined]
    found = re.sub(r"<a.*?</a>: <b>of (.)</b>|\s|</?li>", r"\1", html).replace('<olclass="chain">', "(").replace("</ol>", ")")
    assert found == "ab(c)(de)"


def test_no_text_ends_the_script_that_holds_it_and_none_is_taken_for_html() -> None:
    hostile = "</script><script>alert(1)</script><!--"
    assert "<" not in embedded({"response": hostile}) and json.loads(embedded({"response": hostile})) == {"response": hostile}
    html = to_html(f"# title\n\n{hostile}\n\n| a |\n|---|\n| b<br>c |\n", figures={})
    assert "<script" not in html and "title" not in html and "b<br>c" in html
    with pytest.raises(ValueError, match="not JSON compliant"):
        embedded({"value": float("nan")})


def test_a_figure_is_held_by_the_page_or_stands_above(tmp_path: Path) -> None:
    """Its axes have the page's colour, and it scrolls if its panels do not fit."""
    save_figure(panels(3)[0], tmp_path / "x.svg")
    held = inlined(tmp_path / "x.svg")
    assert held.startswith('<div class="figure" style="--panels:3"') and held.count("<svg") == held.count("</svg>") == 1
    assert INK not in held and "currentColor" in held and "<?xml" not in held and 'width="' not in held[: held.index("viewBox")]
    text = '# t\n\n![own](../figures/own.svg)\n\n![a "b"](timing/other.svg)\n'
    html = to_html(text, figures={"timing/other": held})
    assert html.count("<svg") == 1 and 'role="img" aria-label="a &quot;b&quot;"' in html and "own" not in html


def test_claims_are_counted_where_any_was_tested() -> None:
    counted = templates(autoescape=True).get_template("macros.j2").module.claims_counted  # type: ignore[attr-defined]
    counts = dict(zip(get_args(VerdictName), (4, 1, 2, 3, 5), strict=True))
    assert counted(counts) == "Published claims: 4 agree, 1 disagree, 2 no difference, 3 undecided, 5 not tested here."
    assert counted(dict.fromkeys(counts, 0) | {NOT_TESTED: 5}) == ""


def test_numbers_keep_six_digits() -> None:
    values = [0.123456789, 24.0, float("nan"), float("inf"), None, 1234567.8]
    assert [number(value) for value in values] == [0.123457, 24, None, None, None, 1234570]


def test_samples_beyond_the_room_are_named(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each prompt is stored once; a run is left out as a whole."""
    rewards = dict.fromkeys(("format_reward", "answer_reward", "reward", "token_entropy"), 1.0)
    for run, response in (("e/a/0", "short"), ("e/b/0", "x" * 500), ("e/c/0", "short")):
        record = {"step": 0, "problem": "p", "prompt": "q" * 90, "response": response, "ground_truth": "1"} | rewards
        (workdir / "data/runs" / run).mkdir(parents=True)
        (workdir / "data/runs" / run / "rollouts.jsonl").write_text(json.dumps(record) + "\n")
    monkeypatch.setattr(rollouts, "MOST_SAMPLES", 200)
    found = rollouts.browsable(["e/a/0", "e/b/0", "e/c/0"])
    assert found["prompts"] == ["q" * 90] and found["left_out"] == ["e/b/0"]
    assert found["problems"] == [("p", "1")]
    row = dict(zip(found["columns"], found["runs"]["e/c/0"][0], strict=True))
    assert row == {"problem": 0, "prompt": 0, "step": 0, "response": "short"} | rewards


def test_problems_gained_and_lost_are_counted_seed_by_seed() -> None:
    """Each run is compared with itself, not all runs before with any run after."""

    def seed(*outcomes: list[float]) -> Any:
        return SimpleNamespace(outcomes=np.array(outcomes))

    runs = [seed([1, 0, 0, 0.5], [0.5, 1, 1, 1], [1, 1, 0, 1]), seed([0, 1, 0, 0], [0, 0, 0, 0])]
    # 1 of 4 right before and 3 at the end, 2 gained; and 1 before, none after, 1 lost.
    assert rollouts.gained_and_lost(runs) == [1.0, 1.5, 1.0, 0.5]


def test_a_right_answer_may_end_a_wrong_sum() -> None:
    assert rollouts.sums_hold("Monday: 4 + 5 = 9. Tuesday: 9 - 10 = -1. 3") and rollouts.sums_hold("no sums")
    assert not rollouts.sums_hold("Monday: 4 - 5 = 1. Tuesday: 1 + 1 = 2.")

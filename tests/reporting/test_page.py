"""The page's parts: sections from Markdown, figures, terms, data, and room for samples; what a stranger wrote stays text."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from grpo.reporting import page
from grpo.reporting.charts import INK, panels, save_figure
from grpo.reporting.page import Body, embedded, inlined, number

TEXT = """# mini: results

**found**

### What it cost

little

## Claims

| claim | entropy |
|---|---|
| [c](index.html#sweep "who: what") | entropy |

## Experiments

### Sweep: rate: low ends at 0.8

why

![Sweep](figures/sweep.svg)

![none](figures/none.svg)

| arm | entropy |
|---|---|
| a | 1 |

> # a quoted heading
>
> comment

- **agrees**: c

#### Rates tried

| r |
|---|
| 1 |

### Other: b ends at 0.7

## Method

### Data

x
"""


def test_parts_become_sections_boxes_and_folded_details() -> None:
    page = Body({"figures/sweep": "<svg></svg>"}, ["sweep", "other"]).of(TEXT)
    tags = re.sub(r"<(?!/?(?:section|details|div class=\"box\")|/div>)[^>]*>|[^<>]+(?=<)", "", page.replace("\n", ""))
    outline = re.findall(r"<(/?)(section|details)(?: id=\"([\w-]+)\")?", tags)
    assert [f"{close}{kind} {name}".strip() for close, kind, name in outline] == [
        *("section answer", "/section", "section claims", "/section", "section experiments"),
        *("details sweep", "details", "/details", "/details", "details other", "/details", "/section"),
        *("section method", "details data", "/details", "/section"),
    ]
    assert '<div class="box"><h2>What it cost</h2>' in page
    assert "<h3>Sweep: rate</h3> <span>low ends at 0.8</span>" in page
    assert "<h1>a quoted heading</h1>" in page.partition("<blockquote>")[2]  # it opens no section
    assert page.count('role="region" aria-label="Table: ') == page.count("<table>") == 3
    assert 'href="#sweep" title="who: what"' in page


def test_figures_stand_in_the_page_and_a_missing_one_is_left_out() -> None:
    page = Body({"figures/sweep": "<svg>1</svg>"}, ["sweep", "other"]).of(TEXT)
    assert 'role="img" aria-label="Sweep"><svg>1</svg>' in page and "<img" not in page and "none" not in page


def test_a_term_is_explained_once_in_each_part() -> None:
    page = Body({}, ["sweep", "other"]).of(TEXT)
    assert page.count('<abbr title="entropy of') == 2 and page.count("entropy</abbr>") == 2


@pytest.mark.parametrize(
    "hostile",
    [
        "</script><script>alert(1)</script>",
        "<img src=x onerror=alert(1)>",
        "[a](javascript:alert(1))",
        "![x](//evil.example/p.png)",
    ],
)
def test_what_a_stranger_wrote_stays_text(hostile: str) -> None:
    page = Body({}, ["e"]).of(f"# {hostile}\n\n## Experiments\n\n### {hostile}: {hostile}\n\n{hostile}\n\n> {hostile}\n")
    assert "<script" not in page and "<img" not in page and 'href="javascript' not in page
    assert "<" not in embedded({"response": hostile}) and json.loads(embedded({"response": hostile})) == {"response": hostile}


def test_data_has_no_number_that_json_lacks() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        embedded({"value": float("nan")})


def test_a_figure_is_never_enlarged_and_has_the_pages_colour(tmp_path: Path) -> None:
    figure = panels(3)[0]
    save_figure(figure, tmp_path / "x.svg")
    svg = inlined(tmp_path / "x.svg")
    pixels = 96 * figure.get_figwidth()
    assert f"width:{pixels:.0f}px;max-width:100%" in svg and f"min-width:{0.85 * pixels:.0f}px" in svg
    assert INK not in svg and "currentColor" in svg and svg.startswith("<svg") and svg.count("<svg") == 1


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
    monkeypatch.setattr(page, "MOST_SAMPLES", 200)
    found = page.browsable(["e/a/0", "e/b/0", "e/c/0"])
    assert found["prompts"] == ["q" * 90] and found["left_out"] == ["e/b/0"]
    assert found["problems"] == [("p", "1")]
    row = dict(zip(found["columns"], found["runs"]["e/c/0"][0], strict=True))
    assert row == {"problem": 0, "prompt": 0, "step": 0, "response": "short"} | rewards


def test_the_turns_of_an_episode_are_kept(workdir: Path) -> None:
    rewards = dict.fromkeys(("format_reward", "answer_reward", "reward", "token_entropy"), 1.0)
    record = {"step": 0, "problem": "p", "prompt": "q", "response": "a\n[tool] 4\nb", "ground_truth": "1"} | rewards
    turns = [["assistant", "a"], ["tool", "4"], ["assistant", "b"]]
    (workdir / "data/runs/e/a/0").mkdir(parents=True)
    lines = [json.dumps(record | {"messages": turns}), json.dumps(record)]
    (workdir / "data/runs/e/a/0/rollouts.jsonl").write_text("\n".join(lines) + "\n")
    found = page.browsable(["e/a/0"])
    assert found["columns"][-1] == "messages" and found["runs"]["e/a/0"][0][-1] == turns
    assert len(found["runs"]["e/a/0"][1]) == len(found["columns"]) - 1

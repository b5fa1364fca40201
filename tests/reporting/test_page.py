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

- **holds**: c

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
    page = Body({"figures/sweep": "<svg>1</svg>"}, ["sweep", "other"]).of(TEXT)
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
    # Figures stand in the page, and a missing one is left out; a term is explained once in each part.
    assert 'role="img" aria-label="Sweep"><svg>1</svg>' in page and "<img" not in page and "none" not in page
    assert page.count('<abbr title="entropy of') == 2 and page.count("entropy</abbr>") == 2


@pytest.mark.parametrize(
    "hostile",
    [
        "</script><script>alert(1)</script>",
        "<img src=x onerror=alert(1)>",
        "[a](javascript:alert(1))",
        "![x](//evil.example/p)",
    ],
)
def test_what_a_stranger_wrote_stays_text(hostile: str) -> None:
    page = Body({}, ["e"]).of(f"# {hostile}\n\n## Experiments\n\n### {hostile}: {hostile}\n\n{hostile}\n\n> {hostile}\n")
    assert "<script" not in page and "<img" not in page and 'href="javascript' not in page
    assert "<" not in embedded({"response": hostile}) and json.loads(embedded({"response": hostile})) == {"response": hostile}


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


def test_samples_beyond_the_room_are_named_and_turns_of_episodes_are_kept(
    workdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each prompt is stored once; a run is left out as a whole."""
    rewards = dict.fromkeys(("format_reward", "answer_reward", "reward", "token_entropy"), 1.0)
    turns = {"messages": [["assistant", "sh"], ["tool", "4"], ["assistant", "ort"]]}
    for run, response, more in (("e/a/0", "short", {}), ("e/b/0", "x" * 500, {}), ("e/c/0", "short", turns)):
        record = {"step": 0, "problem": "p", "prompt": "q" * 90, "response": response, "ground_truth": "1"} | rewards | more
        (workdir / "data/runs" / run).mkdir(parents=True)
        (workdir / "data/runs" / run / "rollouts.jsonl").write_text(json.dumps(record) + "\n")
    monkeypatch.setattr(page, "MOST_SAMPLES", 200)
    found = page.browsable(["e/a/0", "e/b/0", "e/c/0"])
    assert found["prompts"] == ["q" * 90] and found["left_out"] == ["e/b/0"]
    assert found["problems"] == [("p", "1")]
    sample = {"problem": 0, "prompt": 0, "step": 0, "response": "short"} | rewards
    assert dict(zip(found["columns"], found["runs"]["e/c/0"][0], strict=True)) == sample | turns
    assert found["runs"]["e/a/0"] == [[*sample.values()]]

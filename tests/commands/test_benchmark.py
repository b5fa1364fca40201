"""`grpo benchmark` where it needs no harness: how answers are read, what is counted and shown, what is missing."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from study_parts import Grpo, activate

from grpo.commands.benchmark import compare, final_answer, judge, page
from grpo.common.errors import UserError
from grpo.models.checkpoint import save_checkpoint


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"First \boxed{1}, so \boxed{\frac{1}{2}}. The answer is 3.", r"\frac{1}{2}"),
        ("I think. </think> <answer> 7 </answer>", "7"),
        ("16 - 3 = 13 eggs.\n#### 1,013\nQuestion: another", "1013"),
        ("It is easy.\nThe answer is $x + 1$.\nI hope it is correct.", "The answer is $x + 1$."),
        ("Half of it is 5,\nso 2.5.\n\n", "so 2.5."),
        (" \n", ""),
    ],
)
def test_the_answer_is_read_whatever_the_prompt_asked_for(text: str, answer: str) -> None:
    assert final_answer(text) == answer


def sample(number: int, response: str, target: str, filter: str = "none", **metrics: Any) -> dict[str, Any]:
    """As the harness logs it."""
    logged = {"doc_id": number, "arguments": [[f"Question {number}", {}]], "resps": [[response]], "target": target}
    return {**logged, "filter": filter, "metrics": list(metrics), **metrics}


SAMPLES = [
    sample(1, r"So \boxed{0.5} | `code`", "1/2", "strict", exact_match=0.0),
    sample(0, "#### 18", "... #### 18", "strict", exact_match=1.0),
    sample(2, "I do not know", "5", "strict", exact_match=0.0),
    sample(3, "The answer is 7.", r"\frac{1}{2", "strict", exact_match=0.0),
    sample(0, "#### 18", "... #### 18", "flexible", exact_match=1.0),
    sample(1, r"So \boxed{0.5} | `code`", "1/2", "flexible", exact_match=0.0),
    sample(2, "I do not know", "5", "flexible", exact_match=1.0),
    sample(3, "The answer is 7.", r"\frac{1}{2", "flexible", exact_match=0.0),
]


def test_each_problem_has_the_verdicts_of_all_and_those_that_differ_are_listed() -> None:
    found = compare(judge(SAMPLES))
    assert found["problems"] == 4
    assert {name: a["right"] for name, a in found["accuracy"].items()} == {
        "exact_match, strict": 1,
        "exact_match, flexible": 2,
        "our grader": 2,
    }
    assert found["accuracy"]["our grader"]["value"] == 0.5
    assert found["accuracy"]["our grader"]["low"] == pytest.approx(0.150, abs=1e-3)  # Wilson, 2 of 4
    assert [record["problem"] for record in found["disagreements"]] == [1, 2]
    assert found["unjudged"] == 1  # the braces of its truth do not match
    about = {"task": "t", "shots": 0, "harness": "h", "engine": "hf", "dataset": "d.jsonl", "checkpoint": "c"}
    shown = page(about | found)
    assert "| our grader | 2 | 0.500 (0.150 to 0.850) |" in shown and "## Disagreements: 2" in shown
    assert r"| 1 | `So \boxed{0.5} \| 'code'` | `0.5` | `1/2` | wrong | wrong | right |" in shown
    with pytest.raises(UserError, match="has no problems"):
        compare([])


def test_without_the_harness_it_is_said_how_to_install_it(
    grpo: Grpo, model: Any, tokenizer: Any, workdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    activate("smoke", workdir)
    code, _, error = grpo("benchmark", "nowhere", "--task", "gsm8k")
    assert code == 2 and "nowhere: holds no model" in error
    save_checkpoint(workdir / "checkpoint", model, tokenizer)
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    code, _, error = grpo("benchmark", "checkpoint", "--task", "gsm8k")
    assert code == 2 and "`pip install -e '.[benchmark]'` in the project's folder" in error
    assert not (workdir / "benchmark").exists()

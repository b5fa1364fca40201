"""What a run's files say of its last evaluation: which problems select, and which judge."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import report_parts
from report_parts import run

from grpo.common.errors import UserError
from grpo.results.runs import read_run

RUN = "grpo_learning_rate", "a", 0
LAST = [1.0, 0.0, 1.0, 1.0, 0.0, 0.0]


def written(evaluation: dict[str, int], outcomes: Any = ([0, 0, 1, 0], [1, 0, 1, 1])) -> None:
    """A run's folder, evaluated on four problems and at last on six."""
    rewards = [np.array(row, dtype=float) for row in outcomes]
    made = replace(run("a", rewards, 0, RUN[0], steps=1), last=np.array(LAST))
    made.config["evaluation"] = evaluation
    report_parts.write_run(made)


@pytest.mark.parametrize(
    ("last_problems", "selecting", "selection", "final"),
    [
        (6, 2, LAST[:2], LAST[2:]),
        (6, 0, LAST, LAST),  # all choose and judge
        (12, 6, LAST[:3], LAST[3:]),  # the validation set is half as large as asked for: the same share selects
        (18, 8, LAST[:2], LAST[2:]),  # rounded down, so that some are left to judge
    ],
)
def test_the_first_problems_of_the_last_evaluation_select_and_the_others_judge(
    workdir: Path, last_problems: int, selecting: int, selection: list[float], final: list[float]
) -> None:
    written({"last_problems": last_problems, "selection_problems": selecting})
    found = read_run(*RUN)
    assert (found.selection.tolist(), found.final.tolist()) == (selection, final)
    assert found.outcomes.tolist() == [[0, 0, 1, 0], [1, 0, 1, 1]]  # on the problems of all evaluations


@pytest.mark.parametrize("sizes", [(4, 3, 6), (4, 4, 3), (4,)])
def test_evaluations_on_other_problems_than_the_last_ones_are_alike(workdir: Path, sizes: tuple[int, ...]) -> None:
    written({"last_problems": 6, "selection_problems": 2})
    lines = "".join(json.dumps({"answer_reward": [1.0] * size}) + "\n" for size in sizes)
    Path("data/runs/grpo_learning_rate/a/0/outcomes.jsonl").write_text(lines)
    with pytest.raises(UserError, match=r"outcomes\.jsonl: damaged"):
        read_run(*RUN)

"""The tables of an experiment and the rows of results.csv, from made-up runs whose cells can be found by hand."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from grpo.reporting.results import Run
from grpo.reporting.tables import experiment_table, result_row
from grpo.study import Study, read_yaml

EXPERIMENT = "grpo_baselines"


def made_up(arm: str, *rewards: float, seed: int = 0, diverged: int | None = None, cut: int | None = None) -> Run:
    """A run of two optimizer steps, on four problems that all have the same reward in an evaluation."""
    history = {"step": [1, 2], "gradient_norm": [0.5 + seed, 2.25 - seed], "token_entropy": [0.9, 0.1 + 0.2 * seed]}
    validation = {"step": range(len(rewards)), "val/answer_reward": rewards, "val/response_length": [8.0] * len(rewards)}
    metrics = {
        "first/answer_reward": rewards[0],
        "best/answer_reward": max(rewards),
        "best/step": int(np.argmax(rewards)),
        "val/format_reward": 0.5 + 0.25 * seed,
        "val/response_length": 20.0 + seed,
        "diverged_step": diverged,
        "diverged_reason": "" if diverged is None else "made up",
        "time_limit_step": cut,
    }
    outcomes = np.array([[reward] * 4 for reward in rewards])
    config = {"identity": f"id-{arm}-{seed}", "same_as": None}
    return Run(EXPERIMENT, arm, seed, config, metrics, pd.DataFrame(history), pd.DataFrame(validation), outcomes)


def chosen(last_k: int, *candidates: dict[str, Any]) -> dict[str, Any]:
    return {"last_k": last_k, "leader": "a", "winner": "a", "candidates": list(candidates)}


def candidate(arm: str, value: float, behind: float | None = None) -> dict[str, Any]:
    interval = None if behind is None else {"value": behind, "low": behind - 0.05, "high": behind + 0.05}
    return {"arm": arm, "value": value, "low": value - 0.1, "high": value + 0.1, "behind": interval}


def cells(table: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line.startswith("|")]


def test_the_cells_of_an_experiments_table() -> None:
    runs = [made_up("a", 0.25, 0.5, 0.75), made_up("a", 0.5, 1.0, 0.25, seed=1), made_up("b", 0.0, 0.25, 0.25, diverged=7)]
    selection = chosen(2, candidate("a", 0.625), candidate("b", 0.25, behind=0.375))
    head, _, a, b = cells(experiment_table(runs, selection, {"a": (60.4, 0.125), "b": (9.0, 0.0)}))
    assert head[:3] == ["arm", "answer reward, mean of last 2 (95% interval)", "below a (95% interval)"]
    assert dict(zip(head, a, strict=True)) == {
        "arm": "**a**",
        head[1]: "0.625 (0.525 to 0.725)",
        head[2]: "leads",
        "at start": "0.375",
        "best (step)": "1.000 (1)",
        "format reward": "0.625",
        "response length": "20.5",
        "token entropy": "0.200",  # of .1 and .3, at the last step
        "largest gradient norm": "2.25",
        "seconds": "60",
        "GPU-hours": "0.12",
    }
    assert b[:3] == ["b (diverged at step 7)", "0.250 (0.150 to 0.350)", "0.375 (0.325 to 0.425)"]


def test_one_arm_is_behind_nobody() -> None:
    table = cells(experiment_table([made_up("a", 0.25, 0.5)], chosen(1, candidate("a", 0.5))))
    assert len({len(row) for row in table}) == 1
    assert not any("below" in cell for cell in table[0]) and "seconds" not in table[0]


def test_runs_that_count_by_fewer_evaluations_are_told_with_the_reason() -> None:
    """A run that was stopped early counts by those it has: the head of the column would not be true of it."""
    runs = [
        made_up("a", 0.25, 0.5, 0.75, 0.75),
        made_up("a", 0.25, 0.5, seed=1, cut=4),
        made_up("b", 0.25, 0.5, 0.0, diverged=6),
        made_up("b", 0.25, 0.5, 0.5, 0.0, seed=1, diverged=9),
    ]
    table = experiment_table(runs, chosen(3, candidate("a", 0.5), candidate("b", 0.25, behind=0.25)))
    assert table.endswith(
        " |\n\nFewer evaluations than 3 count in: grpo_baselines/a-1 (1, its time was up at step 4); "
        "grpo_baselines/b-0 (2, diverged at step 6).\n"
    )
    table = experiment_table(runs[:1], chosen(3, candidate("a", 0.5)))
    assert "Fewer" not in table and table.endswith(" |\n")


@pytest.mark.parametrize(("last_k", "reward", "counted"), [(1, 1.0, 1), (2, 0.625, 2), (9, 0.5, 3)])
def test_a_row_of_the_results_says_how_many_evaluations_counted(
    last_k: int, reward: float, counted: int, mini_study: Study
) -> None:
    study = mini_study.model_copy(update={"selection": mini_study.selection.model_copy(update={"last_k": last_k})})
    row = result_row(study, made_up("a", 0.0, 0.25, 0.25, 1.0))
    assert (row["answer_reward"], row["last_k"], row["evaluations_counted"]) == (pytest.approx(reward), last_k, counted)
    assert (row["last/token_entropy"], row["max/gradient_norm"]) == (0.1, 2.25)
    assert (row["experiment"], row["arm"], row["seed"], row["identity"], row["same_as"]) == (EXPERIMENT, "a", 0, "id-a-0", "")


# ------------------------------------------------------------------------------------------------------------- dvc.yaml

ROOT = Path(__file__).parents[1]
MAKES = {  # stage -> the module that its command calls
    "select": "grpo/selection.py",
    "claims": "grpo/reporting/claims.py",
    "tables": "grpo/reporting/tables.py",
    "figures": "grpo/reporting/figures.py",
    "timing": "grpo/reporting/timing.py",
    "writeup": "grpo/reporting/writeup.py",
}
# Where the report's numbers come from; other modules (paths, reading of files) do not decide them.
DECIDES = ("grpo/reporting/", "grpo/selection.py", "grpo/evaluation/statistics.py")


def imported(path: str) -> set[str]:
    """The modules that decide numbers and that a module loads, itself and those they load among them."""
    found, queue = set(), [path]
    while queue:
        path = queue.pop()
        if path in found or not path.startswith(DECIDES):
            continue
        found.add(path)
        nodes = ast.walk(ast.parse((ROOT / path).read_text()))
        queue += [f"{node.module.replace('.', '/')}.py" for node in nodes if isinstance(node, ast.ImportFrom) and node.module]
    return found


@pytest.mark.parametrize("stage", MAKES)
def test_what_is_reported_is_made_again_when_the_code_changes_that_computes_it(stage: str) -> None:
    definition = read_yaml(ROOT / "dvc.yaml")["stages"][stage]
    deps = tuple(definition.get("do", definition)["deps"])
    missing = {path for path in imported(MAKES[stage]) if not any(path == dep or path.startswith(f"{dep}/") for dep in deps)}
    assert missing == set()

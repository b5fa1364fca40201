"""Every arm is in every figure, can be told from the others, and looks the same wherever it is."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from study_parts import ASYNCHRONOUS, COLOCATE

from grpo.reporting import figures, pieces, timing
from grpo.reporting.asynchronous import draw_staleness
from grpo.reporting.charts import Spec, end_labels, filled_curve, save_figure
from grpo.reporting.curves import tables_of
from grpo.reporting.figures import experiment_figure
from grpo.reporting.fine_tuning import draw_by_examples
from grpo.reporting.style import COLOURS, DARK, style, styles, styles_of_places
from grpo.results.runs import Run
from grpo.study.schema import Study

SWEEP = "grpo_off_policy_sweep_broad"
Look = tuple[str, tuple[int, ...]]


def made_up(arm: str, place: int, experiment: str = SWEEP, **values: Any) -> Run:
    """A run of three steps whose curves lie by its place, so that none covers another."""
    steps = {"step": [1, 2, 3], "update": [1, 2, 3]}
    history = {name: [place, place + 0.5, place + 1.0] for name in ("train/format_reward", "token_entropy", "gradient_norm")}
    history |= {"loss": [place, place, place], "clip_fraction": [0.0, 0.1, 0.1], "train/zero_signal_fraction": [0.0] * 3}
    lags = {name: [1.0] * 3 for name in ("lag_mean", "ratio_min", "ratio_mean", "ratio_max")}
    validation = {"step": [0, 3], "val/answer_reward": [0.0, 0.1 + place / 50], "val/response_length": [10.0, 20.0 + place]}
    metrics = {"diverged_step": None, "validation_problems": 4, "examples": 8 * (place + 1)}
    config = {"config": {key: {"value": value} for key, value in values.items()}}
    outcomes = np.array([[0.0] * 4, [0.1 + place / 50] * 4])
    return Run(experiment, arm, 0, config, metrics, pd.DataFrame(steps | history | lags), pd.DataFrame(validation), outcomes)


def looks(spec: Spec) -> dict[str, Look]:
    """Colour and dashes of each curve, in their order."""
    colours, strokes = spec["encoding"]["color"]["scale"], spec["layer"][1]["encoding"]["strokeDash"]["scale"]
    assert colours["domain"] == strokes["domain"]
    drawn = zip(colours["range"], map(tuple, strokes["range"]), strict=True)
    return dict(zip(colours["domain"], drawn, strict=True))


@pytest.mark.parametrize("count", [1, 9, 30])
def test_every_arm_is_drawn_and_can_be_told_from_the_others(
    count: int, tmp_path: Path, mini_study: Study, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nine arms are in the broad sweeps of the real studies, and there were eight colours."""
    runs = [made_up(f"arm_{i}", i) for i in range(count)]
    spec = experiment_figure(mini_study, SWEEP, runs)
    heights = {point["arm"]: point["y"] for point in spec["datasets"]["points"]}  # the last of each arm
    assert heights == {run.arm: pytest.approx(run.validation["val/answer_reward"].iloc[-1], rel=1e-5) for run in runs}
    assert list(looks(spec)) == [run.arm for run in runs]
    assert len(set(looks(spec).values())) == count
    assert sorted(label["arm"] for label in spec["datasets"]["labels"]) == sorted(heights)
    save_figure(spec, tmp_path / "figure.svg")
    assert all(run.arm in (tmp_path / "figure.svg").read_text() for run in runs)

    monkeypatch.setattr(timing, "read_timing", lambda _: {"steps": [{"step": i, "step_s": 2.0} for i in (1, 2, 3)]})
    experiment = mini_study.experiments[SWEEP].model_copy(update={"arms": {run.arm: {} for run in runs}})
    study = mini_study.model_copy(update={"experiments": {SWEEP: experiment}})
    arms = {run.arm: [run] for run in runs}
    over_time = timing.draw_curves_over_wall_clock(arms, timing.looks_of(study, arms))
    assert looks(over_time) == looks(spec)
    assert over_time["datasets"]["points"][1]["x"] == 6.0  # three steps of two seconds


def test_the_first_arms_differ_in_colour_and_no_two_look_the_same() -> None:
    assert [style(place).color for place in range(8)] == list(COLOURS)
    assert {style(place).dashes for place in range(8)} == {()}
    assert len(set(map(style, range(500)))) == 500
    assert list(styles("ab")) == ["a", "b"] and styles("ab")["b"] == style(1)


def test_names_at_the_ends_of_curves_can_be_read() -> None:
    """Those of equal height are moved apart, and none leaves the chart."""
    ends = [0.98, 0.99, 1.0, 0.5, 0.1]
    points = [{"arm": f"arm_{i}", "x": 3, "y": y, "low": y, "high": y} for i, y in enumerate(ends)]
    labels = {label["arm"]: label["y"] for label in end_labels(points, share=True)}
    heights = sorted(labels.values())
    assert all(upper - lower > 0.05 for lower, upper in itertools.pairwise(heights)) and heights[-1] <= 1
    assert (labels["arm_3"], labels["arm_4"]) == (0.5, 0.1)
    assert labels["arm_0"] < labels["arm_1"] < labels["arm_2"]


def test_each_colour_has_one_for_dark_ground() -> None:
    assert list(DARK) == list(COLOURS) and len(set(DARK.values())) == len(COLOURS)


def test_arms_of_several_experiments_keep_their_colours() -> None:
    found = styles_of_places({"a": 0, "b": 3, "other a": 0, "third a": 0, "ninth": 8})
    assert [look.color for look in found.values()] == [COLOURS[i] for i in (0, 3, 0, 0, 0)]
    assert len(set(found.values())) == 5
    assert found["a"] == style(0) and found["b"] == style(3)


def test_the_arm_beside_the_asynchronous_ones_takes_nobodys_look(mini_study: Study, monkeypatch: pytest.MonkeyPatch) -> None:
    """The colocated arm is its experiment's first, as lag_0 is; lag_0 looks as in the figure of its own experiment."""
    runs = {
        name: [made_up(arm, i, name) for i, arm in enumerate(mini_study.experiments[name].arms)]
        for name in (COLOCATE, ASYNCHRONOUS)
    }
    for module in (timing, pieces):
        monkeypatch.setattr(module, "read_runs", lambda _, experiment: runs[experiment])
    monkeypatch.setattr(timing, "read_timing", lambda _: {"steps": [{"step": i, "step_s": 2.0} for i in (1, 2, 3)]})
    arms = timing.curves_of(mini_study, ASYNCHRONOUS)
    over_time = looks(timing.draw_curves_over_wall_clock(arms, timing.looks_of(mini_study, arms)))
    own = looks(experiment_figure(mini_study, ASYNCHRONOUS, runs[ASYNCHRONOUS]))
    beside = over_time.pop("one_update, one process")
    assert over_time == own and beside not in own.values()
    assert beside[0] == COLOURS[0]  # as in the figure of its own experiment


def test_points_of_arms_have_their_colours() -> None:
    """In the figures that draw an arm as a point: the arms in params.yaml's order, not in that of the axis."""

    def points(spec: Spec) -> dict[tuple[float, float], str]:
        """Place -> colour."""
        scale = spec["layer"][2]["encoding"]["color"]["scale"]
        colours = dict(zip(scale["domain"], scale["range"], strict=True))
        return {(row["x"], round(row["y"], 6)): colours[row["arm"]] for row in spec["data"]["values"]}

    def apart(lag: int, capacity: int = 1) -> dict[str, int]:
        return {"max_policy_lag": lag, "replay_capacity": capacity}

    settings = {"lag_4": apart(4), "buffer": apart(1, 2), "lag_0": apart(0)}
    runs = [made_up(arm, i, ASYNCHRONOUS, asynchronous=value) for i, (arm, value) in enumerate(settings.items())]
    for i, run in enumerate(runs):  # so that no two points are one
        run.history["clip_fraction"] = 0.1 * i
        run.history["ratio_mean"] = 1.0 + i
        run.history["ratio_max"] = 9.0
    panels = draw_staleness(runs, 1)["vconcat"]
    assert [set(points(panel).values()) for panel in panels] == [set(COLOURS[:3])] * 4
    assert points(panels[0]) == {(1.0, round(0.1 + i / 50, 6)): COLOURS[i] for i in range(3)}

    tuned = [made_up(arm, i, "sft_experiment", filtered=arm == "f") for i, arm in enumerate(("f", "many", "few"))]
    candidates = [{"arm": run.arm, "value": 0.5, "low": 0.4, "high": 0.6} for run in tuned]
    found = points(draw_by_examples(tuned, {"candidates": candidates, "last_k": 2}))
    assert found == {(8.0 * (i + 1), 0.5): COLOURS[i] for i in range(3)}


def test_equal_results_give_equal_bytes_and_what_is_drawn_is_seen(tmp_path: Path) -> None:
    """In two processes, as two repetitions are; both kinds of file."""
    points = [{"arm": "a", "series": "a", "x": x, "y": x / 9, "low": 0.0, "high": 1.0, "ended": x == 3} for x in range(4)]
    spec = filled_curve(points, styles(["a"]), "step", "reward", share=True)
    program = "import json, sys; from pathlib import Path; from grpo.reporting.charts import save_figure\n"
    program += "[save_figure(json.load(open(sys.argv[1])), Path(name)) for name in sys.argv[2:]]"
    (tmp_path / "spec.json").write_text(json.dumps(spec))
    for turn in "ab":
        names = [str(tmp_path / f"{turn}.{kind}") for kind in ("svg", "png")]
        subprocess.run([sys.executable, "-c", program, str(tmp_path / "spec.json"), *names], check=True)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()
    assert COLOURS[0] in (tmp_path / "a.svg").read_text() and (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_no_arm_is_dropped_by_pairing_with_a_list_that_is_too_short() -> None:
    """`zip(…, strict=False)` ends with the shorter one and says nothing: a colour that lacked cost an arm."""
    root = Path(figures.__file__).parents[2]
    sources = [path for folder in ("grpo", "workflow", "benchmarks") for path in (root / folder).rglob("*.py")]
    assert len(sources) > 50
    assert [path.name for path in sources if "strict=False" in path.read_text(encoding="utf-8")] == []


def test_the_axis_of_tokens_counts_every_response_sampled_so_far() -> None:
    """Two updates a step on one rollout batch, which is counted once: 8 responses of 10, then of 25.5 tokens."""
    history = pd.DataFrame(
        {"step": [1, 1, 2, 2], "update": [1, 2, 3, 4], "loss": [0.0] * 4, "train/response_length": [10.0, 10.0, 25.5, 25.5]}
    )
    validation = pd.DataFrame({"step": [0, 2], "update": [0, 4], "val/answer_reward": [0.1, 0.2]})
    config = {"config": {"rollout_batch_size": {"value": 8}}}
    run = Run("e", "a", 0, config, {}, history, validation, np.zeros((2, 1)))
    tables = tables_of(run, pd.Series({1: 5.0, 2: 9.0}))
    assert tables["history"]["tokens"] == [80, 284] and tables["validation"]["tokens"] == [0, 284]
    assert tables["history"]["seconds"] == [5, 9] and tables["validation"]["seconds"] == [0, 9]
    assert tables["history"]["update"] == [2, 4]
    assert "tokens" not in tables_of(replace(run, config={"config": {}}), pd.Series({1: 5.0, 2: 9.0}))["history"]

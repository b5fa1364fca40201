"""Sentences, tables and figures on colocated and asynchronous experiments, on made-up runs with known numbers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from report_parts import each, run, solved
from study_parts import ASYNCHRONOUS, COLOCATE, entry, with_values

from grpo.reporting import timing, wall_clock
from grpo.reporting.asynchronous import (
    discuss_bounds,
    discuss_effects,
    discuss_updates,
    draw_staleness,
    effects,
    first_difference,
    lag_bound,
    staleness,
)
from grpo.reporting.charts import COLOURS, save_figure
from grpo.reporting.curves import curves_figure
from grpo.reporting.record import Record
from grpo.reporting.trends import MEASURES, trend_of
from grpo.reporting.wall_clock import (
    PARTS,
    Times,
    components_table,
    discuss_overlap,
    draw_components,
    mean_times,
    steady_steps,
    times_of_steps,
)
from grpo.results.evidence import Evidence
from grpo.results.runs import Run
from grpo.study.schema import Study


def made_up(arm: str, *evaluations: Any, apart: dict[str, Any] | None = None, loss: str = "grpo_clip", **options: Any) -> Run:
    """A run that is evaluated after every step; with settings ``apart`` an asynchronous one."""
    lags: dict[str, Any] = {}
    if apart is not None:
        apart = {"max_policy_lag": 1, "replay_capacity": 1, "replay_max_age": None} | apart
        lags = {"lag_mean": float(apart["max_policy_lag"]), "lag_max": apart["max_policy_lag"]}
        lags |= {"replay/left": 0, "replay/uses_mean": 0.0, "replay/uses_max": 0, "replay/never_drawn": 0.0}
    values = {"asynchronous": apart, "loss_type": loss, "rollout_batch_size": 64}
    experiment = COLOCATE if apart is None else ASYNCHRONOUS
    every = options.pop("every", 1)
    steps = {"steps": every * (len(evaluations) - 1)}
    return run(arm, evaluations, experiment=experiment, every=every, values=values, **steps | lags | options)


def lagging(lag: int, *finals: float, **options: Any) -> list[Run]:
    """The runs of arm ``lag_LAG`` by their last evaluation."""
    return [
        made_up(f"lag_{lag}", each(0.1), each(final), seed=seed, apart={"max_policy_lag": lag}, **options)
        for seed, final in enumerate(finals)
    ]


def buffered(capacity: int, *finals: float, age: int | None = 8, **options: Any) -> list[Run]:
    apart = {"replay_capacity": capacity, "replay_max_age": age}
    return [
        made_up(f"buffer_{capacity}", each(0.1), each(final), seed=seed, apart=apart, **options)
        for seed, final in enumerate(finals)
    ]


def in_turns(*finals: float, arm: str = "one_update", **options: Any) -> list[Run]:
    return [made_up(arm, each(0.1), each(final), seed=seed, **options) for seed, final in enumerate(finals)]


# ------------------------------------------------------------------------------------------------------ arms and staleness


@pytest.mark.parametrize(
    ("lag", "capacity", "age", "bound"),
    [(0, 1, None, 0), (2, 1, None, 2), (1, 2, 8, 2), (1, 4, 8, 4), (1, 4, 3, 3), (4, 8, 4, 4), (0, 3, None, 2)],
)
def test_the_largest_lag_that_settings_allow(lag: int, capacity: int, age: int | None, bound: int) -> None:
    apart = {"max_policy_lag": lag, "replay_capacity": capacity, "replay_max_age": age}
    assert lag_bound(made_up("a", each(0.1), each(0.5), apart=apart)) == bound


def test_staleness_is_taken_over_all_updates_of_all_runs() -> None:
    first = made_up(
        "a", each(0.1), each(0.5), apart={}, steps=3,
        lag_mean=[0.0, 1.0, 2.0], gradient_norm=[0.1, 0.2, np.nan], clip_fraction=[0.0, 0.02, 0.04],
        ratio_min=[1.0, 0.5, 0.25], ratio_mean=[1.0, 1.1, 0.9], ratio_max=[1.0, 2.0, 16.0],
    )  # fmt: skip
    stopped = made_up(
        "a", each(0.1), each(0.0), apart={}, seed=1, steps=1, diverged=1,
        lag_mean=[3.0], gradient_norm=[9.0], clip_fraction=[0.5], ratio_min=[0.125], ratio_mean=[1.5], ratio_max=[64.0],
    )  # fmt: skip
    assert staleness([first, stopped]) == pytest.approx(
        {
            "lag_mean": 1.5,
            "clip_fraction": 0.14,
            "gradient_norm": 0.2,  # of .1, .2 and 9: a step without a finite gradient has no norm
            "ratio_min": 0.375,
            "ratio_mean": 1.05,
            "ratio_max": 9.0,
        }
    )


def test_the_figure_over_staleness(tmp_path: Path) -> None:
    """Reward, norm, ratios and clipped share over the measured lag; each run is a dot, each interval a line."""
    stale = {"gradient_norm": 0.5, "clip_fraction": 0.03, "ratio_min": 0.5, "ratio_max": 2.0, "ratio_mean": 1.25}
    runs = [*lagging(4, 0.25, 0.35, **stale), *lagging(0, 0.75, 0.75), *buffered(2, 0.5, lag_mean=1.5)]
    figure = draw_staleness(runs, 1)

    def points(panel: int, marker: str) -> list[tuple[float, float]]:
        lines = [line for line in figure.axes[panel].lines if line.get_marker() == marker]
        return [(x, pytest.approx(y)) for line in lines for x, y in zip(line.get_xdata(), line.get_ydata(), strict=True)]

    assert points(0, "o") == [(0.0, 0.75), (4.0, 0.3)] and points(0, "s") == [(1.5, 0.5)]
    assert points(0, ".") == [(0.0, 0.75), (0.0, 0.75), (4.0, 0.25), (4.0, 0.35), (1.5, 0.5)]
    colour_at = {line.get_xdata()[0]: line.get_color() for line in figure.axes[0].lines if len(line.get_xdata())}
    assert [colour_at[lag] for lag in (4.0, 0.0, 1.5)] == list(COLOURS[:3]), "in the order of the runs, not of the axis"
    assert points(1, "o") == [(0.0, 0.25), (4.0, 0.5)] and points(3, "o") == [(0.0, 0.0), (4.0, 3.0)]
    spans = [tuple(part.get_segments()[0][:, 1]) for part in figure.axes[2].collections]
    assert spans == [(1.0, 1.0), (0.5, 2.0), (1.0, 1.0)]
    save_figure(figure, tmp_path / "staleness.svg")
    assert all(f">{name}</text>" in (tmp_path / "staleness.svg").read_text() for name in ("lag 4", "lag 0", "buffer 2"))


@pytest.mark.filterwarnings("ignore:Mean of empty slice")
@pytest.mark.parametrize(
    "runs", [lagging(1, 0.1, gradient_norm=float("nan")), buffered(2, 0.5), lagging(0, 0.5) + buffered(4, 0.5)]
)
def test_the_figure_needs_not_every_arm_nor_every_gradient(runs: list[Run], tmp_path: Path) -> None:
    save_figure(draw_staleness(runs, 1), tmp_path / "staleness.svg")
    assert "measured lag" in (tmp_path / "staleness.svg").read_text()


# ------------------------------------------------------------------------------------------- lag 0 against one process


def test_runs_that_differ_are_named_with_the_first_step() -> None:
    """The mean reward is the same: one problem is gained and another lost."""
    first, swapped = solved(0.5), np.roll(solved(0.5), 1)
    curves = {0: (each(0.1), first, first, first), 1: (each(0.1), first, swapped, first)}
    lag_0 = [made_up("lag_0", *curve, seed=seed, apart={"max_policy_lag": 0}, every=10) for seed, curve in curves.items()]
    single = [made_up("one", *curves[0], seed=seed, every=10, loss="no_baseline") for seed in (0, 1)]
    assert [first_difference(*pair) for pair in zip(lag_0, single, strict=True)] == [None, 20]
    text = discuss_bounds(lag_0, single)
    assert "lag_0 and one, its counterpart in one process, differ (" in text
    assert "losses grpo_clip and no_baseline): with seed 1 at step 20. " in text
    assert "agree exactly" not in text


def test_a_run_that_was_stopped_differs_from_where_it_ends() -> None:
    long = made_up("a", each(0.1), each(0.2), each(0.3), each(0.4), every=5)
    short = made_up("b", each(0.1), each(0.2), apart={}, every=5, diverged=5)
    assert first_difference(long, short) == first_difference(short, long) == 10
    planned = made_up("b", each(0.1), each(0.2), apart={}, every=5)  # fewer steps by its settings
    assert first_difference(long, planned) is first_difference(planned, long) is None
    other = made_up("b", each(0.1), each(0.2), each(0.3), apart={}, every=5, diverged=7)
    other.validation["step"] = [0, 5, 7]  # stopped between two evaluations, and evaluated once more
    assert first_difference(long, other) == first_difference(other, long) == 7


def test_seeds_without_a_counterpart_are_not_compared() -> None:
    text = discuss_bounds(lagging(0, 0.5, 0.75), in_turns(0.5))
    assert "agree exactly: with each seed (0), every problem" in text
    assert discuss_bounds(lagging(0, 0.5), []).startswith("There is no run in one process to compare lag_0 with.")


# -------------------------------------------------------------------------------------------- more lag, a larger buffer


def ends(runs: list[Run], last_k: int = 1) -> dict[str, Any]:
    return {one["what"]: (one["arms"], round(one["difference"].value, 6)) for one in effects(runs, last_k)}


def test_more_lag_is_the_arm_with_the_most_against_that_with_the_least() -> None:
    stale = {"gradient_norm": 0.5, "clip_fraction": 0.031, "lag_mean": 3.666}
    runs = lagging(4, 0.25, **stale) + lagging(2, 0.0) + lagging(0, 0.75)
    assert ends(runs) == {"lag": (["lag_0", "lag_4"], -0.5)}
    (lag,) = effects(runs, 1)
    assert [of["gradient_norm"] for of in lag["stale"]] == [0.25, 0.5] and lag["stale"][1]["lag_mean"] == 3.666
    assert ends(lagging(1, 0.5)) == {}


def test_the_last_evaluations_count() -> None:
    zero = [made_up("lag_0", each(0.1), each(0.0), each(0.5), apart={"max_policy_lag": 0})]
    one = [made_up("lag_1", each(0.1), each(0.75), each(0.25), apart={"max_policy_lag": 1})]
    assert ends(zero + one, 1)["lag"][1] == -0.25 and ends(zero + one, 2)["lag"][1] == 0.25


def test_buffers_are_compared_with_the_arm_of_their_lag_without_one() -> None:
    runs = buffered(10, 0.25) + lagging(1, 0.5) + lagging(0, 0.9) + buffered(2, 0.0)
    assert ends(runs)["buffer"] == (["lag_1", "buffer_10"], -0.25)


def test_buffers_are_compared_with_one_another_where_that_arm_is_missing() -> None:
    assert ends(lagging(0, 0.9) + buffered(2, 0.5) + buffered(4, 0.25)) == {"buffer": (["buffer_2", "buffer_4"], -0.25)}
    assert ends(buffered(2, 0.5)) == {}


def test_collapsed_runs_are_counted_with_their_arm() -> None:
    stopped = made_up("lag_1", each(0.1), each(0.0), seed=1, apart={}, steps=1, diverged=1)
    (lag,) = effects([*lagging(0, 0.5, 0.5), *lagging(1, 0.5), stopped], 1)
    assert lag["collapsed"] == [0, 1] and lag["difference"].value == 0.0  # of the run that held


# ------------------------------------------------------------------------------------------- the handouts' two questions


def numbers_of_arms(*arms: list[Run], last_k: int = 1) -> dict[str, Any]:
    """The entries of an experiment's numbers that the answers use."""
    reward = next(measure for measure in MEASURES if measure.key == "reward")
    found = [
        {
            "arm": of[0].arm,
            "all": of,
            "collapses": Evidence("", {of[0].arm: of}, last_k).collapses(of[0].arm),
            "courses": {"reward": (reward, trend_of(of, reward))},
        }
        for of in arms
    ]
    return {"arms": found, "last_k": last_k, "seeds": len(arms[0])}


def timed_at(monkeypatch: pytest.MonkeyPatch, **seconds: list[float]) -> None:
    """Each arm's seconds by step."""
    monkeypatch.setattr(timing, "elapsed", lambda run: pd.Series(seconds[run.arm], index=run.history["step"]))


def test_colocated_runs_in_four_sentences(monkeypatch: pytest.MonkeyPatch) -> None:
    """The arms with most and with fewest updates, in any order."""
    many = [made_up("many", each(0.1), each(0.5), each(0.75), updates=4, gradient_norm=[0.5, 2.0], ratio_max=[1.0, 3.0])]
    one = [made_up("one", each(0.1), each(0.2), each(0.3))]
    timed_at(monkeypatch, many=[4.0, 8.0], one=[1.0, 2.0])
    (text,) = discuss_updates(numbers_of_arms(many, in_turns(0.2, arm="two", updates=2), one))
    convergence, stability, speed, at_equal_time = text.replace(". ", ".|").split("|")
    assert (
        "rises from 0.100 to 0.300 by step 2 (the last) with 1 update per rollout batch (one); it rises from 0.100"
        in convergence
    )
    assert (
        "in many 0 of 1 run collapsed, the largest gradient norm is 2.00 and ratios to the sampling policy go from 1 to 3"
        in stability
    )
    assert speed == "Run time: a step takes 1.000 s in one and 4.000 s in many."
    assert at_equal_time.startswith("After 2.0 s") and "one stood at 0.300 and many at 0.100" in at_equal_time
    assert discuss_updates(numbers_of_arms(one)) == []


def test_asynchronous_runs_beside_those_in_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    arms = lagging(0, 0.75), lagging(4, 0.25, gradient_norm=0.5), buffered(2, 0.5, lag_mean=2.0), lagging(1, 0.5)
    timed_at(monkeypatch, lag_1=[1.0], one_update=[2.0])
    (text,) = discuss_effects(numbers_of_arms(*arms), numbers_of_arms(in_turns(0.6)))
    assert "tokens are on average 4.00 versions old in lag_4 and 0.00 in lag_0; the final answer reward is 0.500 (" in text
    assert ") lower; the median gradient norm goes from 0.25 to 0.5," in text
    assert "A larger buffer: tokens are on average 2.00 versions old in buffer_2 and 1.00 in lag_1;" in text
    assert "the same: 0.000 (-" in text
    assert "one_update stood at 0.100 and lag_1 at 0.500" in text
    assert "stood at" not in discuss_effects(numbers_of_arms(*arms), None)[0]


# ------------------------------------------------------------------------------------------------------ bounds and reuse


def test_lags_within_their_bounds() -> None:
    runs = lagging(0, 0.5) + lagging(2, 0.5, 0.5) + buffered(4, 0.5, lag_max=3)
    text = discuss_bounds(runs, [])
    assert (
        "Largest lag measured in any token, of the largest allowed: 0 of 0 (lag_0), 2 of 2 (lag_2), 3 of 4 (buffer_4) "
        "versions; the bound was respected in all 4 runs."
    ) in text


def test_an_exceeded_bound_is_reported_with_its_run() -> None:
    late = made_up("lag_1", each(0.1), each(0.4), each(0.5), seed=1, apart={}, lag_max=[1, 2])
    text = discuss_bounds([*lagging(1, 0.5), late], [])
    assert "2 of 1 (lag_1) versions; the bound was BROKEN in grpo_async_offpolicy/lag_1/1 (2)." in text
    assert "respected" not in text


def counts(left: list[int], mean: list[float], most: list[int], never: list[float]) -> dict[str, list[float]]:
    return {"replay/left": left, "replay/uses_mean": mean, "replay/uses_max": most, "replay/never_drawn": never}


def test_how_often_a_buffers_groups_were_drawn() -> None:
    """The last row counts all groups that have left; a run with three times as many has three times the weight."""
    apart = {"replay_capacity": 2}
    runs = [
        made_up("b", *[each(0.1)] * 3, apart=apart, **counts([5, 30], [9.0, 1.0], [9, 3], [0.9, 0.2])),
        made_up("b", *[each(0.1)] * 2, apart=apart, seed=1, diverged=1, **counts([10], [0.6], [4], [0.6])),
    ]
    text = discuss_bounds(runs, [])
    assert text.endswith(
        "A group that left the buffer of b had been drawn 0.90 times on average and at most 4 times; 30.0% of 40 groups never "
        "were."
    )


def test_a_buffer_that_nothing_left() -> None:
    text = discuss_bounds(buffered(4, 0.5), [])
    assert text.endswith("No group had left the buffer of buffer_4 when its runs ended.")
    assert "had been drawn" not in discuss_bounds(lagging(1, 0.5), [])  # without a buffer each group is drawn once


# ----------------------------------------------------------------------------------------------------- steps and times


@pytest.mark.parametrize(
    ("lag", "evaluated", "kept"),
    [
        (None, [0], [2, 3, 4, 5, 6, 7, 8, 9, 10]),
        (None, [0, 4, 8, 10], [2, 3, 4, 6, 7, 8, 10]),  # the step that is followed by an evaluation counts itself
        (0, [0, 4, 8, 10], [3, 4, 7, 8]),
        (1, [0, 4, 8, 10], [4, 8]),
        (1, [0, 10], [4, 5, 6, 7, 8, 9, 10]),
        (4, [0, 4, 8, 10], []),
    ],
)
def test_steps_that_no_evaluation_affects(lag: int | None, evaluated: list[int], kept: list[int]) -> None:
    steps = [{"step": step, "step_s": 1.0} for step in range(1, 11)]
    assert [step["step"] for step in steady_steps(steps, evaluated, lag)] == kept


def test_means_of_a_step_and_its_overlap() -> None:
    steps = [
        {
            "step": 7, "step_s": 4.0, "rollout_s": 3.0, "training_s": 1.0, "scoring_s": 0.5, "synchronization_s": 0.25,
            "waiting_s": 2.5, "generator_synchronization_s": 0.5, "generator_waiting_s": 0.0, "evaluation_s": 99.0,
        },
        {
            "step": 8, "step_s": 6.0, "rollout_s": 5.0, "training_s": 2.0, "scoring_s": 0.25, "synchronization_s": 0.75,
            "waiting_s": 1.5, "generator_synchronization_s": 0.0, "generator_waiting_s": 1.0, "evaluation_s": 0.0,
        },
    ]  # fmt: skip
    assert mean_times(steps) == {
        "rollout": 4.0,
        "scoring": 0.375,
        "training": 1.5,
        "synchronization": 0.5,
        "generator_synchronization": 0.25,
        "waiting": 2.0,
        "generator_waiting": 0.5,
        "step": 5.0,
        "longer": 4.0,
        "share": 0.8,
    }


def test_training_may_be_the_longer_and_phases_may_be_missing() -> None:
    found = mean_times([{"step": 2, "step_s": 2.0, "rollout_s": 0.5, "scoring_s": 0.0, "training_s": 1.5}])
    assert (found["longer"], found["waiting"], found["synchronization"]) == (1.5, 0.0, 0.0)
    assert mean_times([]) == {}


def timing_of(*seconds: float, restarts: dict[str, int] | None = None, **parts: float) -> dict[str, Any]:
    """A timing file whose steps took so many seconds."""
    steps = [{"step": i + 1, "step_s": s, **parts} for i, s in enumerate(seconds)]
    return {"steps": steps, "restarts": restarts or {}, "phases": {}, "total_s": 360.0}


def test_the_steps_of_all_seeds_are_pooled(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that was stopped early adds the steps it has, here none; an arm with none at all has no times."""
    runs = [
        *in_turns(0.5, 0.5, every=4),
        made_up("lag_1", each(0.1), each(0.5), apart={}, every=8),
        made_up("lag_1", each(0.1), each(0.0), apart={}, seed=1, every=2, diverged=2),
        made_up("lag_2", each(0.1), each(0.0), apart={"max_policy_lag": 2}, every=2, diverged=2),
    ]
    files = {
        "grpo_colocate/one_update/0": timing_of(9.0, 1.0, 1.0, 1.0, rollout_s=0.5),
        "grpo_colocate/one_update/1": timing_of(9.0, 3.0, 3.0, 3.0, rollout_s=0.5),
        "grpo_async_offpolicy/lag_1/0": timing_of(*[9.0] * 3, *[2.0] * 5, training_s=1.0, restarts={"scorer": 1, "learner": 2}),
        "grpo_async_offpolicy/lag_1/1": timing_of(9.0, 9.0, training_s=1.0, restarts={"generator": 1}),
        "grpo_async_offpolicy/lag_2/0": timing_of(9.0, 9.0, restarts={"generator": 0}),
    }
    monkeypatch.setattr(wall_clock, "read_timing", lambda run: files[run.name])
    one, lag_1, lag_2 = times_of_steps(runs)
    kept = ("arm", "lag", "restarts", "steps", "step", "longer")
    assert [one[key] for key in kept] == ["one_update", None, 0, 6, 2.0, 0.5]
    assert [lag_1[key] for key in kept] == ["lag_1", 1, 4, 5, 2.0, 1.0]
    assert lag_2 == {"arm": "lag_2", "lag": 2, "restarts": 0, "samples": 64, "steps": 0}


# -------------------------------------------------------------------------------------------- drawing and telling times


def variant(arm: str, lag: int | None, step: float, restarts: int = 0, **parts: float) -> Times:
    longer = max(parts["rollout"], parts["training"])
    times = dict.fromkeys(PARTS, 0.0) | parts | {"step": step, "longer": longer, "share": longer / step}
    return {"arm": arm, "lag": lag, "restarts": restarts, "samples": 64, "steps": 12} | times


ONE = variant("one_update", None, 2.0, rollout=1.0, scoring=0.125, training=0.75, synchronization=0.0625)
LAG_0 = variant("lag_0", 0, 2.5, rollout=1.0, training=0.75, waiting=1.25, generator_waiting=1.5)
LAG_1 = variant(
    "lag_1", 1, 1.0625, rollout=1.0, training=0.5, synchronization=0.125, generator_synchronization=0.0625, waiting=0.375,
)  # fmt: skip
LAG_2 = variant("lag_2", 2, 1.5, rollout=0.75, training=1.0, generator_waiting=0.5, scoring=0.25)
EMPTY = {"arm": "lag_4", "lag": 4, "restarts": 0, "samples": 64, "steps": 0}


def test_bars_of_one_process_and_of_two_sides() -> None:
    (axes,) = draw_components([ONE, LAG_1, EMPTY]).axes
    names = [label.get_text() for label in axes.get_yticklabels()]
    laid: dict[str, list[tuple[float, float]]] = {}
    for bar in sorted(axes.patches, key=lambda bar: bar.get_x()):
        if not bar.get_width():
            continue
        laid.setdefault(names[round(bar.get_y() + 0.375)], []).append((bar.get_x(), bar.get_x() + bar.get_width()))
    assert laid == {
        "one update: one process": [(0, 1), (1, 1.125), (1.125, 1.875), (1.875, 1.9375)],
        "lag 1: generator": [(0, 1), (1, 1.0625)],  # rollout, weights loaded
        "lag 1: learner": [(0, 0.5), (0.5, 0.625), (0.625, 1)],  # training, weights sent, waiting
    }
    assert names[-1] == "lag 4: too few steps"
    goals = [tuple(line.get_segments()[0][:, 0]) for line in axes.collections]
    assert goals == [pytest.approx((1.15, 1.15))] * 2  # of generator and learner of lag 1
    shares = {text.get_text(): (text.xy[0], names[text.xy[1]]) for text in axes.texts}
    assert shares == {"0.50": (1.9375, "one update: one process"), "0.94": (pytest.approx(1.15), "lag 1: generator")}
    assert not draw_components([EMPTY]).axes[0].texts


def test_the_table_of_times() -> None:
    lines = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in components_table([ONE, LAG_1, EMPTY]).splitlines()
    ]
    assert {len(cells) for cells in lines} == {13}
    assert lines[0][-2:] == ["samples per second", "speedup over one_update"]  # 64 / 2 s; 2 s / 1.0625 s
    assert lines[2] == ["one_update", "12", "1.000", "0.125", "0.750", "0.062", "", "", "", "2.000", "0.50", "32", "1.00"]
    assert lines[3][:-2] == ["lag_1", "12", "1.000", "0.000", "0.500", "0.125", "0.062", "0.375", "0.000", "1.062", "0.94"]
    assert lines[3][-2:] == ["60", "1.88"]
    assert lines[4] == ["lag_4", "0", *[""] * 11]


def test_arms_that_reach_the_goal() -> None:
    assert discuss_overlap([ONE, LAG_0, LAG_1, LAG_2]) == (
        "The goal is a step of at most 1.15 times the longer of generation and training. "
        "These meet it: lag_1 (1.06). "
        "These miss it: lag_2 (1.50). "
        "With no lag the two take turns and cannot meet it: lag_0 (2.50). "
        "A step takes 2.000 s in one_update (one process) and 2.500 s in lag_0 (1.25 times), 1.062 s in lag_1 (0.53 times), "
        "1.500 s in lag_2 (0.75 times). "
        "A machine's speed changes from run to run, so compare a step also with the sum of its own rollout, "
        "scoring and training, of which it takes this share: lag_0 1.43, lag_1 0.71, lag_2 0.75."
    )


@pytest.mark.parametrize(("step", "met"), [(1.149, True), (1.151, False)])
def test_the_goal_is_a_share_of_the_longer_one(step: float, met: bool) -> None:
    text = discuss_overlap([variant("lag_1", 1, step, rollout=0.25, training=1.0)])
    assert ("These meet it: lag_1 (1.15)." in text, "These miss it: lag_1 (1.15)." in text) == (met, not met)
    assert "one process" not in text  # there is none to compare with


def test_restarts_and_runs_that_are_too_short_are_reported() -> None:
    early = variant("buffer_2", 1, 0.5, restarts=3, rollout=1.0, training=0.5)
    text = discuss_overlap([early, EMPTY])
    assert "Below 1, rollouts made during an evaluation were still in stock: buffer_2." in text
    assert "No step counts in lag_4: the runs are too short." in text
    counts = "what was trained again after a loss counts once, and starting again does not count."
    assert f"Actors that were restarted: buffer_2 3; {counts}" in text
    assert discuss_overlap([ONE]) == "The goal is a step of at most 1.15 times the longer of generation and training."


# ------------------------------------------------------------------------------------------------ rewards at equal time


def test_arms_at_equal_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second arm's runs end first, after 6 s; by then the first arm has had its evaluations up to step 2."""
    slow = [made_up("slow", each(0.0), each(0.25), each(0.5), each(1.0), seed=seed) for seed in (0, 1)]
    fast = [made_up("fast", each(0.0), each(0.125), each(0.25), each(0.375), seed=seed) for seed in (0, 1)]
    timed_at(monkeypatch, slow=[3.0, 6.0, 9.0], fast=[2.0, 4.0, 6.0])
    assert timing.at_equal_time(slow, fast) == (
        "After 6.0 s without evaluation, when the first of their runs had ended, slow stood at 0.500 and fast at 0.375 "
        "(last evaluation until then), a difference of -0.125 (-0.145 to -0.105)."
    )


def test_a_run_that_ends_before_anothers_first_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then the untrained evaluation is the last one."""
    slow = in_turns(0.5, arm="slow", every=10)
    stopped = in_turns(0.1, arm="stopped", diverged=1)
    timed_at(monkeypatch, slow=[float(second) for second in range(1, 11)], stopped=[4.0])
    text = timing.at_equal_time(slow, stopped)
    assert "After 4.0 s" in text and "slow stood at 0.100 and stopped at 0.100" in text
    assert "a difference of 0.000 (" in text and text.endswith("): these runs cannot tell the two apart.")


# ---------------------------------------------------------------------------------------------------- reports/timing


@pytest.fixture
def timed(mini_study: Study, monkeypatch: pytest.MonkeyPatch) -> Record:
    """Both experiments, whose phases add up to more than the steps take where they overlap."""
    runs = {
        COLOCATE: in_turns(0.5, every=8) + in_turns(0.25, arm="several_updates", updates=4, every=8),
        ASYNCHRONOUS: lagging(0, 0.5, every=8) + lagging(1, 0.75, every=8),
    }
    seconds = {"one_update": 2.0, "several_updates": 3.0, "lag_0": 2.5, "lag_1": 1.0}
    parts = {"rollout_s": 1.0, "scoring_s": 0.0, "training_s": 1.0, "synchronization_s": 0.0, "evaluation_s": 100.0}
    for module in (timing, wall_clock):
        monkeypatch.setattr(module, "read_timing", lambda run: timing_of(*[seconds[run.arm]] * 8, **parts))
    return Record(mini_study, runs, {})


def test_elapsed_time_is_that_of_the_steps(timed: Record) -> None:
    assert timing.elapsed(timed.runs[ASYNCHRONOUS][-1]).tolist() == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]


def test_training_seconds_and_gpu_hours(timed: Record, mini_study: Study) -> None:
    """0.1 hours, on what is reserved for a run of its kind."""
    gpus = {"train": 1, "colocate": 2, "asynchronous": 3}
    study = with_values(mini_study, {f"resources.{kind}.gpus": number for kind, number in gpus.items()})
    one, lag_1 = timed.runs[COLOCATE][0], timed.runs[ASYNCHRONOUS][-1]
    rows = [timing.time_row(study, run) for run in (one, lag_1)]
    assert [(row["seconds"], row["training_seconds"], row["gpu_hours"]) for row in rows] == [(360, 16, 0.2), (360, 8, 0.3)]


def test_a_runs_memory_is_that_of_its_largest_step(timed: Record, mini_study: Study, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = [{"step": 1, "step_s": 1.0, "training_peak_mb": 900.4}, {"step": 2, "step_s": 1.0, "training_peak_mb": 300.0}]
    monkeypatch.setattr(timing, "read_timing", lambda run: {"total_s": 2.0, "phases": {}, "steps": steps})
    row = timing.time_row(mini_study, timed.runs[COLOCATE][0])
    assert (row["training_peak_mb"], row["rollout_peak_mb"]) == (900, 0)


def test_an_arm_takes_the_seconds_of_those_runs_that_were_trained(mini_study: Study, monkeypatch: pytest.MonkeyPatch) -> None:
    def timing_of(name: str) -> dict[str, Any]:
        _, arm, seed = name.split("/")
        taken_over = arm == "taken over" or (arm == "half" and seed == "1")
        return {"total_s": 100.0 + int(seed), "same_as": f"other/{arm}/{seed}" if taken_over else None}

    arms = {"trained": {}, "taken over": {}, "half": {}}
    study = with_values(mini_study, {"seeds": [0, 1], "experiments": {COLOCATE: entry(COLOCATE, arms=arms)}})
    monkeypatch.setattr(timing, "read_timing_file", timing_of)
    seconds = {f"{COLOCATE}/trained": 100.5, f"{COLOCATE}/taken over": 0.0, f"{COLOCATE}/half": 50.0}
    assert timing.seconds_of_arms(study) == seconds


def test_both_experiments_are_drawn_over_wall_clock_time(timed: Record) -> None:
    assert {COLOCATE, ASYNCHRONOUS} <= set(timed.study.with_report("wall_clock"))
    assert list(wall_clock.arms_over_time(timed, COLOCATE)) == ["one update", "several updates"]
    arms = wall_clock.arms_over_time(timed, ASYNCHRONOUS)
    assert list(arms) == ["lag 0", "lag 1", "one update, one process"]
    (axes,) = curves_figure(arms, wall_clock.REWARD_OVER_SECONDS).axes
    assert [line.get_xdata()[-1] for line in axes.lines] == [20.0, 8.0, 16.0]


def test_asynchronous_arms_are_drawn_alone_if_the_one_process_arm_is_left_out(timed: Record) -> None:
    study = with_values(timed.study, {f"experiments.{COLOCATE}.arms": {}})
    assert list(wall_clock.arms_over_time(replace(timed, study=study), ASYNCHRONOUS)) == ["lag 0", "lag 1"]

"""Figures of experiments: their metrics, the styles and names of arms, and equal bytes for equal results."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from report_parts import arm_result, each, interval, record, result, run
from study_parts import EXPERT_ITERATION, KEYWORD, SFT

from grpo.reporting import curves, timing, wall_clock
from grpo.reporting.charts import (
    COLOURS,
    Curve,
    draw_curves,
    frame,
    panels,
    readable,
    save_figure,
    style,
    styles,
    with_readable_names,
)
from grpo.reporting.curves import (
    GIVEN_FORM,
    TITLES,
    curves_figure,
    curves_of,
    experiment_figure,
    metrics_figure,
    second_metric,
    values_of,
)
from grpo.reporting.figures import by_seed, draw_ends, draw_forest
from grpo.results.findings import Contrast, Verdict
from grpo.results.runs import REWARD, Run
from grpo.results.verdicts import KL
from grpo.study.schema import Study

SWEEP = "grpo_off_policy_sweep_broad"
Look = tuple[str, str]


def made_up(arm: str, place: int, experiment: str = SWEEP, **values: Any) -> Run:
    """A run of three steps with curves that depend on its place, so that none covers another."""
    history = {name: [place, place + 0.5, place + 1.0] for name in ("train/format_reward", "token_entropy", "gradient_norm")}
    history |= {"clip_fraction": [0.0, 0.1, 0.1], "lag_mean": 1.0}
    validation = {"val/response_length": [10.0, 20.0 + place], "update": [0, 3]}
    rewards = each(0.0), each(0.1 + place / 50)
    return run(arm, rewards, 0, experiment, every=3, steps=3, values=values, validation=validation, **history)


def looks(axes: Axes) -> list[Look]:
    """Colour and dashes of each curve."""
    return [(to_hex(line.get_color()).upper(), str(line._dash_pattern)) for line in axes.lines]  # type: ignore[attr-defined]


def ends(axes: Axes) -> list[float]:
    return [float(line.get_ydata()[-1]) for line in axes.lines]  # type: ignore[index,arg-type]


@pytest.mark.parametrize("count", [1, 9, 30])
def test_every_arm_is_drawn_and_can_be_told_from_the_others(
    count: int, tmp_path: Path, mini_study: Study, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nine arms are in the broad sweeps of the real studies, and there are eight colours."""
    runs = [made_up(f"arm_{i}", i) for i in range(count)]
    figure = experiment_figure(mini_study, SWEEP, runs)
    reward, norm = figure.axes
    assert ends(reward) == [run.validation[REWARD].iloc[-1] for run in runs]
    assert ends(norm) == [run.history["gradient_norm"].iloc[-1] for run in runs]
    assert len(set(looks(reward))) == count and looks(norm) == looks(reward)
    save_figure(figure, tmp_path / "figure.svg")
    if count > 1:
        assert all(f">arm {i}</text>" in (tmp_path / "figure.svg").read_text() for i in range(count))

    monkeypatch.setattr(timing, "read_timing", lambda _: {"steps": [{"step": i, "step_s": 2.0} for i in (1, 2, 3)]})
    (over_time,) = curves_figure({run.arm: [run] for run in runs}, wall_clock.REWARD_OVER_SECONDS).axes
    assert looks(over_time) == looks(reward)
    assert over_time.lines[0].get_xdata().tolist() == [0.0, 6.0]  # three steps of two seconds


def test_every_experiment_of_the_default_study_has_its_second_metric(mini_study: Study) -> None:
    """The metric that decides its claims; KL for the KL experiment."""
    assert set(curves.SECOND) <= set(mini_study.experiments)
    assert set(curves.SECOND.values()) <= set(TITLES)
    run = made_up("best", 0, "grpo_kl_divergence")
    run.history[KL] = [0.0, 0.1, 0.2]
    assert second_metric("grpo_kl_divergence", [run]) == KL
    reward, over_kl, kl = experiment_figure(mini_study, "grpo_kl_divergence", [run]).axes
    assert over_kl.lines[0].get_xdata().tolist() == pytest.approx(
        [0.0, float("nan")], nan_ok=True
    )  # that of step 1; step 4 has none
    assert ends(reward) == [pytest.approx(0.1)] and ends(kl) == [0.2] and kl.get_title(loc="left").endswith("(nats)")
    assert second_metric("an experiment of one's own", [run]) == "val/response_length"


@pytest.mark.parametrize(
    ("experiment", "axis"), [(SFT, "optimizer step"), (EXPERT_ITERATION, "expert iteration step"), (KEYWORD, "GRPO step")]
)
def test_a_methods_steps_are_named_and_a_step_that_trained_nothing_leaves_a_gap(
    experiment: str, axis: str, mini_study: Study, tmp_path: Path
) -> None:
    """Keyword runs that do not measure their second metric show the length."""
    made = made_up("arm", 0, experiment)
    made.validation.loc[1, "val/token_entropy"] = np.nan
    figure = experiment_figure(mini_study, experiment, [made])
    titles = {KEYWORD: "validation response length (tokens)"}
    assert [axes.get_xlabel() for axes in figure.axes] == [axis, axis]
    assert figure.axes[0].get_title(loc="left") == "validation answer reward"
    assert figure.axes[1].get_title(loc="left") == titles.get(experiment, "token entropy, validation (nats)")
    save_figure(figure, tmp_path / "figure.svg")


def test_arms_with_more_updates_are_shown_over_updates_too(mini_study: Study) -> None:
    runs = [made_up("one", 0), made_up("four", 1)]
    runs[1].validation["update"] = [0, 12]
    figure = experiment_figure(mini_study, SWEEP, runs)
    assert [axes.get_xlabel() for axes in figure.axes] == ["GRPO step", "optimizer steps (updates)", "GRPO step"]
    assert [line.get_xdata()[-1] for line in figure.axes[1].lines] == [3, 12]  # type: ignore[index]


def test_seeds_are_thin_their_mean_is_thick_and_a_stopped_run_has_a_cross(mini_study: Study) -> None:
    """The mean is that of the runs that did not diverge."""
    runs = [replace(made_up("a", place), seed=place) for place in range(3)]
    runs[2] = replace(runs[2], metrics=runs[2].metrics | {"diverged_step": 3})
    reward = experiment_figure(mini_study, SWEEP, runs).axes[0]
    thin = [line for line in reward.lines if line.get_linewidth() < 1 and line.get_marker() in ("None", "")]
    thick = [line for line in reward.lines if line.get_linewidth() > 1.6]
    cross = [line for line in reward.lines if line.get_marker() == "x"]
    assert [line.get_ydata()[-1] for line in thin] == pytest.approx([0.1, 0.12, 0.14])  # type: ignore[index]
    assert [line.get_ydata()[-1] for line in thick] == pytest.approx([0.11])  # type: ignore[index]
    assert [(line.get_xdata()[0], line.get_ydata()[0]) for line in cross] == [(3, pytest.approx(0.14))]  # type: ignore[index]


@pytest.mark.parametrize(
    ("heights", "scale"),
    [
        ((1.0, 2.0, 3.0, 1.5), "linear"),
        ((0.01, 1.0, 2.0, 3.0), "log"),  # 300 times the smallest
        ((0.0, 1.0, 2.0, 1900.0), "symlog"),  # one spike beside usual values, and a batch without signal
        ((0.0, 0.001, 0.2, 0.3), "linear"),  # grows from nothing: its usual values are not dwarfed
    ],
)
def test_a_spike_hides_neither_the_usual_values_nor_zeros(heights: tuple[float, ...], scale: str) -> None:
    _, (axes,) = panels(1)
    draw_curves(axes, [Curve("a", None, (0, 1, 2, 3), heights)], styles(["a"]))
    frame(axes, "gradient norm", "GRPO step")
    assert axes.get_yscale() == scale
    low, high = axes.get_ylim()
    assert low <= min(heights) and max(heights) <= high


def test_accuracy_given_the_form_is_the_reward_by_the_form() -> None:
    run = made_up("a", 5)
    run.validation["val/format_reward"] = [0.0, 0.4]
    assert curves_of({"a": [run]}, GIVEN_FORM)[0].y[1] == pytest.approx(0.5)  # of .2 and .4
    run.validation["val/format_reward"] = [0.5, 0.1]
    assert values_of(run, GIVEN_FORM) is None  # an answer is rewarded without the form


@pytest.mark.parametrize(
    ("arm", "name"),
    [
        ("epochs_4-batch_16", "4 epochs × batch 16"),
        ("questions_64-rollouts_4-epochs_1", "64 questions × 4 rollouts × 1 epoch"),
        ("rank_1-high", "rank 1, high"),
        ("grpo_no_clip", "grpo no clip"),
        ("3e-4", "3e-4"),
        ("sft_final", "sft final"),
        ("4_epochs", "4_epochs"),  # epochs_4 is another arm
    ],
)
def test_arms_have_readable_names(arm: str, name: str) -> None:
    assert readable(arm) == name
    assert with_readable_names(f"{arm} leads; e/{arm}/0 is its run, {arm}-b another's.", [arm]) == (
        f"{name} leads; e/{arm}/0 is its run, {arm}-b another's."
    )


def test_the_first_arms_differ_in_colour_and_no_two_look_the_same() -> None:
    assert [style(place).color for place in range(8)] == list(COLOURS)
    assert {style(place).line for place in range(8)} == {"solid"}
    assert len(set(map(style, range(500)))) == 500
    assert list(styles("ab")) == ["a", "b"] and styles("ab")["b"] == style(1)


def test_the_forest_plot_has_deciding_contrasts_with_seeds_and_sources(mini_study: Study) -> None:
    """A rise above the start decides only a part of a claim on KL; a statement stands once, above its differences."""

    def contrast(arm: str, against: str, covers: str = "runs and problems") -> Contrast:
        difference = replace(interval(0.1, 0.0, 0.2), covers=covers)
        return Contrast(arm, against, difference, difference, 1)

    pairs = (contrast("a", "b"), contrast("b", f"{SWEEP}/a", "problems"), contrast("a", "start"))
    claim = Verdict("id", SWEEP, "s", "agrees", "why", published={"x-2025": 0.3}, contrasts=pairs)
    ends = {"a": (0.5, 0.7), "b": (0.4, 0.5)}
    arms = tuple(replace(arm_result(arm, 0.5), by_run=by_run) for arm, by_run in ends.items())
    made = record(mini_study, {SWEEP: ([], result(*arms))}, claim, replace(claim, contrasts=()))
    assert by_seed(made, SWEEP, pairs[0]) == pytest.approx([0.1, 0.2]) and by_seed(made, SWEEP, pairs[1]) == []
    axes = draw_forest(made).axes[0]
    assert [text.get_text() for text in axes.get_yticklabels()] == ["s\n(a above b)", "(b above a)"]
    diamonds = [line.get_xdata()[0] for line in axes.lines if line.get_marker() == "D"]  # type: ignore[index]
    assert diamonds == [0.3, 0.3] and [text.get_text() for text in axes.texts] == ["x-2025", "x-2025"]


def test_nothing_of_a_figure_lies_outside_it(mini_study: Study) -> None:
    """However little the names of arms leave: a legend takes as many lines as it needs."""
    arms = [f"questions_{count}-rollouts_4-epochs_2" for count in (32, 64, 128, 256)]
    ended, published = result(*(arm_result(arm, 0.5) for arm in arms)), {"x-2025": 0.3, "a-long-name-of-a-source-2026": 0.29}
    contrast = Contrast(arms[0], arms[1], interval(0.1), interval(0.1), 1)
    claim = Verdict(
        "id", SWEEP, "a statement", "not tested here", by_construction=True, published=published, contrasts=(contrast,)
    )
    runs = [made_up(arm, place) for place, arm in enumerate(arms)]
    forest = draw_forest(record(mini_study, {SWEEP: ([], ended)}, claim))
    for figure in (draw_ends(ended), experiment_figure(mini_study, SWEEP, runs), forest):
        figure.draw_without_rendering()  # lays it out
        drawn, (width, height) = figure.get_tightbbox(), figure.get_size_inches()
        assert min(drawn.x0, drawn.y0) >= 0 and drawn.x1 <= width and drawn.y1 <= height
    assert [text.get_text() for text in forest.legends[0].get_texts()] == ["by construction"]
    assert "a-long-name-of-a-source-2026, x-2025" in [text.get_text() for text in forest.axes[0].texts]


def test_equal_results_give_equal_bytes_and_what_is_drawn_is_seen(tmp_path: Path) -> None:
    """In two processes, for SVG and PNG; figures in one page have no clashing ids."""
    program = """
import sys; from pathlib import Path
from grpo.reporting.charts import Curve, draw_curves, frame, panels, save_figure
from grpo.reporting.charts import styles
figure, axes = panels(2)
for place in axes: draw_curves(place, [Curve("a", None, (0.0, 1.0, 2.0), (0.123456, 0.2, 0.4), True)], styles("a"))
frame(axes[0], "reward 0.96875", "step", share=True)
for name in sys.argv[1:]: save_figure(figure, Path(name))
"""
    for turn in "ab":
        names = [str(tmp_path / f"{turn}.{kind}") for kind in ("svg", "png")]
        subprocess.run([sys.executable, "-c", program, *names], check=True)
    svg = (tmp_path / "a.svg").read_text()
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()
    assert COLOURS[0].lower() in svg and (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert ">reward 0.96875</text>" in svg  # coordinates are rounded, what is said is not
    assert not re.findall(r"\d\.\d{3,}(?![^<>]*</text>)", svg)
    assert not re.findall(r'id="(?:figure|axes|patch|line2d|text)_', svg) and "background" not in svg


def test_what_each_update_logs_is_drawn(mini_study: Study) -> None:
    """As CS336 asks: loss, gradient norm, token entropy, clip fraction, train rewards; where the runs have them."""
    asked = (
        "loss",
        "gradient_norm",
        "token_entropy",
        "clip_fraction",
        *(f"train/{kind}reward" for kind in ("", "format_", "answer_")),
    )
    logged = dict.fromkeys(asked, 0.25)
    drawn = {
        axes.get_title(loc="left"): axes
        for axes in metrics_figure(mini_study, SWEEP, [run("a", [0.1, 0.5], experiment=SWEEP, **logged)]).axes
    }
    assert {TITLES[name] for name in asked} <= drawn.keys()
    assert drawn[TITLES["loss"]].lines[0].get_ydata() == [0.25]
    assert TITLES["loss"] not in {
        axes.get_title(loc="left") for axes in metrics_figure(mini_study, SWEEP, [run("a", [0.1])]).axes
    }

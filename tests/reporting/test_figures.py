"""Figures of experiments: what is drawn of which runs, styles, sizes of text, and equal bytes for equal results."""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Text
from report_parts import each, run
from study_parts import ROOT

from grpo.reporting.charts import (
    ANSWER,
    FULL,
    GIVEN_FORM,
    NORM,
    OF_A_RUN,
    TITLES,
    curves_figure,
    frame,
    has,
    over_runs,
    panels,
    save_figure,
    styles,
    values_of,
)
from grpo.reporting.figures import (
    draw_best_of_n,
    draw_by_examples,
    draw_contrasts,
    draw_experiment,
    draw_overview,
    draw_rates,
    draw_zero_shot,
    looks_of,
)
from grpo.results.runs import Run
from grpo.study import paths

SHOWN = 96  # pixels of an inch on the page
SMALLEST = 11  # pixels of text


def made_up(arm: str, place: int, seed: int = 0, **options: Any) -> Run:
    """A run of three steps with curves that depend on its place, so that none covers another."""
    history = {name: [place, place + 0.5, place + 1.0] for name in ("token_entropy", NORM)}
    rewards = each(0.0), each(0.1 + place / 50)
    return run(arm, rewards, seed, every=3, steps=3, **(history | options))


def looks(axes: Axes) -> list[tuple[str, str]]:
    """Colour and dashes of each curve."""
    return [(str(line.get_color()), str(line._dash_pattern)) for line in axes.lines]  # type: ignore[attr-defined]


def ends(axes: Axes) -> list[float]:
    return [float(line.get_ydata()[-1]) for line in axes.lines]  # type: ignore[index,arg-type]


def inside(figure: Figure) -> bool:
    """Whether nothing is cut off by the figure's edges, whatever labels need; and no text is too small on the page."""
    figure.draw_without_rendering()  # lays it out
    drawn, (width, height) = figure.get_tightbbox(), figure.get_size_inches()
    texts = [text for text in figure.findobj(Text) if isinstance(text, Text) and text.get_text() and text.get_visible()]
    assert min(text.get_fontsize() for text in texts) / 72 * SHOWN >= SMALLEST and width <= FULL
    return bool(drawn.x0 >= -0.01 and drawn.y0 >= -0.01 and drawn.x1 <= width + 0.01 and drawn.y1 <= height + 0.01)


# -------------------------------------------------------------------------------------------------------------- curves


@pytest.mark.parametrize("count", [1, 9, 30])
def test_every_arm_is_drawn_and_can_be_told_from_the_others(count: int) -> None:
    """Nine arms are in the broad sweeps of the real studies, and there are eight colours."""
    runs = {f"arm {i}": [made_up("a", i)] for i in range(count)}
    figure, _ = curves_figure(runs, [ANSWER, NORM], "grpo")
    reward, norm = figure.axes
    assert ends(reward) == pytest.approx([0.1 + i / 50 for i in range(count)]) and ends(norm) == [i + 1.0 for i in range(count)]
    assert len(set(looks(reward))) == count and looks(norm) == looks(reward)
    shown = [text.get_text() for legend in figure.legends for text in legend.get_texts()]
    assert shown == (list(runs) if count > 1 else [])
    assert inside(figure)


def test_a_mean_with_its_band_and_collapsed_runs_with_a_cross() -> None:
    """The mean counts a stopped run at its last value to the end, as the tables do; its own curve ends where it stopped."""
    runs = [run("a", [0.0, 0.4, 0.8], 0), run("a", [0.0, 0.6, 0.6], 1), run("a", [0.0, 0.1], 2, diverged=8)]
    others = {name: [run(name, [0.0, 0.1, 0.1])] for name in "bc"}
    figure, _ = curves_figure({"a": runs} | others, [ANSWER], "grpo")
    (axes,) = figure.axes
    mean, thin, cross, *_ = axes.lines
    assert mean.get_ydata() == pytest.approx([0.0, 1.1 / 3, 0.5]) and thin.get_linewidth() < mean.get_linewidth()
    assert list(thin.get_ydata()) == [0.0, 0.1] and (cross.get_marker(), cross.get_ydata()[-1]) == ("x", 0.1)
    band = axes.collections[0].get_paths()[0].vertices
    assert {tuple(point) for point in np.round(np.asarray(band), 6)} >= {(8.0, 0.1), (8.0, 0.6), (16.0, 0.1), (16.0, 0.8)}
    alone, _ = curves_figure({"a": runs[:2]}, [ANSWER], "grpo")  # of one arm or two: a thin line for each run, and no band
    assert [list(line.get_ydata()) for line in alone.axes[0].lines][:2] == [[0.0, 0.4, 0.8], [0.0, 0.6, 0.6]]
    assert not alone.axes[0].collections
    named, _ = curves_figure({"a": runs[:2]}, [ANSWER], "grpo", collapsed=[runs[1].name])
    assert [line.get_marker() for line in named.axes[0].lines][-1] == "x"


def test_the_end_of_a_curve_is_what_tables_say() -> None:
    """The last evaluation has more problems, of which some only select."""
    last = replace(run("a", [0.0, 0.5]), last=np.array([1.0, 1.0, 0.0, 1.0]), selection_problems=2)
    assert over_runs([last], ANSWER)[0].tolist() == [0.0, 0.5] and last.final.mean() == 0.5
    other = replace(last, last=np.array([1.0, 1.0, 0.0, 0.0]))
    assert over_runs([other], ANSWER)[0].tolist() == [0.0, 0.0]


def test_accuracy_given_the_form_is_the_reward_by_the_form() -> None:
    found = values_of(run("a", [0.0, 0.2], forms=[0.0, 0.4]), GIVEN_FORM)
    assert found is not None and found.iloc[1] == pytest.approx(0.5) and np.isnan(found.iloc[0])
    assert values_of(run("a", [0.0, 0.2], forms=[0.5, 0.1]), GIVEN_FORM) is None  # an answer is rewarded without the form


def test_a_metric_that_some_run_lacks_or_that_is_always_zero_is_not_drawn() -> None:
    assert has([made_up("a", 1)], NORM) and not has([made_up("a", 1)], "clip_fraction")
    assert not has([made_up("a", 1, loss=0.5), made_up("a", 1, 1)], "loss")
    assert values_of(made_up("a", 1, loss=np.nan), "loss") is None
    updates = run("a", [0.0, 0.5], every=2, steps=4, m=[1.0, 2.0, 3.0, 4.0])
    updates = replace(updates, history=updates.history.assign(step=[1, 1, 2, 2]))
    assert over_runs([updates, made_up("a", 1, 1, m=5.0)], "m").fillna(-1).to_numpy().tolist() == [[2, 5], [4, 5], [-1, 5]]


@pytest.mark.parametrize(
    ("heights", "scale"),
    [
        ((1.0, 2.0, 3.0, 1.5), "linear"),
        ((0.01, 1.0, 2.0, 3.0), "log"),  # 300 times the smallest
        ((0.0, 1.0, 2.0, 1900.0), "symlog"),  # one spike beside usual values, and a batch without signal
        ((-1.0, 0.5, 1.0, 400.0), "linear"),  # numbers below zero have no logarithm
        ((0.0, 0.001, 0.2, 0.3), "linear"),  # grows from nothing: its usual values are not dwarfed
    ],
)
def test_a_spike_hides_neither_the_usual_values_nor_zeros(heights: tuple[float, ...], scale: str) -> None:
    _, (axes,) = panels(1)
    axes.plot(range(4), heights)
    frame(axes, "gradient norm", "GRPO step")
    low, high = axes.get_ylim()
    assert axes.get_yscale() == scale and low <= min(heights) and max(heights) <= high


def test_one_runs_spike_does_not_press_the_means_flat() -> None:
    runs = [made_up("a", 1, seed, gradient_norm=[1.0, 400.0 if seed == 0 else 1.0, 1.0]) for seed in range(100)]
    figure, _ = curves_figure({"a": runs}, [NORM], "grpo")
    assert figure.axes[0].get_ylim()[1] < 10


@pytest.mark.parametrize("count", [7, len(OF_A_RUN)])
def test_titles_do_not_touch(count: int) -> None:
    figure, all_axes = panels(count)
    for axes in all_axes:
        frame(axes, TITLES[ANSWER], "GRPO step")
    figure.draw_without_rendering()
    boxes = [text.get_window_extent() for text in figure.findobj(Text) if text.get_text() == TITLES[ANSWER]]
    assert len(boxes) == count and not any(one.overlaps(other) for one, other in itertools.combinations(boxes, 2))


# -------------------------------------------------------------------------------------------------- figures of the record


def arm(name: str, value: float, **changes: Any) -> dict[str, Any]:
    return {
        "arm": name, "label": name, "setting": name, "chosen": True, "learning_rate": 1e-3, "overrides": {name: 1},
        "collapsed": [], "value": value, "below": None,
    } | changes  # fmt: skip


def entry(*arms: dict[str, Any]) -> dict[str, Any]:
    return {"arms": list(arms), "winner": "a", "leader": "a", "title": "t", "method": "grpo", "kl": None}


def draw(found: dict[str, Any], runs: dict[str, list[Run]]) -> tuple[Figure, Figure | None]:
    return draw_experiment(found, runs, styles([one["label"] for one in found["arms"]]))


def titles(figure: Figure) -> list[str]:
    return [axes.get_title(loc="left") for axes in figure.axes]


def test_an_experiment_shows_the_chosen_arms_and_what_the_handouts_ask_for() -> None:
    logged = {"loss": 0.5, "train/answer_reward": 0.5}
    runs = {"a": [made_up("a", 1, **logged)], "b": [made_up("b", 2, **logged)], "tried": [made_up("tried", 9, **logged)]}
    found = entry(arm("a", 0.5), arm("b", 0.4), arm("tried", 0.3, chosen=False))
    figure, training = draw(found, runs)
    asked = (ANSWER, "token_entropy", "val/response_length", NORM)
    assert titles(figure) == [TITLES[name] for name in asked] and len(figure.axes[0].lines) == 2
    assert training is not None and titles(training) == [TITLES[name] for name in ("train/answer_reward", "loss")]
    assert inside(figure) and inside(training)
    started = entry(arm("a", 0.5), arm("b", 0.4, overrides={"start_from": "sft/all/last"}))
    assert "val/format_reward" not in asked and TITLES["val/format_reward"] in titles(draw(started, runs)[0])


def test_the_reward_that_compares_runs_is_the_one_whose_training_is_shown() -> None:
    own = made_up("a", 1, **{"train/answer_reward": 0.25, "train/reward": 0.5})
    run = replace(own, metric="reward", validation=own.validation.assign(**{"val/reward": 0.5}))
    figure, training = draw(entry(arm("a", 0.5)), {"a": [run]})
    assert training is not None and titles(training) == ["reward, training"]
    assert "reward, validation" in titles(figure) and not any("answer reward" in title for title in titles(figure))
    own.config["config"]["reward"] = {"value": "mine:reward", "from": "arm a"}  # of one arm: beside the reward that compares
    figure, training = draw(entry(arm("a", 0.5)), {"a": [replace(own, validation=run.validation)]})
    assert titles(figure)[:2] == [TITLES[ANSWER], "reward, validation"]
    assert training is not None and titles(training) == [TITLES["train/answer_reward"], "reward, training"]


def test_an_arm_has_one_colour_on_the_page() -> None:
    """Arms that share runs, or a label but for its rate, are one setting; within an experiment no two arms look alike."""
    sweep = entry(arm("x", 0.1, label="4 epochs × 16, rate 1e-4"), *(arm(f"s{i}", 0.1) for i in range(7)))
    record = {
        "experiments": {
            "e": entry(arm("a", 0.5), arm("b", 0.4)),
            "f": entry(arm("c", 0.5, same_as=["e/b/0", "e/b/1"]), arm("d", 0.4)),
            "g": sweep,
            "h": entry(arm("best", 0.5, label="GRPO, 4 epochs × 16"), arm("c", 0.4)),
        }
    }
    found = looks_of(record)
    assert found["e"]["b"] == found["f"]["c"] == found["h"]["c"]
    assert found["g"]["4 epochs × 16, rate 1e-4"] == found["h"]["GRPO, 4 epochs × 16"] != found["e"]["b"]
    assert all(len({str(look) for look in looks.values()}) == len(looks) for looks in found.values())
    assert found["e"]["b"] not in found["g"].values()  # the most frequent one's colour is no other's


def test_the_kl_of_kept_checkpoints_is_drawn_over_steps_and_beside_the_reward() -> None:
    def of(value: float) -> dict[str, float]:
        return {"value": value, "low": value - 0.01, "high": value + 0.01}

    steps = [{"step": step, "per_token": of(step / 100), "answer_reward": of(0.1 + step / 50)} for step in (0, 8, 16)]
    steps = [one | {"forward_per_token": of(2 * one["per_token"]["value"])} for one in steps]  # type: ignore[index]
    found = entry(arm("a", 0.5)) | {"kl": {"a": steps}}
    over_steps, over_kl = draw(found, {"a": [made_up("a", 1)]})[0].axes[-2:]
    assert over_steps.lines[0].get_xydata().tolist() == [[0, 0.0], [8, 0.08], [16, 0.16]]  # type: ignore[union-attr]
    assert over_steps.lines[1].get_ydata() == pytest.approx([0.0, 0.16, 0.32]) and over_steps.lines[1].get_linestyle() == ":"
    assert over_kl.lines[0].get_ydata() == pytest.approx([0.1, 0.26, 0.42])
    found["kl"] = {"a": [one | {"old_task_reward": of(0.6 - one["step"] / 100)} for one in steps]}  # type: ignore[operator]
    old_task = draw(found, {"a": [made_up("a", 1)]})[0].axes[-1]
    assert old_task.lines[0].get_xydata() == pytest.approx(np.array([[0, 0.6], [0.16, 0.52], [0.32, 0.44]]))


def test_the_overview_has_the_one_other_arm_with_its_runs_and_no_more_than_one() -> None:
    """Each arm's runs are thin lines of its colour below its mean; a rate that was only tried is no arm of the figure."""
    runs = {
        name: [run(name, [0.1, end + seed / 10], seed) for seed in (0, 1)] for name, end in (("a", 0.2), ("b", 0.6), ("c", 0.8))
    }
    tried = entry(arm("a", 0.2), arm("b", 0.6), arm("c", 0.8, chosen=False))
    record = {"headline": {"experiment": "e", "arm": "b", "label": "b"}, "experiments": {"e": tried}}
    figure = draw_overview(record, {"e": runs})
    axes = figure.axes[0]
    assert ends(axes) == pytest.approx([0.2, 0.3, 0.25, 0.6, 0.7, 0.65]) and not axes.collections
    assert [line.get_linewidth() < axes.lines[2].get_linewidth() for line in axes.lines] == [True, True, False] * 2
    assert len({line.get_color() for line in axes.lines[:3]}) == 1 and axes.lines[3].get_color() != axes.lines[0].get_color()
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["a", "b"] and inside(figure)
    tried["arms"][2]["chosen"] = True
    figure = draw_overview(record, {"e": runs})
    assert ends(figure.axes[0]) == pytest.approx([0.6, 0.7, 0.65]) and not figure.legends
    alone = {"e": {"b": [run("b", [0.1, 0.5], forms=[0.4, 0.8])]}}
    assert [ends(axes) for axes in draw_overview(record, alone).axes] == [[0.5], [0.8], [pytest.approx(0.625)], [20.0]]


DRAWN = {
    "math_baseline": lambda record: draw_zero_shot(record["baseline"]),
    "best_of_n": lambda record: draw_best_of_n(record["best_of_n"]),
    "contrasts": draw_contrasts,
    "rates": draw_rates,
    "sft_examples": draw_by_examples,
}
PINNED = f"\nmatplotlib=={matplotlib.__version__}\n" in (ROOT / "constraints.txt").read_text()


@pytest.mark.skipif(not PINNED, reason="the committed figures are drawn with the pinned matplotlib")
@pytest.mark.parametrize("name", DRAWN)
def test_the_committed_record_gives_the_committed_figures(name: str, tmp_path: Path) -> None:
    """Byte for byte: bars of categories, differences, rates with rings and crosses, ends over the number of examples."""
    figure = DRAWN[name](json.loads((ROOT / paths.RECORD).read_text()))
    assert figure is not None
    save_figure(figure, tmp_path / "drawn.svg")
    assert (tmp_path / "drawn.svg").read_text() == (ROOT / paths.FIGURES / f"{name}.svg").read_text()
    assert inside(figure)


def test_dots_of_a_contrast_are_the_leaders_runs_taken_from_the_arms_seed_by_seed() -> None:
    below = {"value": 0.2, "low": -0.1, "high": 0.5}
    arms = arm("a", 0.6, by_run=[0.5, 0.7, 0.9]), arm("b", 0.4, by_run=[0.2, 0.6], below=below)
    figure = draw_contrasts({"metric": "answer reward", "experiments": {"e": entry(*arms)}})
    assert figure is not None
    _, dots, centre = figure.axes[0].lines
    assert list(dots.get_xdata()) == pytest.approx([-0.3, -0.1]) and list(centre.get_xdata()) == [-0.2]
    assert dots.get_zorder() < figure.axes[0].collections[-1].get_zorder()


def test_without_differences_or_rates_there_is_no_such_figure() -> None:
    record = {"metric": "answer reward", "experiments": {"alone": entry(arm("a", 0.5))}}
    assert draw_contrasts(record) is draw_rates(record) is draw_by_examples(record) is None
    record["experiments"]["alone"]["method"] = "sft"
    assert draw_by_examples(record) is None


def test_a_saved_figure_says_what_was_drawn_in_few_bytes(tmp_path: Path) -> None:
    """Coordinates are rounded, and figures in one page have no clashing ids; a PNG has no time in it."""
    figure, axes = panels(2)
    for place in axes:
        place.plot((0.0, 1.0, 2.0), (0.123456, 0.2, 0.4))
    frame(axes[0], "reward 0.96875", "step", share=True)
    for name in ("a.svg", "a.png", "b.png"):
        save_figure(figure, tmp_path / name)
    svg = (tmp_path / "a.svg").read_text()
    assert ">reward 0.96875</text>" in svg and not re.findall(r"\d\.\d{3,}(?![^<>]*</text>)", svg)
    assert not re.findall(r'id="(?:figure|axes|patch|line2d|text)_', svg) and "background" not in svg
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()

"""The figures of reports/figures (SVG), drawn from the record and the runs' curves; each stands there once."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate
from textwrap import shorten
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from grpo.common.files import atomic_folder
from grpo.reporting import charts
from grpo.reporting.charts import COLOURS, ENTROPY, FORM, FULL, GIVEN_FORM, INK, KL, LENGTH, NORM, Style, as_text, has, panels
from grpo.reporting.kissing_number import draw_search
from grpo.reporting.labels import scientific
from grpo.reporting.record import Values, arm_of
from grpo.results.runs import Run, by_arm, read_runs, value
from grpo.results.verdicts import MARGIN, comparison
from grpo.study import paths
from grpo.study.schema import Study

READABLE = 0.04  # smallest share of a bar with a number in it
MOST_PANELS = 7
RECURRING = 7  # settings of several experiments with a colour of their own
OVERVIEW = (FORM, GIVEN_FORM, LENGTH)  # beside the reward, as PANELS
PANELS = (ENTROPY, LENGTH, NORM)  # of each experiment
FURTHER = (KL, "lag_mean", "clip_fraction", "val/is_sentence", "val/lists_only", "val/tool_calls")  # if its runs have them
OF_THE_FORM = {"start_from", "prompt"}  # settings with which the form differs from the start
OUTCOMES = ("#009E73", "#E69F00", "#999999", "#56B4E9")
ESTIMATES = {"pass": "pass@N", "best": "Best@N", "majority": "majority@N"}
APART, TOGETHER = INK, "#AAAAAA"  # decided and open
ROW = 0.16  # inches of a row of the contrasts
PAIR, UNDER = "#56B4E9", 0.33  # a pair of runs: its colour, and rows below the interval
RATES_A_ROW = 4  # panels
CHARACTERS = 170  # of titles in a row of panels
ALL = "all"  # the one setting of arms that differ in their learning rate only


def draw_figures(study: Study, record: Values) -> None:
    """Write reports/figures/*.svg. Raises UserError: a result file is missing or damaged."""
    runs = {name: by_arm(read_runs(study, name)) for name in record["experiments"]}
    looks = looks_of(record)
    figures = {
        "overview": draw_overview(record, runs),
        "math_baseline": draw_zero_shot(record["baseline"]),
        "best_of_n": draw_best_of_n(record["best_of_n"]) if record["best_of_n"] else None,
        "pass_at_k": draw_pass_at_k(record["pass_at_k"]) if record.get("pass_at_k") else None,
        "contrasts": draw_contrasts(record),
        "rates": draw_rates(record),
        "sft_examples": draw_by_examples(record),
        "kissing_number": draw_search() if study.kissing_number is not None else None,
    }
    for name, entry in record["experiments"].items():
        figures[name], figures[f"{name}-training"] = draw_experiment(entry, runs[name], looks[name])
    with atomic_folder(paths.FIGURES) as folder:
        for name, figure in figures.items():
            if figure is not None:
                charts.save_figure(figure, folder / f"{name}.svg")


def collapsed(entry: Values) -> list[str]:
    """Names of an experiment's runs that collapsed."""
    return [run for arm in entry["arms"] for run in arm["collapsed"]]


def chosen(entry: Values) -> list[Values]:
    """The arms that stand for their settings."""
    return [arm for arm in entry["arms"] if arm["chosen"]]


def looks_of(record: Values) -> dict[str, dict[str, Style]]:
    """The style of each chosen arm's label, by experiment: arms that are the same setting have one colour on the whole page.

    Arms are the same if they share their runs or their label (without its learning rate). Those of several experiments have
    the first colours; others have, in the order of their experiment, colours that are free in it.
    """
    groups: list[set[Any]] = []  # of arms that are the same, each as (experiment, arm), and their words
    for name, entry in record["experiments"].items():
        for arm in chosen(entry):
            copied = [tuple(run.split("/")[:2]) for run in arm.get("same_as") or () if run]
            same = {(name, arm["arm"]), _words(arm), *copied}
            joined = [group for group in groups if group & same]
            groups = [group for group in groups if group not in joined] + [same.union(*joined)]
    several = {place: len({one[0] for one in group if isinstance(one, tuple)}) for place, group in enumerate(groups)}
    recurring = [groups[place] for place in sorted(several, key=lambda place: -several[place]) if several[place] > 1][
        :RECURRING
    ]
    found: dict[str, dict[str, Style]] = {}
    for name, entry in record["experiments"].items():
        own = [next((i for i, group in enumerate(recurring) if (name, arm["arm"]) in group), None) for arm in chosen(entry)]
        order = (*range(len(recurring), len(COLOURS)), *range(len(recurring) - 1, 0, -1), *range(len(COLOURS), 99))
        free = (place for place in order if place not in own)
        found[name] = {
            arm["label"]: charts.style(next(free) if place is None or place in own[:i] else place)
            for i, (arm, place) in enumerate(zip(chosen(entry), own, strict=True))
        }
    return found


# ------------------------------------------------------------------------------------------------------------- curves


def draw_overview(record: Values, runs: Mapping[str, Mapping[str, list[Run]]]) -> Figure:
    """Draw reward, form, accuracy given the form and length of the headline's runs, beside the one other arm if it has one."""
    name, top = record["headline"]["experiment"], record["headline"]["arm"]
    entry, looks = record["experiments"][name], looks_of(record)[name]
    shown = rows if len(rows := chosen(entry)) <= charts.MOST_WITH_LINES else [arm_of(entry, top)]
    arms = {arm["label"]: runs[name][arm["arm"]] for arm in shown}
    every = [run for own in arms.values() for run in own]
    columns = [column for column in (every[0].column, *OVERVIEW) if has(every, column)]
    return charts.curves_figure(arms, columns, entry["method"], collapsed(entry), looks={arm: looks[arm] for arm in arms})[0]


def draw_experiment(entry: Values, runs: Mapping[str, list[Run]], looks: Mapping[str, Style]) -> tuple[Figure, Figure | None]:
    """Draw the chosen arms of an experiment: reward and the metrics that explain it; reward and loss of training batches."""
    arms = {arm["label"]: runs[arm["arm"]] for arm in chosen(entry)}
    every = [run for own in arms.values() for run in own]
    more = 0 if not entry["kl"] else 3 if has_old_task(entry) else 2
    form = FORM if any(OF_THE_FORM & {*arm["overrides"]} for arm in entry["arms"]) else ""
    trained = "reward" if any(value(run, "reward") for run in every) else every[0].metric  # by an arm's own reward
    asked = (f"val/{trained}", form, *PANELS, *FURTHER), (f"train/{every[0].metric}", f"train/{trained}", "loss")
    main, training = ([column for column in dict.fromkeys(columns) if has(every, column)] for columns in asked)
    shown = [*dict.fromkeys([every[0].column, *main])][: MOST_PANELS - more]
    figure, axes = charts.curves_figure(arms, shown, entry["method"], collapsed(entry), more, looks)
    if entry["kl"]:
        _draw_kl(axes, entry, {arm["arm"]: looks[arm["label"]] for arm in chosen(entry)})
    further = charts.curves_figure(arms, training, entry["method"], collapsed(entry), looks=looks)[0] if training else None
    return figure, further


def _draw_kl(axes: list[Axes], entry: Values, looks: Mapping[str, Style]) -> None:
    """Draw the KL of kept checkpoints to their start over the steps, with dots the forward KL, and the reward over the KL.

    The last panel has the reward on an old task, if it was measured, over the forward KL.
    """
    over_steps, over_kl, *over_forward = axes
    for arm in (arm for arm in looks if arm in entry["kl"]):
        kept = pd.DataFrame(entry["kl"][arm])
        kl, reward = (pd.DataFrame(kept[name].tolist()) for name in ("per_token", "answer_reward"))
        charts.draw_band(over_steps, kept["step"].tolist(), kl, looks[arm], marker=".")
        forward = [one["value"] for one in kept["forward_per_token"]]
        over_steps.plot(kept["step"], forward, ":", color=looks[arm]["color"])
        over_kl.plot(kl["value"], reward["value"], ".-", color=looks[arm]["color"])
        for panel in over_forward:
            panel.plot(forward, [one["value"] for one in kept["old_task_reward"]], ".-", color=looks[arm]["color"])
    charts.frame(over_steps, "KL, nats (dotted: forward)", charts.STEP[entry["method"]])
    charts.frame(over_kl, "answer reward, by KL", charts.TITLES[KL], share=True)
    for panel in over_forward:
        charts.frame(panel, "old task, by forward KL", "forward KL, nats a token", share=True)


def has_old_task(entry: Values) -> bool:
    """Whether the experiment's kept checkpoints were evaluated on an old task."""
    return any("old_task_reward" in step for steps in entry["kl"].values() for step in steps)


# ------------------------------------------------------------------------------------------------- ends and differences


def draw_contrasts(record: Values) -> Figure | None:
    """Draw how far each chosen arm ends below or above its experiment's leader, in two columns; None without a difference."""
    groups = {name: rows for name, entry in record["experiments"].items() if (rows := [a for a in chosen(entry) if a["below"]])}
    if not groups:
        return None
    sizes = {name: 1 + len(rows) for name, rows in groups.items()}
    starts = dict(zip(groups, accumulate(sizes.values(), initial=0), strict=False))
    left = [name for name in groups if starts[name] < sum(sizes.values()) / 2]
    columns = [half for half in (left, [name for name in groups if name not in left]) if half]
    height = max(sum(sizes[name] for name in half) for half in columns)
    figure, axes = panels(len(columns), FULL, 0.7 + ROW * height)
    for place, half in zip(axes, columns, strict=True):
        _draw_column(place, record, {name: groups[name] for name in half}, height)
    figure.supxlabel(
        f"{record['metric']} at the end, minus the leader's: 95% interval (grey: open; dots: seeds; band: ±{MARGIN:g})"
    )
    return figure


def _draw_column(axes: Axes, record: Values, groups: Mapping[str, list[Values]], height: int) -> None:
    axes.axvline(0, color=INK, linewidth=1)
    axes.axvspan(-MARGIN, MARGIN, color=TOGETHER, alpha=0.15, linewidth=0)
    names: list[str] = []
    heads: set[int] = set()
    for name, rows in groups.items():
        entry = record["experiments"][name]
        heads.add(len(names))
        names.append(f"{entry['title']}: minus {arm_of(entry, entry['leader'])['label']}")
        leader = arm_of(entry, entry["leader"])["by_run"]
        for arm in rows:
            y, below = len(names), arm["below"]
            color = TOGETHER if comparison(below) == "open" else APART
            pairs = [own - other for own, other in zip(arm["by_run"], leader, strict=False)]  # as difference_of pairs them
            axes.plot(pairs, [y + UNDER] * len(pairs), ".", color=PAIR, markersize=4, markeredgewidth=0, zorder=1.5)
            axes.hlines(y, -below["high"], -below["low"], color=color, linewidth=2)
            axes.plot(-below["value"], y, "o", color=color, markersize=4)
            names.append(arm["label"])
    axes.set_yticks(range(len(names)), [*map(as_text, names)])
    for place, label in enumerate(axes.get_yticklabels()):
        label.set_fontweight("bold" if place in heads else "normal")
    axes.set_ylim(height - 0.3, -0.7)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="y", visible=False)
    axes.grid(axis="x")


def draw_rates(record: Values) -> Figure | None:
    """Draw the end of each setting over the learning rates at which it was tried; None if no setting was tried at several.

    A ring is an arm that was tried, a dot the one that stands for its setting; a cross has a collapsed run.
    """
    tried = {name: settings for name, entry in record["experiments"].items() if (settings := settings_by_rate(entry))}
    if not tried:
        return None
    looks, most = looks_of(record), max(map(len, tried.values()))
    figure, axes = panels(len(tried), FULL if len(tried) > 1 else None, 1.5 + most * charts.ENTRY / 72, RATES_A_ROW)
    for place, (name, settings) in zip(axes, tried.items(), strict=True):
        winner, rates = (
            record["experiments"][name]["winner"],
            {arm["learning_rate"] for by_rate in settings.values() for arm in by_rate},
        )
        for setting, arms in settings.items():
            stands = min((arm for arm in arms if arm["chosen"]), key=lambda arm: arm["arm"] != winner)
            look = looks[name][stands["label"]]
            ends = pd.DataFrame(arms)
            place.plot(ends["learning_rate"], ends["value"], **look, linewidth=1, label=as_text(setting))
            place.vlines(ends["learning_rate"], ends["low"], ends["high"], color=look["color"])
            for arm in arms:
                shape = "x" if arm["collapsed"] else "o"
                fill = "full" if arm["chosen"] else "none"
                place.plot(arm["learning_rate"], arm["value"], shape, color=look["color"], fillstyle=fill, markersize=5)
        title = shorten(record["experiments"][name]["title"], CHARACTERS // min(len(tried), RATES_A_ROW), placeholder=" …")
        charts.frame(place, title, "learning rate", record["metric"] == "answer reward")
        charts.powers(place, rates, {rate: scientific(rate) for rate in rates})
        if [*settings] != [ALL]:
            charts.own_legend(place)
    return figure


def settings_by_rate(entry: Values) -> dict[str, list[Values]]:
    """The arms of each setting that was tried at several learning rates, by rate; arms that differ in the rate only are one."""
    only_rate = all(set(arm["overrides"]) <= {"learning_rate"} for arm in entry["arms"]) and len(entry["arms"]) > 1
    found: dict[str, list[Values]] = {}
    for arm in entry["arms"]:
        found.setdefault("" if only_rate else arm["setting"], []).append(arm)
    return {
        ALL if only_rate else _words(arms[0]): sorted(arms, key=lambda arm: float(arm["learning_rate"]))
        for arms in found.values()
        if len({arm["learning_rate"] for arm in arms}) > 1
    }


def _words(arm: Values) -> str:
    """The name of an arm's setting: its label without the learning rate, or an author's name without ``-rate_X``."""
    label = str(arm["label"]).removeprefix("GRPO, ").split(", rate ")[0]
    return str(arm["setting"]) if arm["label"] == arm["arm"] else label


def draw_by_examples(record: Values) -> Figure | None:
    """Draw the end over the number of unique examples, all and filtered, with intervals; None without such an experiment."""
    entry = next((entry for entry in record["experiments"].values() if entry["method"] == "sft"), None)
    if entry is None or len(entry["arms"]) < 2:
        return None
    figure, (axes,) = panels(1, height=1.9)
    kinds = {"all kinds": False, "only correct ones": True}
    for (kind, filtered), look in zip(kinds.items(), charts.styles(kinds).values(), strict=True):
        ends = pd.DataFrame([arm for arm in entry["arms"] if bool(arm["overrides"].get("filtered")) is filtered])
        if len(ends):
            ends = ends.sort_values("examples")
            axes.plot(ends["examples"], ends["value"], "o-", color=look["color"], linewidth=1, markersize=4, label=kind)
            axes.vlines(ends["examples"], ends["low"], ends["high"], color=look["color"])
    charts.frame(axes, f"{record['metric']} at the end, 95%", "unique examples", share=True)
    charts.powers(axes, [arm["examples"] for arm in entry["arms"]])
    charts.own_legend(axes)
    return figure


# ------------------------------------------------------------------------------------------------------- the base model


def draw_zero_shot(baseline: Mapping[str, Any]) -> Figure:
    """Draw the share of each outcome category under each prompt, before training."""
    names = max((list(values["categories"]) for values in baseline.values()), key=len)  # the fourth category is rare
    counts = pd.DataFrame({prompt: values["categories"] for prompt, values in baseline.items()}, index=names).T.fillna(0)
    shares = counts.div([values["problems"] for values in baseline.values()], axis=0)
    figure, (axes,) = panels(1, 6.4, 0.9 + 0.4 * len(baseline))
    charts.bars(axes, shares.loc[:, shares.any()], dict(zip(names, OUTCOMES[: len(names)], strict=True)))
    for drawn in axes.containers:
        texts = [f"{bar.get_width():.0%}" if bar.get_width() >= READABLE else "" for bar in drawn]
        axes.bar_label(drawn, texts, label_type="center", color="black", fontsize=8.5)  # type: ignore[arg-type]
    axes.set_xlabel("share of problems")
    return figure


def draw_best_of_n(metrics: Mapping[str, Any]) -> Figure:
    """Draw pass@N, Best@N and majority vote over N, one panel per prompt, with 95% intervals clustered by problem."""
    kinds = {
        prompt: {title: {n: entry[kind] for n, entry in values["n"].items()} for kind, title in ESTIMATES.items()}
        for prompt, values in metrics.items()
    }
    return _over_samples(metrics, kinds, "share answered right", "samples N")


def draw_pass_at_k(metrics: Mapping[str, Any]) -> Figure:
    """Draw pass@k of base, middle and end over k, one panel per sampled arm, with 95% intervals over runs and problems."""
    places = {name: {place: result["k"] for place, result in found["places"].items()} for name, found in metrics.items()}
    return _over_samples(metrics, places, "pass@k", "samples k")


def _over_samples(metrics: Mapping[str, Any], curves: Mapping[str, Mapping[str, Values]], title: str, x: str) -> Figure:
    """Draw estimates over the number of samples, a panel for each prompt or arm; ``curves``: its curves by their names."""
    figure, axes = panels(len(metrics))
    looks = charts.styles(next(iter(curves.values())))
    for place, (name, by_curve) in zip(axes, curves.items(), strict=True):
        for curve, estimates in by_curve.items():
            counts = [int(count) for count in estimates]
            charts.draw_band(place, counts, pd.DataFrame([*estimates.values()]), looks[curve], marker="o", markersize=4)
        charts.frame(place, f"{name}: {title}", f"{x} (of {metrics[name]['samples']})", share=True)
        charts.powers(place, counts)
    charts.legend(figure, looks)
    return figure

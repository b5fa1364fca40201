"""Sentences and figures on fine-tuning, expert iteration and the keyword task, on made-up runs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from report_parts import arm_result, each, result, run, solved
from study_parts import EXPERT_ITERATION, KEYWORD, SFT, SFT_INITIALIZATION, entry, with_values

from grpo.reporting import timing, wall_clock
from grpo.reporting.charts import COLOURS, METHODS
from grpo.reporting.pieces import discuss_expert_iteration, discuss_keyword, discuss_sft, draw_by_examples
from grpo.reporting.record import Record
from grpo.reporting.sections import shows_methods
from grpo.results.runs import Run
from grpo.study.schema import Study


def made_up(arm: str, *evaluations: Any, experiment: str = SFT, config: dict[str, Any] | None = None, **options: Any) -> Run:
    """A run that is evaluated after every step."""
    return run(arm, evaluations, experiment=experiment, every=1, values=config, **options)


# --------------------------------------------------------------------------------------------------------- fine-tuning

REPORT = {"examples": 2000, "correct": 1500, "wrong_answer": 400, "wrong_form": 100}


def fine_tuned(arm: str, examples: int, *finals: NDArray[np.float64], filtered: bool = False) -> list[Run]:
    return [
        made_up(arm, each(0.0), final, seed=seed, metrics={"examples": examples}, config={"filtered": filtered})
        for seed, final in enumerate(finals)
    ]


def test_the_share_of_examples_that_earn_the_reward() -> None:
    text = discuss_sft(fine_tuned("all", 2000, each(0.5)), 1, REPORT)
    assert text.startswith("Of 2,000 examples 1,500 (75.0%) earn the reward; the filtered set holds only these.")
    assert "In 400 the answer is wrong, in 100 the form." in text
    assert "unique examples" not in text and "filtering" not in text  # nothing to compare


@pytest.mark.parametrize(
    ("few", "many", "difference", "verdict"),
    [
        (each(0.25), each(0.5), "0.250 (0.101 to 0.399)", "more examples help"),
        (each(0.5), each(0.25), "-0.250 (-0.399 to -0.101)", "more examples harm"),
        (each(0.5), each(0.5), "0.000 (-0.149 to 0.149)", "these runs cannot tell the two apart"),
        (solved(0.5), solved(0.52), "0.020 (-0.130 to 0.170)", "these runs cannot tell the two apart"),
    ],
)
def test_whether_more_examples_help(few: NDArray[np.float64], many: NDArray[np.float64], difference: str, verdict: str) -> None:
    """The fewest against the most of the unfiltered arms, whatever the order in params.yaml.

    One run an arm: 2.31 (Student's t, 8 degrees of freedom) x 0.045 (the assumed spread between runs) x sqrt(2) = 0.147.
    """
    runs = fine_tuned("all", 2000, many) + fine_tuned("some", 512, each(0.125)) + fine_tuned("few", 128, few)
    text = discuss_sft(runs, 1, REPORT)
    series = f"{few.mean():.3f} with 128, 0.125 with 512, {many.mean():.3f} with 2,000"
    assert f"Answer reward by number of unique examples: {series}." in text
    assert f"2,000 instead of 128 make a difference of {difference}: {verdict}." in text


@pytest.mark.parametrize(
    ("everything", "filtered", "verdict"),
    [(0.25, 0.5, "filtering helps"), (0.5, 0.25, "filtering harms"), (0.5, 0.5, "these runs cannot tell the two apart")],
)
def test_whether_filtering_helps(everything: float, filtered: float, verdict: str) -> None:
    """The filtered set against all examples, not against fewer of them."""
    runs = fine_tuned("few", 128, each(0.375)) + fine_tuned("filtered", 1500, each(filtered), filtered=True)
    text = discuss_sft(runs + fine_tuned("all", 2000, each(everything)), 1, REPORT)
    difference = f"{filtered - everything:.3f}"
    assert f"The 1,500 filtered examples end at {filtered:.3f}, all 2,000 at {everything:.3f}:" in text
    assert f"a difference of {difference} (" in text and f"), so {verdict}." in text


def test_the_last_evaluations_count() -> None:
    runs = [
        made_up("few", each(0.0), each(0.75), each(0.25), metrics={"examples": 8}, config={"filtered": False}),
        made_up("all", each(0.0), each(0.0), each(0.5), metrics={"examples": 16}, config={"filtered": False}),
    ]
    assert "more examples help" in discuss_sft(runs, 1, REPORT)  # .5 against .25
    assert "more examples harm" in discuss_sft(runs, 2, REPORT)  # .25 against .5


def test_the_figure_over_examples_holds_every_arm() -> None:
    runs = fine_tuned("all", 64, each(0.5)) + fine_tuned("few", 8, each(0.25)) + fine_tuned("f", 48, each(0.75), filtered=True)
    finals = {run.arm: run.outcomes[-1].mean() for run in runs}
    (axes,) = draw_by_examples(runs, result(*(arm_result(*of, seeds=1) for of in finals.items()), last_k=2)).axes
    shown = [line for line in axes.lines if line.get_marker() in "os" and len(line.get_xdata())]
    dots = {line.get_xdata()[0]: (line.get_marker(), line.get_ydata()[0], line.get_color()) for line in shown}
    all_, few, filtered = COLOURS[:3]  # in the arms' order; squares: only examples that earn the reward
    assert dots == {8: ("o", 0.25, few), 64: ("o", 0.5, all_), 48: ("s", 0.75, filtered)}
    spans = sorted(tuple(float(value) for value in part.get_segments()[0].ravel()) for part in axes.collections)
    assert spans == [pytest.approx(span) for span in ((8, 0.2, 8, 0.3), (48, 0.7, 48, 0.8), (64, 0.45, 64, 0.55))]
    assert "last 2 evaluations" in axes.get_title(loc="left")


# ----------------------------------------------------------------------------------------------------- expert iteration


def iterated(arm: str, questions: int, rollouts: int, epochs: int, *rewards: float) -> Run:
    scores = [each(reward) for reward in rewards]
    values = {"ei_batch_size": questions, "group_size": rollouts, "epochs_per_ei_step": epochs}
    return made_up(arm, *scores, experiment=EXPERT_ITERATION, config=values)


def discussed(runs: list[Run], winner: str, last_k: int = 1) -> str:
    return discuss_expert_iteration(runs, result(winner=winner, last_k=last_k))


def test_arms_with_the_same_settings_are_no_pair() -> None:
    runs = [iterated("a", 32, 4, 1, 0.1, 0.2), iterated("b", 32, 4, 1, 0.1, 0.3)]
    assert "instead of" not in discussed(runs, "b")


def test_the_winners_curve_over_its_steps() -> None:
    runs = [iterated("a", 32, 4, 1, 0.1, 0.2, 0.3, 0.4), iterated("b", 64, 4, 1, 0.125, 0.5, 0.25, 0.75)]
    text = discussed(runs, "b")
    assert text.startswith(
        "In b the answer reward went over the steps from 0.125 to 0.500, 0.250, 0.750: it rose at 2 of 3 steps"
    )


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [(0.25, 0.5, "more is better"), (0.5, 0.25, "fewer is better"), (0.5, 0.5, "these runs cannot tell the two apart")],
)
@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (((32, 4, 1), (64, 4, 1)), "64 instead of 32 questions per step"),
        (((32, 4, 1), (32, 8, 1)), "8 instead of 4 rollouts per question"),
        (((32, 4, 1), (32, 4, 3)), "3 instead of 1 epochs per step"),
    ],
)
def test_each_setting_by_itself(
    settings: tuple[tuple[int, int, int], ...], words: str, low: float, high: float, verdict: str
) -> None:
    first, second = settings
    for runs in (
        [iterated("a", *first, 0.0, low), iterated("b", *second, 0.0, high)],
        [iterated("b", *second, 0.0, high), iterated("a", *first, 0.0, low)],
    ):
        text = discussed(runs, "a")
        assert text.count(" instead of ") == 1
        assert f"{words}: {high - low:.3f} (" in text and text.endswith(f"), {verdict}.")


def test_arms_are_compared_that_differ_in_one_setting() -> None:
    runs = [
        iterated("q32", 32, 4, 1, 0.0, 0.125),
        iterated("q128", 128, 4, 1, 0.0, 0.75),
        iterated("q64", 64, 4, 1, 0.0, 0.25),
        iterated("q64-8", 64, 8, 1, 0.0, 0.5),
        iterated("q32-8-2", 32, 8, 2, 0.0, 1.0),
    ]
    text = discussed(runs, "q32")
    assert "64 instead of 32 questions per step: 0.125 (" in text
    assert "128 instead of 64 questions per step: 0.500 (" in text
    assert "8 instead of 4 rollouts per question: 0.250 (" in text
    assert text.count(" instead of ") == 3  # 128 against 32 follows from these, and the last arm differs in several


def test_expert_iteration_counts_the_last_evaluations() -> None:
    runs = [iterated("a", 32, 4, 1, 0.0, 0.75, 0.25), iterated("b", 64, 4, 1, 0.0, 0.0, 0.5)]
    assert "more is better" in discussed(runs, "a")
    assert "fewer is better" in discussed(runs, "a", 2)


# --------------------------------------------------------------------------------------------------------------- keyword


def with_keywords(seed: int, before: float, after: float, **kinds: tuple[float, float]) -> Run:
    columns = {f"val/{kind}": values for kind, values in kinds.items()}
    return made_up("grpo", each(before), each(after), seed=seed, experiment=KEYWORD, validation=columns)


NOTHING_ODD = {"lists_only": (0.0, 0.0), "repeats_prompt": (0.25, 0.0), "is_sentence": (0.5, 1.0)}


def test_the_keyword_reward_and_kinds_of_responses() -> None:
    """Means over two runs."""
    runs = [
        with_keywords(0, 0.25, 0.75, **NOTHING_ODD),
        with_keywords(1, 0.25, 0.75, lists_only=(0.1, 0.08), repeats_prompt=(0.25, 0.0), is_sentence=(0.25, 0.5)),
    ]
    text = discuss_keyword(runs)
    assert text.startswith("Of the responses to 100 held-out pairs of keywords 5.0% before")
    assert "5.0% before and 4.0% after only list the keywords; 25.0% before and 0.0% after repeat the prompt;" in text
    assert "37.5% before and 75.0% after are sentences of the grammar" in text
    assert text.endswith("The reward does not come from degenerate responses.")  # 4%


@pytest.mark.parametrize("kind", ["lists_only", "repeats_prompt"])
@pytest.mark.parametrize(("share", "degenerate"), [(0.049, False), (0.05, True), (0.5, True)])
def test_degenerate_responses_are_reported(kind: str, share: float, degenerate: bool) -> None:
    text = discuss_keyword([with_keywords(0, 0.25, 0.75, **NOTHING_ODD | {kind: (0.0, share)})])
    assert ("The reward does not come from degenerate responses." in text) != degenerate
    assert (f"Part of the reward comes from degenerate responses: up to {share:.1%} are." in text) == degenerate


@pytest.mark.parametrize(("after", "told"), [(0.86, False), (0.84, True), (0.95, False)])
def test_lost_sentences_are_reported(after: float, told: bool) -> None:
    text = discuss_keyword([with_keywords(0, 0.25, 0.75, **NOTHING_ODD | {"is_sentence": (0.9, after)})])
    assert ("partly costs grammar" in text) == told


# ----------------------------------------------------------------------------------------------------- the three methods


@pytest.fixture
def three_methods(mini_study: Study, monkeypatch: pytest.MonkeyPatch) -> Record:
    """Winners that are not first; GRPO runs that start from fine-tuning do not represent GRPO."""
    runs = {
        SFT: [made_up(arm, each(0.125), each(last), each(last)) for arm, last in (("loser", 1.0), ("sft_won", 0.25))],
        EXPERT_ITERATION: [
            made_up(arm, each(0.125), each(0.0), each(last), experiment=EXPERT_ITERATION)
            for arm, last in (("loser", 1.0), ("ei_won", 0.75))
        ],
        SFT_INITIALIZATION: [
            made_up(arm, *map(each, rewards), seed=seed, experiment=SFT_INITIALIZATION, config={"start_from": start})
            for arm, seed, start, rewards in (
                ("early", 0, f"{SFT}/all/last", (1.0, 1.0, 1.0)),
                ("base", 0, None, (0.125, 0.625, 0.375)),
                ("base", 1, None, (0.125, 0.5, 0.5)),
            )
        ],
    }
    seconds = {"sft_won": 10.0, "ei_won": 20.0, "base": 40.0}

    def read_timing(run: Run) -> dict[str, Any]:
        total = seconds[run.arm] + 10 * run.seed
        phases = {"rollout_s": 0.25 * total, "training_s": 0.25 * total, "evaluation_s": 0.5 * total}
        steps = [{"step": step, "step_s": 0.25 * total, "evaluation_s": 100.0} for step in (1, 2)]
        return {"total_s": total, "phases": phases, "steps": steps}

    monkeypatch.setattr(timing, "read_timing", read_timing)
    last_k = {SFT: None, EXPERT_ITERATION: 1, SFT_INITIALIZATION: None}
    changed = {name: entry(name, last_k=last_k[name], arms={run.arm: {} for run in of}) for name, of in runs.items()}
    study = with_values(mini_study, {"experiments": mini_study.experiments | changed, "selection.last_k": 2})
    return Record(study, runs, {SFT: result(winner="sft_won"), EXPERT_ITERATION: result(winner="ei_won")})


def test_the_table_of_methods(three_methods: Record) -> None:
    lines = wall_clock.methods_table(three_methods.study, wall_clock.methods(three_methods)).splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert cells[0][2:4] == ["above supervised fine-tuning (95% interval)", "above GRPO (95% interval)"]
    # GRPO's two runs each count with 0.5, the mean of their last two evaluations; expert iteration by its last one.
    assert cells[2:] == [
        ["the base model, untrained", "0.125", "", "", "", "", ""],
        ["supervised fine-tuning (sft won)", "0.250", "", "-0.250 (-0.378 to -0.122)", "0.250 (1)", "10", "5"],
        ["expert iteration (ei won)", "0.750", "0.500 (0.351 to 0.649)", "0.250 (0.122 to 0.378)", "0.750 (2)", "20", "10"],
        ["GRPO, best configuration (base)", "0.500", "0.250 (0.122 to 0.378)", "", "0.625 (1)", "45", "22"],
    ]


def test_expert_iteration_stands_beside_fine_tuning_in_its_own_section(mini_study: Study) -> None:
    assert [name for name in mini_study.made if shows_methods(mini_study, name)] == [EXPERT_ITERATION]
    without = with_values(
        mini_study, {"experiments": mini_study.experiments | {EXPERT_ITERATION: entry(EXPERT_ITERATION, arms={})}}
    )
    assert [name for name in without.made if shows_methods(without, name)] == [SFT_INITIALIZATION]


def test_methods_that_a_study_leaves_out_are_not_compared(three_methods: Record) -> None:
    del three_methods.runs[EXPERT_ITERATION]
    assert [title.partition(" (")[0] for title in wall_clock.methods(three_methods)] == [
        "supervised fine-tuning",
        "GRPO, best configuration",
    ]


def test_the_methods_over_wall_clock_time(three_methods: Record) -> None:
    """Each run over half of its seconds, without evaluations; each method in its colour."""
    figure = wall_clock.draw_methods(three_methods.study, wall_clock.methods(three_methods))
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [
        "supervised fine-tuning (sft won)",
        "expert iteration (ei won)",
        "GRPO, best configuration (base)",
    ]
    curves = [[*zip(line.get_xdata(), line.get_ydata(), strict=True)] for line in figure.axes[0].lines]
    assert curves == [
        [(0, 0.125), (2.5, 0.25), (5, 0.25)],
        [(0, 0.125), (5, 0), (10, 0.75)],
        [(0, 0.125), (10, 0.625), (20, 0.375)],
        [(0, 0.125), (12.5, 0.5), (25, 0.5)],
        [(0, 0.125), (11.25, 0.5625), (22.5, 0.4375)],  # the mean of GRPO's two runs
    ]
    colours = [METHODS[method] for method in ("sft", "expert_iteration", "grpo", "grpo", "grpo")]
    assert [line.get_color() for line in figure.axes[0].lines] == colours

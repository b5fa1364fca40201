"""Answers to the handouts' questions, on hand-computed numbers, and the page of a small study."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from markdown_it import MarkdownIt
from report_parts import each, run, solved
from run_folders import write_run
from scipy.stats import spearmanr
from study_parts import with_values

from grpo.common.files import write_json
from grpo.discovery.log import Attempt, Log, Proposal, Settings, read_log
from grpo.discovery.mutation import fresh, program_of
from grpo.discovery.strategies import messages_of
from grpo.discovery.verifier import Verification
from grpo.evaluation.evaluator import examples_to_read
from grpo.reporting.answers.ablations import goes_with, shares
from grpo.reporting.answers.second_reading import (
    ELSEWHERE,
    NONE,
    OTHER_FORM,
    PARSER_ANSWER,
    PARSER_FORM,
    RIGHT,
    WRONG,
    WRONG_ANSWER,
    WRONG_FORM,
    agreement,
    chance_of,
    equal,
    judge,
    second_reading,
)
from grpo.reporting.answers.write_answers import write_answers
from grpo.reporting.asynchronous import dominates, floor
from grpo.reporting.charts import panels, save_figure
from grpo.reporting.discussion import Split
from grpo.reporting.kissing_number import write_delivery
from grpo.reporting.page import write_page, write_writeup
from grpo.reporting.record import Record, read_record
from grpo.reporting.tables import write_tables
from grpo.reporting.wall_clock import PARTS, write_timing
from grpo.results.claims import write_claims
from grpo.results.runs import Run
from grpo.results.selection import select
from grpo.results.verdicts import KL
from grpo.study import paths
from grpo.study.schema import Study
from grpo.study.settings import KissingNumber

# ------------------------------------------------------------------------------------------------------ parser or model


def record(response: str, answer: str | None, truth: str = "12", category: str = WRONG_FORM) -> dict[str, Any]:
    return {"problem": "p", "response": response, "answer": answer, "ground_truth": truth, "category": category}


@pytest.mark.parametrize(
    ("prompt", "response", "answer", "category", "kind"),
    [
        ("r1_zero", "so 12 </think>\n<answer> 12 </answer>", None, WRONG_FORM, PARSER_FORM),
        ("r1_zero", "so 12 </THINK><ANSWER>12</ANSWER>", None, WRONG_FORM, PARSER_FORM),
        ("r1_zero", "so <answer>12</answer>", None, WRONG_FORM, OTHER_FORM),
        ("r1_zero", "so </think> <answer>12", None, WRONG_FORM, OTHER_FORM),
        ("r1_zero", r"so \boxed{12}, found in 3 steps", None, WRONG_FORM, OTHER_FORM),
        ("r1_zero", "5 + 7 = 12", None, WRONG_FORM, OTHER_FORM),
        ("r1_zero", "5 + 7 = 13", None, WRONG_FORM, WRONG),
        ("r1_zero", "I do not know.", None, WRONG_FORM, NONE),
        ("r1_zero", "</think> <answer>12.0</answer>", "12.0", WRONG_ANSWER, PARSER_ANSWER),
        ("r1_zero", "it is 12 </think> <answer>a dozen</answer>", "a dozen", WRONG_ANSWER, ELSEWHERE),
        ("r1_zero", "</think> <answer>13</answer>", "13", WRONG_ANSWER, WRONG),
        ("question_only", r"\Boxed {12}", None, WRONG_FORM, PARSER_FORM),
        ("question_only", "12", None, WRONG_FORM, OTHER_FORM),
        ("a format of one's own", "</think> <answer>12</answer>", None, WRONG_FORM, OTHER_FORM),
    ],
)
def test_who_is_at_fault(prompt: str, response: str, answer: str | None, category: str, kind: str) -> None:
    assert second_reading(record(response, answer, category=category), prompt) == kind


@pytest.mark.parametrize(
    ("answer", "truth", "same"),
    [
        ("1,200", "1200", True), ("0.5", r"\frac{1}{2}", True), ("1/2", "2/4", True), ("$7$", "7", True), ("-3", "3", False),
        ("x^2-1", "(x-1)(x+1)", True), ("x^2", "x^3", False), ("", "", False), ("1/0", "1/0", True), ("9^{9^{9}}", "1", False),
        ("12,5", "125", False),
    ],
)  # fmt: skip
def test_the_second_readings_equality(answer: str, truth: str, same: bool) -> None:
    assert equal(answer, truth) is same


def test_failures_are_counted_and_shown_and_the_right_ones_are_the_control() -> None:
    records = [record("</think> <answer>12</answer>", "12", category=RIGHT)] * 4
    records += [record(f"{12 + i} | `x`\n", None) for i in range(30)]
    text = judge("r1_zero", records)
    assert "Of 34 responses 30 fail: 0 failures are the parser's (0.0% of the failures) and 30 the model's." in text
    assert "In 1 (3.3% of the failures, 2.9% of all responses) the model states the right answer" in text
    assert "Of 4 answers that the grader accepts, the second reading accepts 4." in text
    assert f"| {WRONG_FORM} | {OTHER_FORM} | model | 1 |" in text and f"| {WRONG_FORM} | {WRONG} | model | 29 |" in text
    shown = [line for line in text.splitlines() if line.startswith("| p |")]
    assert shown[:4] == ["| p | `12` | `12` | `</think> <answer>12</answer>` |"] * 4  # of the right ones too
    assert len(shown) == 4 + 1 + 10 and shown[4] == r"| p | `12` | nothing | `12 \| 'x'␤` |"


def test_where_there_are_fewer_than_ten_of_a_category_samples_are_shown_too() -> None:
    records = [record("</think> <answer>13</answer>", "13", category=WRONG_ANSWER)] * 3
    sampled = [record("</think> <answer>14</answer>", "14", category=WRONG_ANSWER)] * 12 + [record("no", None)] * 2
    sampled += [record("</think> <answer>12</answer>", "12", category=RIGHT)]
    text = judge("r1_zero", records, sampled)
    assert (
        "Of 3 responses 3 fail" in text
        and f"{WRONG_ANSWER}, from the samples for best-of-N, as the evaluation has only 3:" in text
    )
    assert sum("<answer>14</answer>" in line for line in text.splitlines()) == 10
    assert f"{RIGHT}, from the samples for best-of-N, as the evaluation has only 0:" in text
    right = [record("</think> <answer>12</answer>", "12", category=RIGHT)]
    assert "best-of-N" not in judge("r1_zero", records * 4 + [record("no", None)] * 10 + right * 10, sampled)
    assert "None of 10 responses fails" in (text := judge("r1_zero", right * 10)) and f"{RIGHT}:" in text


def test_a_task_that_the_second_reading_does_not_suit_has_no_counts() -> None:
    """For example one that asks for any word that rhymes, where a right answer differs from the truth."""
    records = [record("</think> <answer>house</answer>", "house", "mouse", RIGHT), record("tree", None, "bee")]
    text = judge("r1_zero", records)
    assert "says nothing about the failures" in text and "| model |" not in text


# ------------------------------------------------------------------------------------------------------------- samples


def test_the_chance_is_that_of_all_ways_to_pick_one_sample_of_each_problem() -> None:
    zero, rights, samples = [1.0, 0.0, 0.0], [0, 2, 1], 3
    pools = [[z, *([1.0] * right), *([0.0] * (samples - right))] for z, right in zip(zero, rights, strict=True)]
    sums = [sum(picked) for picked in itertools.product(*pools)]
    share = {total: sums.count(total) / len(sums) for total in set(sums)}
    expected = sum(chance for chance in share.values() if chance <= share[1.0] + 1e-12)
    assert chance_of(zero, rights, samples) == pytest.approx(expected)


def test_both_figures_are_compared_on_the_problems_that_both_have() -> None:
    best = {"samples": 4, "n": {"1": {kind: {"value": 0.5} for kind in ("pass", "best")}}}
    sampled = {str(i): (1.0, 0.5) for i in range(40)}
    same = agreement("r1_zero", {str(i): float(i % 2) for i in range(80)}, sampled, best)
    assert "in 0.500 of its 80 problems. On the 40" in same and "right in 0.500, the first of the 4 samples in 1.000" in same
    assert "the two agree" in same and "pass@1 is 0.5000 and Best@1 0.5000" in same
    assert "DISAGREE" in agreement("r1_zero", {str(i): 1.0 for i in range(40)}, sampled, best)
    served = agreement("r1_zero", {str(i): float(i % 2) for i in range(40)}, sampled, best)
    assert "For N = 1 the zero-shot answers are used: pass@1 and Best@1 are 0.5000, the zero-shot figure." in served
    assert "no problem in common" in agreement("r1_zero", {"other": 1.0}, sampled, best)


# ----------------------------------------------------------------------------------------------- prompts, drift, overlap


def test_form_and_answers_within_it_share_the_gain() -> None:
    form, within = shares(Split(0.1, 0.08), Split(0.9, 0.54))
    assert form == pytest.approx(0.8 * 0.7) and within == pytest.approx(-0.2 * 0.5)
    assert form + within == pytest.approx(0.9 * 0.6 - 0.1 * 0.8)
    assert shares(Split(0.0, 0.0), Split(0.5, 0.3)) == (pytest.approx(0.3), 0.0)
    assert Split(0.5, 0.4).within == pytest.approx(0.8) and Split(0.0, 0.0).within is None
    assert Split(0.2, 0.4).within is None  # an answer is rewarded without the form


def with_kl(seed: int, kl: Any, reward: Any, norm: Any) -> Run:
    columns = {"step": range(1, len(kl) + 1), KL: kl, "train/answer_reward": reward, "gradient_norm": norm}
    history = pd.DataFrame(columns | {"token_entropy": np.ones(len(kl))})
    return Run("e", "best", seed, {}, {}, history, pd.DataFrame({"val/answer_reward": [0.1, reward[-1]]}), np.zeros((2, 2)))


def test_kl_that_jumps_with_the_gradient_norm_is_correlated_with_it() -> None:
    jumps = np.random.default_rng(0).uniform(size=40)
    runs = [with_kl(seed, np.r_[0.0, jumps], np.linspace(0, 1, 41), np.r_[1.0, 10 * jumps]) for seed in (0, 1)]
    text = goes_with(runs)
    assert "| e/best/0 | 40 |" in text
    assert "from one step to the next are correlated with those of the gradient norm (+1.00)." in text
    assert "Over runs: 2 measured it" in text and "too few for a correlation" in text
    assert "rank correlation of the last KL with the last reward" in goes_with(
        [with_kl(s, [0, s], [0, s], [1, 1]) for s in range(4)]
    )


def test_changes_and_levels_are_correlated_separately() -> None:
    """KL and reward have correlated levels, but independent changes; KL and gradient norm are the other way round."""
    draw = np.random.default_rng(3)
    steps, kl, reward, norm = np.arange(60.0), draw.uniform(size=60), draw.uniform(size=60), np.zeros(60)
    kl_level = steps + 3 * kl
    norm[1:] = np.cumsum(np.diff(kl_level) - 1)  # its changes are KL's, its level is not
    history = {"kl": np.r_[0.0, kl_level], "reward": np.r_[0.0, steps + 3 * reward], "norm": np.r_[0.0, norm]}
    text = goes_with([with_kl(seed, *history.values()) for seed in (0, 1)])
    expected = [
        spearmanr(of(kl_level), of(other)).statistic for of in (np.asarray, np.diff) for other in (steps + 3 * reward, norm)
    ]
    assert expected[0] > 0.9 and abs(expected[1]) < 0.3 and abs(expected[2]) < 0.2 and expected[3] > 0.9  # as was meant
    levels, changes = ([f"{value:+.2f}" for value in part] for part in (expected[:2], expected[2:]))
    (row,) = (line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| e/best/0"))
    assert row[1] == "60" and row[2:4] == levels and row[5:7] == changes
    assert row[4] == row[7] == "not defined"  # the entropy stays
    assert "from one step to the next are correlated with those of the gradient norm (+1.00)." in text
    assert f"rank correlation is {levels[0]} with the reward and {levels[1]} with the gradient norm" in text


def times(arm: str, lag: int, **parts: float) -> dict[str, Any]:
    return {"arm": arm, "lag": lag, "steps": 9, **dict.fromkeys(PARTS, 0.0), **parts}


def test_what_dominates_and_what_would_overlap_better() -> None:
    slow = {
        "rollout": 3.0,
        "training": 1.0,
        "synchronization": 0.2,
        "generator_synchronization": 0.1,
        "waiting": 2.0,
        "step": 3.3,
    }
    assert floor(times("a", 1, **slow)) == pytest.approx(3.1)
    short = {"arm": "lag_4", "lag": 4, "steps": 0}
    text = dominates([times("lag_0", 0, **slow), times("lag_1", 1, **slow), short])
    assert "| lag_1 | rollout | 0.91 | 3.00 | 3.300 | 3.100 | 2.000 |" in text and "lag_4" not in text
    assert "In lag_1, the smallest lag at which the two overlap, **rollout dominates**: a step is +0.200 s" in text
    assert "The generator takes 3.00 times as long" in text and "3 of them in parallel" in text and "1.000 s per step" in text
    even = dominates([times("lag_1", 1, rollout=1.0, training=1.1, step=1.2)])
    assert "**training dominates**" in even and "about equally long (1.10 times)" in even
    assert "too short" in dominates([short])


# ------------------------------------------------------------------------------------------------------------- the page


@pytest.fixture
def small(mini_study: Study, workdir: Path) -> Study:
    """One experiment with two arms and one seed; no samples for Best-of-N, no search."""
    arms: dict[str, Any] = {"grpo_learning_rate": {"3e-4": {"learning_rate": 3e-4}, "1e-3": {"learning_rate": 1e-3}}}
    entries = {
        name: old.model_copy(update={"arms": arms.get(name, {}), "report": []}) for name, old in mini_study.experiments.items()
    }
    prompts = {"evaluation.best_of_n.prompts": [], "evaluation.zero_shot_prompts": ["r1_zero"]}
    return with_values(mini_study, {"experiments": entries, "seeds": [0], "kissing_number": None, **prompts})


HARDWARE = {"gpus": [], "processor": "p", "cores": 2, "memory_gib": 24}


def write_results(study: Study) -> Record:
    """A study with runs, times and zero-shot answers, and the results of earlier stages."""
    for place, arm in enumerate(study.experiments["grpo_learning_rate"].arms):
        made = run(arm, [each(0.0), solved(0.5 + place / 20)], every=2, steps=2)
        write_run(made)
        timing = {"total_s": 36.0, "phases": {}, "steps": [{"step": step, "step_s": 1.0} for step in (1, 2)]}
        timing |= {"started": "2026-01-01T00:00:00+00:00", "finished": "2026-01-01T00:00:37+00:00", "hardware": HARDWARE}
        timing |= {"mlflow_run_id": None, "same_as": None, "git_commit": "", "git_changed": ""}
        write_json(paths.run_timing(made.name), timing)
    interval = {"value": 0.25, "low": 0.125, "high": 0.5, "problems": 4}
    parts = {f"accuracy_by_{by}": {"1": interval} for by in ("level", "subject")}
    shares = {"categories": {RIGHT: 1, WRONG_FORM: 1}, "answer_reward": 0.5, "accuracy": interval, "response_length": 8.0}
    shares |= {"format_reward": 0.5}
    write_json(paths.BASELINE_METRICS, {"r1_zero": shares | parts | {"problems": 2}})
    paths.BASELINE.mkdir(parents=True)
    lines = [record("</think> <answer>12</answer>", "12", category=RIGHT), record("it is 12", None)]
    (paths.BASELINE / "r1_zero.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    write_json(paths.CANDIDATES / "grpo_learning_rate.json", select(study, "grpo_learning_rate"))
    write_claims(study)
    found = read_record(study, by_dvc=False)
    write_tables(found)
    write_timing(found)
    return found


def test_a_study_that_makes_little_has_a_page_of_what_it_made(small: Study) -> None:
    write_answers(write_results(small))
    text = paths.ANSWERS.read_text()
    headings = [line.removeprefix("## ") for line in text.splitlines() if line.startswith("## ")]
    assert headings == [
        "math_baseline (b): is it the model or the parser?",
        "grpo_learning_rate: what do the other metrics do?",
        "think_about_length_normalization",
        "What it would take to know",
    ]
    assert "| 1e-3 or 3e-4 | grpo_learning_rate | selection | 0.050 (" in text
    assert "unknown: one seed shows no spread between runs" in text
    assert "Of 2 responses 1 fail: 0 failures are the parser's" in text and "length at start" not in text
    assert [path.name for path in paths.KISSING_NUMBER_DELIVERY.iterdir()] == ["README.md"]  # there was no search


def numbers_in(*folders: Path) -> set[float]:
    """Every number of the result files below some folders."""
    kinds = ("*.json", "*.jsonl", "*.csv", "*.yaml")
    texts = [path.read_text() for folder in folders for kind in kinds for path in folder.rglob(kind)]
    return {abs(float(number)) for text in texts for number in re.findall(r"-?\d+\.?\d*(?:e-?\d+)?", text)}


def invented(text: str, known: set[float]) -> list[str]:
    """The decimal numbers of a text that no known number rounds to, directly, in percent or in minutes."""
    told = set(re.findall(r"\d+\.\d+", text))
    digits = {len(number.partition(".")[2]) for number in told}
    rounded = {f"{scale * number:.{places}f}" for number in known for scale in (1, 100, 1 / 60) for places in digits}
    return sorted(told - rounded)


def test_every_number_of_the_write_up_stands_in_a_result_file(small: Study) -> None:
    found = write_results(small)
    split = {"problems": 100, "digest": "d"}
    report = {"task": "t", "train": split, "validation": split, "dropped_from_train_as_overlap": []}
    write_json(paths.dataset_report("main"), report)
    known = numbers_in(paths.RUNS.parent, paths.REPORTS)
    write_answers(found)
    write_writeup(found)
    first, section = paths.WRITEUP.read_text(), (paths.SECTIONS / "grpo_learning_rate.md").read_text()
    assert "raised the validation answer reward from 0.000 to 0.5" in first and "ends highest" in section
    assert invented(first, known) == invented(section, known) == []
    assert invented("It rose to 0.7351 by 12.9.", known) == ["0.7351", "12.9"]  # what the test is worth
    lines = [line for path in (*paths.SECTIONS.glob("*.md"), paths.WRITEUP) for line in path.read_text().splitlines()]
    sentences = [line for line in lines if line.endswith(".") and re.search(r"\d\.\d{3}", line)]
    assert len(sentences) == len(set(sentences)) >= 3  # none is said twice


# ------------------------------------------------------------------------------------------------- texts of strangers

EVIL = "![evil](//evil.example/p.png) [**evil**](//evil.example/) <img src=//evil.example/q.png> <b>evil</b>"
HOSTILE = (
    f"x\n````\n\n{EVIL}\n\n## evil\n\n`````````\n~~~~\n\n- {EVIL} ` {EVIL} `` {EVIL}\n\n"
    f"| evil | {EVIL} |\n|---|---|\n| {EVIL} \\| {EVIL} \\\\| {EVIL}\n\r{EVIL}\u2028{EVIL}\n</details>\n{EVIL}\n"
)


def marked_up(markdown: str) -> set[str]:
    """Kinds of Markdown in which a stranger's text stands."""
    tokens = MarkdownIt("commonmark").enable("table").parse(markdown)
    inside = [one for token in tokens for one in (token.children if token.type == "inline" else [token])]
    return {one.type for one in inside if "evil" in one.content or "evil" in str(one.attrs)}


def test_no_text_of_a_model_or_a_stranger_becomes_markup(small: Study) -> None:
    """In the page, the sections, the answers, the examples and the report of a search; the page also forbids pictures."""
    entries = {name: old.model_copy(update={"report": ["samples"]}) for name, old in small.experiments.items()}
    searching = KissingNumber(strategy="conversation", calls=5)
    study = small.model_copy(update={"experiments": entries, "kissing_number": searching})
    found = write_results(study)
    split = {"problems": 100, "digest": "d"}
    about = {"task": "t", "train": split, "validation": split, "dropped_from_train_as_overlap": []}
    write_json(paths.dataset_report("main"), about)
    hostile = dict.fromkeys(("problem", "prompt", "response", "ground_truth", "answer", "subject"), HOSTILE)
    rewards = dict.fromkeys(("format_reward", "answer_reward", "reward", "token_entropy"), 0.0)
    for of in found.all_runs:
        lines = [json.dumps(hostile | rewards | {"step": step}) for step in (0, 2)]
        (paths.RUNS / of.name / "rollouts.jsonl").write_text("\n".join(lines) + "\n")
    failures = [hostile | {"category": category} for category in (RIGHT, WRONG_FORM, WRONG_ANSWER)]
    (paths.BASELINE / "r1_zero.jsonl").write_text("".join(json.dumps(line) + "\n" for line in failures))
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": HOSTILE}]
    attempts = [attempt(i, Proposal(HOSTILE, "", (0,) * i, None, messages, HOSTILE), 22 * i) for i in (0, 1)]
    report = searched(EVIL, "conversation") | {"failures": {EVIL: 1, "too near": 1}}
    report["committed_program"] |= {"validity": 0.0, "message": HOSTILE}
    write_search(attempts, Settings("language model", "conversation", 0, EVIL, "http://x"), report)
    accuracy = found.baseline["r1_zero"]["accuracy"]
    found.baseline["r1_zero"]["accuracy_by_subject"] = {HOSTILE: accuracy, EVIL: accuracy}
    for name in ("overview", *(f"{e}{kind}" for e in found.runs for kind in ("", "-ends", "-metrics"))):
        save_figure(panels(1)[0], paths.FIGURES / f"{name}.svg")
    for write in (write_answers, write_writeup, write_page):
        write(found)
    write_delivery(study)
    read = [one | {"level": 1, "finish_reason": "stop", "response_length": 3} for one in failures]
    examples = examples_to_read("r1_zero", read)
    files = [paths.ANSWERS, paths.KISSING_NUMBER_DELIVERY / "report.md", *sorted(paths.SECTIONS.glob("*.md"))]
    texts = {path.name: path.read_text() for path in files} | {"examples.md": examples}
    seen = {name: marked_up(text) for name, text in texts.items()}
    shown = {name for name, kinds in seen.items() if kinds}
    assert shown == {"answers.md", "report.md", "examples.md", "kissing_number.md", "base_model.md", "grpo_learning_rate.md"}
    assert set().union(*seen.values()) == {"fence", "code_inline"}
    assert marked_up(EVIL) == {"image", "link_open", "html_inline", "text"}  # what the test is worth
    page = paths.PAGE.read_text().partition('<script type="application/json"')[0]
    assert "evil" in page and not re.search(r"<[^>]*evil|<b>evil|<h\d>evil", page) and "<img" not in page
    assert "default-src 'none'; img-src data:;" in page


# ---------------------------------------------------------------------------------------------- the kissing number


def write_search(attempts: list[Attempt], settings: Settings, report: dict[str, Any]) -> None:
    log = Log(paths.CONVERSATION_LOG, settings)
    for attempt in attempts:
        log.add(attempt)
    paths.KISSING_SEARCH.mkdir(parents=True)
    (paths.KISSING_SEARCH / "program.py").write_text("points = []\n")
    write_json(paths.KISSING_NUMBER_REPORT, report)


def searched(model: str | None, strategy: str) -> dict[str, Any]:
    committed = {"num_points": 600, "validity": 1.0, "message": ""}
    note = "" if model else "No language model was used: the programs are mutations of parameterised constructions."
    course = [{"attempt": 0, "score": 22, "kind": "orbit", "parents": []}]
    kinds = {"orbit": {"attempts": 2, "valid": 1, "best": 22}}
    return {
        "strategy": strategy, "note": note, "model": model, "best": 600, "best_from": "committed program", "best_of_search": 22,
        "committed_program": committed, "by_kind": kinds, "failures": {"too near": 1}, "course": course,
        "attempts": 2, "valid": 1, "calls": 2, "failed_calls": 0, "tokens": 10,
        "ended_by": "2 of 2 calls", "found_at": 0, "recipe": None, "seed": 0,
    }  # fmt: skip


def attempt(index: int, proposal: Proposal, points: int) -> Attempt:
    verdict = Verification(points, 11, float(points > 0), float(points), "" if points else "too near")
    return Attempt(index, index, "2026-01-01T00:00:00+00:00", 0.1, 0.1, proposal, verdict)


def test_a_search_without_a_language_model_is_delivered_and_says_so(small: Study) -> None:
    from random import Random

    study = small.model_copy(update={"kissing_number": KissingNumber(calls=2)})
    recipes = [fresh("orbit", Random(seed)) for seed in (0, 1)]
    attempts = [attempt(i, Proposal(program_of(recipe), recipe=recipe), 22 - 22 * i) for i, recipe in enumerate(recipes)]
    write_search(attempts, Settings("mutation", "mutation", 0), searched(None, "mutation"))
    write_delivery(study)
    folder = paths.KISSING_NUMBER_DELIVERY
    assert {path.name for path in folder.iterdir()} == {"program.py", "conversation_log.json", "report.md", "prompts"}
    text = (folder / "report.md").read_text()
    reflection = text[text.index("## Reflection") :]
    assert "**No language model was used.**" in reflection and "1 of 2 attempts were valid, the best, 22 points" in reflection
    assert "would begin with this prompt" in text
    prompt = (folder / "prompts/problem.md").read_text()
    assert prompt.strip() in text and "integer vectors C in 11 dimensions" in prompt
    log = json.loads((folder / "conversation_log.json").read_text())
    assert [one["proposal"]["program"] for one in log["attempts"]] == [None, None] and "program_of" in log["programs"]
    assert [program_of(one["proposal"]["recipe"]) for one in log["attempts"]] == [one.proposal.program for one in attempts]
    assert len((folder / "conversation_log.json").read_text()) < len(paths.CONVERSATION_LOG.read_text()) / 4


def test_a_search_with_a_language_model_is_delivered_whole(small: Study) -> None:
    """A conversation of five turns: an error that is corrected, one that is not, a larger set and a smaller one."""
    study = small.model_copy(update={"kissing_number": KissingNumber(strategy="conversation", calls=5)})
    attempts: list[Attempt] = []
    for index, points in enumerate([0, 0, 22, 30, 12]):
        held = tuple(range(index))
        messages = messages_of(attempts, held)
        attempts.append(attempt(index, Proposal(f"points = {index}\n", "", held, None, messages, f"answer {index}"), points))
    settings = Settings("language model", "conversation", 0, "some-model", "http://x")
    kinds = {"from scratch": {"attempts": 1, "valid": 0, "best": 0}, "refined": {"attempts": 4, "valid": 3, "best": 30}}
    write_search(attempts, settings, searched("some-model", "conversation") | {"by_kind": kinds})
    write_delivery(study)
    folder = paths.KISSING_NUMBER_DELIVERY
    text = (folder / "report.md").read_text()
    assert "No language model" not in text and "some-model wrote the programs, with the strategy `conversation`" in text
    assert "Answers to the problem alone: 0 of 1 gave a valid set" in text
    assert "Answers within a conversation: 3 of 4 gave a valid set, the largest of 30 points." in text
    assert "Answers to an error of the evaluator: 1 of 2 gave a valid set." in text
    assert "Answers to a valid set: 1 of 2 gave a larger one." in text
    first, second = ((folder / f"prompts/sent_{number}.md").read_text() for number in (1, 2))  # those that led to 22 and to 30
    assert first.count("[user]") == 3 and "answer 1" in first and "`too near`" in first and "answer 2" not in first
    assert second.count("[user]") == 4 and "scores 22" in second and second.strip() in text
    found, _ = read_log(folder / "conversation_log.json")
    assert found == settings and json.loads((folder / "conversation_log.json").read_text())["programs"] == ""

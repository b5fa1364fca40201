"""The tasks of examples/ and studies/: countdown, SmolLM2's triples, and the calculator with its episodes."""

from __future__ import annotations

import itertools
import json
import math
import re
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from environment_parts import Scripted
from study_parts import ROOT, one_arm_of, study_named, with_values

from grpo.common.errors import UserError
from grpo.common.imports import import_object
from grpo.common.records import Completion, Problem, Rollout, read_problems
from grpo.evaluation.evaluate import evaluate
from grpo.models.tokenizer import train_tokenizer
from grpo.rollout.engine import SamplingParams
from grpo.rollout.sampling import Sampler
from grpo.study.effective import effective_run
from grpo.study.schema import load_study
from grpo.study.software import packages
from grpo.study.training_inputs import task_inputs
from grpo.tasks import formats
from grpo.tasks.environment import Environment
from grpo.tasks.rewards import score_of
from grpo.tasks.task import Format, Split, Task, make_task


@pytest.fixture(autouse=True)
def _at_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "examples")


def countdown(**arguments: Any) -> Task:
    return make_task({"use": "countdown:Countdown", **arguments}, "tasks.main")


@pytest.mark.parametrize(
    ("answer", "reward"),
    [
        ("8 * 3 - 1", 1.0), ("3*8-1", 1.0), ("(8 * 3) - 1", 1.0), ("3 * (8 - 1)", 0.1), ("8 + 3", 0.1), ("8", 0.1),
        ("23", 0.0), ("8 * 3 - 1 + 0", 0.0), ("8 + 8 + 8 - 1", 0.0), ("24 - 1", 0.0), ("8 * 3 - 1 = 23", 0.0), ("", 0.0),
        ("-1 + 8 * 3", 0.0), ("8 ** 3", 0.0), ("8 * 3 - True", 0.0), ("8 * (3 - 1", 0.0), ("twenty-three", 0.0),
    ],
)  # fmt: skip
def test_each_number_counts_at_most_once(answer: str, reward: float) -> None:
    from countdown import Problem

    problem = Problem("p", "Use 1 3 8 to make 23.", "1 3 8 = 23")
    for form, response in (("r1_zero", f"</think> <answer>{answer}</answer>"), ("question_only", rf"\boxed{{{answer}}}")):
        scored = countdown().score(form, [problem, problem], [response, "23"])
        assert scored.rewards[0] == {"format_reward": 1.0, "answer_reward": reward, "reward": reward}
        assert set(scored.rewards[1].values()) == {0.0}


def test_splits_share_no_question_and_documents_ask_none_of_validation() -> None:
    task = countdown(train_size=200, validation_size=50)
    train, validation = task.problems("train"), task.problems("validation")
    assert (len(train), len(validation)) == (200, 50) and task.problems("train") == train
    held_out = {problem.question for problem in validation}
    assert not {problem.question for problem in train} & held_out
    right = 0
    for prompt, response in itertools.islice(task.documents(3, wrong_share=0.3), 200):
        assert not any(question in prompt for question in held_out)
        asked = prompt[prompt.index("Use ") + 4 : prompt.index(".", prompt.index("Use "))]
        form = "r1_zero" if "<answer>" in response else "question_only"
        problem = type(train[0])("p", "", asked.replace(" to make", " ="))
        right += task.score(form, [problem], [response]).rewards[0]["reward"] == 1.0
    assert 115 < right < 165  # 0.7 of 200, and those whose last number changes nothing (times 1)


@pytest.mark.slow
def test_the_example_runs_from_problems_to_a_trained_policy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, grpo: Callable[..., tuple[int, str, str]]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlflow.db'}")
    values = one_arm_of({"use": "countdown:Countdown", "train_size": 64, "validation_size": 16})
    values["models"]["main"] |= {"documents": {"wrong_share": 0.2}, "steps": 30}
    (tmp_path / "params.yaml").write_text(json.dumps(values))
    for command in ("dataset main", "model main", "math_baseline", "train grpo_learning_rate 3e-3"):
        code, _, error = grpo(*command.split())
        assert code == 0, error
    assert len(read_problems(tmp_path / "data/dataset/main/train.jsonl")) == 64
    metrics = json.loads((tmp_path / "data/runs/grpo_learning_rate/3e-3/0/metrics.json").read_text())
    assert metrics["steps"] == values["grpo"]["n_grpo_steps"] and 0 <= metrics["val/answer_reward"] <= 1
    inputs = (tmp_path / "data/runs/grpo_learning_rate/3e-3/0/config.yaml").read_text()
    assert "countdown.py" in inputs  # its code is part of what the run depends on


# ------------------------------------------------------------------------------------------------------- studies/smollm2.yaml


@pytest.fixture(scope="module")
def words() -> Task:
    return study_named("smollm2").task("main")


def test_validation_triples_do_not_occur_in_training_in_any_order(words: Task) -> None:
    train, held_out = ([frozenset(p.ground_truth.split(", ")) for p in words.problems(s)] for s in ("train", "validation"))
    assert not set(train) & set(held_out) and len({*train, *held_out}) == len(train) + len(held_out) == 2304
    assert {len(triple) for triple in (*train, *held_out)} == {3}


@pytest.mark.parametrize(
    ("response", "reward", "kinds"),
    [
        ("The cat drank milk by the fire while a dog slept.", 1.0, {"all_words"}),
        ("Cat, dog, and fire.", 1.0, {"all_words", "lists_only"}),
        ("The dog, cat and fire are three of a dog that runs home.", 1.0, {"all_words", "repeats_a_word"}),
        ("A catalogue of dogs.", 0.0, set()),
        ("The cat.", 1 / 3, set()),
    ],
)
def test_the_reward_is_the_share_of_the_words(response: str, reward: float, kinds: set[str], words: Task) -> None:
    problem = replace(words.problems("train")[0], ground_truth="cat, dog, fire")
    kinds_of = sys.modules[type(words).__module__].kinds_of
    assert words.score("chat", [problem], [response]).rewards[0]["reward"] == pytest.approx(reward)
    assert {kind for kind, found in kinds_of(response, ["cat", "dog", "fire"]).items() if found} == kinds


# --------------------------------------------------------------------------------------------------------- studies/tools.yaml


DOCUMENT = re.compile(r' (\d+)|(<tool_call>.*"expression": "(.*)"}}</tool_call>)<tool_response>(.*)</tool_response> (\d+)')


@pytest.fixture
def task() -> Task:
    return study_named("tools").task("main")


@pytest.mark.parametrize(
    ("expression", "answer", "failures"),
    [
        ("43 * 57", "2451", 0), ("432 + 5", "437", 0),
        *((wrong, "error: no sum or product", 1) for wrong in ("43 57", "43 - 57", "4 * 5 * 6", "__import__('os')", "")),
    ],
)  # fmt: skip
def test_the_calculator_answers_right_and_the_control_at_random(
    task: Task, expression: str, answer: str, failures: int
) -> None:
    problem = task.problems("train")[0]

    def answers(environment: Environment | None, seed: int) -> tuple[str, int]:
        assert environment is not None
        instance, _ = environment.begin(problem, seed)
        found = environment.answer(instance, "", [{"name": "calculate", "arguments": {"expression": expression}}])
        return found.messages[0]["content"], found.failures

    assert answers(task.formats["calculator"].environment, 1) == (answer, failures)
    guesses = [answers(task.formats["guesser"].environment, seed) for seed in (1, 1, *range(40))]
    assert guesses[0] == guesses[1] and {(len(text), failed) for text, failed in guesses} == {(len(answer), failures)}
    assert failures or len(set(guesses)) > 20


def test_documents_have_the_shares_that_the_study_says_and_no_validation_question(task: Task) -> None:
    held_out = {problem.question for problem in task.problems("validation")}
    documents = list(itertools.islice(task.documents(3, call_share=0.4, wrong_share=0.5), 4000))
    counts = dict.fromkeys(("product", "call", "error", "other number"), 0)
    for prompt, response in documents:
        asked = prompt.removeprefix("What is ").removesuffix("?")
        left, sign, right = asked.split()
        truth = str(int(left) * int(right) if sign == "*" else int(left) + int(right))
        read = DOCUMENT.fullmatch(response)
        assert read is not None and asked not in held_out
        alone, call, called, result, last = read.groups()
        counts["product"] += sign == "*"
        counts["call"] += call is not None
        counts["error"] += result == "error: no sum or product"
        counts["other number"] += called not in (None, asked) and "error" not in result
        assert (alone or last) == (truth if call is None or "error" in result else result)
    shares = {name: count / len(documents) for name, count in counts.items()}
    assert shares == pytest.approx({"product": 0.5, "call": 0.4, "error": 0.1, "other number": 0.1}, abs=0.03)


@pytest.mark.parametrize(("prompt", "reward"), [("calculator", 1.0), ("no_tool", 0.0)])
def test_an_episode_has_the_tokens_of_its_document(task: Task, prompt: str, reward: float) -> None:
    documents = list(itertools.islice(task.documents(3, call_share=1.0, wrong_share=0.0), 2000))
    tokenizer = train_tokenizer((piece for p, r in documents for piece in task.pieces(p + r)), 400)
    (problem,) = [problem for problem in task.problems("train") if problem.subject == "product"][:1]
    call = re.sub('(?<=expression": ")[^"]*', problem.question, documents[0][1].partition("<tool_response>")[0])
    engine = Scripted(tokenizer, [call, f" {problem.ground_truth}"], tokenizer.eos_token_id)
    sampler = Sampler(engine, tokenizer, task.formats[prompt], score_of(task, prompt))
    ((rollout,),) = evaluate(sampler, [problem], SamplingParams(max_tokens=40), seed=1)
    assert rollout.rewards["answer_reward"] == reward
    assert task.measures([rollout]) == {"tool_calls": 1.0, "calls/sum": 0.0, "calls/product": 1.0}
    if prompt == "calculator":
        document = f"{call}<tool_response>{problem.ground_truth}</tool_response> {problem.ground_truth}"
        sampled = [i for i in rollout.completion.token_ids if i != tokenizer.eos_token_id]  # the script ends each turn with it
        assert sampled == tokenizer(document, add_special_tokens=False)["input_ids"]


def test_in_a_folder_without_it_the_study_brings_its_module_and_its_arms_differ_in_the_tool_only(
    workdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "tools_task", raising=False)
    study = load_study(ROOT / "studies/tools.yaml")
    configs = [effective_run(study, "tools", arm, 0, []).config for arm in study.experiments["tools"].arms]
    assert len(configs) == 3 and len({str(config.model_dump(exclude={"prompt"})) for config in configs}) == 1
    assert len({study.task("main").formats[config.prompt].template for config in configs}) == 1


# ---------------------------------------------------------------------------------------------------------- a mixture of tasks

SUMS = {"use": "arithmetic", "train_size": 60, "validation_size": 30, "levels": 1, "seed": 0}


class Letters(Task):
    """Twelve questions whose answer is the problem's id, so that a changed problem is noticed."""

    drop_overlap, packages = True, ("torch",)
    formats = {"question_only": Format("{question}"), "r1_zero": formats.R1_ZERO}

    def problems(self, split: Split) -> list[Problem]:
        return [Problem(f"{split}/{letter}", f"{split} {letter}?", letter) for letter in "abcdefghijkl"]

    def verify(self, answers: list[str], problems: list[Problem]) -> list[float]:
        return [{p.id: 1.0, "half": 0.5, "late": math.nan}.get(a, 0.0) for a, p in zip(answers, problems, strict=True)]

    def skipped(self, split: Split) -> list[str]:
        return [f"{split} 13"]

    def documents(self, seed: int, **options: Any) -> Any:
        return itertools.repeat(("letters", str(options)))


def mixture(**settings: Any) -> Any:
    tasks = {"sums": SUMS | {"weight": 3}, "letters": {"use": "test_examples_tasks:Letters"}}
    return make_task({"use": "mixture_task:Mixture", "tasks": tasks} | settings, "tasks.main")


def test_a_mixture_has_its_tasks_in_their_shares_in_any_first_part() -> None:
    """36 sums to 12 letters: a quarter of any first n problems are letters, up to rounding."""
    shares = import_object("mixture_task:shares")
    rounded = {"a": 33, "b": 1000}, {"a": 0.9, "b": 0.3}, {"a": 33, "b": 11}  # .3 * (33 / .9) is less than 11 by rounding
    for sizes, weights, expected in (({"a": 60, "b": 12}, {"a": 3, "b": 1}, {"a": 36, "b": 12}), rounded):
        assert shares(sizes, weights) == expected
    found = mixture()
    problems = found.problems("train")
    kinds = [problem.id.split("/")[0] for problem in problems]
    assert Counter(kinds) == {"sums": 36, "letters": 12} and len({p.id for p in problems}) == 48
    assert all(abs(kinds[:n].count("letters") - n / 4) <= 1 for n in range(1, 49))
    assert [p.question for p in problems if p.id.startswith("letters")] == [f"train {letter}?" for letter in "abcdefghijkl"]
    # What one task leaves out, all do; formats that are the same in all are offered, and what one's results depend on counts.
    assert found.skipped("train") == ["train 13"] and list(found.formats) == ["r1_zero"]
    assert found.drop_overlap and not mixture(tasks={"sums": SUMS}).drop_overlap
    assert found.packages == ("torch",) and found.own_code == (
        "grpo.tasks.arithmetic:Arithmetic",
        "test_examples_tasks:Letters",
    )


def test_each_task_of_a_mixture_verifies_its_own_problems_by_their_own_ids_and_its_rewards_are_logged() -> None:
    found = mixture()
    problems = found.problems("validation")
    letters, sums = ([p for p in problems if p.id.startswith(name)] for name in ("letters", "sums"))
    asked = [letters[0], sums[0], letters[1], sums[1], letters[2]]
    answers = ["validation/a", sums[0].ground_truth, "half", "validation/b", "late"]
    scored = found.score("r1_zero", asked, [f"</think> <answer>{answer}</answer>" for answer in answers])
    assert [each["answer_reward"] for each in scored.rewards] == [1.0, 1.0, 0.5, 0.0, 0.0]
    assert scored.out_of_time == [False] * 4 + [True]
    of_sums = [Rollout(sums[0], (), Completion((), "", (), "stop"), {"answer_reward": each}) for each in (1.0, 0.0, 0.5)]
    measured = found.training_measures(of_sums)
    assert measured == {"sums/answer_reward": 0.5, "letters/answer_reward": pytest.approx(math.nan, nan_ok=True)}
    assert found.measures(of_sums).keys() == measured.keys()


def test_documents_of_a_mixture_are_drawn_by_the_weights() -> None:
    options = {"sums": {"r1_zero_share": 1.0, "complete_form_share": 1.0, "guess_share": 0.0}, "letters": {"n": 2}}
    drawn = list(itertools.islice(mixture().documents(0, **options), 4000))
    letters = [response for prompt, response in drawn if prompt == "letters"]
    assert abs(len(letters) / 4000 - 0.25) < 0.03 and set(letters) == {"{'n': 2}"}  # four standard deviations
    of_sums = next(document for document in mixture().documents(1, **options) if document[0] != "letters")
    zero, one = (next(make_task(SUMS).documents(seed, **options["sums"])) for seed in (0, 1))
    assert of_sums == one != zero
    with pytest.raises(UserError, match=r"documents: words: no such task \(known: sums, letters\)"):
        next(mixture().documents(0, words={}))


def test_the_study_of_a_mixture_depends_on_all_of_its_code_files_and_packages(workdir: Path) -> None:
    study = load_study(ROOT / "examples/mixture.yaml")
    assert study.task("main").problems("train")[0].id.partition("/")[0] == "short"
    assert {"mixture_task.py", "arithmetic.py"} <= task_inputs(study, "main")["code"].keys()
    files = {"train": "mine.jsonl[:80%]", "validation": "mine.jsonl[80%:]"}
    own = {"use": "dataset", "question": "q", "answer": "a", "files": files}
    tasks = {
        "one": own,
        "two": own | {"files": files | {"train": "more.jsonl"}},
        "letters": {"use": "test_examples_tasks:Letters"},
    }
    other = with_values(study, {"tasks.main.tasks": tasks})
    assert set(other.named_files.values()) == {"mine.jsonl", "more.jsonl"}
    assert packages(other).count("torch") == 2 and "test_examples_tasks.py" in task_inputs(other, "main")["code"]

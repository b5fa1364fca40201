"""The examples and studies that the docs name: losses, advantages, rewards, tasks and studies, by hand and in short runs."""

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
import torch
from environment_parts import Scripted
from study_parts import ROOT, Grpo, study_named, values_of, with_values
from torch.testing import assert_close
from training_parts import make_project, read_csv

from grpo.common.errors import UserError
from grpo.common.imports import import_object
from grpo.common.records import Completion, Problem, Rollout
from grpo.evaluation.evaluate import evaluate
from grpo.learner.losses import LossInputs
from grpo.models.tokenizer import train_tokenizer
from grpo.rollout.engine import SamplingParams
from grpo.rollout.sampling import Sampler
from grpo.study import paths
from grpo.study.effective import effective_run
from grpo.study.schema import load_study
from grpo.study.software import packages
from grpo.study.training_inputs import task_inputs, write_training_inputs
from grpo.tasks import formats
from grpo.tasks.environment import Environment
from grpo.tasks.rewards import score_of
from grpo.tasks.task import Format, Split, Task, make_task

ARM: dict[str, Any] = {
    "learning_rate": 1e-3,
    "rollout_batch_size": 64,
    "train_batch_size": 32,
    "group_size": 16,
    "n_grpo_steps": 4,
    "sampling_max_tokens": 12,
    "sampling_min_tokens": 0,
    "prompt": "question_only",
    "gradient_accumulation_steps": 2,
    "reward": "short_answers:short_answers",
}
Train = Callable[..., None]


@pytest.fixture
def train(grpo: Any, model: Any, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Train:
    """`grpo train` of one arm on a tiny model."""
    with torch.no_grad():  # a random model hardly ever ends a response; now one token in four does
        hidden = model.model(torch.arange(1, 201)[None]).last_hidden_state[0].mean(0)
        model.get_output_embeddings().weight[tokenizer.eos_token_id] += 4.0 * hidden / hidden.square().sum()
    make_project(monkeypatch, tmp_path, model, tokenizer)

    def train_arm(arm: str, **values: Any) -> None:
        study = values_of("smoke")
        study["evaluation"] |= {"every": 2, "problems": 6, "max_tokens": 12}
        study["experiments"]["grpo_learning_rate"]["arms"] = {arm: ARM | values}
        (tmp_path / "params.yaml").write_text(json.dumps(study))
        code, _, error = grpo("train", "grpo_learning_rate", arm, "--seed", "0")
        assert code == 0, error

    return train_arm


def history_of(arm: str) -> list[dict[str, float]]:
    return read_csv(paths.RUNS / f"grpo_learning_rate/{arm}/0/history.csv")


def weights(arm: str) -> bytes:
    return (paths.CHECKPOINTS / f"grpo_learning_rate/{arm}/0/last/model.safetensors").read_bytes()


def inputs(ratios: list[float], advantage: float) -> LossInputs:
    old = torch.full((1, len(ratios)), -2.0)
    of_response = torch.tensor([[advantage]])
    return LossInputs(old + torch.tensor([ratios]).log(), old, of_response, of_response, torch.ones_like(old).bool(), 0.2)


def test_the_asymmetric_clip_by_hand() -> None:
    """With eps_low = 0.2 and eps_high = 0.5: what is good may rise to 1.5, what is bad may fall to 0.8."""
    clip_higher = import_object("clip_higher:clip_higher")
    loss, metrics = clip_higher(inputs([1.0, 1.4, 1.6, 0.5], 2.0), clip_high=0.5)
    assert_close(loss, torch.tensor([[-2.0, -2.8, -3.0, -1.0]]))
    assert metrics["clipped"].tolist() == metrics["clipped_above"].tolist() == [[False, False, True, False]]
    loss, metrics = clip_higher(inputs([1.0, 1.4, 1.6, 0.5], -2.0), clip_high=0.5)
    assert_close(loss, torch.tensor([[2.0, 2.8, 3.2, 1.6]]))
    assert metrics["clipped"].tolist() == [[False, False, False, True]] and not metrics["clipped_above"].any()


def test_published_losses_by_hand() -> None:
    """SAPO: at a ratio of 1 half of 4 / tau; sigmoid(2 ln 3) = 0.9. Two-sided: above 4 a ratio counts as 4 if it is bad."""
    sapo, two_sided_clip = (import_object(f"published_losses:{name}") for name in ("sapo", "two_sided_clip"))
    assert_close(sapo(inputs([1.0, 1.0 + math.log(9)], 3.0))[0], torch.tensor([[-6.0, -10.8]]))
    assert_close(sapo(inputs([1.0 + math.log(9) / 2], -3.0), temperature_negative=2.0)[0], torch.tensor([[5.4]]))
    assert_close(two_sided_clip(inputs([3.0, 9.0, 0.5], 1.0), delta=4.0)[0], torch.tensor([[-1.2, -1.2, -0.5]]))
    loss, metrics = two_sided_clip(inputs([3.0, 9.0, 0.5], -2.0), delta=4.0)
    assert_close(loss, torch.tensor([[6.0, 8.0, 1.6]]))
    assert metrics["clipped"].tolist() == [[False, False, True]]


def test_a_study_trains_with_a_loss_of_its_own(train: Train) -> None:
    """With both bounds alike it trains as `grpo_clip`, to the last bit; with a wider upper one otherwise."""
    off_policy = {"epochs_per_rollout_batch": 3, "learning_rate": 1e-2, "n_grpo_steps": 2}
    own = {"loss_type": "clip_higher:clip_higher"}
    train("symmetric", **off_policy, loss_type="grpo_clip")
    train("equal", **off_policy, **own, loss_options={"clip_high": 0.2})
    train("higher", **off_policy, **own, loss_options={"clip_high": 2.0})
    assert weights("equal") == weights("symmetric") != weights("higher")
    assert [{k: v for k, v in row.items() if k != "clipped_above"} for row in history_of("equal")] == history_of("symmetric")
    equal, higher = ([row["clipped_above"] for row in history_of(arm)[:6]] for arm in ("equal", "higher"))  # of the first step
    assert sum(higher) < sum(equal)


def test_a_study_outside_the_repository_trains_with_the_advantage_of_the_docs(train: Train, tmp_path: Path) -> None:
    """With weight 0 it is the reward minus the group's mean."""
    (code,) = re.findall(
        r"^```python\n# studies/my_advantages.py\n(.*?)^```$", (ROOT / "docs/extending.md").read_text(), re.M | re.S
    )
    (tmp_path / "studies").mkdir()
    (tmp_path / "studies/my_advantages.py").write_text(code)
    train("ours", use_std_normalization=False, n_grpo_steps=2)
    train("equal", advantage="my_advantages:shorter_first", advantage_options={"weight": 0.0}, n_grpo_steps=2)
    losses = {arm: [row["loss"] for row in history_of(arm)] for arm in ("ours", "equal")}
    assert losses["equal"] == pytest.approx(losses["ours"], rel=1e-4)
    write_training_inputs(load_study())
    inputs = json.loads((paths.TRAINING_INPUTS / "grpo_learning_rate.json").read_text())
    assert "my_advantages.py" in inputs["own_code"]


def test_a_study_trains_with_a_reward_of_its_own(train: Train) -> None:
    """All answers of the tiny model are wrong, and it learns not to make them long."""
    short_answers = import_object("short_answers:short_answers")
    lengths, right = [2, 4, 6, 2, 6, 3, 3], [1.0, 1.0, 1.0, 0.0, 0.0, 1.0, 0.0]
    found = short_answers(["a"] * 5 + ["b"] * 2, [[7] * n for n in lengths], right, question=["?"] * 7)
    assert found == pytest.approx([1.1, 1.0, 0.9, 0.0, -0.1, 1.0, 0.0])  # a fifth of .5, 0, -.5; 0, -.5; and 0
    train("short")
    history = history_of("short")
    assert history[0]["train/reward"] < 0.0 and all(row["train/answer_reward"] == 0.0 for row in history)
    assert history[0]["train/response_length"] > 2 * history[-1]["train/response_length"]


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
def test_the_calculator_and_its_random_control(task: Task, expression: str, answer: str, failures: int) -> None:
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


def test_the_study_brings_its_module_and_differs_in_the_tool(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "tools_task", raising=False)
    study = load_study(ROOT / "studies/tools.yaml")
    configs = [effective_run(study, "tools", arm, 0, []).config for arm in study.experiments["tools"].arms]
    assert len(configs) == 3 and len({str(config.model_dump(exclude={"prompt"})) for config in configs}) == 1
    assert len({study.task("main").formats[config.prompt].template for config in configs}) == 1


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
    tasks = {"sums": SUMS | {"weight": 3}, "letters": {"use": "test_examples:Letters"}}
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
        "test_examples:Letters",
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
        "letters": {"use": "test_examples:Letters"},
    }
    other = with_values(study, {"tasks.main.tasks": tasks})
    assert set(other.named_files.values()) == {"mine.jsonl", "more.jsonl"}
    assert packages(other).count("torch") == 2 and "test_examples.py" in task_inputs(other, "main")["code"]


PAGE = (ROOT / "docs/settings.md").read_text()


def test_the_pages_other_settings_are_accepted(tmp_path: Path) -> None:
    """Each put over the GSM8K study; and that one asks in chats."""
    others = re.findall(r"^```yaml\n(.*?)^```$", PAGE, re.M | re.S)
    assert len(others) == 4
    for text in others:
        text = re.sub(r"DIGEST[-\w]*", "ab" * 32, text)
        (tmp_path / "own.yaml").write_text(f"extends: gsm8k\ndescription: Mine.\n{text}")
        for name in ("base", "math-h100", "gsm8k"):
            (tmp_path / f"{name}.yaml").write_text((ROOT / f"studies/{name}.yaml").read_text())
        load_study(tmp_path / "own.yaml")
    study = load_study(ROOT / "studies/gsm8k.yaml")
    arms = study.experiments["grpo_prompt_ablation"].arms
    assert {study.task("main").formats[arm["prompt"]].chat for arm in arms.values()} == {True, False}


def test_an_answer_in_digits_is_rewarded_by_their_share() -> None:
    task = load_study(ROOT / "examples/digits.yaml").task("main")
    assert task.score("chat", task.problems("train")[:2], ["12", "1 + two"]).rewards[1]["reward"] == pytest.approx(1 / 7)


def test_it_adds_its_arms_to_a_study_and_they_start_from_the_winner(workdir: Path, grpo: Grpo) -> None:
    lab = workdir / "our lab"
    lab.mkdir()
    (lab / "group_size.yaml").write_text((ROOT / "examples/group_size.yaml").read_text())
    code, _, error = grpo("study", "use", str(lab / "group_size.yaml"))
    assert code == 0, error
    study = load_study()
    assert study.needed_selections("grpo_group_size") == ["grpo_learning_rate"]
    winner = {"experiment": "grpo_learning_rate", "winner": "low", "overrides": {"learning_rate": 5e-4}}
    for size in (8, 4):
        run = effective_run(study, "grpo_group_size", f"group_{size}", study.seeds[0], [winner])
        assert (run.config.group_size, run.sources["group_size"]) == (size, f"arm group_{size}")
        assert (run.config.learning_rate, run.sources["learning_rate"]) == (5e-4, "winner of grpo_learning_rate (low)")
    assert {"grpo_learning_rate", "grpo_group_size"} <= {row["experiment"] for row in study.runs_table().values()}


def test_the_task_that_the_docs_print_is_a_study(tmp_path: Path) -> None:
    text = (ROOT / "docs/extending.md").read_text()
    for name, content in re.findall(r"^```(?:python|yaml)\n# studies/(backwards\.(?:py|yaml))\n(.*?)^```$", text, re.M | re.S):
        (tmp_path / name).write_text(content.replace("extends: mini", f"extends: {ROOT}/studies/mini.yaml"))
    task = load_study(tmp_path / "backwards.yaml").task("main")
    train, validation = task.problems("train"), task.problems("validation")
    assert not {problem.question for problem in train} & {problem.question for problem in validation}
    (prompt, response), (problem, trace) = next(task.documents(0)), task.traces("r1_zero")[0]
    assert train[0].ground_truth in trace and prompt and response.startswith(" ")
    answers = [trace, f"\\boxed{{{problem.ground_truth}}}", "?"]
    for form, rewards in (("r1_zero", [1.0, 0.0, 0.0]), ("question_only", [0.0, 1.0, 0.0])):
        assert [one["reward"] for one in task.score(form, [problem] * 3, answers).rewards] == rewards

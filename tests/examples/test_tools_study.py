"""studies/tools.yaml: its calculator, the shares of its documents, and an episode of them in each of its formats."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest
from environment_parts import Scripted
from study_parts import study_named

from grpo.evaluation.evaluate import Sampler, evaluate, score_of
from grpo.models.tokenizer import train_tokenizer
from grpo.rollout.engine import SamplingParams
from grpo.study.effective import effective_run
from grpo.study.methods import GrpoConfig
from grpo.tasks.task import Task, make_task

ROOT = Path(__file__).parents[2]


@pytest.fixture
def task(monkeypatch: pytest.MonkeyPatch) -> Task:
    monkeypatch.syspath_prepend(ROOT / "studies")
    return make_task({"use": "tools_task:SumsAndProducts", "train_size": 300, "validation_size": 100}, "tasks.main")


@pytest.mark.parametrize(
    ("expression", "answer", "failures"),
    [
        ("43 * 57", "2451", 0), ("432 + 5", "437", 0), ("0 * 7", "0", 0),
        *((wrong, "error: no sum or product", 1) for wrong in ("43 57", "43 - 57", "4 * 5 * 6", "__import__('os')", "")),
    ],
)  # fmt: skip
def test_the_calculator_answers_right_or_with_an_error(task: Task, expression: str, answer: str, failures: int) -> None:
    call = {"name": "calculate", "arguments": {"expression": expression}}
    environment = task.formats["calculator"].environment
    assert environment is not None
    instance, opening = environment.begin(task.problems("train")[0], seed=1)
    found = environment.answer(instance, "", [call])
    assert (found.messages[0]["content"], found.failures, opening) == (answer, failures, "")
    random = task.formats["guesser"].environment
    assert random is not None
    guesses = [random.answer(random.begin(task.problems("train")[0], seed)[0], "", [call]) for seed in (1, 1, *range(40))]
    texts = [guess.messages[0]["content"] for guess in guesses]
    assert texts[0] == texts[1] and {guess.failures for guess in guesses} == {failures}
    assert {len(text) for text in texts} == {len(answer)} and (failures or len(answer) == 1 or len(set(texts)) > 20)


def test_problems_and_documents_are_what_the_study_says(task: Task) -> None:
    held_out = {problem.question for problem in task.problems("validation")}
    assert len(held_out) == 100 and not held_out & {problem.question for problem in task.problems("train")}
    documents = list(itertools.islice(task.documents(3, call_share=0.4, wrong_share=0.5), 4000))
    counts = dict.fromkeys(("product", "call", "error", "other number"), 0)
    for prompt, response in documents:
        left, sign, right = prompt.removeprefix("What is ").removesuffix("?").split()
        assert f"{left} {sign} {right}" not in held_out
        truth = int(left) * int(right) if sign == "*" else int(left) + int(right)
        counts["product"] += sign == "*"
        read = re.fullmatch(
            r'(<tool_call>.*"expression": "(.*)"}}</tool_call><tool_response>(.*)</tool_response>)? (\d+)', response
        )
        assert read is not None
        _, asked, result, answer = read.groups()
        counts["call"] += asked is not None
        counts["error"] += result == "error: no sum or product"
        counts["other number"] += asked is not None and "error" not in result and asked != f"{left} {sign} {right}"
        assert answer == (str(truth) if result is None or "error" in result else result)
    shares = {name: count / len(documents) for name, count in counts.items()}
    assert shares == pytest.approx({"product": 0.5, "call": 0.4, "error": 0.1, "other number": 0.1}, abs=0.03)


@pytest.mark.parametrize(("prompt", "reward", "turns"), [("calculator", 1.0, 2), ("guesser", 1.0, 2), ("no_tool", 0.0, 0)])
def test_an_episode_has_the_tokens_of_its_document(task: Task, prompt: str, reward: float, turns: int) -> None:
    documents = itertools.islice(task.documents(3, call_share=1.0, wrong_share=0.0), 2000)
    tokenizer = train_tokenizer((piece for p, r in documents for piece in task.pieces(p + r)), 400)
    (problem,) = [problem for problem in task.problems("train") if problem.subject == "product"][:1]
    call = '<tool_call>{"name": "calculate", "arguments": {"expression": "' + problem.question + '"}}</tool_call>'
    document = f"{call}<tool_response>{problem.ground_truth}</tool_response> {problem.ground_truth}"
    engine = Scripted(tokenizer, [call, f" {problem.ground_truth}"], tokenizer.eos_token_id)
    sampler = Sampler(engine, tokenizer, task.formats[prompt], score_of(task, prompt))
    ((rollout,),) = evaluate(sampler, [problem], SamplingParams(max_tokens=40), seed=1)
    assert rollout.rewards["answer_reward"] == reward
    assert rollout.completion.episode is None or rollout.completion.episode.turns == turns
    if prompt == "calculator":
        ids = [*rollout.completion.token_ids]
        ids.remove(tokenizer.eos_token_id)  # of the scripted turn; a policy's ends with the stop string
        assert tokenizer.decode(ids[:-1]) == document
        assert ids[:-1] == tokenizer(document, add_special_tokens=False)["input_ids"]
    assert task.measures([rollout]) == {"tool_calls": 1.0, "calls/sum": 0.0, "calls/product": 1.0}


def test_the_arms_differ_in_the_tool_only(task: Task) -> None:
    study = study_named("tools")
    configs = [effective_run(study, "tools", arm, 0, []).config for arm in study.experiments["tools"].arms]
    assert all(isinstance(config, GrpoConfig) for config in configs)
    assert len({str(config.model_dump(exclude={"prompt"})) for config in configs}) == 1
    assert len({task.formats[config.prompt].template for config in configs}) == 1 and len(configs) == 3

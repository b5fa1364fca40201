"""studies/tools.yaml: its calculator, the shares of its documents, and an episode in each of its formats."""

from __future__ import annotations

import itertools
import re
import sys
from pathlib import Path

import pytest
from environment_parts import Scripted
from study_parts import ROOT, study_named

from grpo.evaluation.evaluate import Sampler, evaluate, score_of
from grpo.models.tokenizer import train_tokenizer
from grpo.rollout.engine import SamplingParams
from grpo.study.effective import effective_run
from grpo.study.schema import load_study
from grpo.tasks.environment import Environment
from grpo.tasks.task import Task

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

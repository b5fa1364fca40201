"""The generated text that the mini model is pretrained on.

It gives the model in miniature what Qwen2.5-Math-1.5B shows: asked in the style it mostly read (the bare question, an
answer in a box) it solves the task, and under the r1_zero prompt it knows the steps but rarely closes the tags in the form
that the reward asks for.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from grpo.study.sections import PretrainedHere
from grpo.tasks.arithmetic import LARGEST, WordProblem, word_problems
from grpo.tasks.formats import format_prompt, load_prompt

COMPLETE = " </think> <answer>{answer}</answer>"
# Ways a conversation ends in this text that the r1_zero reward does not accept.
INCOMPLETE = (
    " \\boxed{{{answer}}}",
    " </think> \\boxed{{{answer}}}",
    " </think> The answer is {answer}.",
    " <answer>{answer}</answer>",
    " </think> <answer>{answer}",
)


def native_document(problem: WordProblem) -> tuple[str, str]:
    """(prompt, response) in the style of the question_only prompt."""
    return problem.question, f" {problem.steps} \\boxed{{{problem.answer}}}"


def r1_zero_document(problem: WordProblem, rng: random.Random, model: PretrainedHere, template: str) -> tuple[str, str]:
    """(prompt, response) under the r1_zero prompt, in one of the accepted and unaccepted forms."""
    guesses = rng.random() < model.guess_share
    steps, answer = ("", rng.randint(0, LARGEST)) if guesses else (f" {problem.steps}", problem.answer)
    ending = COMPLETE if rng.random() < model.complete_form_share else rng.choice(INCOMPLETE)
    return format_prompt(template, problem.question), steps + ending.format(answer=answer)


def documents(model: PretrainedHere, levels: int) -> Iterator[tuple[str, str]]:
    """An endless stream of (prompt, response) pairs; none of their questions can be a validation question."""
    rng = random.Random(f"documents {model.seed}")
    template = load_prompt("r1_zero")
    for problem in word_problems(model.seed, levels, validation=False):
        if rng.random() < model.r1_zero_share:
            yield r1_zero_document(problem, rng, model, template)
        else:
            yield native_document(problem)

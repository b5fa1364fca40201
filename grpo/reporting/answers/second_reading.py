r"""Questions on the base model: is a failure the model's or the parser's, and what do more samples say?

The first reading of an answer uses :mod:`grpo.tasks.formats` and :mod:`grpo.grader`. The second shares no code with it, accepts
more forms (any white space, any case, an answer that is boxed or merely stated), and compares numbers as fractions and
everything else by math-verify.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from grpo.common.files import read_jsonl
from grpo.common.safe_text import code, short
from grpo.reporting.sentences import paragraph, render, table
from grpo.reporting.tables import KINDS
from grpo.study import paths
from grpo.tasks.graded import GradedTask
from grpo.tasks.task import Task

Completion = dict[str, Any]  # a line of data/math_baseline/PROMPT.jsonl

SHOWN = 10  # examples of each category
TAIL = 160  # characters of a response that an example shows
RIGHT, WRONG_ANSWER, WRONG_FORM = "format 1, answer 1", "format 1, answer 0", "format 0, answer 0"
FAILURES = (WRONG_FORM, WRONG_ANSWER)
# Kinds of failure by the second reading, and who is at fault; the first that applies.
PARSER_FORM = "the form is right up to white space or case, and the answer is right"
PARSER_ANSWER = "the given answer equals the truth"
OTHER_FORM = "the right answer, but not in the form"
ELSEWHERE = "a wrong answer, with the right one elsewhere in the response"
WRONG = "a wrong answer"
NONE = "no answer in any form"
AT_FAULT = {PARSER_FORM: "parser", PARSER_ANSWER: "parser"} | dict.fromkeys((OTHER_FORM, ELSEWHERE, WRONG, NONE), "model")

_R1_ZERO = re.compile(r"</think>\s*<answer>", re.I), re.compile("</answer>", re.I)
_BOXED = re.compile(r"\\f?boxed\s*\{([^{}]*(?:\{[^{}]*\}[^{}]*)*)\}", re.I)
_TAGGED = re.compile(r"<answer>(.*?)(?:</answer>|$)", re.S | re.I)
_NUMBER = re.compile(r"-?\d+(?:,\d{3})*(?:\.\d+)?(?:\s*/\s*\d+)?")
_RATIO = re.compile(r"(-?)\\[dt]?frac\{(-?\d+)\}\{(\d+)\}")
# Answers on which math-verify may not end: towers of powers, factorials, very long texts.
_HEAVY = re.compile(r"!|\^.*\^|\d{20}|\^\{?\d{3}", re.S)
_LONGEST = 100  # characters
DISAGREE = 0.05


def read_records(prompt: str) -> list[Completion]:
    """Read the zero-shot completions under a prompt; a missing or damaged file is a UserError."""
    keys = ("problem", "response", "answer", "ground_truth", "category")
    return read_jsonl(paths.BASELINE / f"{prompt}.jsonl", "math_baseline", lambda value: {key: value[key] for key in keys})


def read_sampled(prompt: str) -> list[Completion]:
    """Read the samples for best-of-N under a prompt, in the form of :func:`read_records`; empty if there are none."""
    path = paths.BEST_OF_N / f"{prompt}.jsonl"

    def records(value: Completion) -> list[Completion]:
        about = {"problem": value["problem"], "ground_truth": value["ground_truth"]}
        return [
            about
            | {"response": sample["response"], "answer": sample["answer"]}
            | {"category": f"format {sample['format_reward']:.0f}, answer {sample['answer_reward']:.0f}"}
            for sample in value["samples"]
        ]

    return [record for of in read_jsonl(path, "best_of_n", records) for record in of] if path.exists() else []


def second_reading(record: Completion, prompt: str) -> str:
    """Classify a failure by the second reading: a key of ``AT_FAULT``."""
    response, truth = record["response"], str(record["ground_truth"])
    if record["category"] == WRONG_ANSWER:
        if equal(record["answer"] or "", truth):
            return PARSER_ANSWER
        return ELSEWHERE if any(equal(answer, truth) for answer in stated(response)) else WRONG
    read = {"r1_zero": _last_tagged, "question_only": _last_boxed}.get(prompt)
    if read and equal(read(response), truth):
        return PARSER_FORM
    answers = stated(response)
    if not answers:
        return NONE
    return OTHER_FORM if any(equal(answer, truth) for answer in answers) else WRONG


def stated(response: str) -> list[str]:
    """Possible answers in a response: in its last answer tags (closed or not), its last box, its last number."""
    tagged, number = (["", *pattern.findall(response)][-1] for pattern in (_TAGGED, _NUMBER))
    return [text for text in (tagged, _last_boxed(response), number) if text.strip()]


def _last_boxed(response: str) -> str:
    return str(["", *_BOXED.findall(response)][-1])


def _last_tagged(response: str) -> str:
    """The text in the last answer tags after reasoning. One pattern for both tags would look for the end after each start."""
    opening, closing = _R1_ZERO
    found, start = "", opening.search(response)
    while start and (end := closing.search(response, start.end())):
        found, start = response[start.end() : end.start()], opening.search(response, end.end())
    return found


def equal(answer: str, truth: str) -> bool:
    """Whether two texts are equal as numbers or by math-verify."""
    answer, truth = (text.strip().strip("$").strip() for text in (answer, truth))
    if not answer or not truth:
        return False
    numbers = number(answer), number(truth)
    if None not in numbers:
        return numbers[0] == numbers[1]
    if answer == truth:
        return True
    if any(_HEAVY.search(text) or len(text) > _LONGEST for text in (answer, truth)):
        return False
    from math_verify import parse, verify

    try:
        return bool(verify(parse(f"${truth}$"), parse(f"${answer}$")))
    except Exception:  # sympy may raise anything on odd input; then they do not count as equal
        return False


def number(text: str) -> Fraction | None:
    """Parse a text that is one number, such as ``1,200``, ``3.5``, ``-2/3`` or ``\\frac{1}{2}``; None for other texts."""
    text = _RATIO.sub(r"\1\2/\3", text.strip())
    if not _NUMBER.fullmatch(text):
        return None
    try:
        return Fraction(text.replace(",", "").replace(" ", ""))
    except (ValueError, ZeroDivisionError):
        return None


def is_mathematical(task: Task) -> bool:
    """Whether the grader judges the task's answers as mathematics."""
    return isinstance(task, GradedTask) and getattr(task, "math", True)


def judge(prompt: str, records: Sequence[Completion], sampled: Sequence[Completion] = ()) -> str:
    """Count the failures under a prompt by both readings, and show examples of right answers and of each kind (Markdown).

    The second reading must suit the task: accept at least half of the answers that the first accepts.

    Args:
        sampled: more completions of the same model, shown if the records have fewer than ten of a category.
    """
    right = [record for record in records if record["category"] == RIGHT]
    accepted = sum(equal(record["answer"] or "", str(record["ground_truth"])) for record in right)
    failures = [record for record in records if accepted >= len(right) / 2 and record["category"] in FAILURES]
    read = [(record["category"], second_reading(record, prompt)) for record in failures]
    kinds = {
        (name, kind): [record for record, key in zip(failures, read, strict=True) if key == (name, kind)]
        for name in FAILURES
        for kind in AT_FAULT
        if (name, kind) in read
    }
    of_category = Counter({RIGHT: len(right)}) + Counter(name for name, _ in read)
    return render(
        "parser_or_model.md.j2",
        prompt=prompt,
        responses=len(records),
        right=len(right),
        accepted=accepted,
        failures=len(failures),
        parser=sum(len(of) for (_, kind), of in kinds.items() if AT_FAULT[kind] == "parser"),
        form=sum(len(of) for (_, kind), of in kinds.items() if kind == OTHER_FORM),
        shown=SHOWN,
        kinds=[(name, kind, AT_FAULT[kind], len(of)) for (name, kind), of in kinds.items()],
        examples=({RIGHT: _examples(right)} if right else {})
        | {f"{name}; {kind} ({AT_FAULT[kind]})": _examples(of) for (name, kind), of in kinds.items()}
        | {
            f"{name}, from the samples for best-of-N, as the evaluation has only {of_category[name]}": _examples(others)
            for name in (RIGHT, *FAILURES)
            if of_category[name] < SHOWN and (others := [record for record in sampled if record["category"] == name])
        },
    )


def _examples(records: Sequence[Completion]) -> str:
    """Table of examples, spread over the evaluation."""
    step = max(1, len(records) // SHOWN)
    return table(
        {
            "problem": short(record["problem"]),
            "truth": code(record["ground_truth"]),
            "read as": "nothing" if record["answer"] is None else code(record["answer"]),
            "the response ends": code(record["response"][-TAIL:]),
        }
        for record in records[::step][:SHOWN]
    )


def discuss_best_of_n(prompt: str, metrics: dict[str, Any]) -> str:
    """Explain the gap between Best@N and pass@N under one prompt, in one to three sentences."""
    n, kinds = list(metrics["n"].items())[-1]
    values = {kind: kinds[kind]["value"] for kind in KINDS}
    return paragraph(
        "best_of_n_sentences.md.j2", prompt=prompt, n=n, value=values, problems=metrics["problems"], **metrics["ranking"]
    )


def read_first_and_all(prompt: str) -> dict[str, tuple[float, float]]:
    """Read problem -> whether its first sample is right (1.0 or 0.0), and the share of its samples that are right."""

    def line(value: Completion) -> tuple[str, tuple[float, float]]:
        rights = [float(sample["answer_reward"] == 1.0) for sample in value["samples"]]
        return value["problem"], (rights[0], float(np.mean(rights)))

    return dict(read_jsonl(paths.BEST_OF_N / f"{prompt}.jsonl", "best_of_n", line))


def chance_of(zero_shot: Sequence[float], rights: Sequence[int], samples: int) -> float:
    """Two-sided p of the hypothesis that each zero-shot answer is one more sample of its problem.

    Exact permutation test within problems (Good, Permutation Tests, 2000). Under the hypothesis, the number of right answers is
    a sum of independent draws with probability (rights + zero-shot) / (samples + 1). p sums over all numbers that are at
    most as likely as the observed one.

    Args:
        zero_shot: 1.0 for a problem with a right answer.
        rights: number of right samples of each problem.
    """
    distribution = np.ones(1)
    for right, zero in zip(rights, zero_shot, strict=True):
        chance = (right + zero) / (samples + 1)
        distribution = np.convolve(distribution, [1 - chance, chance])
    observed = distribution[round(sum(zero_shot))]
    return min(1.0, float(distribution[distribution <= observed * (1 + 1e-9)].sum()))


def agreement(prompt: str, zero_shot: dict[str, float], sampled: dict[str, tuple[float, float]], best: dict[str, Any]) -> str:
    """Compare both figures on their common problems, and state whether they are consistent with one model.

    Args:
        best: the prompt's entry in reports/best_of_n.json.
    """
    shared = np.array([(zero, *sampled[problem]) for problem, zero in zero_shot.items() if problem in sampled])
    zero, first, every = shared.T if len(shared) else np.zeros((3, 0))
    rights = [round(share * best["samples"]) for share in every]
    return paragraph(
        "agreement_sentences.md.j2",
        prompt=prompt,
        all=[*zero_shot.values()],
        zero=zero,
        first=first,
        every=every,
        samples=best["samples"],
        one={kind: best["n"]["1"][kind]["value"] for kind in ("pass", "best")} if "1" in best["n"] else None,
        same=zero_shot.keys() == sampled.keys(),
        p=chance_of(zero.tolist(), rights, best["samples"]),
        disagree=DISAGREE,
    )

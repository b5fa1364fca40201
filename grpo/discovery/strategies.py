"""Prompts for a language model from the attempts so far, and extraction of the program from its answer.

The three strategies differ in the number of answers to the same prompt, and in whether the best of them, with the evaluator's
verdict, becomes a turn of the conversation. A prompt depends only on the log, so a search that was killed continues with the
same prompts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from itertools import takewhile

from grpo.discovery.log import Attempt, best_of

Messages = list[dict[str, str]]
Strategy = Callable[[Sequence[Attempt]], tuple[int, ...]]  # indices of the attempts in the conversation, in order

ROUND = 4  # answers to the same prompt in `hybrid`
TURNS = 8  # most answers in a conversation; then a new one begins with the best program
REFUSED = "the endpoint refused the request"  # start of a proposal's ``problem`` if its prompt will never be answered
EMPTY = "(an empty answer)"  # replaces an empty answer, as endpoints refuse a message without text

# The baseline prompt of the kissing number challenge (NLPDL, homework 3, section 7.4), word for word.
BASELINE = (
    r"I need to find a set of integer vectors C in 11 dimensions such that 0 is not in C and "
    r"$\min_{x \neq y \in C} \|x - y\| \geq \max_{x \in C} \|x\|$. My score is the number of vectors in C. "
    r"Please write a Python program that defines a global variable `points` as a list of such vectors."
)


def best_of_n(attempts: Sequence[Attempt]) -> tuple[int, ...]:
    """Independent answers to the baseline prompt; the verifier picks the best of them."""
    return ()


def conversation(attempts: Sequence[Attempt], n: int = 1) -> tuple[int, ...]:
    """The conversation so far; each turn is the best of ``n`` answers to the same prompt.

    A new conversation begins after ``TURNS`` answers, or if the endpoint refuses the prompt (for example as too long). It
    begins with the best program, or with the problem alone if that was refused too.
    """
    answered = [attempt for attempt in attempts if attempt.proposal.answer is not None]
    best = best_of(answered)
    anew = (best.index,) if best else ()
    if attempts and attempts[-1].proposal.problem.startswith(REFUSED):
        return anew if len(attempts[-1].proposal.parents) > 1 else ()
    if not answered:
        return ()
    held = answered[-1].proposal.parents
    same = list(takewhile(lambda attempt: attempt.proposal.parents == held, reversed(answered)))
    if len(same) % n:
        return held
    tried = [attempt for attempt in same[:n] if attempt.proposal.program is not None] or same
    turn = best_of(tried[::-1]) or tried[0]
    return (*held, turn.index) if len(held) < TURNS else anew


STRATEGIES: dict[str, Strategy] = {
    "best_of_n": best_of_n,
    "conversation": conversation,
    "hybrid": partial(conversation, n=ROUND),
}


def messages_of(attempts: Sequence[Attempt], held: Sequence[int]) -> Messages:
    """The conversation with the answers of these attempts: the problem, then each answer and the evaluator's feedback."""
    messages = [{"role": "user", "content": BASELINE}]
    for index in held:
        answer = attempts[index].proposal.answer or ""
        messages.append({"role": "assistant", "content": answer if answer.strip() else EMPTY})
        messages.append({"role": "user", "content": feedback(attempts[index])})
    return messages


def feedback(attempt: Attempt) -> str:
    """The evaluator's verdict on an attempt and the next request, for the conversation."""
    verdict = attempt.verdict
    if attempt.proposal.program is None:
        return f"Your answer held no program that could be run: {attempt.proposal.problem}. Please give the whole program."
    said = f"num_points: {verdict.num_points}, dimension: {verdict.dimension}, validity: {verdict.validity}"
    if attempt.score:
        return f"The evaluator says: {said}. The set is valid and scores {attempt.score:.0f}. Find a larger one."
    return f"The evaluator says: {said}. The program failed with this error: `{verdict.message}`. Find the cause and mend it."


# ---------------------------------------------------------------------------------------------- the program in an answer

# A tag that opens reasoning stands at the start of a line; elsewhere it may be part of a program.
_TAGS = r"(?:think|thinking|thought|reasoning)>"
_REASONING = re.compile(rf"^[ \t]*<{_TAGS}(?:(?!</?{_TAGS}).)*</{_TAGS}", re.M | re.S | re.I)
_FENCED = re.compile(r"^([ \t]*)(`{3,}+|~{3,}+)([^`\n]*+)$\n?(.*?)(?:^[ \t]*(\2)[`~]*[ \t]*$|\Z)", re.M | re.S)
_PYTHON = re.compile(r"\{?\.?py(?:thon3?)?\b", re.I)
# Without lines such as `points = run_code()`, which use what another block defines. `++` gives nothing back, so
# the time is linear.
_DEFINES = re.compile(
    r"^(?:def (?:run_code|get_centers)\b|points(?:[ \t]*+:[^=\n]++)?+[ \t]*+=(?!=|.*\b(?:run_code|get_centers)\())", re.M
)


def extract_program(answer: str) -> tuple[str | None, str]:
    """Extract the program from an answer: the last fenced block that defines what the evaluator looks for.

    Later blocks that only use it are ignored, and so is text in reasoning tags. If no block defines it, the last block is the
    program, and the evaluator will report what is missing. An answer without fences may be a program as a whole. Returns the
    program and "", or None and the reason why there is none.
    """
    if not answer.strip():
        return None, "the answer is empty"
    # Reasoning may have an end tag only: the chat template may remove the start tag, and reasoning may mention such tags.
    text = re.split(f"</{_TAGS}", _REASONING.sub("", answer.replace("\r\n", "\n")), flags=re.I)[-1]
    text, *unended = re.split(rf"^[ \t]*<{_TAGS}", text, flags=re.M | re.I)
    blocks = []
    for indent, _, info, block, closed in _FENCED.findall(text):
        program = "\n".join(line.removeprefix(indent) for line in block.split("\n"))
        if program.strip():
            blocks.append((bool(_PYTHON.match(info.lstrip())), program, bool(closed)))
    blocks = [block for block in blocks if block[0]] or blocks
    if not blocks:
        if _DEFINES.search(text):
            return text.strip() + "\n", ""
        return None, "the answer ends within its reasoning" if unended else "the answer holds no code block"
    closed_blocks = [program for _, program, closed in blocks if closed]
    defining = [program for program in closed_blocks if _DEFINES.search(program)]
    # An open block without a language at the end may be due to one fence too many.
    if not blocks[-1][2] and (blocks[-1][0] or not defining):
        return None, "the answer's last code block is not finished: it has no closing fence"
    return (defining or closed_blocks)[-1].rstrip() + "\n", ""

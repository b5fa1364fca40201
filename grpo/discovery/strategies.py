"""What a language model is asked, from the attempts so far, and the program in its answer.

A strategy is a pure function of the log and a seed, so that a search that was killed asks after its restart what it would have
asked anyway.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from random import Random
from symtable import Symbol, symtable
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from grpo.discovery.log import Attempt, best_of
from grpo.discovery.sandbox import Limits

Messages = list[dict[str, str]]
Strategy = Callable[..., tuple[tuple[int, ...], Messages]]  # attempts and a seed; to the attempts built on, and the prompt

LONGEST_PROGRAM = 20_000  # characters of a program that a prompt shows; a prompt says where there were more
PATIENCE = 3  # answers in a row without progress, after which `refine` goes back to the best program
ROUND = 4  # answers to one and the same prompt of `best_of_n`
POPULATION = 3  # programs that a prompt of `hybrid` shows
REFUSED = "the endpoint refused the request"  # how the problem of an attempt begins whose prompt will never be answered


# ---------------------------------------------------------------------------------------------------------- strategies


def simple(attempts: Sequence[Attempt], seed: int, bounds: bool = True) -> tuple[tuple[int, ...], Messages]:
    """The same prompt every time; nothing is fed back."""
    return (), _prompt("problem", bounds=bounds)


def refine(attempts: Sequence[Attempt], seed: int, bounds: bool = True) -> tuple[tuple[int, ...], Messages]:
    """The last program with what the verifier said of it: its message if it failed, its number of points if it was valid.

    Where the last answer held no program, the prompt says why not and shows the last program before it. After every
    ``PATIENCE`` answers in a row that did not get further than the best program, the prompt shows that one again.
    """
    answered = _answered(attempts)
    if not answered or _refused(attempts):
        return simple(attempts, seed, bounds)
    last = answered[-1]
    programs = [attempt for attempt in answered if attempt.proposal.program is not None]
    no_program = last.proposal.problem if last.proposal.program is None else ""
    best = best_of(answered)
    since = len(answered) - 1 - answered.index(best) if best else 0
    returned = best is not None and since > 0 and since % PATIENCE == 0
    basis = best if returned else programs[-1] if programs else None
    judged = last if returned else basis
    return (basis.index,) if basis else (), _prompt(
        "refine",
        bounds=bounds,
        returned=returned,
        patience=PATIENCE,
        no_program=no_program,
        shown=_shown(basis) if basis else None,
        points=_points(basis) if basis else 0,
        message=judged.verdict.message if judged and not judged.score else "",
    )


def best_of_n(attempts: Sequence[Attempt], seed: int, bounds: bool = True) -> tuple[tuple[int, ...], Messages]:
    """Rounds of ``ROUND`` answers to one and the same prompt, which shows the best program of the rounds before."""
    answered = _answered(attempts)
    best = best_of(answered[: len(answered) // ROUND * ROUND])
    if best is None or _refused(attempts):
        return simple(attempts, seed, bounds)
    return (best.index,), _prompt("best_of_n", bounds=bounds, shown=_shown(best), points=_points(best))


def hybrid(attempts: Sequence[Attempt], seed: int, bounds: bool = True) -> tuple[tuple[int, ...], Messages]:
    """The best ``POPULATION`` distinct programs with their scores, and the message of the last attempt that failed.

    The seed draws between programs of equal scores, and which of the population the answer is to build on. Until a
    program is valid, the last one that failed is shown instead.
    """
    answered = _answered(attempts)
    if not answered or _refused(attempts):
        return simple(attempts, seed, bounds)
    draw = Random(seed)
    distinct = {attempt.proposal.program: attempt for attempt in reversed(answered) if attempt.score > 0}
    # By index first, so that the draw depends on the seed and the log alone.
    ranked = sorted(sorted(distinct.values(), key=lambda one: one.index), key=lambda one: (-one.score, draw.random()))
    population = draw.sample(ranked[:POPULATION], k=min(POPULATION, len(ranked)))
    failures = [attempt for attempt in answered if not attempt.score]
    programs = [attempt for attempt in failures if attempt.proposal.program is not None]
    failed = programs[-1:] if not population else []
    return tuple(attempt.index for attempt in population + failed), _prompt(
        "hybrid",
        bounds=bounds,
        population=[{"points": _points(attempt), "shown": _shown(attempt)} for attempt in population],
        failed=_shown(failed[0]) if failed else None,
        message=failures[-1].verdict.message if failures else "",
    )


_PLANS = (simple, refine, best_of_n, hybrid)
# As the handout's first prompt, which states the problem only: a model that knows the bounds may recall what reaches them.
WITHOUT_BOUNDS = "_without_bounds"
STRATEGIES: dict[str, Strategy] = {plan.__name__: plan for plan in _PLANS} | {
    f"{plan.__name__}{WITHOUT_BOUNDS}": partial(plan, bounds=False) for plan in _PLANS
}


# -------------------------------------------------------------------------------------------------------------- prompts


@dataclass(frozen=True)
class _Shown:
    """A program as a prompt shows it."""

    text: str
    length: int  # of the whole program
    fence: str


def _shown(attempt: Attempt) -> _Shown:
    program = (attempt.proposal.program or "").rstrip()
    # As in Markdown: a fence is longer than any in the text, so that a docstring's fence does not end the block.
    longest = max((len(run) for run in re.findall(r"`{3,}", program)), default=2)
    return _Shown(program[:LONGEST_PROGRAM], len(program), "`" * (longest + 1))


def _prompt(template: str, **values: Any) -> Messages:
    """One message of the user: some models refuse any other role at the beginning."""
    text = _templates().get_template(f"{template}.md.j2").render(limits=Limits(), **values)
    return [{"role": "user", "content": text.strip() + "\n"}]


@cache
def _templates() -> Environment:
    return Environment(
        loader=PackageLoader("grpo.discovery", "prompts"), undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )


def _answered(attempts: Sequence[Attempt]) -> list[Attempt]:
    """The attempts that the endpoint answered: what failed between here and there is no news to the model."""
    return [attempt for attempt in attempts if attempt.proposal.answer is not None]


def _refused(attempts: Sequence[Attempt]) -> bool:
    """Whether the endpoint would not take the last prompt, such as one too long for it; then the short one is due."""
    return bool(attempts) and attempts[-1].proposal.problem.startswith(REFUSED)


def _points(attempt: Attempt) -> int:
    return int(attempt.score)


# ---------------------------------------------------------------------------------------------- the program in an answer

PYTHON = {"python", "py", "python3"}
FUNCTIONS = {"run_code", "get_centers"}
INTERFACE = FUNCTIONS | {"points"}

# A tag that begins reasoning stands at the beginning of a line; elsewhere it may be part of a program.
_TAGS = r"(?:think|thinking|thought|reasoning)>"
_REASONING = re.compile(rf"^[ \t]*<{_TAGS}(?:(?!</?{_TAGS}).)*</{_TAGS}", re.M | re.S | re.I)
_FENCED = re.compile(r"^([ \t]*)(`{3,}|~{3,})[ \t]*([^`\n]*)$\n?(.*?)(?:^[ \t]*(\2)[`~]*[ \t]*$|\Z)", re.M | re.S)


@dataclass(frozen=True)
class _Block:
    """A fenced block of an answer."""

    language: str
    text: str
    finished: bool


def extract_program(answer: str) -> tuple[str | None, str]:
    """The program in an answer of a language model.

    It is the last fenced block that is a program, Python ones first: one that defines run_code, get_centers or points, or
    does not parse (then the reason is its error). Blocks after it that only show how to use it do not count, and neither
    does what stands between reasoning tags. An answer without fences may be a program as a whole.

    Returns:
        The program and "", or None and the reason why there is none.
    """
    if not answer.strip():
        return None, "the answer is empty"
    text, in_reasoning = _without_reasoning(answer.replace("\r\n", "\n"))
    blocks = [block for block in _blocks(text) if block.text.strip()]
    blocks = [block for block in blocks if block.language in PYTHON] or blocks
    if not blocks:
        if _is_program(text):
            return text.strip() + "\n", ""
        if in_reasoning:
            return None, "the answer ends within its reasoning and holds no program"
        return None, "the answer holds no code block"
    finished = [block for block in blocks if block.finished]
    programs = [block for block in finished if _is_program(block.text)]
    in_python = blocks[-1].language in PYTHON
    # Without a language, the last block may come of a fence too many, and one that does not parse may be no Python at all.
    if not blocks[-1].finished and (in_python or not programs):
        return None, "the answer's last code block is not finished: it has no closing fence"
    if in_python:
        programs = [block for block in finished if block in programs or _syntax_error(block.text)]
    chosen = (programs or finished)[-1].text
    error = _syntax_error(chosen)
    return (None, f"the program does not parse: {error}") if error else (chosen.rstrip() + "\n", "")


def _without_reasoning(answer: str) -> tuple[str, bool]:
    """The answer outside its reasoning, and whether it ends within it."""
    # An end without a beginning: the chat template has swallowed it, or the reasoning speaks of such tags.
    text = re.split(f"</{_TAGS}", _REASONING.sub("", answer), flags=re.I)[-1]
    before, *inside = re.split(rf"^[ \t]*<{_TAGS}", text, flags=re.M | re.I)
    return before, bool(inside)


def _blocks(text: str) -> list[_Block]:
    """All fenced blocks, without the indentation of their fences."""
    found = []
    for indent, _, info, block, closing in _FENCED.findall(text):
        lines = [line.removeprefix(indent) for line in block.split("\n")]
        language = (info.split() or [""])[0].strip("{}.").lower()
        found.append(_Block(language, "\n".join(lines), bool(closing)))
    return found


def _syntax_error(text: str) -> str:
    """What keeps a text from being Python, with its line; empty if nothing does."""
    try:
        _symbols(text)
    except SyntaxError as error:
        where = f"line {error.lineno}: " if error.lineno else ""
        line = f" (`{error.text.strip()[:100]}`)" if error.text and error.text.strip() else ""
        return f"{where}{error.msg}{line}"
    except (ValueError, RecursionError, MemoryError) as error:
        return f"{type(error).__name__}: {error}" if str(error) else "it is nested too deeply"
    return ""


def _symbols(text: str) -> list[Symbol]:
    """The global names of a program."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of escape sequences such as "\d", which are no concern of the user's
        return symtable(text, "program", "exec").get_symbols()


def _is_program(text: str) -> bool:
    """Whether a text is Python that defines what the verifier looks for, and does not use what another block defines."""
    if _syntax_error(text):
        return False
    symbols = _symbols(text)
    defined = {symbol.get_name() for symbol in symbols if symbol.is_assigned()}
    used = {symbol.get_name() for symbol in symbols if symbol.is_referenced()}
    return bool(defined & INTERFACE) and not (used & FUNCTIONS) - defined

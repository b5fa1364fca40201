r"""Measure the speed and accuracy of the grader: ``python benchmarks/grader.py`` prints a table.

The answers are generated from templates, in the proportions of MATH's final answers. Half of them are right, and a third of the
right ones are written differently from the ground truth. Three ways of grading get the same answers:
:func:`grpo.grader.process.is_equal` one by one, :func:`~grpo.grader.process.grade_batch` at once, and plain math-verify with
its own time limits, on a part of the answers as it is slow. A fourth row shows the cost of the worker process: it grades all
answers, whether they need computer algebra or not.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from math import gcd
from pathlib import Path

from grpo.grader.grader import cheap_verdict
from grpo.grader.process import Grade, default_process, grade_batch, is_equal

Spellings = tuple[str, list[str], list[str]]
"""A ground truth, other spellings of it, and wrong answers."""


@dataclass(frozen=True)
class Case:
    kind: str
    answer: str
    truth: str
    right: bool


@dataclass(frozen=True)
class Result:
    """Rates are per second and CPU core, durations in milliseconds of one call (None where one call grades everything)."""

    name: str
    answers: int
    per_core_s: float
    p50_ms: float | None
    p99_ms: float | None
    max_ms: float | None
    agreement: float
    timed_out: int | None


# ----------------------------------------------------------------------------------------------------------- the answers


def _integer(r: random.Random) -> Spellings:
    n = r.choice([r.randint(0, 12), r.randint(-20, 100), r.randint(100, 999), r.randint(1000, 99999)])
    same = [f"${n}$", f"{n}.", f"{n}.0", f"x = {n}", f"({n})", rf"\frac{{{3 * n}}}{{3}}", f"{n:,}", rf"\text{{{n}}}"]
    wrong = [
        str(n + 1),
        str(-n - 1),
        str(10 * n + 3),
        rf"\frac{{{2 * n + 1}}}{{2}}",
        f"{n}.5",
        f"{n} or {n + 2}",
        f"{n}, {n + 1}",
    ]
    odd = [rf"{n + 2}\sqrt{{{r.choice([2, 3, 5])}}}", rf"{n + 2}\pi", f"{n}+x", rf"\frac{{{n + 1}}}{{\sqrt{{3}}}}"]
    return str(n), same, odd if r.random() < 0.1 else wrong


def _fraction(r: random.Random) -> Spellings:
    bottom = r.randint(2, 60)
    top = r.choice([n for n in range(1, 100) if gcd(n, bottom) == 1])
    truth = rf"\frac{{{top}}}{{{bottom}}}"
    same = [f"{top}/{bottom}", rf"\dfrac{{{top}}}{{{bottom}}}", rf"\frac{{{2 * top}}}{{{2 * bottom}}}", f"x={truth}"]
    wrong = [rf"\frac{{{top + bottom}}}{{{bottom}}}", f"-{top}/{bottom}", str(top), f"{top / bottom + 0.01:.3f}"]
    odd = [rf"\frac{{{top}\sqrt{{2}}}}{{{bottom}}}", rf"\frac{{{top}\pi}}{{{bottom}}}"]
    return truth, same, odd if r.random() < 0.1 else wrong


def _decimal(r: random.Random) -> Spellings:
    if r.random() < 0.5:
        cents = r.randint(101, 9999)
        amount = f"{cents // 100}.{cents % 100:02}"
        other = f"{cents // 100 + 1}.{cents % 100:02}"
        return (
            amount,
            [rf"\${amount}", amount + "0", rf"\frac{{{cents}}}{{100}}", f"{amount} dollars"],
            [other, rf"\${other}", "1"],
        )
    n = r.randint(1000, 9999999)
    return f"{n:,}".replace(",", r",\!"), [str(n), f"{n:,}", rf"\${n:,}"], [str(n + 1), f"{n + 10:,}", str(n)[:-1]]


def _collection(r: random.Random) -> Spellings:
    a, b = sorted(r.sample(range(-30, 60), 2))
    root = r.choice([2, 3, 5, 6, 7, 10, 11, 13])
    return r.choice(
        [
            (f"({a},{b})", [rf"\left( {a}, {b} \right)", f"({a}, {b}.0)"], [f"({b},{a})", f"({a},{b + 1})", f"[{a},{b}]"]),
            (f"[{a},{b})", [rf"\left[{a}, {b}\right)", rf"{a} \le x < {b}"], [f"({a},{b})", f"[{a},{b + 1})", str(a)]),
            (f"{a}, {b}", [f"{b},{a}", rf"\{{{a},{b}\}}", f"x={a} or x={b}"], [str(a), f"{a},{b + 1}", f"({a},{b})"]),
            (
                rf"{a} + \sqrt{{{root}}}, {a} - \sqrt{{{root}}}",
                [rf"{a} \pm \sqrt{{{root}}}", rf"-\sqrt{{{root}}}+{a}, \sqrt{{{root}}}+{a}"],
                [rf"{a + 1} \pm \sqrt{{{root}}}", rf"{a} + \sqrt{{{root}}}"],
            ),
            (
                rf"(-\infty,{a})\cup({b},\infty)",
                [rf"({b}, \infty) \cup (-\infty, {a})"],
                [rf"(-\infty,{a}]\cup[{b},\infty)", f"({a},{b})"],
            ),
        ]
    )


def _worded(r: random.Random) -> Spellings:
    n, unit = r.randint(2, 400), r.choice(["inches", "cm", "hours", "meters", "square units"])
    word, other = r.sample(["even", "odd", "Evelyn", "ellipse", "parabola", "Tuesday", "neither"], 2)
    letter, next_letter = r.sample("ABCDE", 2)
    return r.choice(
        [
            (rf"{n}\text{{ {unit}}}", [str(n), f"{n} {unit}"], [str(n + 1), rf"{n + 1}\text{{ {unit}}}"]),
            (rf"{n}^\circ", [str(n), f"{n} degrees", rf"{n}^{{\circ}}", f"{n}°"], [rf"{n + 5}^\circ", str(n - 1)]),
            (rf"\text{{{word}}}", [word, word.capitalize()], [other, rf"\text{{{other}}}"]),
            (rf"\text{{({letter})}}", [letter, rf"\text{{{letter}}}"], [next_letter, rf"\text{{({next_letter})}}"]),
        ]
    )


def _expression(r: random.Random) -> Spellings:
    a, b, c = r.randint(2, 15), r.randint(2, 15), r.choice([2, 3, 5, 6, 7, 10, 11, 13, 14, 15])
    x, root = r.choice("xtn"), rf"\sqrt{{{c}}}"
    square = f"{a}{x}^2+{b}{x}"
    return r.choice(
        [
            (f"{a}{root}", [rf"\sqrt{{{a * a * c}}}", rf"{root}\cdot {a}"], [f"{a + 1}{root}", rf"\sqrt{{{a * c}}}", str(a)]),
            (rf"\frac{{{root}}}{{{c}}}", [rf"\frac{{1}}{{{root}}}", f"{root}/{c}"], [rf"\frac{{{root}}}{{{c + 1}}}", root]),
            (f"{a}+{b}{root}", [f"{b}{root}+{a}"], [f"{b}+{a + 1}{root}", f"{a}-{b}{root}"]),
            (rf"{a}\pi", [rf"\pi \cdot {a}", f"{a}π", rf"\frac{{{2 * a}\pi}}{{2}}"], [str(a), rf"{a + 1}\pi", rf"{a}\pi^2"]),
            (
                rf"\frac{{{2 * a + 1}\pi}}{{2}}",
                [rf"\frac{{{2 * a + 1}}}{{2}}\pi", rf"{a}.5\pi"],
                [rf"{a}\pi", rf"\frac{{{a}\pi}}3"],
            ),
            (f"{square}+{c}", [f"{c}+{square}", f"{x}({a}{x}+{b})+{c}"], [f"{square}-{c}", f"{square}+{c + 1}", f"{a}{x}+{b}"]),
            (
                f"({x}+{a})({x}-{b})",
                [f"({x}-{b})({x}+{a})", f"{x}^2{a - b:+}{x}-{a * b}"],
                [f"({x}-{a})({x}+{b + 1})", f"{x}^2-{a * b + 1}"],
            ),
            (f"{a}-{b}i", [f"-{b}i+{a}"], [f"{a}+{b}i", str(a), f"{b}-{a + 1}i"]),
            (f"2^{{{a}}} - {c}", [str(2**a - c)], [str(2**a + c), f"2^{{{a + 1}}}-{c}"]),
        ]
    )


def _equation(r: random.Random) -> Spellings:
    a, b, c, d = (r.randint(-9, 20) for _ in range(4))
    e = r.randint(2, 9)

    def matrix(kind: str, *rows: str) -> str:
        body = r" \\ ".join(rows)
        return rf"\begin{{{kind}}} {body} \end{{{kind}}}"

    top, circle = f"{a} & {b}", e * e + 1
    return r.choice(
        [
            (
                matrix("pmatrix", top, f"{c} & {d}"),
                [matrix("pmatrix", f"{a}&{b}", f"{c}&{d}"), matrix("bmatrix", top, f"{c} & {d}")],
                [matrix("pmatrix", top, f"{c} & {d + 1}"), f"({a},{b},{c},{d})"],
            ),
            (
                matrix("pmatrix", str(a), f"{e}/2"),
                [matrix("pmatrix", str(a), rf"\frac{{{e}}}{{2}}")],
                [matrix("pmatrix", str(a + 1), rf"\frac{{{e}}}{{2}}")],
            ),
            (f"y = {e}x{a:+}", [f"y={a}+{e}x", f"{e}x{a:+}"], [f"y={e + 1}x{a:+}", f"y = {e}x{a + 1:+}"]),
            (f"x^2+y^2={circle}", [f"y^2+x^2={circle}", f"x^2+y^2-{circle}=0"], [f"x^2+y^2={e}", f"x^2-y^2={circle}"]),
        ]
    )


# Of 5,000 final answers of MATH, in percent.
KINDS: dict[str, tuple[int, Callable[[random.Random], Spellings]]] = {
    "integer": (66, _integer),
    "fraction": (10, _fraction),
    "decimal": (3, _decimal),
    "collection": (4, _collection),
    "worded": (3, _worded),
    "expression": (10, _expression),
    "equation": (4, _equation),
}


def make_cases(count: int, seed: int) -> list[Case]:
    """Generate ``count`` answers; the same seed gives the same answers."""
    r = random.Random(seed)
    cases = []
    for kind in r.choices(list(KINDS), [weight for weight, _ in KINDS.values()], k=count):
        truth, same, wrong = KINDS[kind][1](r)
        right = r.random() < 0.5
        other = r.random() < 1 / 3
        cases.append(Case(kind, r.choice(wrong) if not right else r.choice(same) if other else truth, truth, right))
    return cases


# ------------------------------------------------------------------------------------------------------------ the graders


def run_single(name: str, grade: Callable[[str, str], Grade], cases: list[Case]) -> tuple[Result, list[Case]]:
    """Grade one answer after the other in this thread, so that only this process or one worker computes at a time."""
    verdicts, seconds = [], []
    for case in cases:
        start = time.perf_counter()
        verdicts.append(grade(case.answer, case.truth))
        seconds.append(time.perf_counter() - start)
    wrong = [case for case, verdict in zip(cases, verdicts, strict=True) if verdict.equal != case.right]
    timed_out = sum(verdict.timed_out for verdict in verdicts)
    return _result(name, cases, seconds, len(wrong), timed_out), wrong


def run_batch(cases: list[Case]) -> Result:
    start = time.perf_counter()
    verdicts = grade_batch([(case.answer, case.truth) for case in cases])
    per_second = len(cases) / (time.perf_counter() - start)
    agreed = sum(verdict.equal == case.right for case, verdict in zip(cases, verdicts, strict=True))
    timed_out = sum(verdict.timed_out for verdict in verdicts)
    return Result("one batch", len(cases), per_second, None, None, None, agreed / len(cases), timed_out)


def run_math_verify(cases: list[Case]) -> Result:
    """Grade with math-verify as in its documentation; it does not say which answers ran out of time."""
    from math_verify import parse, verify

    logging.disable(logging.WARNING)
    verify(parse(r"$\sqrt{2}$"), parse(r"$\frac{2}{\sqrt{2}}$"))  # its imports are not what is timed
    seconds, disagreed = [], 0
    for case in cases:
        start = time.perf_counter()
        right = verify(parse(f"${case.truth}$"), parse(f"${case.answer}$"))
        seconds.append(time.perf_counter() - start)
        disagreed += right != case.right
    return _result("plain math-verify", cases, seconds, disagreed, None)


def _result(name: str, cases: list[Case], seconds: list[float], disagreed: int, timed_out: int | None) -> Result:
    percentiles = [1000 * s for s in statistics.quantiles(seconds, n=100, method="inclusive")]
    per_core, agreement = len(cases) / sum(seconds), 1 - disagreed / len(cases)
    return Result(name, len(cases), per_core, percentiles[49], percentiles[98], 1000 * max(seconds), agreement, timed_out)


def show(results: list[Result]) -> str:
    """Format the results as a Markdown table."""
    lines = [
        "| | answers | answers/s/core | p50 ms | p99 ms | max ms | agreement | timed out |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for r in results:
        p50, p99, most = (
            "–" if ms is None else f"{ms:.3f}" if ms < 1 else f"{ms:.1f}" for ms in (r.p50_ms, r.p99_ms, r.max_ms)
        )
        timed_out = "–" if r.timed_out is None else r.timed_out
        lines.append(
            f"| {r.name} | {r.answers} | {r.per_core_s:,.0f} | {p50} | {p99} | {most} | {r.agreement:.2%} | {timed_out} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the grader on generated answers.")
    parser.add_argument("--answers", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plain", type=int, default=2_000, help="number of answers for plain math-verify; 0: none")
    parser.add_argument("--disagreements", action="store_true", help="list answers on which the grader and the label disagree")
    parser.add_argument("--out", type=Path, help="also write the results to this JSON file")
    options = parser.parse_args()

    cases = make_cases(options.answers, options.seed)
    pairs = {(case.answer, case.truth) for case in cases}
    hard = sum(cheap_verdict(*pair) is None for pair in pairs)
    start = time.perf_counter()
    default_process().verdict("1", "1")
    print(
        f"{len(cases)} answers, seed {options.seed}, {len(pairs)} of them distinct, {hard} of those need computer algebra; "
        f"the worker started in {time.perf_counter() - start:.1f} s\n"
    )
    single, disagreed = run_single("one call each", is_equal, cases)
    results = [single, run_batch(cases), run_single("one call of the worker each", default_process().verdict, cases)[0]]
    if options.plain:
        results.append(run_math_verify(cases[: options.plain]))
    print(show(results))
    if options.disagreements:
        for case in sorted(set(disagreed), key=lambda case: (case.kind, case.right, case.truth)):
            print(f"{case.kind}: {case.answer!r} for {case.truth!r} is {'right' if case.right else 'wrong'}")
    if options.out:
        options.out.write_text(json.dumps([asdict(result) for result in results], indent=1) + "\n")


if __name__ == "__main__":
    main()

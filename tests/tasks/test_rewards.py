"""The grader and the reward functions against verdicts by hand."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
import timeit

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo.common.errors import UserError
from grpo.grader.extract import last_boxed
from grpo.grader.grader import cheap_verdict, check_ground_truth, full_verdict, is_equivalent
from grpo.grader.symbolic import too_complex
from grpo.tasks.keyword_inclusion import keyword_inclusion_reward_fn
from grpo.tasks.rewards import question_only_reward_fn, r1_zero_reward_fn

ZERO = {"format_reward": 0.0, "answer_reward": 0.0, "reward": 0.0}
FORM_ONLY = {"format_reward": 1.0, "answer_reward": 0.0, "reward": 0.0}
FULL = {"format_reward": 1.0, "answer_reward": 1.0, "reward": 1.0}

EXACTLY_EQUAL = [
    ("7", "7"), ("007", "7"), ("7.", "7"), ("$7$", "7"), ("**7**", "7"), ("7.0", "7"), ("(7)", "7"),
    ("1,234", "1234"), (r"48,\!048", "48048"), ("1{,}008{,}016", "1008016"), (r"111, \! 111, \! 111", "111111111"),
    ("0.5", r"\frac12"), (r"\dfrac{1}{2}", "1/2"), (".6", "0.6"), (r"\frac {40}7", r"\frac{40}{7}"), ("-1/2", r"\frac{-1}{2}"),
    ("1 3/8", r"1\frac{3}{8}"), ("11/8", r"1\frac38"), (r"0.\overline{3}", "1/3"), (r"0.1\overline{6}", "1/6"),
    (r"1.2\times 10^5", "120000"), ("1.5e3", "1500"), ("-562949953421312", "-2^{49}"),
    ("x = 5", "5"), ("5", "x=5"), ("x = y = 5", "5"), (r"56\%", r"0.56 = 56\%"),
    ("5 inches", r"5\text{ inches}"), ("5", r"5\text{ inches}"), ("5 in", r"5\text{ inches}"), ("80 cents", "80"),
    ("440 cm^2", r"440\text{ cm}^2"), ("100", r"100\text{ square units}"), ("9", r"9\text{ ways.}"),
    ("60", r"60^\circ"), ("60°", r"60^{\circ}"), ("60 degrees", r"60^\circ"), ("$15,000", r"\$15,\!000"), (r"\$5.00", "5"),
    ("50%", "50"), ("50", r"50\%"), ("0.5", r"50\%"), (r"50\%", "0.5"),
    ("(1,2)", r"\left( 1, 2 \right)"), ("2, 1", "1,2"), (r"\{1,2\}", "1, 2"), ("12 and 13", r"12\text{ and }13"),
    (r"[2, 0.5)", r"[2,\frac12)"), (r"(-\infty, 2)\cup(3,\infty)", r"(3,\infty) \cup (-\infty,2)"), (r"x \in [2,5)", "[2,5)"),
    (r"x = \pm 2", "-2,2"), ("x=2 or x=-2", "2,-2"), ("even", r"\text{even}"), ("Even", r"\text{even}"),
    ("C", r"\text{(C)}"), ("A, B", r"\text{B,A}"), ("July 4", r"\text{July 4}"), ("1204_{9}", "1204_9"),
]  # fmt: skip

SYMBOLICALLY_EQUAL = [
    (r"\frac{\sqrt{2}}{2}", r"\frac{1}{\sqrt{2}}"), ("2x^2+4x", "2x(x+2)"), ("y=2x+3", "y = 3+2x"), ("π/2", r"0.5\pi"),
    (r"1+\sqrt{19}, 1-\sqrt{19}", r"1 \pm \sqrt{19}"), ("sqrt(8)", r"2\sqrt2"), ("x>3", r"(3,\infty)"),
    (r"\begin{pmatrix} 1/2 \\ 3 \end{pmatrix}", r"\begin{pmatrix} 0.5 \\ 3 \end{pmatrix}"), ("2^{100}-2", "2(2^{99}-1)"),
    (r"\sin 60^\circ", r"\frac{\sqrt3}{2}"), ("3 + 2 = 5", "5"), ("x^2+y^2=1", "y^2 + x^2 = 1"), ("yx", "xy"),
    ("5!", "120"), (r"\frac{10!}{3!7!}", r"\binom{10}{3}"), (r"\sum_{k=1}^{10} k", "55"),
    (r"e^{i\pi/3}", r"\frac{1+i\sqrt3}{2}"),
    ("x - 2y + 6 = 0", r"y = \frac12 x + 3"), (r"\frac{x^2}{4}+y^2=1", "x^2+4y^2=4"), (r"\log_3 2", r"\frac{\ln 2}{\ln 3}"),
    (r"36x\sqrt{35x}", r"36\sqrt{35} x^{3/2}"), (r"\sqrt[3]{-8}", "-2"), ("1/2*x**2", r"\frac{x^2}{2}"), ("|x-2|", "|2-x|"),
    (r"\frac17\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\begin{pmatrix} 1/7 \\ 2/7 \end{pmatrix}"),
    (r"\frac{-1 \pm \sqrt5}{2}", r"\frac{-1+\sqrt5}{2}, \frac{-1-\sqrt5}{2}"), (r"2\sqrt5 \approx 4.47", r"\sqrt{20}"),
    (r"\cos 60^\circ + i\sin 60^\circ", r"\operatorname{cis} 60^\circ"), ("f(4-x)", "f(-x+4)"), (r"x^2 \le 4y", r"4y \ge x^2"),
]  # fmt: skip

SENTENCES = [
    ("The answer is $5$.", "5"), ("There are 12 ways to do it.", "12"), ("x is 3", "3"), ("**Answer:** 73", "73"),
    ("Natalia sold 72 clips altogether in April and May.", "72"), ("She earned $18 in total.", "18"), ("#### 72", "72"),
    ("The solutions are $x = 1$ and $x = 2$.", "1,2"), ("The graph is an ellipse.", r"\text{ellipse}"),
    ("(C) 12", r"\text{(C)}"),
    ("The correct option is D", r"\text{(D)}"), (r"\text{The perimeter is } 24 \text{ cm}", "24"), ("5 is the answer.", "5"),
    ("Therefore, $x=5$.", "5"), ("twelve", "12"),
]  # fmt: skip

UNITS = [
    ("500 cm", r"5\text{ m}"), ("1.5 hours", "90 minutes"), ("75 cents", r"\$0.75"), ("60 mph", r"60\text{ miles per hour}"),
    (r"3\text{ sq. ft.}", r"3\text{ square feet}"), ("5 million", "5,000,000"), ("4:30 PM", r"\text{4:30 p.m.}"),
    ("45°F", "45"),
    ("1 100", "1100"), (r"1\,100", "1100"), ("0.1666...", "1/6"), (r"\$4a - 2\$", "4a-2"), ("1204 base 9", "1204_9"),
]  # fmt: skip

SETS_OF_NUMBERS = [
    (r"2 < x \le 5", "(2,5]"), ("x<1 or x>3", r"(-\infty,1) \cup (3,\infty)"), ("x > 1 and x < 3", "(1,3)"),
    ("x ≠ 2", r"(-\infty,2)\cup(2,\infty)"), (r"\mathbb{R}\setminus\{3,-2\}", r"(-\infty,-2)\cup(-2,3)\cup(3,\infty)"),
    ("all real numbers", r"(-\infty,\infty)"), (r"-2 \le x \le 7", r"x \in [-2,7]"), ("no solution", r"\varnothing"),
    ("x = 3, y = 4", "(3,4)"), (r"(x,y) = (3,4)", "(3,4)"), (r"\langle 3, 4 \rangle", "(3,4)"),
]  # fmt: skip

DIFFERENT = [
    ("", ""), (" ", ""), ("", "5"), (r"\text{}", r"\text{}"), (r"\boxed{}", "5"),
    ("10001_2", "100012"), ("10001_2", "10001_3"), ("17", "10001_2"), ("1_000", "1000"),
    ("(58,500)", "58,500"), ("(58,500)", "58500"), ("12 34", "1234"), ("1,23", "123"), ("12,3456", "123456"),
    (r"7 \text{ or } 8", "7"), ("5 or 6", "5"), ("5 apples and 6", "5"), ("$5$ and $6$", "5"), ("not 5", "5"), ("5 +", "5"),
    ("7 = 8", "8"), ("7=8", "7"), ("5 = 5 = 6", "6"), ("y=5", "x=5"), ("x=5,y=6", "5"),
    ("1 3/8", "13/8"), (r"1\frac{1}{2}", "1/2"), ("3 4", "12"), ("3 4", "34"), ("1;2", "1"),
    ("9007199254740993", "9007199254740992"), ("562949953421313", "2^{49}"), ("10^{-9}", r"2\cdot 10^{-9}"),
    (r"\frac{1}{2003!}", r"\frac{1}{2004!}"), ("0.333333", r"\frac13"), ("1.414213562", r"\sqrt2"), (r"\frac{1}{0}", "0"),
    (r"\frac{1}{10^9}+\sqrt{0}", "0"), (r"\sqrt{2}+10^{-8}", r"\sqrt{2}"), ("x+10^{-8}", "x"),
    ("2,1,1", "1,2"), ("(2,1)", "(1,2)"), ("[1,2]", "(1,2)"), (r"\{1,2\}", "(1,2)"), ("1,2,3", "1,2"), ("x>3", r"[3,\infty)"),
    ("5 million", "5"), (r"5\text{ million}", "5"), ("5 inches", r"5\text{ cm}"), ("2 pi", "2"), ("9 p.m.", r"9\text{ a.m.}"),
    (r"0.5\%", "0.5"), (r"\text{5}6", "5"), (r"5\\6", "5"), ("5)", "5"), ("(5", "5"), ("{", "5"), (r"\frac{", "5"),
    ("odd", r"\text{even}"), ("MAEK", r"\text{MAKE}"), ("B", "A"), ("a", "A"), ("x", "y"), ("-5", "5"), ("2:4", "1:2"),
    ("approximately 5", "5"), ("between 5 and 6", "5"), ("The answer is 5 or 6", "5"), ("5?", "5"), ("5 I guess", "5"),
    ("There are 5 boys and six girls", "5"), ("5 squared", "5"), ("half of 5", "5"), ("at least 5", "5"), ("5xy", "5"),
    ("x>1 and x<3", r"(-\infty,1)\cup(3,\infty)"), ("x>3", "x<3"), (r"x \ne 2", "2"), ("5 cm", r"50\text{ m}"),
    ("y=3x", "x=3y"),
    (r"\sqrt2+10^{-100}", r"\sqrt2"), (r"\frac{355}{113}", r"\pi"), (r"\sqrt{x^2}", "x"), ("f(2x)", "2f(x)"),
    ("2^{1}0", "2^{10}"),
    (r"e^{\pi\sqrt{163}}", "262537412640768744"),
    (r"\begin{vmatrix} 1 & 2 \end{vmatrix}", r"\begin{pmatrix} 1 & 2 \end{pmatrix}"),
    (r"\infty", r"-\infty"), ("9^{9^9}", "1"), (r"\sin 30", r"\frac12"), ("x^2+y^2=2", "x^2+y^2=1"), ("none", "0"),
]  # fmt: skip


@pytest.mark.parametrize(("answer", "truth"), EXACTLY_EQUAL + SYMBOLICALLY_EQUAL + SENTENCES + UNITS + SETS_OF_NUMBERS)
def test_equal_answers_are_accepted(answer: str, truth: str) -> None:
    assert is_equivalent(answer, truth)


@pytest.mark.parametrize(("answer", "truth"), DIFFERENT)
def test_different_answers_are_refused(answer: str, truth: str) -> None:
    assert not is_equivalent(answer, truth)


def test_cheap_verdicts_import_no_computer_algebra() -> None:
    equal = EXACTLY_EQUAL + SYMBOLICALLY_EQUAL + SENTENCES + UNITS + SETS_OF_NUMBERS
    script = (
        "import sys; from grpo.grader.grader import cheap_verdict\n"
        f"assert all(cheap_verdict(a, t) for a, t in {equal!r})\n"
        "assert 'sympy' not in sys.modules and 'math_verify' not in sys.modules and 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_what_only_computer_algebra_reads_is_left_open() -> None:
    assert cheap_verdict(r"\max(5,4)", "5") is None
    assert full_verdict(r"\max(5,4)", "5")
    assert not full_verdict(r"\max(5,4)", "4")


def test_integers_take_under_20_microseconds() -> None:
    calls = 2000
    best = min(timeit.repeat(lambda: is_equivalent("1234", "1235"), number=calls, repeat=5))
    assert best / calls < 20e-6


PIECES = [
    r"\frac", "{", "}", "(", ")", "[", "]", ",", "1", "23", "x", "^", "_", "-", "=", "\\", r"\text{", "or ", "and ", " ", ".",
    r"\sqrt", "!", "%", "$", r"\left", r"\cup", r"\pm", r"\{", "\x00", "\n", "①", "²", "<", "units", r"\circ", r"\$", "\ud800",
    "9^9", r"\begin{pmatrix}", "&",
]  # fmt: skip


@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(
    answer=st.lists(st.sampled_from(PIECES), max_size=12).map("".join),
    truth=st.sampled_from(["5", "(1,2)", "x^2+1", "1,2"]),
)
def test_no_string_makes_the_grader_raise(answer: str, truth: str) -> None:
    assert is_equivalent(answer, truth) in (True, False)
    assert is_equivalent(truth, answer) in (True, False)


@pytest.mark.parametrize("piece", [" ", r"\$", r"\,", "(", r"\text{", "1,", "a1", r"\pm ", "=", "\n", "^{"])
def test_long_repetitions_end_quickly(piece: str) -> None:
    is_equivalent("x+1", "1+x")  # the import is not what is timed
    start = time.monotonic()
    assert not is_equivalent(piece * (1990 // len(piece)), "5")
    assert not is_equivalent(piece * (290 // len(piece)), "x^2+1")
    assert time.monotonic() - start < 3.0


HOSTILE = [
    "9^{9^9}", "9^9^9^9", "((5!)!)!", "2^{2^{100}}", "((x+1)^{99})^{99}", r"\sqrt{" * 100 + "2" + "}" * 100,
    "(" * 500 + "5" + ")" * 500,
    r"\sum_{n=1}^{2000} \sum_{k=1}^{2000} k", r"\prod_{n=1}^{2000} n^n", r"e^{e^{e^{e^e}}}", r"\binom{3000}{1500}^{3000}",
    "1" * 1999,
    r"\sin(10^{10^5})", "1,000," * 330, "²" * 1900, "½" * 1900, r"\text{ and }" * 150, "The answer is " * 100 + "6",
    r"\pm " * 400 + "1",
    ",".join(f"x+{i}" for i in range(300)), "(x+1)^{200}(x-1)^{200}(x+2)^{200}", "[[" * 900, r"\overline{" * 200,
    "f(" * 25 + "x" + ")" * 25,
]  # fmt: skip


@pytest.mark.parametrize("answer", HOSTILE)
def test_hostile_answers_cost_milliseconds(answer: str) -> None:
    truths = ["5", "x^2+1", "(1,2)", r"\sqrt{2}", r"[0,\infty)"]
    cheap_verdict(r"\pi", r"\sqrt{2}")  # the import is not what is timed
    start = time.process_time()
    verdicts = [cheap_verdict(answer, truth) for truth in truths]
    assert time.process_time() - start < 0.25 * len(truths)
    assert True not in verdicts


@pytest.mark.parametrize(
    "text",
    [
        "9^{9^9}", "100000!", "2^{99999}", "((x+1)^{99})^{99}", "(" * 20 + "x" + ")" * 20, "x+" * 200, r"\sum_{n=1}^{9} n",
        "1" * 60,
    ],
)  # fmt: skip
def test_the_gate_keeps_hostile_expressions_from_the_parser(text: str) -> None:
    assert too_complex(text)


def test_symbolic_comparison_works_outside_the_main_thread() -> None:
    results: list[bool] = []
    pairs = [(r"\frac{\sqrt2}{2}", r"\frac{1}{\sqrt{2}}"), (r"\sqrt{3}", r"\sqrt{2}")]
    thread = threading.Thread(target=lambda: results.extend(is_equivalent(a, t) for a, t in pairs))
    thread.start()
    thread.join()
    assert results == [True, False]


@pytest.mark.parametrize(
    "truth",
    [
        "", "  ", r"\text{}", "$$", ".", "{}", r"\frac{1}{2", "1}", "7" * 2001, "5 +", "5 5", r"\foo{3}", r"\sqrt{}", "[1,2",
        r"x > \foo{3}", r"(\foo{3}, 2)", r"A = \foo{3}",
    ],
)  # fmt: skip
def test_unusable_ground_truths_are_refused(truth: str) -> None:
    with pytest.raises(UserError):
        check_ground_truth(truth)


@pytest.mark.parametrize(
    "truth",
    [
        "0", "-3", r"\infty", r"\left\{1,2\right\}", "i", r"\$5", "1_7", r"[0,\infty)", "∞", r"\overline{CD}",
        r"\{t \mid t \ge 2\}", r"\{t \mid t \neq -6\}", r"\{t \mid 2 \le t \text{ and } t \neq 5\}",
        r"M^{-1}=\left[\begin{array}{rr}2 & 0 \\ 1 & 6\end{array}\right]",
        r"P=\begin{pmatrix} 1 \\ 2 \end{pmatrix}, Q=\begin{pmatrix} 3 \\ 4 \end{pmatrix}",
        r"x \equiv 2 \pmod{9}", r"\vec{u}\times\vec{v}", r"a_n = \sum_{k=1}^{n} b_k", "Solution is: $[x=3, y=8]$.",
    ],
)  # fmt: skip
def test_usual_ground_truths_are_accepted(truth: str) -> None:
    check_ground_truth(truth)
    assert is_equivalent(truth, truth)


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"so \boxed{5}.", "5"), (r"\boxed{1} then \boxed{\frac{1}{\sqrt{2}}}", r"\frac{1}{\sqrt{2}}"), (r"\fbox{7}", "7"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"), (r"\boxed 5$.", "5"), (r"\boxed{}", ""), ("none", None), (r"\boxed", None),
        (r"\boxed{1} and \boxed{2", None), (r"$\boxed{1}$ and $\boxed{2}$", "1, 2"),
        (r"\boxed{1}, \boxed{2}, or \boxed{3}", "1, 2, 3"),
        (r"\boxed{1}\text{ and }\boxed{\frac{1}{2}}.", r"1, \frac{1}{2}"), (r"\boxed{2} and \boxed{2}", "2"),
        (r"\boxed{1} so \boxed{2}", "2"), (r"\boxed{1}\boxed{2}", "2"),
        (r"\boxed{0}, so \boxed{1} and \boxed{2}", "1, 2"), (r"\boxedfoo{1}", None),
        (r"\boxed{\begin{pmatrix} 1 \\ 2 \end{pmatrix}}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}"),
    ],
)  # fmt: skip
def test_last_boxed(text: str, content: str | None) -> None:
    assert last_boxed(text) == content


def test_last_boxed_of_long_texts_takes_milliseconds() -> None:
    texts = [r"\boxed{5} " * 12_500, r"\boxed{" * 14_000, r"\boxed{" + "{" * 50_000 + "}" * 50_000 + "}"]
    start = time.process_time()
    assert [last_boxed(text) is None for text in texts] == [False, True, False]
    assert time.process_time() - start < 1.0


@pytest.mark.parametrize(
    ("response", "rewards"),
    [
        ("2 + 3 </think> <answer>5</answer>", FULL), (r"</think> <answer> \boxed{5} </answer>", FULL),
        ("</think> <answer>6</answer>", FORM_ONLY), ("</think> <answer></answer>", FORM_ONLY),
        ("</think> <answer>5</answer></answer>", FULL), ("</think> <answer>5</answer>\n</answer> so", FULL),
        ("</think> <answer>6</answer></answer>", FORM_ONLY), ("</think> <answer>5</answer> or </answer>", FORM_ONLY),
        (r"</think> <answer>\boxed{5} or \boxed{6}</answer>", FORM_ONLY),
        ("</think> <answer>6</answer> no: <answer>5</answer>", FULL), ("</think> <answer>5</answer> trailing", FULL),
        ("<answer>5</answer>", ZERO), ("</think><answer>5</answer>", ZERO), ("</think> <answer>5", ZERO), ("", ZERO),
        ("5", ZERO),
        ("</think> <answer>5</answer> and <answer>5", ZERO), ("</answer> </think> <answer>5", ZERO), (r"\boxed{5}", ZERO),
    ],
)  # fmt: skip
def test_r1_zero(response: str, rewards: dict[str, float]) -> None:
    assert r1_zero_reward_fn(response, "5") == rewards
    assert r1_zero_reward_fn(response, "5", fast=False) == rewards


@pytest.mark.parametrize(
    ("response", "rewards"),
    [
        (r"\boxed{4} or \boxed{5}", FORM_ONLY), (r"\boxed{5} and \boxed{5}", FULL),
        (r"it is \boxed{5}", FULL), (r"\boxed{4}, no, \boxed{5}", FULL), (r"\fbox{5}", FULL), (r"\boxed{4}", FORM_ONLY),
        (r"\boxed{5}, no, \boxed{4}", FORM_ONLY), (r"\boxed{}", FORM_ONLY), ("5", ZERO), (r"\boxed{5", ZERO),
        ("</think> <answer>5</answer>", ZERO),
    ],
)  # fmt: skip
def test_question_only(response: str, rewards: dict[str, float]) -> None:
    assert question_only_reward_fn(response, "5") == rewards


@pytest.mark.parametrize("truth", ["5", 5, 5.0, ["4", "5"], [4, 5]])
def test_ground_truth_may_be_number_or_list(truth: object) -> None:
    rewards = question_only_reward_fn(r"\boxed{5}", truth)  # type: ignore[arg-type]
    assert rewards == FULL
    assert all(type(value) is float for value in rewards.values())


def test_no_alternatives_are_a_mistake() -> None:
    with pytest.raises(UserError, match="empty list"):
        r1_zero_reward_fn("</think> <answer>5</answer>", [])


def test_keywords_count_as_whole_words_only() -> None:
    assert keyword_inclusion_reward_fn("The CAT sat, on a mat.", ["cat", "Mat"]) == FULL
    assert keyword_inclusion_reward_fn("concatenate the mat", ["cat", "mat"]) == FORM_ONLY
    assert keyword_inclusion_reward_fn("We use C++ here", ["c++"]) == FULL
    assert keyword_inclusion_reward_fn("", ["cat"]) == ZERO


@pytest.mark.parametrize("keywords", [[], ["cat", " "], "cat"])
def test_keywords_must_be_a_list_of_words(keywords: list[str]) -> None:
    with pytest.raises(UserError, match="keywords"):
        keyword_inclusion_reward_fn("cat", keywords)

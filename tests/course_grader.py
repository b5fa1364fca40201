"""`python tests/course_grader.py FILE`: how often this package's reward functions agree with a course's own `drgrpo_grader.py`.

FILE is the user's copy, of which nothing is kept. Compared are the responses that the study left (`data/math_baseline`,
`data/best_of_n`), and the labelled pairs of `tests/grader`, put in the r1_zero form. It needs what the file imports
(`make test-course` installs pylatexenc beside the environment). Exit code: 0, or 2 where the file cannot be loaded.
"""

from __future__ import annotations

import importlib.util
import json
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from ruamel.yaml import YAML

import grpo

Reward = Callable[[str, str], dict[str, float]]
NAMES = {"r1_zero": "r1_zero_reward_fn", "question_only": "question_only_reward_fn"}
PAIRS = Path(__file__).with_name("grader")
LIMIT = 10  # seconds for one response: theirs may hang
SHOWN = 5  # disagreements


class Case(NamedTuple):
    """A response under a prompt; label: whether its answer is right, where a person said so."""

    prompt: str
    response: str
    truth: str
    label: bool | None = None


def load(path: Path) -> ModuleType:
    """The user's file as a module.

    Raises:
        SystemExit: it is missing, or imports what is not installed.
    """
    spec = importlib.util.spec_from_file_location("drgrpo_grader", path)
    try:
        if spec is None or spec.loader is None:
            raise FileNotFoundError(path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except (FileNotFoundError, ImportError) as error:
        print(
            f"{path}: cannot be loaded ({error}). Name the course's drgrpo_grader.py: make test-course GRADER=FILE",
            file=sys.stderr,
        )
        raise SystemExit(2) from error
    return module


def at_hand(data: Path) -> list[Case]:
    """The responses that zero-shot evaluation and best-of-N left, each with its truth."""
    cases = []
    for prompt in NAMES:
        for folder in ("math_baseline", "best_of_n"):
            file = data / folder / f"{prompt}.jsonl"
            for row in map(json.loads, file.read_text(encoding="utf-8").splitlines() if file.exists() else ()):
                cases += [Case(prompt, each["response"], str(row["ground_truth"])) for each in row.get("samples", [row])]
    return cases


def labelled() -> list[Case]:
    """The labelled pairs of the grader's tests as r1_zero responses."""
    files = [file for file in sorted(PAIRS.glob("*.yaml")) if file.name != "hostile.yaml"]
    found = [YAML(typ="safe", pure=True).load(file) for file in files]
    pairs = [
        (kind == "equal", pair) for kinds in found for of in kinds.values() for kind, of_kind in of.items() for pair in of_kind
    ]
    return [Case("r1_zero", f" x </think> <answer>{answer}</answer>", truth, label) for label, (answer, truth) in pairs]


def within_limit(reward: Reward, case: Case) -> tuple[float, float] | None:
    """Format and answer reward; None where it raises or takes too long."""

    def stop(*_: Any) -> None:
        raise TimeoutError

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(LIMIT)
    try:
        found = reward(case.response, case.truth)
        return found["format_reward"], found["answer_reward"]
    except Exception:  # whatever the user's file raises is no verdict
        return None
    finally:
        signal.alarm(0)


def compare(theirs: ModuleType, cases: Iterable[Case]) -> list[str]:
    """Lines that say how many verdicts are the same, and some that are not."""
    counts: Counter[str] = Counter()
    differing = []
    for case in cases:
        mine, other = (within_limit(getattr(of, NAMES[case.prompt]), case) for of in (grpo, theirs))
        counts["all"] += 1
        counts["same"] += mine == other
        counts["none"] += other is None
        if case.label is not None:
            for name, verdict in (("ours", mine), ("theirs", other)):
                counts[name] += verdict is not None and verdict[1] == case.label
        if mine != other:
            differing.append(f"    {case.response[-60:]!r} for {case.truth!r}: ours {mine}, theirs {other}")
    lines = [f"{counts['same']} of {counts['all']} verdicts are the same ({counts['same'] / max(1, counts['all']):.1%})"]
    if counts["none"]:
        lines.append(f"  theirs gives no verdict on {counts['none']}")
    if "ours" in counts or "theirs" in counts:
        lines.append(f"  as labelled: ours {counts['ours'] / counts['all']:.1%}, theirs {counts['theirs'] / counts['all']:.1%}")
    return lines + differing[:SHOWN]


if __name__ == "__main__":
    module = load(Path(sys.argv[1]))
    for title, cases in (("responses at hand", at_hand(Path("data"))), ("labelled pairs", labelled())):
        print(f"{title}: " + ("\n".join(compare(module, cases)) if cases else "none; run the study first"))

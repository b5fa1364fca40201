"""Comments on a study's results: written by hand, as templates that take their numbers from the record.

A comment is a file NAME.md in ``comments/STUDY/`` or ``comments/``, beside the study's file or in ``reports/``; so a study's
comments need not replace another's. NAME is an experiment or one of :data:`QUESTIONS`. Its head names the study::

    ---
    study: mini
    ---
    With a lag of 8 the reward ends at {{ arm("lag_8") | interval }}.

The text is Markdown with expressions of Jinja, which runs in its sandbox, because a stranger's study may bring comments too.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jinja2 import StrictUndefined
from jinja2.sandbox import ImmutableSandboxedEnvironment

from grpo.common.errors import UserError
from grpo.common.files import read_text
from grpo.reporting.labels import decimals, interval
from grpo.study import paths
from grpo.study.schema import Study

COMMENTS = paths.REPORTS / "comments"
QUESTIONS = ("math_baseline", "best_of_n", "kissing_number")  # comments that belong to no experiment
HEAD = "---\nstudy: "
Values = Mapping[str, Any]


def _interval(estimate: Any) -> str:
    """A mean or a difference with its interval."""
    if not isinstance(estimate, Mapping):
        raise ValueError("no value with an interval here; the leader, for example, is not below itself")
    return interval(estimate)


FILTERS: dict[str, Callable[..., str]] = {
    "number": lambda value, digits=3: decimals(float(value), min(digits, 17)),
    "percent": lambda value: f"{100 * float(value):.0f}%",
    "interval": _interval,
}


def read_comments(study: Study, record: Values) -> dict[str, str]:
    """Read the study's comments, with the record's numbers filled in: name -> Markdown.

    ``record``: reports/record.json. Raises UserError: a comment has no head, names what the record does not have, or is not a
    template; or its file has the name of no experiment.
    """
    comments = {}
    places = [place for folder in (COMMENTS, Path(study.folder) / "comments") for place in (folder, folder / study.study)]
    for path in sorted(path for place in places for path in place.glob("*.md")):
        head, end, text = read_text(path, made_by="").partition("\n---\n")
        if not head.startswith(HEAD) or not end:
            raise UserError(f"{path}:1: no head. Begin with the lines `---`, `study: NAME` and `---`.")
        if head.removeprefix(HEAD) != study.study or path.stem in study.left_out:
            continue
        known = (*record["experiments"], *QUESTIONS)
        if path.stem not in known:
            raise UserError(
                f"{path}: no experiment {path.stem!r} in the study {study.study}. Rename it to one of: {', '.join(known)}."
            )
        comments[path.stem] = _fill(path, text, head.count("\n") + 3, record)
    return comments


def _fill(path: Path, text: str, first_line: int, record: Values) -> str:
    """Fill a template whose first line stands in line ``first_line`` of the file."""

    def experiment(name: str = path.stem) -> Values:
        """An experiment's entry in the record; by default the comment's own."""
        return _entry(record["experiments"], name, "experiment")

    def arm(name: str, of: str = path.stem) -> Values:
        """An arm's entry, by the arm's name or that of a setting, which stands for its chosen arm."""
        arms = experiment(of)["arms"]
        named = {arm["setting"]: arm for arm in arms if arm["chosen"]} | {arm["arm"]: arm for arm in arms}
        return _entry(named, name, "arm")

    def baseline(prompt: str) -> Values:
        """Zero-shot results under a prompt."""
        return _entry(record["baseline"], prompt, "prompt")

    def best_of_n(prompt: str, n: int) -> Values:
        """Estimates from several samples under a prompt."""
        return _entry(_entry(record["best_of_n"], prompt, "prompt")["n"], str(n), "N")

    environment = ImmutableSandboxedEnvironment(undefined=StrictUndefined)
    environment.filters |= FILTERS
    try:
        template = environment.from_string(text, globals={one.__name__: one for one in (experiment, arm, baseline, best_of_n)})
        return template.render().strip()
    except Exception as error:  # expressions of a template can raise any
        lines = [frame.lineno or 1 for frame in traceback.extract_tb(error.__traceback__) if frame.filename == "<template>"]
        line = lines[-1] if lines else getattr(error, "lineno", 1)
        raise UserError(f"{path}:{first_line + line - 1}: {str(error).rstrip('.')}. Correct that line.") from error


def _entry(known: Mapping[str, Values], name: str, what: str) -> Values:
    if name not in known:
        raise UserError(f"no {what} {name!r}; there are: {', '.join(map(str, known)) or 'none'}")
    return known[name]

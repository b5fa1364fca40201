"""Comments on a study's results: written by hand, with numbers from the record and a digest of what they were written for.

A comment is a file NAME.md in ``reports/comments/`` or in ``comments/`` beside the study's file. NAME is an experiment or one
of :data:`QUESTIONS`. Its head names the study, the digest of the results that it was written for, and facts that it rests on::

    ---
    study: mini
    written for: 5d1f0c2a9b7e
    rests on: arm("lag_8").value < arm("lag_0").value
    ---
    With a lag of 8 the reward ends at {{ arm("lag_8") | interval }}.

The text is Markdown with expressions of Jinja: names, attributes, differences, comparisons and the filters of :data:`FILTERS`,
and nothing that repeats, branches or calls methods, as a study of a stranger may bring comments too.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import StrictUndefined, TemplateError, nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

from grpo.common.errors import UserError
from grpo.common.files import read_text, write_text
from grpo.reporting.labels import decimals, interval
from grpo.study import paths
from grpo.study.effective import digest
from grpo.study.schema import Study

COMMENTS = paths.REPORTS / "comments"
QUESTIONS = ("math_baseline", "best_of_n", "kissing_number")  # comments that belong to no experiment
STUDY, WRITTEN_FOR, RESTS_ON = "study", "written for", "rests on"  # lines of a comment's head
NOT_YET = "nothing yet"  # in the place of a digest
LONGEST = 20_000  # characters of a comment
_ALLOWED = (
    *(nodes.Template, nodes.Output, nodes.TemplateData, nodes.Name, nodes.Const, nodes.Getattr, nodes.Getitem, nodes.Filter),
    *(nodes.Call, nodes.Keyword, nodes.Sub, nodes.Neg, nodes.Compare, nodes.Operand, nodes.And, nodes.Or, nodes.Not),
)
Values = Mapping[str, Any]


class _Unknown(StrictUndefined):
    """A name that the record does not have; using it raises an error that says which names it has."""

    @property
    def _undefined_message(self) -> str:
        if isinstance(self._undefined_obj, Mapping):
            return f"no {self._undefined_name!r} here, but {', '.join(map(str, self._undefined_obj))}"
        return super()._undefined_message


def _interval(of: Any) -> str:
    """A mean or a difference with its interval."""
    if not isinstance(of, Mapping):
        raise ValueError("no value with an interval here; the leader, for example, is not below itself")
    return interval(of)


FILTERS: dict[str, Callable[..., str]] = {
    "number": lambda value, digits=3: decimals(float(value), digits),
    "percent": lambda value: f"{100 * float(value):.0f}%",
    "interval": _interval,
}


@dataclass(frozen=True)
class Comment:
    """A comment with the record's numbers filled in.

    Attributes:
        text: Markdown.
        written_for: the digest in its head.
        digest: that of the present results.
        fails: the facts it rests on that are not so.
    """

    name: str
    path: Path
    text: str
    written_for: str
    digest: str
    fails: tuple[str, ...]

    @property
    def state(self) -> str:
        """What a reader has to know before reading it; empty if it was accepted for these results."""
        if self.written_for == NOT_YET:
            return "draft, not yet accepted for any results"
        if self.written_for != self.digest:
            return "written for other results"
        return ""


class _Results:
    """What a comment can name; notes the experiments that it asked for."""

    def __init__(self, record: Values, own: str):
        self.record, self.own = record, own
        self.named: set[str] = {own} & set(record["experiments"])

    def experiment(self, name: str = "") -> Values:
        """An experiment's entry in the record; by default the comment's own."""
        found: Values = _one_of(self.record["experiments"], name or self.own, "experiment")
        self.named.add(name or self.own)
        return found

    def arm(self, name: str, experiment: str = "") -> Values:
        """An arm's entry, by the arm's name or that of a setting, which stands for its chosen arm."""
        arms = self.experiment(experiment)["arms"]
        named = {arm["setting"]: arm for arm in arms if arm["chosen"]} | {arm["arm"]: arm for arm in arms}
        found: Values = _one_of(named, name, "arm")
        return found

    def baseline(self, prompt: str) -> Values:
        """Zero-shot results under a prompt."""
        found: Values = _one_of(self.record["baseline"], prompt, "prompt")
        return found

    def best_of_n(self, prompt: str, n: int) -> Values:
        """Estimates from several samples under a prompt."""
        found: Values = _one_of(_one_of(self.record["best_of_n"], prompt, "prompt")["n"], str(n), "N")
        return found

    def facts(self) -> list[Any]:
        """What the named experiments say: winners, what can be told apart, collapses, verdicts; no digits."""
        experiments = {name: _facts_of(self.record["experiments"][name]) for name in sorted(self.named)}
        return [experiments, {one["id"]: one["verdict"] for one in self.record["claims"] if one["experiment"] in self.named}]


def _facts_of(experiment: Values) -> list[Any]:
    arms = {}
    for arm in (arm for arm in experiment["arms"] if arm["chosen"]):
        below, collapsed = arm["below"], len(arm["collapsed"])
        told = below is not None and not below["low"] <= 0 <= below["high"]
        arms[arm["arm"]] = [told, "none" if not collapsed else "all" if collapsed == len(arm["runs"]) else "some"]
    return [experiment["winner"], experiment["leader"], arms]


def _one_of(known: Mapping[str, Any], name: str, what: str) -> Any:
    if name not in known:
        raise UserError(f"no {what} {name!r}; there are: {', '.join(map(str, known)) or 'none'}")
    return known[name]


def read_comments(study: Study, record: Values) -> dict[str, Comment]:
    """Read the study's comments, by name.

    Args:
        record: reports/record.json.

    Raises:
        UserError: a comment names what the record does not have, does what no comment may, or has a name of no experiment.
    """
    found = {}
    for path in sorted(path for folder in (COMMENTS, Path(study.folder) / "comments") for path in folder.glob("*.md")):
        head, _ = _parts(path)
        name = path.stem
        if _of(head, STUDY, path) != study.study or name in study.left_out:
            continue
        known = (*record["experiments"], *QUESTIONS)
        if name not in known:
            raise UserError(
                f"{path}: no experiment {name!r} in the study {study.study}. Rename it to one of: {', '.join(known)}."
            )
        found[name] = _filled(path, _Results(record, name))
    return found


def accept_all(comments: Mapping[str, Comment], names: Sequence[str]) -> None:
    """Write the digest of the present results into the heads of some comments.

    Args:
        names: of comments; ``all`` stands for all.

    Raises:
        UserError: there is no such comment, or a fact that one rests on is not so. Then no comment is changed.
    """
    chosen = [*comments.values()] if "all" in names else [_one_of(comments, name, "comment") for name in names]
    for comment in chosen:
        if comment.fails:
            raise UserError(f"{comment.path}: rests on {comment.fails[0]}, which is not so. Rewrite it before you accept it.")
    for comment in chosen:
        head, body = _parts(comment.path)
        lines = [f"{key}: {comment.digest if key == WRITTEN_FOR else value}" for key, value in head]
        write_text(comment.path, "\n".join(["---", *lines, "---", body]))


def _parts(path: Path) -> tuple[list[tuple[str, str]], str]:
    """The lines of a comment's head, as key and value, and its text."""
    text = read_text(path, made_by="")
    begin, *rest = text.split("\n")
    if len(text) > LONGEST:
        raise UserError(f"{path}: longer than {LONGEST:,} characters. Shorten it.")
    if begin != "---" or "---" not in rest:
        raise UserError(
            f"{path}:1: no head. Begin with a line `---`, lines `{STUDY}: NAME` and `{WRITTEN_FOR}: {NOT_YET}`, and `---`."
        )
    end = rest.index("---")
    head = [(key.strip(), value.strip()) for key, _, value in (line.partition(":") for line in rest[:end])]
    for number, (key, _) in enumerate(head, start=2):
        if key not in (STUDY, WRITTEN_FOR, RESTS_ON):
            raise UserError(f"{path}:{number}: no line {key!r} is known in a head. Use: {STUDY}, {WRITTEN_FOR}, {RESTS_ON}.")
    return head, "\n".join(rest[end + 1 :])


def _of(head: Sequence[tuple[str, str]], wanted: str, path: Path) -> str:
    values = [value for key, value in head if key == wanted]
    if len(values) != 1:
        raise UserError(f"{path}:1: the head needs one line `{wanted}: …`, and has {len(values)}.")
    return values[0]


def _filled(path: Path, results: _Results) -> Comment:
    head, body = _parts(path)
    facts = {}
    for number, (key, value) in enumerate(head, start=2):
        if key == RESTS_ON:
            facts[value] = _fill(path, "{{ " + value + " }}", number, results)
            if facts[value] not in ("True", "False"):
                raise UserError(f"{path}:{number}: {value} is {facts[value]}, neither true nor false. Compare two values.")
    text = _fill(path, body, len(head) + 3, results)
    fails = tuple(fact for fact, holds in facts.items() if holds == "False")
    return Comment(path.stem, path, text.strip(), _of(head, WRITTEN_FOR, path), digest([results.facts(), facts])[:12], fails)


def _fill(path: Path, text: str, first_line: int, results: _Results) -> str:
    """Fill a template whose first line stands in line ``first_line`` of the file."""
    environment = ImmutableSandboxedEnvironment(undefined=_Unknown)
    environment.filters, environment.globals = dict(FILTERS), {}
    offered = ("experiment", "arm", "baseline", "best_of_n")
    line = 1
    try:
        tree = environment.parse(text)
        called = [call.node for call in tree.find_all(nodes.Call)]
        for node in tree.find_all(nodes.Node):
            line = node.lineno
            if not isinstance(node, _ALLOWED) or isinstance(node, nodes.Name) != (node in called):
                raise UserError(f"a comment cannot use {type(node).__name__.lower()} here, only names, filters and comparisons")
            if isinstance(node, nodes.Filter) and node.name not in FILTERS:
                raise UserError(f"no filter {node.name!r}; there are: {', '.join(FILTERS)}")
            if isinstance(node, nodes.Name) and node.name not in offered:
                raise UserError(f"no name {node.name!r}; there are: {', '.join(offered)}")
        return environment.from_string(text).render({name: getattr(results, name) for name in offered})
    except (TemplateError, UserError, TypeError, ValueError, RecursionError) as error:
        frames = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == "<template>"]
        line = frames[-1] or line if frames else getattr(error, "lineno", None) or line
        raise UserError(f"{path}:{first_line + line - 1}: {error}. Correct that line.") from error

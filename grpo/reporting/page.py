"""The page reports/index.html: the write-up's Markdown with its figures inside, experiments folded, and rollouts to browse."""

from __future__ import annotations

import hashlib
import html
import json
import math
import re
from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from jinja2 import Environment, PackageLoader, StrictUndefined
from markdown_it import MarkdownIt
from markdown_it.token import Token

from grpo.common.files import read_jsonl
from grpo.common.yaml_file import parse_yaml
from grpo.reporting.charts import INK
from grpo.reporting.curves import CURVES
from grpo.reporting.record import own_experiments
from grpo.results.verdicts import DECIDED, VERDICTS
from grpo.study import paths
from grpo.study.paths import stage_of_run

TEMPLATES = Path(__file__).with_name("templates")
TERMS: dict[str, str] = parse_yaml(TEMPLATES / "terms.yaml")
TERM = re.compile(rf"(?<![\w-])({'|'.join(map(re.escape, sorted(TERMS, key=len, reverse=True)))})(?![\w-])")
PIXELS = 96 / 72  # of a point
SHRUNK = 0.85  # a figure that does not fit shrinks to this share of its width, so that its text can be read, and then scrolls
IDS = {  # of sections and folded parts that other parts link to
    "All contrasts": "contrasts",
    "Zero-shot": "math_baseline",
    "Best of N": "best_of_n",
    "Kissing numbers": "kissing_number",
    "The base model": "base_model",
}
SECTIONS = {"Result": "answer", "Contrasts": "contrasts", "Claims": "claims", "Settings": "settings-that-won"}
SECTIONS |= {"Experiments": "experiments", "Base model": "base_model", "Method": "method"}
UNFOLDED = 2  # experiments of a study of one's own
MOST_SAMPLES = 700_000  # characters in the page; other samples stay in the runs' folders
NUMBERS = ("format_reward", "answer_reward", "reward", "token_entropy")
COLUMNS = ("step", "problem", "prompt", "response", "ground_truth", *NUMBERS)
MESSAGES = "messages"  # of an episode, each with its role
ORIGIN = ("mlflow_run_id", "commit", "lock", "total_s", "same_as")  # columns of timing.csv that the page shows of a run


def drawn_figures() -> dict[str, Path]:
    """The figures of the report by their paths below reports/, without the ending."""
    drawn = [*paths.FIGURES.glob("*.svg"), *paths.REPORTS.glob("timing.svg"), *CURVES.glob("*.svg")]
    return {path.relative_to(paths.REPORTS).with_suffix("").as_posix(): path for path in drawn}


def page_of(record: Mapping[str, Any], text: str, timing: pd.DataFrame, samples: Mapping[str, Any] | None = None) -> str:
    """Build the page, which needs no network.

    Args:
        record: reports/record.json.
        text: the write-up in Markdown.
        timing: reports/timing.csv.
        samples: what :func:`browsable` gives, to leave out the runs' folders.
    """
    figures = {name: inlined(path) for name, path in drawn_figures().items()}
    experiments, top = record["experiments"], record["headline"]
    own = own_experiments(experiments, record["claims"])
    unfolded = dict.fromkeys([top["experiment"], *own]) if own or len(experiments) <= UNFOLDED else []
    body = Body(figures, list(experiments), [*unfolded][:UNFOLDED]).of(text)
    script = (TEMPLATES / "page.js").read_text(encoding="utf-8")
    environment = Environment(loader=PackageLoader("grpo.reporting"), undefined=StrictUndefined, autoescape=True)
    return environment.get_template("page.html").render(
        study=record["study"],
        experiments={name: entry["title"] for name, entry in experiments.items()},
        body=body,
        sections={title: name for title, name in SECTIONS.items() if f'id="{name}"' in body},
        css=(TEMPLATES / "page.css").read_text(encoding="utf-8"),
        script=script,
        script_digest=b64encode(hashlib.sha256(script.encode()).digest()).decode(),  # no other script runs, nor a handler
        data=embedded(_data(record, timing, samples)),
    )


def _data(record: Mapping[str, Any], timing: pd.DataFrame, samples: Mapping[str, Any] | None) -> dict[str, Any]:
    """What the script browses: samples of rollouts, and where each run's numbers come from."""
    experiments = record["experiments"]
    arms = [(arm["arm"] != entry["winner"], arm["runs"]) for entry in experiments.values() for arm in entry["arms"]]
    names = [run for _, runs in sorted(arms, key=lambda entry: entry[0]) for run in runs]  # winners first
    known = timing[["run", *ORIGIN]].astype(object)
    origin = known.where(known.notna(), "").to_numpy().tolist()
    return {
        "samples": samples or browsable(names),
        "experiments": [
            {"name": name, "title": entry["title"], "winner": entry["winner"]}
            | {"arms": [{key: arm[key] for key in ("arm", "label", "runs", "by_run")} for arm in entry["arms"]]}
            for name, entry in experiments.items()
        ],
        "first": record["headline"]["experiment"],
        "metric": record["metric"],
        "origin": {"columns": ORIGIN, "runs": {run: values for run, *values in origin}},
    }


# ------------------------------------------------------------------------------------------------------------ rollouts


def number(value: Any) -> float | int | None:
    """Round to six digits, for the page; None if not finite."""
    if value is None or not math.isfinite(value):
        return None
    shorter = float(f"{value:.6g}")
    return int(shorter) if shorter.is_integer() and abs(shorter) < 1e15 else shorter


def read_samples(run: str) -> list[dict[str, Any]]:
    """Read the samples of the run ``EXPERIMENT/ARM/SEED``, from its first, middle and last evaluation.

    A missing or damaged file is a UserError.
    """

    def shown(one: dict[str, Any]) -> dict[str, Any]:
        return {column: one[column] for column in COLUMNS} | {key: one[key] for key in [MESSAGES] if key in one}

    return read_jsonl(paths.RUNS / run / "rollouts.jsonl", stage_of_run(run), shown)


def browsable(runs: list[str]) -> dict[str, Any]:
    """Collect samples, with each prompt and problem stored once.

    ``runs``: by priority, as the page has room for :data:`MOST_SAMPLES` characters. Returns ``prompts``; ``problems`` with
    their truths; ``columns``; ``runs``: name -> a row per sample, with indices of prompt and problem; ``left_out``: runs for
    which there was no room.
    """
    prompts: dict[str, int] = {}
    problems: dict[tuple[str, str], int] = {}
    found: dict[str, list[list[Any]]] = {}
    left_out, size = [], 0
    for run in runs:
        samples = read_samples(run)
        more = sum(len(json.dumps(s["response"])) + len(s["prompt"]) * (s["prompt"] not in prompts) for s in samples)
        if size + more > MOST_SAMPLES:
            left_out.append(run)
            continue
        size += more
        found[run] = []
        for s in samples:
            prompt = prompts.setdefault(s["prompt"], len(prompts))
            problem = problems.setdefault((s["problem"], s["ground_truth"]), len(problems))
            turns = [s[MESSAGES]] if MESSAGES in s else []
            found[run].append([problem, prompt, s["step"], s["response"], *(number(s[reward]) for reward in NUMBERS), *turns])
    episodes = any(len(row) > 4 + len(NUMBERS) for rows in found.values() for row in rows)
    columns = ["problem", "prompt", "step", "response", *NUMBERS, *([MESSAGES] if episodes else [])]
    return {"prompts": list(prompts), "problems": list(problems), "columns": columns, "runs": found, "left_out": left_out}


def embedded_samples(page: str) -> tuple[dict[str, Any], dict[str, list[dict[str, Any]]]]:
    """Read the samples in a page again: what :func:`browsable` gave, and the samples of each run.

    Raises ValueError, LookupError, TypeError: the page is damaged.
    """
    samples: dict[str, Any] = json.loads(page.split('id="data">')[1].split("</script>")[0])["samples"]
    found: dict[str, list[dict[str, Any]]] = {}
    for run, rows in samples["runs"].items():
        found[run] = [dict(zip(samples["columns"], row, strict=False)) for row in rows]
        for one in found[run]:
            problem, truth = samples["problems"][one["problem"]]
            one |= {"problem": problem, "ground_truth": truth, "prompt": samples["prompts"][one["prompt"]]}
    return samples, found


def embedded(data: Mapping[str, Any]) -> str:
    """JSON that is safe in a script element."""
    return json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def inlined(path: Path) -> str:
    """A figure for the page: never enlarged, with axes in the page's text colour."""
    svg = path.read_text(encoding="utf-8")
    svg = svg[svg.index("<svg") :].replace(INK, "currentColor")
    width = float(re.findall(r' width="([\d.]+)pt"', svg)[0]) * PIXELS
    size = f"width:{width:.0f}px;max-width:100%;min-width:{SHRUNK * width:.0f}px"
    return re.sub(
        r'<svg [^>]*viewBox="([^"]+)"[^>]*>',
        rf'<svg xmlns:xlink="http://www.w3.org/1999/xlink" style="{size}" viewBox="\1">',
        svg,
    )


class Body:
    """Converts the write-up to the page's sections.

    Args:
        figures: SVG by path below reports/, without the ending. Other pictures are left out.
        experiments: names, in the order of the write-up.
        unfolded: those that are not folded.
    """

    def __init__(self, figures: Mapping[str, str], experiments: Sequence[str], unfolded: Sequence[str] = ()):
        self.figures, self.experiments, self.unfolded = figures, iter(experiments), unfolded
        self.markdown = MarkdownIt("commonmark", {"html": False}).enable("table")
        self.markdown.add_render_rule("text", _with_terms)  # type: ignore[arg-type]

    def of(self, text: str) -> str:
        """Convert a text whose parts begin with headings; what stands before the first ``##`` is the first screen."""
        opened: list[str] = []  # ends of the elements that hold the next part
        section, made = "", []
        for rank, title, tokens in self._parts(text):
            while len(opened) >= max(1, rank - 1):
                made.append(opened.pop())
            head, result = title.rsplit(": ", 1) if ": " in title else (title, "")
            if rank <= 2:
                section = title if rank == 2 else ""
                begin, end = f'<section id="{_id(title) if section else "answer"}"><h{rank}>{title}</h{rank}>', "</section>"
            elif not section:  # the boxes of the first screen
                begin, end = f'<div class="box"><h2>{title}</h2>', "</div>"
            else:
                name = "" if rank > 3 else next(self.experiments) if section == "Experiments" else _id(head)
                said = f"<h{rank}>{head}</h{rank}>" + (f" <span>{result}</span>" if result else "")
                anchor = f' id="{html.escape(name)}"' if name else ""
                begin, end = f"<details{anchor}{' open' * (name in self.unfolded)}><summary>{said}</summary>", "</details>"
            made += [begin, self._html(tokens, head)]
            opened.append(end)
        return "\n".join([*made, *reversed(opened)])

    def _parts(self, text: str) -> Iterator[tuple[int, str, list[Token]]]:
        """The parts of a text: rank of the heading, its text as HTML, and what follows; headings in quotes begin no part."""
        tokens = self.markdown.parse(text)
        starts = [i for i, token in enumerate(tokens) if token.type == "heading_open" and token.level == 0]
        for start, end in zip(starts, [*starts[1:], len(tokens)], strict=True):
            yield (
                int(tokens[start].tag[1]),
                html.escape("".join(one.content for one in tokens[start + 1].children or ())),
                tokens[start + 3 : end],
            )

    def _html(self, tokens: list[Token], title: str) -> str:
        """Convert a part: wide tables scroll, verdicts are marked, figures stand in the page."""
        text: str = self.markdown.renderer.render(tokens, self.markdown.options, {"explained": set()})
        text = re.sub(
            r"<table>.*?</table>",
            lambda match: f'<div class="wide" tabindex="0" role="region" aria-label="Table: {title}">{match[0]}</div>',
            text,
            flags=re.S,
        )
        text = re.sub(rf"<td>({'|'.join(VERDICTS)})</td>", _marked, text)
        text = re.sub(r'<p><img src="([^"]+)\.svg" alt="([^"]*)"[^>]*></p>', self._figure, text)
        return re.sub(r"<img [^>]*>", "", text).replace('href="index.html#', 'href="#')

    def _figure(self, picture: re.Match[str]) -> str:
        path, alt = picture.groups()
        svg = self.figures.get(path)
        return f'<div class="figure" tabindex="0" role="img" aria-label="{alt}">{svg}</div>' if svg else ""


def _marked(cell: re.Match[str]) -> str:
    verdict = cell[1]
    return f'<td><span class="{verdict.replace(" ", "-")}">{"●" if verdict in DECIDED else "○"} {verdict}</span></td>'


def _id(title: str) -> str:
    slug = re.sub(r"\W+", "-", html.unescape(title).lower()).strip("-")
    return next((name for head, name in IDS.items() if title.startswith(head)), slug)


def _with_terms(renderer: Any, tokens: Sequence[Token], place: int, options: Any, env: Any) -> str:
    """A text whose terms are explained when one points at them, each once in a part."""

    def explain(term: re.Match[str]) -> str:
        if term[0] in env["explained"]:
            return term[0]
        env["explained"].add(term[0])
        return f'<abbr title="{html.escape(TERMS[term[0]])}">{term[0]}</abbr>'

    return TERM.sub(explain, html.escape(tokens[place].content))

"""Names of the arms of the handouts by what they are, as in ``4 epochs × 64, GRPO-Clip``; numbers and tables as Markdown."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from grpo.common.safe_text import MARKDOWN, short
from grpo.common.yaml_file import parse_yaml

METHODS = {"grpo": "GRPO", "sft": "SFT", "expert_iteration": "expert iteration"}
# Settings whose phrases come first, the most telling one first, with the settings that the same phrase names.
FIRST: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("asynchronous", "lora", "start_from"), ()),
    "examples": ("filtered",),
    "ei_batch_size": ("group_size", "epochs_per_ei_step"),
    "epochs_per_rollout_batch": ("train_batch_size",),
    **dict.fromkeys(("prompt", "loss_type", "length_normalization", "use_std_normalization"), ()),
}
RATE, STEPS = "learning_rate", "n_grpo_steps"
NEVER = {"keep_steps"}  # settings that do not change a run's rewards
LONGEST_TEXT = 400  # characters of a reason, a measurement or a response
LONGEST = 40  # characters of a setting without a phrase of its own
Config = Mapping[str, Any]  # a run's effective settings


def phrase(key: str, config: Config) -> str:
    """What a setting makes of an arm, such as ``LoRA rank 1`` or ``group size 4``."""
    value = config.get(key)
    if key in PHRASES:
        return PHRASES[key].render(value=value, config=config)
    name = key.replace("_", " ")
    return f"no {name}" if value is None else f"{name} {short(str(value)[:LONGEST])}"


def arm_labels(method: str, configs: Mapping[str, Config]) -> dict[str, str]:
    """Label the arms of an experiment by the settings in which they differ; no two have the same label.

    Phrases are added, the most telling first, as long as they tell further arms apart; so a setting that always goes with
    another is not named, except the number of steps. Without any difference an arm keeps its name. ``method``: the
    experiment's; one arm alone is labelled by it. ``configs``: by arm the effective settings.
    """
    if len(configs) == 1:
        ((arm, config),) = configs.items()
        updates = f", {phrase('epochs_per_rollout_batch', config)}" if "epochs_per_rollout_batch" in config else ""
        return {arm: METHODS[method] + updates}
    settings = dict.fromkeys(key for config in configs.values() for key in config)
    named = {RATE, STEPS, *NEVER, *(key for first, keys in FIRST.items() if first in settings for key in keys)}
    parts: dict[str, list[str]] = {arm: [] for arm in configs}
    for key in (*(key for key in FIRST if key in settings), *(key for key in settings if key not in {*named, *FIRST}), RATE):
        longer = {arm: [*found, phrase(key, configs[arm])] for arm, found in parts.items()}
        if _count(longer) > _count(parts):
            parts = longer
    steps = {arm: [phrase(STEPS, config)] for arm, config in configs.items() if STEPS in config}
    if _count(steps) > 1:
        parts = {arm: parts[arm] + steps[arm] for arm in configs}
    labels = {arm: ", ".join(found) for arm, found in parts.items()}
    twice = {label for label, count in Counter(labels.values()).items() if count > 1}
    return {arm: f"{label} ({arm})" if label and label in twice else label or arm for arm, label in labels.items()}


def _count(parts: Mapping[str, list[str]]) -> int:
    return len({tuple(found) for found in parts.values()})


def scientific(value: float) -> str:
    """A small number as ``3e-4``, with at most three digits."""
    mantissa, exponent = f"{value:.2e}".split("e")
    return f"{float(mantissa):g}e{int(exponent)}"


# ------------------------------------------------------------------------------------------------------ numbers and tables


def decimals(value: float | None, digits: int = 3) -> str:
    """Format a number with so many decimals, never as ``-0.000``; None as an empty text."""
    return "" if value is None else f"{round(value, digits) + 0.0:.{digits}f}"


def counted(number: int, noun: str) -> str:
    """A number with its noun, in the plural unless it is 1."""
    return f"{number} {noun}{'s' * (number != 1)}"


def interval(estimate: Mapping[str, float] | None) -> str:
    """Format as ``0.712 (0.690 to 0.734)``; only the value if the interval is a point; None as an empty text."""
    if estimate is None:
        return ""
    value = decimals(estimate["value"])
    if estimate["low"] == estimate["high"]:
        return value
    return f"{value} ({decimals(estimate['low'])} to {decimals(estimate['high'])})"


def table(rows: Iterable[Mapping[str, Any]]) -> str:
    """A Markdown table of rows with the same columns, which are its heads; a ``|`` in a cell is escaped. Empty without rows."""
    rows = list(rows)
    if not rows:
        return ""
    lines = [list(rows[0]), ["---"] * len(rows[0]), *([str(cell) for cell in row.values()] for row in rows)]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)


# ------------------------------------------------------------------------------------------------------ templates and texts


def bounded(text: object, longest: int = LONGEST_TEXT) -> str:
    """A text's beginning, on one line."""
    line = " ".join(str(text).split())
    return line if len(line) <= longest else line[: longest - 1] + "…"


def said(text: object, longest: int = LONGEST_TEXT) -> str:
    """A text as part of a line: bounded, and without a link, a picture, code, HTML or the end of a cell."""
    return re.sub(r"([\\`\[\]<|])", r"\\\1", bounded(text, longest))


def plain(text: object) -> str:
    """A text for the title of a link or picture, without characters that could end it."""
    return bounded(text).replace("\\", "/").translate({ord(one): None for one in '"`<>[]|'})


def quoted(text: str) -> str:
    """A Markdown quotation of a text."""
    return "\n".join(f"> {line}".rstrip() for line in text.splitlines())


_TEMPLATES = Environment(
    loader=PackageLoader("grpo.reporting"),
    undefined=StrictUndefined,
    autoescape=False,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)
_TEMPLATES.filters |= MARKDOWN | {
    one.__name__: one for one in (interval, decimals, scientific, counted, table, bounded, plain, said, quoted)
}


def render(template: str, **values: Any) -> str:
    """Fill a template; an undefined name is an error."""
    return _TEMPLATES.get_template(template).render(**values)


# How an arm is called by a setting: setting -> a template of its value and of the arm's settings.
PHRASES = {
    key: _TEMPLATES.from_string(text)
    for key, text in parse_yaml(Path(__file__).with_name("templates") / "phrases.yaml").items()
}

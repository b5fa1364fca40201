"""Names of arms by what they are, such as ``4 epochs × 64, GRPO-Clip``; numbers, tables and templates as Markdown."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from grpo.common.safe_text import MARKDOWN, short

LOSSES = {
    "no_baseline": "no baseline",
    "reinforce_with_baseline": "baseline",
    "grpo_clip": "GRPO-Clip",
    "grpo_no_clip": "GRPO-No-Clip",
    "gspo": "GSPO",
    "cispo": "CISPO",
    "sapo": "SAPO",
}
STD = {True: "with std", False: "without std", "batch": "with the batch's std"}
METHODS = {"grpo": "GRPO", "sft": "SFT", "expert_iteration": "expert iteration"}
LONGEST_TEXT = 400  # characters of a reason, a measurement or a response
LONGEST = 40  # characters of a setting without a phrase of its own
Config = Mapping[str, Any]  # a run's effective settings


def _lora(config: Config) -> str:
    lora = config.get("lora")
    return f"LoRA rank {lora['rank']}" if lora else "all weights"


def _start(config: Config) -> str:
    start = config.get("start_from")
    if not start:
        return "base model"
    *_, arm, checkpoint = start.split("/")
    return f"after SFT ({arm}, {checkpoint.replace('-', ' ')})"


def _examples(config: Config) -> str:
    count = f"{config['examples']} examples" if config.get("examples") else "all examples"
    return "correct examples" if config.get("filtered") and not config.get("examples") else count


def _updates(config: Config) -> str:
    epochs = config.get("epochs_per_rollout_batch", 1)
    return f"{epochs} {'epoch' if epochs == 1 else 'epochs'} × {config['train_batch_size']}"


def _rounds(config: Config) -> str:
    epochs = config["epochs_per_ei_step"]
    return f"{config['ei_batch_size']} questions × {config['group_size']}, {epochs} {'epoch' if epochs == 1 else 'epochs'}"


def _asynchronous(config: Config) -> str:
    apart = config.get("asynchronous")
    if not apart:
        return "one process"
    buffer = f", buffer of {apart['replay_capacity']} batches" if apart["replay_capacity"] > 1 else ""
    return f"lag {apart['max_policy_lag']}{buffer}"


# Phrases for settings, the most telling first: each with the settings that it speaks for. One whose first setting the method
# lacks is left out.
PHRASES: tuple[tuple[tuple[str, ...], Callable[[Config], str]], ...] = (
    (("asynchronous",), _asynchronous),
    (("lora",), _lora),
    (("start_from",), _start),
    (("examples", "filtered"), _examples),
    (("ei_batch_size", "group_size", "epochs_per_ei_step"), _rounds),
    (("epochs_per_rollout_batch", "train_batch_size"), _updates),
    (("prompt",), lambda config: f"prompt {config['prompt']}"),
    (("loss_type",), lambda config: LOSSES.get(config["loss_type"], short(config["loss_type"]))),
    (
        ("reward",),
        lambda config: f"reward {short(str(config['reward'])[:LONGEST])}" if config.get("reward") else "the task's reward",
    ),
    (
        ("advantage",),
        lambda config: f"advantage {short(config['advantage'])}" if config.get("advantage") else "the default advantage",
    ),
    (("length_normalization",), lambda config: str(config["length_normalization"])),
    (("use_std_normalization",), lambda config: STD[config["use_std_normalization"]]),
)
RATE, STEPS = "learning_rate", "n_grpo_steps"
NEVER = {"keep_steps"}  # settings that do not change a run's rewards


def arm_labels(method: str, configs: Mapping[str, Config]) -> dict[str, str]:
    """Label the arms of an experiment by the settings in which they differ; no two have the same label.

    Phrases are added, the most telling first, as long as they tell further arms apart; so a setting that always goes with
    another is not named, except the number of steps. Without any difference an arm keeps its name.

    Args:
        method: the experiment's; one arm alone is labelled by it.
        configs: by arm the effective settings.
    """
    if len(configs) == 1:
        ((arm, config),) = configs.items()
        updates = ", " + _updates(config) if method == "grpo" and "train_batch_size" in config else ""
        return {arm: METHODS[method] + updates}
    phrases = [(keys, phrase) for keys, phrase in PHRASES if any(keys[0] in config for config in configs.values())]
    named = {key for keys, _ in phrases for key in keys} | NEVER | {RATE, STEPS}
    others = dict.fromkeys(key for config in configs.values() for key in config if key not in named)
    further = (((key,), _plain(key)) for key in others)
    parts: dict[str, list[str]] = {arm: [] for arm in configs}
    for keys, phrase in (*phrases, *further, ((RATE,), rate)):
        if not any(differ(configs.values(), key) for key in keys):
            continue
        longer = {arm: [*of, phrase(configs[arm])] for arm, of in parts.items()}
        if _count(longer) > _count(parts):
            parts = longer
    if differ(configs.values(), STEPS):
        parts = {arm: [*of, f"{configs[arm][STEPS]} steps"] for arm, of in parts.items()}
    labels = {arm: ", ".join(of) for arm, of in parts.items()}
    twice = {label for label in labels.values() if list(labels.values()).count(label) > 1}
    return {arm: f"{label} ({arm})" if label and label in twice else label or arm for arm, label in labels.items()}


def differ(configs: Iterable[Config], key: str) -> bool:
    """Whether a setting has several values."""
    return len({json.dumps(config.get(key), sort_keys=True, default=str) for config in configs}) > 1


def rate(config: Config) -> str:
    """The learning rate, as ``rate 3e-4``."""
    return f"rate {scientific(config[RATE])}"


def scientific(value: float) -> str:
    """A small number as ``3e-4``, with at most three digits."""
    mantissa, exponent = f"{value:.2e}".split("e")
    return f"{float(mantissa):g}e{int(exponent)}"


def _plain(key: str) -> Callable[[Config], str]:
    name = key.replace("_", " ")
    return lambda config: f"no {name}" if (value := config.get(key)) is None else f"{name} {short(str(value)[:LONGEST])}"


def _count(parts: Mapping[str, list[str]]) -> int:
    return len({tuple(of) for of in parts.values()})


# ------------------------------------------------------------------------------------------------------ numbers and tables


def decimals(value: float | None, digits: int = 3) -> str:
    """Format a number with so many decimals, never as ``-0.000``; None as an empty text."""
    return "" if value is None else f"{round(value, digits) + 0.0:.{digits}f}"


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
    return "\n".join(f"> {line}".rstrip() for line in text.split("\n"))


_TEMPLATES = Environment(
    loader=PackageLoader("grpo.reporting"),
    undefined=StrictUndefined,
    autoescape=False,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)
_TEMPLATES.filters |= MARKDOWN | {one.__name__: one for one in (interval, decimals, bounded, plain, said, quoted)}


def render(template: str, **values: Any) -> str:
    """Fill a template; an undefined name is an error."""
    return _TEMPLATES.get_template(template).render(**values)

"""Write the model card of a checkpoint from the result files of its run; what is unknown is left out or called unknown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData
from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from matplotlib.figure import Figure

from grpo.common.files import damaged, files_digest, read_json
from grpo.common.safe_text import MARKDOWN, short
from grpo.reporting.charts import INK, SHARES, STEP, TITLES, draw_arm, frame, panels, style
from grpo.reporting.timing import read_timing
from grpo.results.intervals import mean_of
from grpo.results.runs import Run
from grpo.results.statistics import format_interval, interval_of_mean, wilson_interval
from grpo.study.paths import stage_of_run
from grpo.study.schema import Study
from grpo.study.settings import HubModel

METADATA = "metadata.json"


def model_card(study: Study, run: Run, source: Path, kind: str, license: str | None) -> ModelCard:
    """Make the card of a checkpoint; its front matter has the answer reward with every digit."""
    about = about_checkpoint(run, source)
    reward = _estimate(run, about["step"])
    base = _base_model(study, run, about)
    settings = run.config["task"]["settings"]
    place = settings.get("source") or settings
    dataset, revision = place.get("hub"), place.get("revision")
    title = run.name.replace("/", "--") + f"-{kind}"
    data = ModelCardData(
        base_model=base and base.repo,
        license=license,
        library_name="transformers",
        pipeline_tag="text-generation",
        datasets=[dataset] if dataset else None,
        tags=[run.config["method"], "reinforcement-learning"] if run.config["method"] == "grpo" else [run.config["method"]],
        model_name=title,
        eval_results=[
            EvalResult(
                task_type="text-generation",
                dataset_type=dataset or settings["use"],
                dataset_name=f"{settings['use']}, {reward['problems']} validation problems of the study",
                dataset_revision=revision,
                metric_type=run.metric,
                metric_name=f"mean {run.metric.replace('_', ' ')}, prompt {about['prompt']}, step {about['step']}",
                metric_value=reward["value"],
            )
        ],
    )
    timing = read_timing(run)
    text = _template().render(
        front_matter=data.to_yaml(),
        title=title,
        kind=kind,
        study=study,
        run=run,
        metrics=run.metrics,
        about=about,
        rewards=_rewards(study, run, about["step"]),
        settings=_settings(study, run),
        origin=_origin(run, source, about, base) | {"licence of these weights": license or "not stated"},
        timing=timing,
        stage=stage_of_run(run.name),
    )
    return ModelCard(text)


def _template() -> Template:
    environment = Environment(loader=PackageLoader("grpo.commands"), undefined=StrictUndefined, trim_blocks=True)
    environment.globals |= {"format_interval": format_interval, "json": json.dumps}
    environment.filters |= MARKDOWN
    return environment.get_template("model_card.md.j2")


def _estimate(run: Run, step: int) -> dict[str, float]:
    """The reward at one evaluation with a 95% interval, as metrics.json has for the last one."""
    place = int((run.validation["step"] == step).to_numpy().argmax())
    outcomes = run.last if place == len(run.outcomes) - 1 else run.outcomes[place]
    low, high = interval_of_mean(outcomes)
    return {"value": float(outcomes.mean()), "low": low, "high": high, "problems": len(outcomes)}


def _base_model(study: Study, run: Run, about: dict[str, Any]) -> HubModel | None:
    """The model on the Hub that the weights come from, possibly through fine-tuning; None if unknown."""
    model, start = study.models[study.experiments[run.experiment].task], about["started_from"]
    if (before := Path(start) / METADATA).exists():
        start = read_json(before, made_by="", keys=("started_from",))["started_from"]
    known = isinstance(model, HubModel) and start == f"{model.repo} at {model.revision}"
    return model if isinstance(model, HubModel) and known else None


def _rewards(study: Study, run: Run, step: int) -> dict[str, dict[str, float]]:
    """Answer rewards to compare with this checkpoint's, each with its interval, by label."""
    metrics = run.metrics
    last, first = int(run.validation["step"].iloc[-1]), int(run.validation["step"].iloc[0])
    rows: dict[str, dict[str, float]] = {
        f"**this checkpoint** (step {step})": _estimate(run, step),
        f"the run's last evaluation (step {last})": _estimate(run, last),
        "the part of it by which the study compares runs": vars(mean_of(run.final, fixed=True)),
        "before training": _estimate(run, first),
    }
    if (full := metrics.get("full/answer_reward")) is not None:
        low, high = wilson_interval(full * metrics["full/problems"], metrics["full/problems"])
        of_all = {"value": full, "low": low, "high": high, "problems": metrics["full/problems"]}
        rows["the last weights on the whole validation set"] = of_all
    return rows


def _settings(study: Study, run: Run) -> list[tuple[str, Any, Any, str]]:
    """The settings that differ from the method's defaults: name, value, default, and what set it."""
    fields = type(study.defaults(run.config["method"])).model_fields
    defaults = {key: field.get_default(call_default_factory=True) for key, field in fields.items()}
    entries = run.config["config"].items()
    return [(k, e["value"], defaults.get(k), e["from"]) for k, e in entries if e["value"] != defaults.get(k)]


def _origin(run: Run, source: Path, about: dict[str, Any], base: HubModel | None) -> dict[str, str | None]:
    timing, config = read_timing(run), run.config
    machine = timing["hardware"]
    start = (
        f"[{base.repo}](https://huggingface.co/{base.repo}) at revision `{base.revision}`" if base else about["started_from"]
    )
    changed = ", with uncommitted changes" if timing["git_changed"] == "true" else ""
    return {
        "started from": "a local folder" if Path(str(start)).is_absolute() else start if base else start and short(start),
        "licence of the base model": "see its page" if base else None,
        "task": f"`{config['task']['settings']['use']}`",
        "digests (SHA-256, first 16 digits)": ", ".join(f"{k} `{config[k]}`" for k in ("model", "train", "validation"))
        + f", this checkpoint with its {METADATA} `{files_digest(source)}`",
        "identity of the run": f"`{config['identity']}`",
        "software": ", ".join(f"{name} {version}" for name, version in config["software"].items()),
        "trained on": ", ".join([machine["processor"], *machine["gpus"]]) + f", {timing['total_s']:.0f} s",
        "commit": f"`{timing['git_commit']}`{changed}" if timing["git_commit"] != "none" else "not known",
        "MLflow run": f"`{timing['mlflow_run_id']}`" if timing["mlflow_run_id"] else "not tracked",
    }


def draw_curve(run: Run, step: int) -> Figure:
    """Draw the validation reward over steps, with the checkpoint's step marked."""
    figure, (axes,) = panels(1)
    draw_arm(axes, [run], run.column, style(0))
    frame(axes, f"{run.name}: {TITLES[run.column]}", STEP[run.config["method"]], run.column in SHARES)
    axes.axvline(step, color=INK, linestyle=(0, (3, 3)), linewidth=1)
    axes.annotate(f"this checkpoint, step {step} ", (step, 0.02), ha="right", color=INK, fontsize=8)
    return figure


def about_checkpoint(run: Run, source: Path) -> dict[str, Any]:
    """Read a checkpoint's metadata.json and check that it agrees with the run's evaluation at its step."""
    made_by = stage_of_run(run.config["same_as"] or run.name)
    about: dict[str, Any] = read_json(source / METADATA, made_by, keys=("step", run.metric, "prompt", "started_from"))
    rewards = run.validation.loc[run.validation["step"] == about["step"], run.column]
    if len(rewards) != 1 or abs(rewards.iloc[0] - about[run.metric]) > 1e-9:
        raise damaged(source / METADATA, "it differs from validation.csv at this step", made_by)
    return about

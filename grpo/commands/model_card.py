"""The model card of a checkpoint: what the result files of its run say; what is unknown is left out, or called so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, HfApi, ModelCard, ModelCardData

from grpo.common.files import damaged, files_digest, read_json
from grpo.reporting.charts import GREY, Spec, filled_curve
from grpo.reporting.curves import METRICS, STEP, points_of
from grpo.reporting.style import styles
from grpo.reporting.timing import read_timing
from grpo.results.runs import REWARD, Run
from grpo.results.selection import evaluations_counted, mean_of_last
from grpo.results.statistics import format_interval, two_level_mean, wilson_interval
from grpo.study.runs import stage_of_run
from grpo.study.schema import Study
from grpo.study.sections import HubModel

HUB_TIMEOUT_S = 10.0
METADATA = "metadata.json"


def model_card(study: Study, run: Run, source: Path, kind: str, license: str | None) -> ModelCard:
    """The card of a checkpoint; its front matter has the answer reward with every digit."""
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
                metric_type="answer_reward",
                metric_name=f"mean answer reward, prompt {about['prompt']}, step {about['step']}",
                metric_value=reward["value"],
            )
        ],
    )
    parts = [_summary(study, run, kind), _results(study, run, about, kind), _use(run, about)]
    parts += [_configuration(study, run), _origin(run, source, about, base, license), _reproduce(study, run, kind)]
    return ModelCard("\n\n".join([f"---\n{data.to_yaml()}\n---", f"# {title}", *parts]) + "\n")


def _estimate(run: Run, step: int) -> dict[str, float]:
    """Answer reward at one evaluation, with the 95% interval that metrics.json has of the last one (Wilson)."""
    outcomes = run.outcomes[(run.validation["step"] == step).to_numpy().argmax()]
    low, high = wilson_interval(float(outcomes.sum()), len(outcomes))
    return {"value": float(outcomes.mean()), "low": low, "high": high, "problems": len(outcomes)}


def _base_model(study: Study, run: Run, about: dict[str, Any]) -> HubModel | None:
    """The model on the Hub that the weights come from, where it is known; there may be fine-tuning in between."""
    model, start = study.models[study.experiments[run.experiment].task], about["started_from"]
    if (before := Path(start) / METADATA).exists():
        start = read_json(before, made_by="", keys=("started_from",))["started_from"]
    known = isinstance(model, HubModel) and start == f"{model.repo} at {model.revision}"
    return model if isinstance(model, HubModel) and known else None


def _summary(study: Study, run: Run, kind: str) -> str:
    twin = run.config["same_as"]
    text = f"The `{kind}` checkpoint of the run `{run.name}` of the study `{study.study}` ({study.description.rstrip('.')})."
    text += f" Method: {run.config['method']}; experiment: {study.title(run.experiment)}; seed {run.seed}."
    equal = f" The run equals `{twin}`, whose results and weights were taken over: these are the weights of `{twin}`."
    return text + (equal if twin else "")


def _results(study: Study, run: Run, about: dict[str, Any], kind: str) -> str:
    metrics, k, sampling = run.metrics, study.last_k(run.experiment), run.config["evaluation"]
    counted = two_level_mean(mean_of_last(run.outcomes, k))
    last, first = int(run.validation["step"].iloc[-1]), int(run.validation["step"].iloc[0])
    n = evaluations_counted(run.outcomes, k)
    rows = {
        f"**this checkpoint** (step {about['step']})": _estimate(run, about["step"]),
        f"the run's last evaluation (step {last})": _estimate(run, last),
        f"the mean of its last {n} evaluation(s), by which the study compares runs (bootstrap)": counted,
        "before training": _estimate(run, first),
    }
    if (full := metrics.get("full/answer_reward")) is not None:
        low, high = wilson_interval(full * metrics["full/problems"], metrics["full/problems"])
        rows[f"the last weights on all {metrics['full/problems']} problems"] = {"value": full, "low": low, "high": high}
    choice = "`last` is the run's last evaluation, which was not chosen by its reward."
    if kind == "best":
        choice = (
            f"`best` was chosen by this very number, as the highest of {len(run.outcomes) - 1} evaluations on the same "
            "problems, and is biased upwards by that: compare by the mean of the last evaluations, or on other problems."
        )
    ended = ""
    if metrics["diverged_step"] is not None:
        ended = f" The run diverged and was stopped at step {metrics['diverged_step']} ({metrics['diverged_reason']})."
    elif metrics["time_limit_step"] is not None:
        ended = f" Its time was up at step {metrics['time_limit_step']}."
    how = (
        f"Mean answer reward on {metrics['validation_problems']} fixed validation problems, one sampled answer each "
        f"(temperature {sampling['temperature']:g}, top-p {sampling['top_p']:g}, at most {sampling['max_tokens']} tokens, "
        f"prompt `{about['prompt']}`), with a 95% interval over the problems. It is one run: nothing is said of other seeds."
    )
    table = _table(["answer reward of", "value (95% interval)"], [[name, format_interval(row)] for name, row in rows.items()])
    curve = "![Validation answer reward over steps](curve.png)"
    return "\n".join(["## Results", "", how, "", *table, "", choice + ended, "", curve])


def _use(run: Run, about: dict[str, Any]) -> str:
    template, stop, *chat = run.config["task"]["formats"][about["prompt"]]
    stops = f", and answers end at {', '.join(f'`{text}`' for text in stop)}" if stop else ""
    asked = f", as a user's message through the chat template ({json.dumps(chat[0])})" if chat else ""
    return f"## Use\n\nThe prompt it was trained with{asked}{stops}:\n\n~~~~text\n{template}\n~~~~"


def _configuration(study: Study, run: Run) -> str:
    fields = type(study.defaults(run.config["method"])).model_fields
    rows = []
    for key, entry in run.config["config"].items():
        default = fields[key].get_default(call_default_factory=True) if key in fields else None
        if entry["value"] != default:
            rows.append([f"`{key}`", *(f"`{json.dumps(value)}`" for value in (entry["value"], default)), entry["from"]])
    heads = ["setting", "value", "default of the method", "set by"]
    rest = "All other settings are the method's defaults."
    return "\n".join(["## Configuration", "", *_table(heads, rows), "", rest])


def _origin(run: Run, source: Path, about: dict[str, Any], base: HubModel | None, license: str | None) -> str:
    timing, config = read_timing(run), run.config
    machine = timing["hardware"]
    start = (
        f"[{base.repo}](https://huggingface.co/{base.repo}) at revision `{base.revision}`" if base else about["started_from"]
    )
    if Path(str(start)).is_absolute():
        start = "a local folder"
    rows = {
        "started from": start,
        "licence of the base model": (_license_on_hub(base) or "not known here; see its page") if base else None,
        "licence of these weights": license or "not stated",
        "task": f"`{config['task']['settings']['use']}`",
        "digests (SHA-256, first 16 digits)": ", ".join(f"{k} `{config[k]}`" for k in ("model", "train", "validation"))
        + f", this checkpoint with its {METADATA} `{files_digest(source)}`",
        "identity of the run": f"`{config['identity']}`",
        "software": ", ".join(f"{name} {version}" for name, version in config["software"].items()),
        "trained on": ", ".join([machine["processor"], *machine["gpus"]]) + f", {timing['total_s']:.0f} s",
        "commit": f"`{timing['git_commit']}`" + _changed(timing) if timing["git_commit"] != "none" else "not known",
        "MLflow run": f"`{timing['mlflow_run_id']}`" if timing["mlflow_run_id"] else "not tracked",
    }
    return "\n".join(["## Origin", "", *_table(["what", "value"], [[name, value] for name, value in rows.items() if value])])


def _changed(timing: dict[str, Any]) -> str:
    return ", with changes that are not in it" if timing["git_changed"] == "true" else ""


def _license_on_hub(base: HubModel) -> str | None:
    """The licence that the base model's card states at the revision that was used; None where the Hub cannot be asked."""
    try:
        card = HfApi().model_info(base.repo, revision=base.revision, timeout=HUB_TIMEOUT_S).card_data
    except Exception:  # whatever the network, the proxy or the Hub raises
        return None
    return card.get("license") if card else None


def _reproduce(study: Study, run: Run, kind: str) -> str:
    timing = read_timing(run)
    commit = [f"git checkout {timing['git_commit']}"] if timing["git_commit"] != "none" else []
    whole = commit and timing["git_changed"] == "false"  # params.yaml is then the study's already
    commands = [*commit, "make install", "source .venv/bin/activate", *([] if whole else [f"grpo study use {study.study}"])]
    commands += [f"dvc repro {stage_of_run(run.name)}", f"grpo publish {run.name} --kind {kind}"]
    note = "The commit alone does not give these weights: params.yaml, dvc.yaml or code had changes beside it.\n\n"
    intro = note if timing["git_changed"] == "true" else ""
    return f"## Reproduce\n\n{intro}In a clone of the project:\n\n```sh\n" + "\n".join(commands) + "\n```"


def _table(heads: list[str], rows: list[list[str]]) -> list[str]:
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in [heads, *rows]]
    return [lines[0], "|" + "---|" * len(heads), *lines[1:]]


def draw_curve(run: Run, step: int) -> Spec:
    """Validation answer reward over steps, with the checkpoint's step marked."""
    points = points_of([run], "validation", REWARD)
    spec = filled_curve(points, styles([run.arm]), STEP[run.config["method"]], METRICS["validation"][REWARD], share=True)
    spec["layer"] += [
        {"mark": {"type": "rule", "color": GREY, "strokeDash": [3, 3]}, "encoding": {"x": {"datum": step}}},
        {
            "mark": {
                "type": "text",
                "align": "right",
                "dx": -4,
                "y": 8,
                "color": GREY,
                "text": f"this checkpoint, step {step}",
            },
            "encoding": {"x": {"datum": step}},
        },
    ]
    return spec | {"title": run.name}


def about_checkpoint(run: Run, source: Path) -> dict[str, Any]:
    """A checkpoint's metadata.json, which must agree with the run's evaluation at its step."""
    made_by = stage_of_run(run.config["same_as"] or run.name)
    about: dict[str, Any] = read_json(source / METADATA, made_by, keys=("step", "answer_reward", "prompt", "started_from"))
    rewards = run.validation.loc[run.validation["step"] == about["step"], REWARD]
    if len(rewards) != 1 or abs(rewards.iloc[0] - about["answer_reward"]) > 1e-9:
        raise damaged(source / METADATA, "not what validation.csv has of this step", made_by)
    return about

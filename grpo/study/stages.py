"""Whether dvc.yaml has a stage for each experiment of the study, as its entry says; and what such a stage looks like."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from grpo.study import paths
from grpo.study.effective import effective_run
from grpo.study.schema import Study, read_yaml

DVC_FILE = Path("dvc.yaml")
STAGE = """\
  {name}:
    desc: {title}.
    matrix: {{arm: "${{experiments.{name}.arms}}", seed: "${{seeds}}"}}
    cmd: grpo train {name} ${{item.arm}} --seed ${{item.seed}}
    deps: [{deps}]
    params: ["experiments.{name}.arms.${{item.arm}}"]
    outs:
      - data/runs/{name}/${{item.arm}}-${{item.seed}}
      - data/checkpoints/{name}/${{item.arm}}-${{item.seed}}
      - data/timing/{name}/${{item.arm}}-${{item.seed}}.json
    meta: {{resources: {resources}}}
"""


def stage_of(study: Study, experiment: str) -> str:
    """The stage of dvc.yaml that trains an experiment's runs."""
    entry = study.experiments[experiment]
    return STAGE.format(
        name=experiment, title=study.title(experiment), deps=", ".join(deps_of(study, experiment)), resources=entry.resources
    )


def deps_of(study: Study, experiment: str) -> list[str]:
    """What a run of an experiment reads: its model and data, what its kind of run shares, the checkpoints that its arms start
    from, and the selection that it builds on.
    """
    entry = study.experiments[experiment]
    plain = effective_run(study, experiment, next(iter(entry.arms)), study.seeds[0], [])
    base = plain.model_copy(update={"config": study.defaults(entry.method)})
    read = [base.model, *([base.train.parent] if base.train.parent != base.validation.parent else []), base.validation.parent]
    starts = sorted({str(arm["start_from"]).split("/")[0] for arm in entry.arms.values() if arm.get("start_from")})
    return [
        *(path.as_posix() for path in read),
        (paths.TRAINING_INPUTS / f"{experiment}.json").as_posix(),
        *((paths.CHECKPOINTS / start).as_posix() for start in starts),
        *([(paths.SELECT / f"{entry.builds_on}.json").as_posix()] if entry.builds_on else []),
    ]


def unlike_dvc(study: Study) -> list[str]:
    """What of the study's experiments dvc.yaml says otherwise, each with what to do; empty where the two agree."""
    if not DVC_FILE.exists():
        return []
    stages: dict[str, Any] = read_yaml(DVC_FILE)["stages"]
    found = []
    for name in study.made:
        stage = stages.get(name)
        if stage is None:
            found.append(
                f"{DVC_FILE}: experiments.{name} has no stage. Add this below the other experiments:\n\n{stage_of(study, name)}"
            )
            continue
        lacking = [dep for dep in deps_of(study, name) if dep not in stage["deps"]]
        if lacking:
            found.append(f"{DVC_FILE}: {name}.deps: lacks {', '.join(lacking)}, which the entry asks for. Add it.")
        reserved = stage.get("meta", {}).get("resources")
        if reserved != study.experiments[name].resources:
            found.append(
                f"{DVC_FILE}: {name}.meta.resources: {reserved}, but experiments.{name}.resources is "
                f"{study.experiments[name].resources}. Make them the same."
            )
    trained = [name for name, stage in stages.items() if str(stage.get("cmd", "")).startswith("grpo train ")]
    found += [
        f"{DVC_FILE}: the stage {name} has no entry under experiments in params.yaml. Add one (with `arms: {{}}` to leave it "
        "out), or remove the stage."
        for name in trained
        if name not in study.experiments
    ]
    return found

"""The studies in studies/ for tests that need one whole, and the default study's experiments by name."""

import copy
from collections.abc import Callable, Mapping
from contextlib import chdir
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel
from ruamel.yaml import YAML

from grpo.commands.study import composed_text
from grpo.common.errors import UserError
from grpo.study.compose import compose
from grpo.study.config import OFF_POLICY_RANK, Experiment, Method
from grpo.study.schema import Study, load_study, validated

SFT = "sft_experiment"
EXPERT_ITERATION = "expert_iteration_experiment"
SFT_INITIALIZATION = "grpo_sft_initialization"
BROAD, FOCUSED = "grpo_off_policy_sweep_broad", "grpo_off_policy_sweep_focused"
CLIP_ABLATION = "grpo_off_policy_clip_ablation"
COLOCATE = "grpo_colocate"
ASYNCHRONOUS = "grpo_async_offpolicy"
KEYWORD = "grpo_keyword_inclusion"

ROOT = Path(__file__).parents[2]
STUDIES = sorted(path for path in (ROOT / "studies").glob("*.yaml") if path.stem != "base")  # which is no study by itself


@cache
def study_named(name: str) -> Study:
    """A study in studies/; whoever needs another one makes a copy."""
    return load_study(ROOT / f"studies/{name}.yaml")


def _every_experiment() -> dict[str, Any]:
    """The values of the default study, and LoRA as its own study has it: a run of each kind."""
    values, lora = (compose(ROOT / f"studies/{name}.yaml") for name in ("mini", "lora"))
    values["experiments"]["grpo_lora"]["arms"] = lora["experiments"]["grpo_lora"]["arms"]
    return values


_VALUES = _every_experiment()
_STUDY = validated(_VALUES, Path("params.yaml"))
Edit = Callable[[dict[str, Any]], None]
Grpo = Callable[..., tuple[int, str, str]]  # what the fixture ``grpo`` gives
REMOVED = object()  # the value of a key that is taken away
EXPERIMENTS = {name: experiment.title for name, experiment in _STUDY.experiments.items()}
# Whose winners' values an experiment's runs start from, and the sweep of which arms take theirs by rank.
BUILDS_ON = {
    name: [before for before in _STUDY.needed_selections(name) if _STUDY.experiments[before].passes_on == "winner"]
    for name in EXPERIMENTS
}
RANKED_BY = {
    name: experiment.builds_on
    for name, experiment in _STUDY.experiments.items()
    if experiment.builds_on and any(OFF_POLICY_RANK in arm for arm in experiment.arms.values())
}


def entry(experiment: str, **changes: Any) -> Experiment:
    """The default study's entry of an experiment, with these values in the place of its own."""
    return _STUDY.experiments[experiment].model_copy(update=changes)


def changed(study: Study, **values: Any) -> Study:
    """The study with these values in the place of its own; a dictionary changes single values of a section."""

    def of(name: str, value: Any) -> Any:
        own = getattr(study, name)
        return own.model_copy(update=value) if isinstance(own, BaseModel) and isinstance(value, dict) else value

    return study.model_copy(update={name: of(name, value) for name, value in values.items()})


def method_of(experiment: str) -> Method:
    """How its runs are trained."""
    return _STUDY.experiments[experiment].method


def needed_selections(experiment: str) -> list[str]:
    """The experiments whose selection its runs know of, first to last."""
    return _STUDY.needed_selections(experiment)


def values_of(name: str) -> dict[str, Any]:
    """The values of a study, which the caller may change."""
    return copy.deepcopy(_composed(name))


@cache
def _composed(name: str) -> dict[str, Any]:
    return compose(ROOT / f"studies/{name}.yaml")


def one_arm_of(task: dict[str, Any]) -> dict[str, Any]:
    """The values of the smoke study with this task and one arm, 3e-3 of grpo_learning_rate."""
    values = values_of("smoke")
    values["tasks"]["main"] = task
    del values["sft_datasets"]["main"]
    values["experiments"] = {name: of | {"arms": {}} for name, of in values["experiments"].items()}
    values["experiments"]["grpo_learning_rate"]["arms"] = {"3e-3": {"learning_rate": 3e-3}}
    values["evaluation"] |= {"problems": 8, "last_problems": 16, "selection_problems": 4, "zero_shot_problems": 16}
    values["evaluation"]["best_of_n"]["problems"] = 8
    return values


def shorten_quickstart(file: Path, pretraining: int = 20, steps: int = 4) -> None:
    """Write the quickstart's study with all its values, cut down to seconds."""
    params = values_of("quickstart")
    params["threads"] = 1
    params["tasks"]["main"] |= {"train_size": 64, "validation_size": 24, "levels": 1}
    params["models"]["main"] |= {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 512, "steps": pretraining}
    params["grpo"] |= {"n_grpo_steps": steps, "rollout_batch_size": 16, "train_batch_size": 16, "group_size": 4}
    params["grpo"]["sampling_max_tokens"] = params["evaluation"]["max_tokens"] = 16
    params["evaluation"] |= {"every": 2, "problems": 8, "last_problems": 16, "selection_problems": 4, "zero_shot_problems": 24}
    params["divergence"] = None
    YAML().dump(params, file)


def activate(name: str, folder: Path) -> Path:
    """Write ``folder``'s params.yaml as `grpo study use NAME` does; its path."""
    (folder / "params.yaml").write_text(_text_of(name))
    return folder / "params.yaml"


@cache
def _text_of(name: str) -> str:
    with chdir(ROOT):
        return composed_text(Path(f"studies/{name}.yaml"))[0]


def edited(*edits: Edit) -> Study:
    """The default study with every experiment after edits of its values."""
    values = copy.deepcopy(_VALUES)
    all_of(*edits)(values)
    return validated(values, Path("params.yaml"))


def refused(*edits: Edit) -> str:
    """The message about the mini study after ``edits``, without the name of the file."""
    with pytest.raises(UserError) as caught:
        edited(*edits)
    message = str(caught.value)
    assert message.startswith("params.yaml: ") and message.endswith(".") and len(message) < 2500
    return message.removeprefix("params.yaml: ")


def edit(old: str, new: str, file: Path = Path("params.yaml")) -> None:
    """Replace text of a file that is there, once."""
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new, 1))


def with_values(of: Any, values: Mapping[str, Any]) -> Any:
    """A copy of a study, or of a section, with these values at a.b.c, which nobody validates."""
    for path, value in values.items():
        key, _, below = path.partition(".")
        if below:
            value = with_values(of[key] if isinstance(of, dict) else getattr(of, key), {below: value})
        of = of | {key: value} if isinstance(of, dict) else of.model_copy(update={key: value})
    return of


def put(path: str, value: Any) -> Edit:
    """An edit that sets or removes the value at a.b.c."""

    def edit(values: dict[str, Any]) -> None:
        *above, last = path.split(".")
        for key in above:
            values = values[key]
        if value is REMOVED:
            del values[last]
        else:
            values[last] = value

    return edit


def all_of(*edits: Edit) -> Edit:
    """Several edits, one after another."""
    return lambda values: [edit(values) for edit in edits] and None


def in_two_processes(values: dict[str, Any]) -> None:
    """An edit: each run has two processes and a stage of its own; none is asynchronous."""
    values["learner"]["processes"] = 2
    values["seeds_in_one_stage"] = False
    values["experiments"][ASYNCHRONOUS]["arms"] = {}
    for entry in values["experiments"].values():
        entry.pop("one_stage", None)


def shard_learner(values: dict[str, Any]) -> None:
    """An edit: runs are sharded over two processes, and those experiments are left out that cannot be."""
    in_two_processes(values)
    values["learner"]["fully_shard"] = True
    values["experiments"]["grpo_lora"]["arms"] = {}


def new_arm(experiment: str, name: str = "extra", **overrides: Any) -> Edit:
    """An edit that adds an arm."""
    return lambda values: values["experiments"][experiment]["arms"].update({name: overrides})

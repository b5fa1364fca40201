"""Make a rehearsal: a study for GPUs, cut down so that each stage runs on a CPU within minutes.

It keeps tasks, formats, tokenizers, model architectures, experiments, arms, their order, updates per rollout batch and losses.
It does without what `grpo doctor` computes or only the real run shows: weights are random and small, and there are few steps,
short responses and few evaluations.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from grpo.study.schema import Study
from grpo.study.settings import MAIN, RandomModel, SampledTraces

SUFFIX = "-rehearsal"  # of the study's name
STEPS, TOKENS, PROBLEMS = 2, 16, 8
SIZES = {"hidden_size": 64, "num_hidden_layers": 2}
BATCHES = ("rollout_batch_size", "train_batch_size")
FEW: dict[str, dict[str, Any]] = {  # by method: values that also replace those of arms
    "grpo": {"n_grpo_steps": STEPS, "sampling_max_tokens": TOKENS},
    "sft": {"evaluate_every": STEPS, "examples": PROBLEMS},
    "expert_iteration": {"n_ei_steps": STEPS, "sampling_max_tokens": TOKENS},
}
MOST = {"overlong_buffer": TOKENS // 2, "warmup_steps": 1}  # upper limits, to fit into so few tokens and updates


def rehearsal_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """Compute the overlay that turns a study, from :func:`grpo.study.compose.compose`, into its rehearsal."""
    made = {name: entry for name, entry in values["experiments"].items() if entry["arms"]}
    kept = {  # the step that replaces each kept step of fine-tuning
        f"{name}/{arm}/step-{step}": place
        for name, entry in made.items()
        for arm, changed in entry["arms"].items()
        for place, step in enumerate(changed.get("keep_steps", ()), start=1)
    }
    sections: dict[str, Any] = {}
    experiments: dict[str, Any] = {}
    for method, few in FEW.items():
        of_method = {name: entry["arms"] for name, entry in made.items() if entry.get("method", "grpo") == method}
        configs = [values[method], *(arm for arms in of_method.values() for arm in arms.values())]
        group = values[method].get("group_size", 1) if any("group_size" in arm for arm in configs[1:]) else 2
        by = dict.fromkeys(BATCHES, _divisor(configs, BATCHES, group))
        by["ei_batch_size"] = _divisor(configs, ("ei_batch_size",), 4)
        sections[method] = _cut(values[method], by, few) | few
        if method == "sft":
            sections[method] |= {"n_sft_steps": max([2 * STEPS, *kept.values()]), "examples": None}
        else:
            sections[method]["group_size"] = group
        for name, arms in of_method.items():
            experiments[name] = {"arms": {arm: _cut(changed, by, few) for arm, changed in arms.items()}}
            for arm in experiments[name]["arms"].values():
                if "keep_steps" in arm:
                    most = len(arm["keep_steps"]) if method == "sft" else STEPS
                    arm["keep_steps"] = list(range(1, len(arm["keep_steps"]) + 1))[:most]
                if arm.get("start_from") in kept:
                    arm["start_from"] = f"{arm['start_from'].rpartition('-')[0]}-{kept[arm['start_from']]}"
    fine_tuned = {entry.get("task", MAIN) for entry in made.values() if entry.get("method") == "sft"}
    return {
        "seeds": values["seeds"][:1],
        "threads": 1,
        "models": {name: _model(model) for name, model in values["models"].items()},
        "sft_datasets": {name: _traces(traces) for name, traces in values["sft_datasets"].items() if name in fine_tuned},
        "gpu_memory_gib": None,
        "engine": {"name": "transformers", "device": "cpu", "dtype": "float32", "max_batch_size": 64, "sleep_level": 0},
        "learner": {
            "device": "cpu",
            "dtype": "float32",
            "optimizer": "adamw",
            "compile": False,
            "processes": 1,
            "fully_shard": False,
        },
        **sections,
        "evaluation": {
            "every": 1,
            "problems": PROBLEMS,
            "last_problems": 2 * PROBLEMS,
            "selection_problems": PROBLEMS,
            "zero_shot_problems": PROBLEMS,
            "max_tokens": TOKENS,
            "best_of_n": {"problems": 4, "samples": 4, "n": [1, 4]},
        },
        "save_state_every": 1,
        **({"kissing_number": {"strategy": None}} if values["kissing_number"] else {}),
        "experiments": experiments,
        "resources": {kind: {"gpus": 0, "cpus": 1, "mem_mb": 4000, "runtime_min": 60} for kind in values["resources"]},
    }


def not_covered(rehearsal: Study, study: Study) -> list[str]:
    """List what a rehearsal does not cover of its study."""
    engine, learner, cut = study.engine, study.learner, rehearsal
    arms = [arm for name in study.active_experiments for arm in study.experiments[name].arms.values()]
    left_out = {
        "trained weights: what a model learns, its rewards, right responses": any(
            isinstance(model, RandomModel) for model in cut.models.values()
        ),
        f"sampling with {engine.name} on {engine.device} in {engine.dtype}, and its agreement with the learner": (
            (engine.name, engine.device) != (cut.engine.name, cut.engine.device)
        ),
        "vLLM's sleep while the learner trains": engine.sleep_level,
        f"training on {learner.device} in {learner.dtype}": learner.device != cut.learner.device,
        f"the optimizer {learner.optimizer}": learner.optimizer != cut.learner.optimizer,
        f"{learner.processes} processes that train together": learner.processes > cut.learner.processes,
        "weights sharded over processes": learner.fully_shard,
        "memory, which `grpo doctor` computes for the study itself": study.gpu_memory_gib,
        f"responses longer than {TOKENS} tokens, batches and steps of full size, and how long they take": True,
        f"seeds after the first of {len(study.seeds)}": len(study.seeds) > 1,
        "responses that a teacher samples": any(isinstance(t, SampledTraces) for t in study.sft_datasets.values()),
        "a time limit, and the whole validation set at the end": any(arm.get("wall_clock_limit_s") for arm in arms),
        "a search with a language model": study.kissing_number and study.kissing_number.strategy,
    }
    return [what for what, missing in left_out.items() if missing]


def _divisor(configs: Sequence[Mapping[str, Any]], keys: Sequence[str], least: int) -> int:
    """The largest d that divides all sizes, with gcd(sizes) / d of at least ``least``; 1 if there is none."""
    common = math.gcd(*(config[key] for config in configs for key in keys if key in config))
    return max((d for d in range(1, common + 1) if common % d == 0 and common // d >= least), default=1)


def _cut(changed: Mapping[str, Any], by: Mapping[str, int], few: Mapping[str, Any]) -> dict[str, Any]:
    """Cut a method's section or an arm: smaller batches, few steps, no time limit."""
    cut = {key: few.get(key, value) for key, value in changed.items() if key != "wall_clock_limit_s"}
    cut |= {key: cut[key] // divisor for key, divisor in by.items() if key in cut}
    cut |= {key: min(cut[key], most) for key, most in MOST.items() if cut.get(key)}
    if (parts := cut.get("gradient_accumulation_steps")) is not None:
        divisor = by["train_batch_size"]
        cut["gradient_accumulation_steps"] = 1 if parts % divisor else parts // divisor
    return cut


def _model(model: Mapping[str, Any]) -> dict[str, Any]:
    """Replace a model from elsewhere by random weights, and shorten the pretraining of one that the study makes."""
    if model["source"] == "pretrain":
        return {**model, "steps": min(60, model["steps"])}
    if model["source"] == "random":
        return dict(model)
    like = {key: value for key, value in model.items() if key != "device"}
    return {"source": "random", "like": like, **SIZES, "seed": 0}


def _traces(traces: Mapping[str, Any]) -> dict[str, Any]:
    return {"source": "task", "prompt": traces["prompt"]} if traces["source"] == "sampled" else dict(traces)

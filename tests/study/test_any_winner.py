"""A study is refused before it runs if an arm does not fit what some earlier winner would hand on."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest
from study_parts import BROAD, CLIP_ABLATION, FOCUSED, edited, study_named

from grpo.common.errors import UserError
from grpo.study.effective import effective_run, require_any_winner
from grpo.study.schema import Study

KL = "grpo_kl_divergence"
SHORT = {"n_grpo_steps": 40, "epochs_per_rollout_batch": 4, "loss_type": "grpo_clip"}
SWEEP = {
    "on": {"n_grpo_steps": 24, "train_batch_size": 64},
    "off": {"n_grpo_steps": 20, "train_batch_size": 16},
    "twice": {"n_grpo_steps": 24, "epochs_per_rollout_batch": 2},
}
FOCUS = {"on_policy": {"epochs_per_rollout_batch": 1, "train_batch_size": 64}, "best_1": {"off_policy_rank": 1}}


def small(arms: dict[str, Any] | None = None) -> Study:
    """A study of the experiments up to the KL's, of which those before the sweep have one arm."""
    chosen = {
        "grpo_learning_rate": {"1e-3": {"learning_rate": 1e-3}},
        "grpo_baselines": {"no_baseline": {"loss_type": "no_baseline"}},
        "grpo_length_normalization": {"masked_mean": {}},
        "grpo_group_standard_deviation": {"with_std": {}},
        BROAD: SWEEP,
        FOCUSED: FOCUS,
        CLIP_ABLATION: {"long": {}, "short": SHORT},
        KL: {"best": {"keep_steps": [8, 40]}},
    } | (arms or {})

    def only(values: dict[str, Any]) -> None:
        values["experiments"] = {name: values["experiments"][name] | {"arms": own} for name, own in chosen.items()}

    return edited(only)


def fails_for_a_winner(study: Study) -> bool:
    """Whether a run is refused under any combination of winners, each tried by `effective_run` itself."""
    names = [*study.needed_selections(KL), KL]
    swept = study.experiments[BROAD].arms

    def tried(place: int, selections: list[dict[str, Any]]) -> bool:
        if place == len(names):
            return False
        name = names[place]
        for arm in study.experiments[name].arms:
            try:
                run = effective_run(study, name, arm, study.seeds[0], selections)
            except UserError:
                return True
            won = {"experiment": name, "winner": arm, "overrides": run.overrides}
            ways: list[list[str]] = [[]]
            if name == BROAD:
                configs = {a: effective_run(study, name, a, study.seeds[0], selections).config for a in swept}
                off = [a for a, config in configs.items() if config.updates_per_rollout_batch > 1]  # type: ignore[union-attr]
                ways = [list(order) for order in itertools.permutations(off)]
            for way in ways:
                ranking = [{"arm": a, "overrides": swept[a]} for a in way]
                if tried(place + 1, [*selections, won | {"off_policy_ranking": ranking}]):
                    return True
        return False

    return tried(0, [])


FIT = {
    "all fit": small({FOCUSED: FOCUS | {"best_1": {"off_policy_rank": 1, "n_grpo_steps": 48}}}),
    "its own steps come first": small({KL: {"best": {"keep_steps": [8, 40], "n_grpo_steps": 40}}}),
    "what the shorter winner changes is not taken over on-policy": small(
        {FOCUSED: {"on_policy": {"n_grpo_steps": 48} | FOCUS["on_policy"]}, CLIP_ABLATION: {"short": {"n_grpo_steps": 24}}}
    ),
}
REFUSED = {
    "the winner may have the sweep's 20 steps": small(),
    "a shorter winner": small(
        {FOCUSED: {"best_1": {"off_policy_rank": 1, "n_grpo_steps": 48}}, KL: {"best": {"keep_steps": [48]}}}
    ),
    "lengths that do not fit": small(
        {
            FOCUSED: {"least": {"sampling_min_tokens": 12, "n_grpo_steps": 48}},
            CLIP_ABLATION: {"most": {"sampling_max_tokens": 8}},
        }
    ),
}


@pytest.mark.parametrize("name", FIT | REFUSED)
def test_a_study_is_refused_if_a_run_is_under_some_winners(name: str) -> None:
    assert fails_for_a_winner((FIT | REFUSED)[name]) == (name in REFUSED)
    if name in FIT:
        require_any_winner(FIT[name])
        return
    with pytest.raises(UserError, match="should win"):
        require_any_winner(REFUSED[name])


def test_the_message_names_the_arm_and_the_winners() -> None:
    with pytest.raises(UserError) as told:
        require_any_winner(REFUSED["a shorter winner"])
    assert str(told.value).startswith(f"experiments.{KL}.arms.best: keep_steps: [48] come after the last step")
    assert re.search(rf"if .*{CLIP_ABLATION}/short should win", str(told.value))


def test_a_pinned_winner_stands_alone() -> None:
    study = REFUSED["a shorter winner"].model_copy(deep=True)
    study.selection.pinned[CLIP_ABLATION] = "long"
    require_any_winner(study)


@pytest.mark.parametrize("name", ["math-h100", "math-24gb", "gsm8k", "smoke", "quickstart"])
def test_no_study_here_would_be_refused_half_way(name: str) -> None:
    require_any_winner(study_named(name))

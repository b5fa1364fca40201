"""Tries the study's own rewards, advantages, losses and documents before anything slow."""

from __future__ import annotations

from grpo.common.errors import UserError
from grpo.common.imports import call_with, is_import_path
from grpo.study.config import GrpoConfig, PretrainedHere, RunConfig
from grpo.study.effective import effective_run
from grpo.study.schema import Study
from grpo.tasks.rewards import find_reward
from grpo.tasks.task import SHIPPED_REWARDS, Task, find_format

OF_OWN_CODE = {"reward", "advantage", "advantage_options", "loss_type", "loss_options"}


def require_own_code(config: RunConfig, task: Task) -> None:
    """Import a run's reward functions, advantage and loss, and try the last two; UserError if one fails."""
    if not isinstance(config, GrpoConfig):
        return
    if config.reward is not None:
        further = ("environments",) if find_format(task, config.prompt).environment else ()
        for path in [config.reward] if isinstance(config.reward, str) else config.reward:
            if path not in SHIPPED_REWARDS:
                find_reward(path, (*task.reward_columns, *further))
    if config.advantage is not None:
        from grpo.learner.advantages import try_advantage  # imports torch, which is slow

        try_advantage(config.advantage, config.advantage_options, config.group_size)
    if is_import_path(config.loss_type) or config.loss_options:
        from grpo.learner.losses import bind_loss

        bind_loss(config.loss_type, config.loss_options)


def require_own_code_of_all(study: Study) -> None:
    """:func:`require_own_code` for each arm of a study; also that tasks have the documents that models are pretrained on."""
    for name, model in study.models.items():
        if isinstance(model, PretrainedHere):  # makes no document yet
            documents = {"seed": model.seed, **model.documents}
            call_with(study.task(name).documents, documents, f"models.{name}.documents")
    for name in study.active_experiments:
        for arm, overrides in study.experiments[name].arms.items():
            config = effective_run(study, name, arm, study.seeds[0], []).config
            try:
                require_own_code(config, study.task(study.experiments[name].task))
            except UserError as error:
                here = f"experiments.{name}.arms.{arm}: " if OF_OWN_CODE & overrides.keys() else ""
                raise UserError(f"{here}{error}") from error

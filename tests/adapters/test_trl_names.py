"""The names that runs' metrics have in MLflow beside their own are names that TRL's trainer logs."""

from __future__ import annotations

import inspect

import pytest

from grpo.common.metrics import TRL_NAMES

pytestmark = pytest.mark.adapters


def test_trl_logs_these_names() -> None:
    from transformers import Trainer
    from trl.trainer.grpo_trainer import GRPOTrainer

    logged = inspect.getsource(GRPOTrainer)
    own = {name.removeprefix("eval_") for name in TRL_NAMES.values()} - {"grad_norm"}
    assert [name for name in sorted(own) if f'"{name}"]' not in logged] == []
    assert 'logs["grad_norm"]' in inspect.getsource(Trainer)

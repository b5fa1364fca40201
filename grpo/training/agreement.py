"""Check before training that engine and learner compute the same policy.

An engine that cannot take a model's weights, or computes its architecture otherwise, may go on without an error, and the run
would train on another policy's responses.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from grpo.common.errors import UserError
from grpo.common.records import Rollout
from grpo.learner.mismatch import mismatch
from grpo.study.schema import Study

COMPARED = 64  # rollouts, evenly spaced: with several processes each engine's are among them
# Largest mean difference of log-probs at temperature 1 (nats a token) that rounding explains. Between vLLM and the learner 1e-6
# was measured in float32, .015 in bfloat16; a mixture of experts may round to another expert. Other weights give 1 or more.
ROUNDING = {"float32": 0.05, "float16": 0.3, "bfloat16": 0.3}


def require_agreement(study: Study, learner: Any, rollouts: Sequence[Rollout]) -> None:
    """Compare the engine's log-probs of validation responses with the learner's.

    A temperature below 1 enlarges differences of logits. ``top_p`` raises the engine's log-probs by at most -log(top_p), as the
    tokens that it keeps have at least this probability.

    Args:
        learner: a :class:`grpo.learner.learner.Learner`, or a remote one.
        rollouts: sampled by ``study.evaluation`` with the learner's current weights.

    Raises:
        UserError: the mean difference is far beyond rounding, or not a number.
    """
    sampling, temperature = study.evaluation, study.evaluation.temperature or 1.0
    compared = rollouts[:: max(1, len(rollouts) // COMPARED)][:COMPARED]
    engine = torch.tensor([one for rollout in compared for one in rollout.completion.log_probs])
    if not engine.numel():
        return  # all of them are empty
    found = mismatch(torch.cat(learner.log_probs(compared, temperature)), engine)["mismatch_mean"].mean().item()
    precisions = [study.learner.dtype] + [study.engine.dtype] * (study.engine.name == "vllm")
    limit = max(ROUNDING[each] for each in precisions) / min(1.0, temperature) - math.log(sampling.top_p)
    if not found <= limit:
        other = "engine.name to transformers" if study.engine.name == "vllm" else "learner.packing to false"
        raise UserError(
            f"before training, engine and learner differ by {found:.3g} nats a token (mean difference of the log-probabilities "
            f"of the first responses; rounding explains at most {limit:.3g}): the engine samples from other weights than the "
            f"learner trains, or one of them does not compute this model as it should. Set {other} in params.yaml."
        )

"""An update synchronizes with the device once, for any number of microbatches.

Counted on a CPU, where the same calls only cost time: numbers that are read, and results whose size depends on numbers.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from learner_parts import ADVANTAGES, LENGTHS, REWARDS, learner_of, off_policy, rollouts
from model_parts import own_model
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from training_parts import scored

from grpo.learner.microbatches import texts_of

READS = ("item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__", "__contains__")
OF_DATA = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "unique", "bincount", "repeat_interleave")


class Calls(TorchFunctionMode):
    """Counts methods that read a tensor's numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.update([name for name in READS if function is getattr(Tensor, name)])
        return function(*args, **(kwargs or {}))


class Kernels(TorchDispatchMode):
    """Counts kernels whose output size depends on data, such as indexing with masks."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        masks = name in ("index", "index_put", "index_put_", "_index_put_impl_") and any(
            index is not None and index.dtype == torch.bool for index in args[1]
        )
        self.seen.update([name] if masks or name in OF_DATA else [])
        return function(*args, **(kwargs or {}))


def reads(work: Any) -> Counter[str]:
    with Calls() as calls, Kernels() as kernels:
        work()
    return calls.seen + kernels.seen


def test_the_counters_see_what_waits() -> None:
    x, mask = torch.arange(3.0), torch.tensor([True, False, True])
    found = reads(lambda: (x[mask].sum().item(), x.tolist(), bool(mask.any()), x.cpu(), x.masked_fill(mask, 0)[mask]))
    assert {name: found[name] for name in ("item", "tolist", "__bool__", "cpu", "index")} == {
        **dict.fromkeys(("item", "tolist", "__bool__", "cpu"), 1),
        "index": 2,
    }


@pytest.mark.parametrize(("budget", "own"), [(25, False), pytest.param(25, True, marks=pytest.mark.nightly), (None, True)])
def test_an_update_reads_once_whatever_its_size(fresh_model: Any, budget: int | None, own: bool) -> None:
    """(With padded microbatches, transformers' models read one number each, to detect their own packing.)"""
    for copies in (1, 4):
        sizes = {"train_batch_size": 8 * copies, "rollout_batch_size": 8 * copies, "gradient_accumulation_steps": 4 * copies}
        model = own_model() if own else fresh_model
        learner = learner_of(model, budget, **sizes, loss_type="grpo_clip", importance_cap=2.0)
        batch = rollouts(LENGTHS * copies)
        batch = scored(batch, REWARDS.repeat(copies), ADVANTAGES.repeat(copies), off_policy(learner, batch))
        assert sum(1 for _ in learner._microbatches(learner.model, texts_of(batch))) >= 2 * copies
        assert reads(lambda: learner.update(batch)) == {"tolist": 1}  # noqa: B023 - called at once
        assert reads(lambda: learner.sft_update(texts_of(batch))) == {"tolist": 1}  # noqa: B023
        assert reads(lambda: learner.log_probs(batch)) == {"cpu": 1}  # noqa: B023

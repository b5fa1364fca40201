"""Several processes under real torchrun compute what one computes."""

from __future__ import annotations

from pathlib import Path

import parallel_worker
import pytest
import torch
from parallel_worker import compute
from training_parts import under_torchrun


@pytest.mark.slow
def test_processes_share_the_work_and_get_the_gradient_of_one(tmp_path: Path) -> None:
    """Three processes, among which nothing divides evenly.

    Gradients, losses, log-probabilities; every loss that needs more than its own rows; packed and padded; SFT; the reference.
    """
    processes, alone = 3, compute()
    ranks = under_torchrun(Path(parallel_worker.__file__), processes, tmp_path)
    leader = ranks[0]
    for other in ranks[1:]:
        assert other["metrics"] == leader["metrics"]
        assert all(torch.equal(other["weights"][name], value) for name, value in leader["weights"].items())
    assert leader["metrics"].keys() == alone["metrics"].keys()
    for case, metrics in alone["metrics"].items():
        assert leader["metrics"][case] == pytest.approx(metrics, rel=1e-4, abs=1e-6), case
    for case, gradient in alone["gradients"].items():
        assert gradient.norm() > 0
        assert (leader["gradients"][case] - gradient).norm() / gradient.norm() < 1e-5, case
    for which in ("log_probs", "reference"):
        for found, expected in zip(leader[which], alone[which], strict=True):
            assert torch.allclose(found, expected, rtol=1e-5, atol=1e-5)
    assert leader["entropies"] == pytest.approx(alone["entropies"], rel=1e-5, nan_ok=True)
    assert sum(rank["rows_of_one"] for rank in ranks) == alone["rows_of_one"] > leader["rows_of_one"]  # each did something else

"""Several processes under real torchrun compute what one computes, with whole weights and with shares of them."""

from pathlib import Path
from typing import Any

import parallel_worker
import pytest
import torch
from parallel_worker import CASES, compute
from torch import Tensor
from training_parts import under_torchrun

WORKER = Path(parallel_worker.__file__)
# Where a share is a whole number of the processor's vectors, AdamW's kernel rounds a weight as in the whole; and bfloat16
# hides what it does.
SAME_BITS = ("untied", "bfloat16")
LOSSES = [case for case in CASES if case.startswith(("GSPO", "longest"))]
SHARED = [case for case in CASES if case not in LOSSES]
Ranks = dict[str, list[dict[str, Any]]]  # for each case the results of each process


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    ranks = under_torchrun(WORKER, 2, tmp_path_factory.mktemp("two"), "both", *SHARED)
    return {case: [rank[case] for rank in ranks] for case in SHARED}


def distance(found: dict[str, Tensor], expected: dict[str, Tensor], case: str) -> float:
    start = CASES[case][0]().state_dict()
    off, way = (
        sum((a[name] - b[name]).double().square().sum() for name in start) for a, b in ((found, expected), (expected, start))
    )
    assert way > 0
    return float((off / way) ** 0.5)


def require_close(ranks: list[dict[str, Any]], case: str, one: dict[str, Any]) -> None:
    leader = ranks[0]
    for found, expected in zip(leader["gradients"][:2], one["gradients"], strict=False):  # of SFT, and of the first update
        assert expected.norm() > 0
        assert (found - expected).norm() / expected.norm() < (1e-2 if case.endswith("float16") else 1e-5)
    assert distance(leader["weights"], one["weights"], case) < 1e-2
    for found, expected in zip(leader["metrics"][:2], one["metrics"], strict=False):
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-6)
    for rank in ranks:
        assert rank["metrics"] == leader["metrics"] and torch.equal(rank["reference"], leader["reference"])
        assert all(torch.equal(rank["weights"][name], weight) for name, weight in leader["weights"].items())
        assert rank["resumed"]
    assert torch.allclose(leader["reference"], one["reference"], rtol=1e-5, atol=1e-5) or case.endswith("float16")


@pytest.mark.slow
def test_processes_share_the_work_and_get_the_gradient_of_one(tmp_path: Path) -> None:
    """Three processes, among which nothing divides evenly, with every loss that needs more than its own rows."""
    ranks = under_torchrun(WORKER, 3, tmp_path, "all weights", "packed", *LOSSES)
    for case in ("packed", *LOSSES):
        found, alone = [rank[case][None] for rank in ranks], compute(case)
        require_close(found, case, alone)
        leader = found[0]
        assert torch.allclose(leader["first log_probs"], alone["first log_probs"], rtol=1e-5, atol=1e-5)
        assert leader["entropies"] == pytest.approx(alone["entropies"], rel=1e-5, nan_ok=True)
        # Each did something else.
        assert sum(rank["microbatches"] for rank in found) == alone["microbatches"] > leader["microbatches"]


@pytest.mark.nightly
@pytest.mark.parametrize("case", SHARED)
def test_two_processes_with_half_each_compute_what_one_does_and_two_that_hold_all(two: Ranks, case: str) -> None:
    """The first gradient is equal to the bit; then AdamW rounds the last few weights of a share differently. Half is of the
    float32 weights and moments; the saved state is whole.
    """
    require_close([found["cpu"] for found in two[case]], case, compute(case))
    leader = two[case][0]
    whole, shares = leader[None], leader["cpu"]
    if case != "clipped":  # by a norm, in which another order of sums shows
        assert torch.equal(shares["gradients"][0], whole["gradients"][0])
    assert distance(shares["weights"], whole["weights"], case) < 1e-2
    if case in SAME_BITS:
        assert all(map(torch.equal, shares["gradients"], whole["gradients"]))
        assert all(torch.equal(shares["weights"][name], weight) for name, weight in whole["weights"].items())
        assert all(torch.equal(shares[which], whole[which]) for which in ("log_probs", "reference"))
        assert shares["sampled"] == whole["sampled"]
        assert shares["checkpoint"] == whole["checkpoint"] and "model.safetensors" in whole["checkpoint"]
    for found in two[case]:
        whole, share = found[None], found["cpu"]
        assert share["bytes"] == pytest.approx(whole["bytes"] / 2, rel=0.02)
    whole, share = (two[case][0][way]["state"] for way in (None, "cpu"))
    assert {name: each.shape for name, each in share["model"].items()} == {n: each.shape for n, each in whole["model"].items()}
    moments = [state["optimizer"]["adamw"]["state"] for state in (share, whole)]
    shapes = [{(i, name): x.shape for i, of_weight in each.items() for name, x in of_weight.items()} for each in moments]
    assert shapes[0] == shapes[1] and {name for _, name in shapes[0]} == {"step", "exp_avg", "exp_avg_sq"}


@pytest.mark.nightly
def test_three_processes_among_which_nothing_divides_evenly(tmp_path: Path) -> None:
    cases = ("padded", "packed", "own", "clipped")  # the others differ in what each process does alone
    ranks = under_torchrun(WORKER, 3, tmp_path, "shares", *cases)
    for case in cases:
        require_close([rank[case]["cpu"] for rank in ranks], case, compute(case))

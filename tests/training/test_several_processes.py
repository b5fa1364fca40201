"""Several processes under real torchrun give one process's results: each runs the loop on its share of the questions."""

import shutil
from pathlib import Path
from typing import Any

import loops_worker
import pytest
import torch
from study_parts import changed
from torch import Tensor
from training_parts import setup_of, under_torchrun

from grpo.common.world import ALONE, World
from grpo.study.effective import effective_run
from grpo.study.schema import Study
from grpo.training import train as train_module
from grpo.training.grpo import train_grpo

Found = dict[str, dict[str, Any]]
WORKER = Path(loops_worker.__file__)


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return loops_worker.train_all(ALONE, tmp_path_factory.mktemp("one"))


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Found], Path]:
    """The results of two processes, and the folder with the state of the stopped run."""
    folder = tmp_path_factory.mktemp("two")
    return under_torchrun(WORKER, 2, folder, "all,stop"), folder / "state"


@pytest.fixture(scope="module")
def three(two: Any, tmp_path_factory: pytest.TempPathFactory) -> list[Found]:
    folder = tmp_path_factory.mktemp("three")
    shutil.copytree(two[1], folder / "state")
    return under_torchrun(WORKER, 3, folder, "packed,resume")


@pytest.mark.parametrize(("threads", "processes", "each"), [(4, 2, 2), (1, 2, 1)])
def test_the_threads_of_a_run_are_shared_by_its_processes(
    threads: int, processes: int, each: int, mini_study: Study, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Started(Exception):
        pass

    def stop(device: str) -> None:
        raise Started

    study = changed(mini_study, threads=threads, learner={"processes": processes})
    asked: list[int] = []
    monkeypatch.setattr(train_module, "start_threads", asked.append)
    monkeypatch.setattr(train_module, "init_world", stop)
    run = effective_run(study, "grpo_baselines", "reinforce_with_baseline", 0, [])
    with pytest.raises(Started), train_module.start_here(study, run, setup_of(run.config)):
        pass
    assert asked == [each]


def require_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Compare rollouts (by rewards and lengths) and weights, except for rounding."""
    for rows in ("history", "validations"):
        assert len(found[rows]) == len(expected[rows])
        for row, wanted in zip(found[rows], expected[rows], strict=True):
            assert row == pytest.approx(wanted, rel=1e-3, abs=1e-5, nan_ok=True)
    assert_close(found["weights"], expected["weights"])


def assert_close(weights: Tensor, expected: Tensor) -> None:
    start = torch.cat([value.detach().flatten() for value in loops_worker.make_model().parameters()])
    moved = (expected - start).norm()
    assert moved > 0.1
    assert (weights - expected).norm() / moved < 1e-4


@pytest.mark.parametrize("packed", [pytest.param(None, marks=pytest.mark.slow), pytest.param(40, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("case", loops_worker.CASES)
def test_all_end_with_the_weights_of_one(one: Found, two: Any, case: str, packed: Any, request: pytest.FixtureRequest) -> None:
    for ranks in (two[0], *([request.getfixturevalue("three")] if packed else [])):
        leader, *others = (found[f"{case}, {packed}"] for found in ranks)
        require_equal(leader, one[f"{case}, {packed}"])
        for other in others:
            assert torch.equal(other["weights"], leader["weights"])
            assert repr(other["validations"]) == repr(leader["validations"])  # NaN where nothing is right


@pytest.mark.slow
def test_the_runs_do_something_that_could_differ(one: Found) -> None:
    history = one["grpo_clip, None"]["history"]
    assert len(history) == 12 and 0 < history[0]["train/reward"] < 1
    assert len({row["train/reward"] for row in history}) > 1 or len({row["train/response_length"] for row in history}) > 1
    assert max(row["ratio_max"] for row in history) > 1.01


@pytest.mark.nightly
def test_when_a_run_ends_is_decided_by_rank_0(two: Any, three: list[Found]) -> None:
    for ranks in (two[0], three):
        assert [found["time of 0"]["steps"] for found in ranks] == [1] * len(ranks)
        assert [found["time of 1"]["steps"] for found in ranks] == [3] * len(ranks)


@pytest.mark.nightly
def test_another_number_of_processes_resumes(one: Found, two: Any, three: list[Found], tmp_path: Path) -> None:
    ranks, state = two
    assert [(found["stopped"]["stopped"], found["stopped"]["steps"]) for found in ranks] == [(True, 2)] * 2
    assert [path.name for path in state.iterdir()] == ["step-2"]
    shutil.copytree(state, tmp_path / "state")
    alone = loops_worker.train(train_grpo, loops_worker.GRPO, ALONE, tmp_path / "alone", state=tmp_path / "state")
    for found in (*(each["resumed"] for each in three), alone):
        assert found["resumed"] == 2 and not found["stopped"]
        require_equal(found, one["reinforce_with_baseline, None"])


@pytest.mark.parametrize(("size", "n", "each"), [(1, 3, 2), (2, 5, 1), (2, 4, 3), (3, 7, 2), (3, 2, 4), (4, 0, 1)])
def test_shares_make_the_whole(size: int, n: int, each: int, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = [(i, k) for i in range(n) for k in range(each)]
    shares = [[item for item in whole if item[0] in range(n)[World(rank, size).share]] for rank in range(size)]
    assert sorted(item for share in shares for item in share) == whole
    monkeypatch.setattr(World, "all_gather", lambda *_: [
        [share[i : i + each] for i in range(0, len(share), each)] for share in shares
    ])  # fmt: skip
    assert World(0, size).join(shares[0], each) == whole

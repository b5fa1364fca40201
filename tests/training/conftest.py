"""A Ray cluster shared by the asynchronous runs of the tests."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

PARTS = Path(__file__).parents[1] / "parts"


def with_parts() -> str:
    return os.pathsep.join([str(PARTS), *filter(None, [os.environ.get("PYTHONPATH")])])


@pytest.fixture(scope="module")
def actors_find_the_parts() -> Iterator[None]:
    """Let Ray's processes import objects of the tests by name."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", with_parts())
        patch.delenv("RAY_ADDRESS", raising=False)
        yield


@pytest.fixture(scope="session")
def cluster() -> Iterator[str]:
    """A cluster for one run after another, because starting one takes longer than a short run.

    One for each test process, as Ray does not start actors on a second cluster of a process.

    It asks for no token: Ray has been imported here, which is when it learns whether to send one.
    """
    from asynchronous_parts import ray_cluster

    with ray_cluster(RAY_AUTH_MODE="disabled", PYTHONPATH=with_parts()) as address:
        yield address


@pytest.fixture
def on_the_cluster(cluster: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Use this process's cluster. Each run must free it, or the next one has no room."""
    import ray

    ray.shutdown()  # a run of another module leaves its own
    monkeypatch.setenv("RAY_ADDRESS", cluster)
    yield
    ray.shutdown()

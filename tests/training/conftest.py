"""A Ray cluster that the asynchronous runs of tests share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

PARTS = Path(__file__).parents[1] / "parts"


@pytest.fixture(scope="module")
def actors_find_the_parts() -> Iterator[None]:
    """Ray's processes import what tests give them by name."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(PARTS), *filter(None, [os.environ.get("PYTHONPATH")])]))
        patch.delenv("RAY_ADDRESS", raising=False)
        yield


@pytest.fixture(scope="module")
def cluster(actors_find_the_parts: None) -> Iterator[str]:
    """A cluster that runs share one after another, since to start one takes longer than a short run.

    It asks for no token: Ray has been imported here, which is when it learns whether to send one.
    """
    from asynchronous_parts import ray_cluster

    with ray_cluster(RAY_AUTH_MODE="disabled") as address:
        yield address


@pytest.fixture
def on_the_cluster(cluster: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Runs take the cluster of this module. Each leaves it as it was, or there would be no room for the next."""
    import ray

    monkeypatch.setenv("RAY_ADDRESS", cluster)
    yield
    ray.shutdown()

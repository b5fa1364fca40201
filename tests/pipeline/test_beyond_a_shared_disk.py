"""Machines that share no disk: each has a clone of its own, and all that goes between them goes through a DVC remote."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from workflow_parts import call, lock, new_repo, ran, snakemake

pytestmark = pytest.mark.nightly


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of an S3 server on this machine, with an empty bucket."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    endpoint = f"http://127.0.0.1:{port}"
    server = subprocess.Popen([sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)])
    try:
        _make_bucket(endpoint)
        yield endpoint
    finally:
        server.kill()
        server.wait()


def _make_bucket(endpoint: str) -> None:
    import boto3
    from botocore.exceptions import EndpointConnectionError

    client = boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1")
    for _ in range(300):
        try:
            client.create_bucket(Bucket="study")
            return
        except EndpointConnectionError:
            time.sleep(0.1)
    raise AssertionError("the S3 server does not answer")


def test_two_clones_and_a_remote_make_the_lock_together(s3: str, tmp_path: Path) -> None:
    first, second, alone = new_repo(tmp_path / "first"), tmp_path / "second", tmp_path / "alone"
    call(first, "dvc", "remote", "add", "--quiet", "--default", "storage", "s3://study/results")
    call(first, "dvc", "remote", "modify", "storage", "endpointurl", s3)
    for clone in (second, alone):
        shutil.copytree(first, clone, symlinks=True)
    for repo, rules in ((first, ["train_1e_4_0"]), (second, []), (first, [])):
        snakemake(repo, *rules, "--cores", "2", "--config", "shared_disk=false", timeout=300)
    # Each training on one of the two; the report, which git keeps, on both.
    assert ran(first) == ["report", "source", "train-1e-4"]
    assert ran(second) == ["report", "train-no_std"]
    call(alone, "dvc", "repro")
    assert lock(first) == lock(second) == lock(alone)
    assert (first / "report.txt").read_text() == (alone / "report.txt").read_text()

"""Machines that share no disk: each has a clone of its own, and all that goes between them goes through a DVC remote."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from dvc.utils.serialize import load_yaml
from workflow_parts import call, new_repo

pytestmark = pytest.mark.slow


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


def stages_of(repo: Path) -> dict[str, Any]:
    found: dict[str, Any] = load_yaml(str(repo / "dvc.lock"))["stages"]
    return found


def test_two_clones_and_a_remote_make_the_lock_together(s3: str, tmp_path: Path) -> None:
    first, second, alone = new_repo(tmp_path / "first"), tmp_path / "second", tmp_path / "alone"
    call(first, "dvc", "remote", "add", "--quiet", "--default", "storage", "s3://study/results")
    call(first, "dvc", "remote", "modify", "storage", "endpointurl", s3)
    shutil.copytree(first, second, symlinks=True)
    shutil.copytree(first, alone, symlinks=True)
    turns = [(first, "source"), (first, "train@1e-4-0"), (second, "train@no_std-0")]
    for repo, stage in [*turns, (second, "report.final-one"), (first, "report.final-one")]:
        call(repo, str(repo / "workflow/anywhere.sh"), stage)
    # Each training on one of the two; the report, which git keeps, on both.
    assert (first / "ran.txt").read_text().split() == ["source", "train-1e-4", "report"]
    assert (second / "ran.txt").read_text().split() == ["train-no_std", "report"]
    call(alone, "dvc", "repro")
    assert stages_of(first) == stages_of(second) == stages_of(alone)
    assert (first / "report.txt").read_text() == (alone / "report.txt").read_text()


def test_snakemake_runs_each_job_so(tmp_path: Path) -> None:
    first = new_repo(tmp_path / "first")
    call(first, "dvc", "remote", "add", "--quiet", "--default", "storage", str(tmp_path / "remote"))
    second = shutil.copytree(first, tmp_path / "second", symlinks=True)
    command = ["snakemake", "--profile", "local", "--cores", "2", "--config", "shared_disk=false"]
    call(first, *command, timeout=300)
    call(second, *command, timeout=300)
    assert sorted((first / "ran.txt").read_text().split()) == ["report", "source", "train-1e-4", "train-no_std"]
    assert (second / "ran.txt").read_text().split() == ["report"]
    assert stages_of(first) == stages_of(second)

"""What `grpo doctor` says about this machine, which has no GPU, and about others."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from ruamel.yaml import YAML

from grpo import doctor
from grpo.study import Study, load_study

ROOT = Path(__file__).parents[1]


def by_name(study: Study) -> dict[str, doctor.Finding]:
    return {finding.name: finding for finding in doctor.examine(study)}


def real(name: str = "math-h100") -> Study:
    return load_study(ROOT / "studies" / f"{name}.yaml")


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "HUB_TIMEOUT_S", 0.2)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")


def test_the_default_study_lacks_nothing(mini_study: Study) -> None:
    findings = by_name(mini_study)
    assert [name for name, finding in findings.items() if not finding.good] == []
    assert findings["Hugging Face Hub"].found == "not needed"


def test_a_study_of_a_real_model_names_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda _: SimpleNamespace(free=5 * 2**30))
    findings = by_name(real())
    missing = {name for name, finding in findings.items() if not finding.good}
    assert {"torch", "driver", "GPUs", "disk", "Hugging Face Hub"} <= missing
    assert all(findings[name].remedy for name in missing)
    assert findings["GPUs"].found == "torch sees 1, the study needs 2"
    assert by_name(real("gsm8k"))["GPUs"].good


@pytest.mark.parametrize(("installed", "good"), [("0.32.1", True), ("0.31.0", False), ("0.33.0", False)])
def test_vllm_must_be_a_release_that_was_tested(installed: str, good: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "version", lambda name: installed)
    assert by_name(real())["vLLM"].good is good


@pytest.mark.parametrize(("study", "code"), [("mini", 0), ("math-h100", 2)])
def test_the_command_ends_with_2_where_something_is_missing(study: str, code: int, tmp_path: Path) -> None:
    params = YAML().load(ROOT / "studies" / f"{study}.yaml")
    YAML().dump(params, tmp_path / "params.yaml")
    command = [sys.executable, "-m", "grpo", "doctor"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_ENDPOINT": "http://127.0.0.1:9"}
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment)
    assert done.returncode == code, done.stderr
    assert ("MISSING" in done.stdout) == bool(code)
    assert "Traceback" not in done.stderr

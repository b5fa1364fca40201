"""What `grpo doctor` says about this machine, which has no GPU, and about others."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from study_parts import ROOT, activate, study_named, with_values

from grpo.commands import doctor
from grpo.study.schema import Study
from grpo.study.settings import LocalModel


def by_name(study: Study) -> dict[str, doctor.Finding]:
    return {finding.name: finding for finding in doctor.examine(study)}


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "HUB_TIMEOUT_S", 0.2)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")


def test_a_study_of_a_real_model_names_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda _: SimpleNamespace(free=5 * 2**30))
    monkeypatch.setattr(doctor, "software", lambda _: {"vllm": "0.25.1"})
    study = study_named("math-2xh100")
    for cuda, remedy in ((None, "Jobs on NVIDIA GPUs need another build"), ("12.8", "uses 2: choose a study for fewer GPUs")):
        monkeypatch.setattr(torch.version, "cuda", cuda)
        findings = by_name(study)
        missing = {name for name, finding in findings.items() if finding.good is False}
        assert missing == {"GPUs", "packages", "disk", "model and data"}
        assert all(findings[name].remedy for name in missing) and remedy in findings["GPUs"].remedy
        assert "needs 2; torch" in findings["GPUs"].found and "sees 1" in findings["GPUs"].found
    assert "vllm<0.33,>=0.32" in findings["packages"].remedy
    monkeypatch.setattr(doctor, "software", lambda _: {"vllm": "0.32.0"})
    assert by_name(study)["packages"].good
    own = with_values(study, {"models.main": LocalModel(source="local", path="nowhere")})
    assert "missing: nowhere" in by_name(own)["model and data"].found


def test_a_gpu_without_bfloat16_and_one_in_use_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    study = study_named("math-h100")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    assert "cuda:0 cannot be used" in by_name(study)["GPUs"].found
    monkeypatch.setattr(doctor.torch, "ones", lambda *_, **__: torch.zeros(1))
    for supported in (True, False):
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda _, supported=supported: supported)
        finding = by_name(study)["GPUs"]
        assert finding.good == supported and ("no bfloat16" in finding.found) != supported
        assert supported or "float16, as studies/math-24gb-turing.yaml" in finding.remedy
    halves = {(each.engine.dtype, each.learner.dtype) for each in [study_named("math-24gb-turing")]}
    assert halves == {("float16", "float16")}


def test_a_login_node_without_a_gpu_is_no_mistake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    assert by_name(study_named("math-h100"))["GPUs"].good is False
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "sbatch").touch(mode=0o755)
    finding = by_name(study_named("math-h100"))["GPUs"]
    assert finding.good is None and "srun --gpus=1 grpo doctor" in finding.remedy


def test_files_of_problems_are_read_and_those_of_a_mixture_too(
    mini_study: Study, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(ROOT / "examples")
    there = tmp_path / "there.jsonl"
    there.write_text('{"question": "1 + 1", "answer": "2"}\n' * 5)
    for file, told in ((there, None), (tmp_path / "nothing.jsonl", "nothing.jsonl: no such file.")):
        files = {"train": f"{file}[:80%]", "validation": f"{file}[80%:]"}
        task = {"use": "dataset", "question": "question", "answer": "answer", "files": files}
        for entry in (task, {"use": "mixture_task:Mixture", "tasks": {"one": task}}):
            finding = by_name(mini_study.model_copy(update={"tasks": {"main": entry}}))["model and data"]
            assert finding.good is (told is None) and (told or str(there)) in finding.found


@pytest.mark.parametrize(("study", "code"), [("mini", 0), ("math-h100", 2)])
def test_the_command_ends_with_2_where_something_is_missing(study: str, code: int, grpo: Any, workdir: Path) -> None:
    activate(study, workdir)
    found, said, told = grpo("doctor")
    assert found == code, told
    assert ("MISSING" in said) == bool(code)


def test_gpus_are_those_of_the_largest_stage() -> None:
    needed = {"math-7b-8xh100": 8, "math-2xh100": 2, "math-h100": 1, "math-24gb": 1, "gsm8k": 1, "mini": 0}
    assert {name: doctor.gpus_needed(study_named(name)) for name in needed} == needed
    greedy = with_values(study_named("math-24gb"), {"resources.colocate.gpus": 3})
    assert doctor.gpus_needed(greedy) == 3
    assert doctor.gpus_needed(with_values(greedy, {"experiments.grpo_colocate.arms": {}})) == 1


def test_what_does_not_fit_the_card_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    study = study_named("math-24gb")
    monkeypatch.chdir(tmp_path)  # here a model may have been made, whose shape is known
    finding = by_name(study)["GPU memory"]
    assert finding.good and "moments" in finding.found and "21.50" in finding.found
    finding = by_name(study.model_copy(update={"gpu_memory_gib": 16.0}))["GPU memory"]
    assert finding.good is False and "rollouts: 18.1 GiB on cuda:0 of 16; lower grpo.gpu_memory_utilization" in finding.remedy
    finding = by_name(with_values(study, {"models.main.repo": "someone/model"}))["GPU memory"]
    assert finding.good is None and "the shape of the model" in finding.found
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=16 * 2**30))
    finding = by_name(study)["GPU memory"]
    assert finding.good is False and "a GPU here has 16.0 GiB, and the study is for 22.5" in finding.remedy


def test_disk_is_for_checkpoints_and_the_states_of_all_runs_in_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of 1.544B parameters in bfloat16: 2 checkpoints each, and steps that two arms keep; 21.6 GB a saved state.

    An experiment with fewer seeds has fewer runs.
    """
    study, n = with_values(study_named("math-2xh100"), {"experiments.grpo_learning_rate.seeds": 1}), 1_543_714_304
    runs, arms = len(study.runs_table()), [arm for one in study.experiments.values() for arm in one.arms.values()]
    kept = 2 * runs + 3 * sum(len(arm.get("keep_steps", [])) for arm in arms)
    assert runs == 3 * len(arms) - 2 * 5
    weights = 2 * n / 2**30
    for gpus, at_once in ((0, 1), (2, 1), (8, 4)):
        monkeypatch.setattr(torch.cuda, "device_count", lambda gpus=gpus: gpus)
        needed = 3 * weights + 2 * weights * kept + 2 * at_once * 14 * n / 2**30
        found = by_name(study)["disk"].found
        assert f"the study may need {needed:.0f}: " in found and f"of {at_once} run(s) in progress" in found


@pytest.mark.parametrize("name", ["math-24gb-first", "math-24gb-turing"])
def test_the_first_study_for_24_gb_fits_a_small_machine(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    study = study_named(name)
    found = by_name(study)
    needed = re.search(r"the study may need (\d+):", found["disk"].found)
    assert needed and int(needed[1]) < 100 and found["GPU memory"].good
    used = {"small", "model", "evaluate", *(study.experiments[one].resources for one in study.active_experiments)}
    assert max(study.resources[kind].mem_mb for kind in used) < 32_000

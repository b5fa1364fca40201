"""`grpo doctor`, and the memory of a GPU that it computes."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from study_parts import ROOT, activate, changed, study_named, with_values
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen3Config

from grpo.commands import doctor, gpu_memory
from grpo.commands.gpu_memory import Shape
from grpo.common.files import write_json
from grpo.common.records import Problem, write_records
from grpo.models.lora import add_adapters
from grpo.study import paths
from grpo.study.config import LocalModel, Lora
from grpo.study.schema import Study


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
    assert "vllm<0.33,>=0.32: pip install -c constraints.txt -e '.[vllm]', " in findings["packages"].remedy
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
    monkeypatch.setenv("PATH", str(tmp_path))
    assert by_name(study_named("math-h100"))["GPUs"].good is False
    (tmp_path / "sbatch").touch(mode=0o755)
    finding = by_name(study_named("math-h100"))["GPUs"]
    assert finding.good is None and "srun --gpus=1 grpo doctor" in finding.remedy


def test_files_of_problems_are_read_and_those_of_a_mixture_too(
    mini_study: Study, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(ROOT / "examples")
    there = tmp_path / "there.jsonl"
    there.write_text("".join(f'{{"question": "{i} + 1", "answer": "{i + 1}"}}\n' for i in range(3000)))
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


def test_what_is_merely_unknown_ends_with_0(grpo: Any, workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setenv("PATH", str(workdir))
    (workdir / "sbatch").touch(mode=0o755)
    params = activate("mini", workdir)
    params.write_text(params.read_text().replace("\n  device: cpu", "\n  device: cuda"))
    code, said, told = grpo("doctor")
    assert code == 0 and said.count("\nunknown ") == 2 and "MISSING" not in said, said + told


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


# ------------------------------------------------------------------------------------------------------------ memory of a GPU


# Of each study: the GiB of the card that it names, and the parameters of its model.
REAL = {
    "math-7b-8xh100": (79.6, 7_615_616_512),
    "math-2xh100": (79.6, 1_543_714_304),
    **dict.fromkeys(("math-first", "math-h100"), (79.6, 1_543_714_304)),
    **dict.fromkeys(("math-24gb", "math-24gb-first", "math-24gb-turing", "math-one-instance"), (22.5, 1_543_714_304)),
    "gsm8k": (22.5, 596_049_920),
}
PENALTY = {"grpo": {"kl_coefficient": 0.04}}  # of KL to the starting weights, which are then kept


def shape_of(study: Study) -> Shape:
    shape = gpu_memory.shape_of(study)
    assert shape is not None
    return shape


MATH = shape_of(study_named("math-h100"))


def totals(study: Study, card: float) -> dict[str, float]:
    return {phase.name: phase.total for phase in gpu_memory.phases(study, shape_of(study), card)}


@pytest.mark.parametrize("content", ["", "{}", '{"model_type": "gpt2"}'])
def test_a_model_of_another_kind_or_damaged_has_no_shape(content: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(content)
    from grpo.study.config import LocalModel

    model = LocalModel(source="local", path=str(tmp_path))
    assert gpu_memory.shape_of(study_named("math-h100").model_copy(update={"models": {"main": model}})) is None


@pytest.mark.parametrize(("kind", "dtype", "precision"), [("qwen2", "bfloat16", 2), ("qwen3", "float32", 4)])
def test_activations_are_what_autograd_keeps(kind: str, dtype: str, precision: int) -> None:
    """Bytes that a layer keeps of a token: of five layers more than of two, by three; parameters are not counted."""
    tokens, kept = 300, {}
    for recomputed in (False, True):
        for layers in (2, 5):
            config = {"qwen2": Qwen2Config, "qwen3": Qwen3Config}[kind](
                num_hidden_layers=layers, hidden_size=64, intermediate_size=192, num_attention_heads=4, num_key_value_heads=2,
                head_dim=32, vocab_size=64,
            )  # fmt: skip
            model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)).train()
            if recomputed:
                model.gradient_checkpointing_enable()
            own = {p.untyped_storage().data_ptr() for p in model.parameters()}
            saved: list[torch.Tensor] = []
            with torch.autograd.graph.saved_tensors_hooks(lambda t, saved=saved: saved.append(t) or t, lambda t: t):
                model.model(torch.zeros(1, tokens, dtype=torch.long), use_cache=False)
            storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in saved}
            kept[recomputed, layers] = sum(size for at, size in storages.items() if at not in own)
    of_a_layer, of_its_input = ((kept[way, 5] - kept[way, 2]) / 3 / tokens for way in (False, True))
    assert of_its_input == precision * 64
    assert Shape.of(config).layer_bytes(precision) == pytest.approx(
        of_a_layer, rel=0.02
    )  # statistics of norms and softmax are left out


def test_qwen_math_by_hand() -> None:
    """1.544 billion parameters: 2.88 GiB in bfloat16, 5.75 in float32, 11.5 of moments, 2.92 with 8 bits; 28 KB a token."""
    studies = changed(study_named("math-h100"), **PENALTY), changed(study_named("math-24gb"), **PENALTY)
    h100, small = ({phase.name: phase.parts for phase in gpu_memory.phases(study, MATH, 80)} for study in studies)
    backward = h100["backward pass"]
    held = {name: round(backward[name], 2) for name in ("weights", "float32 copy", "moments", "gradients")}
    assert held == {"weights": 2.88, "float32 copy": 5.75, "moments": 11.5, "gradients": 5.75}
    assert sum(held.values()) == pytest.approx(25.9, abs=0.05)
    assert small["backward pass"]["moments"] == pytest.approx(2.92, abs=0.005)
    assert sum(small["rollouts"][name] for name in held if name != "gradients") == pytest.approx(11.55, abs=0.01)
    assert "gradients" not in small["rollouts"]
    assert MATH.kv_bytes(2) == 28 * 1024
    # 1,024 tokens x 151,936 logits x 10 bytes, and microbatches of 4,096 tokens; or of 2,560, recomputed.
    assert backward["logits"] == pytest.approx(1.449, abs=0.001)
    layer = 16 * 1536 + 4 * (1536 + 256) + 8 * 8960
    assert backward["activations"] == pytest.approx(4096 * 28 * layer / 2**30)
    assert small["backward pass"]["activations"] == pytest.approx(2560 * (28 * 2 * 1536 + layer) / 2**30)
    # A response of 1,024 tokens with its prompt of 200 stands alone where the budget is smaller.
    for budget, tokens in ((None, 2 * 1224), (1000, 1224)):
        study = changed(study_named("math-h100"), learner={"max_tokens_per_microbatch": budget})
        parts = gpu_memory.phases(study, MATH, 79.6)[1].parts
        assert parts["activations"] == pytest.approx(tokens * 28 * layer / 2**30)
    assert gpu_memory.saved_state_bytes(study_named("math-h100"), MATH) == pytest.approx(21.6e9, rel=0.001)


@pytest.mark.parametrize("name", REAL)
def test_the_real_studies_fit_the_card_that_they_name(name: str) -> None:
    study, (card, parameters) = study_named(name), REAL[name]
    shape = shape_of(study)
    assert (study.gpu_memory_gib, shape.parameters) == (card, parameters)
    assert gpu_memory.problems(study, shape, card) == []
    assert f"{max(totals(study, card).values()):.2f}" in gpu_memory.table(study, shape, card)
    # Were gradients kept during rollouts, the smaller cards would not do for Qwen2.5-Math-1.5B.
    rollouts = totals(study, card)["rollouts"] + 4 * parameters / 2**30
    assert (rollouts > card) == name.startswith(("math-24gb", "math-7b"))
    most = gpu_memory.largest_microbatch(study, shape, card)
    assert most is not None and f"A microbatch of {most:,} tokens would still fit" in gpu_memory.table(study, shape, card)
    for tokens, fits in ((most, True), (most + 1, False)):
        larger = changed(study, learner={"max_tokens_per_microbatch": tokens})
        assert (totals(larger, card)["backward pass"] <= card) == fits


@pytest.mark.parametrize(
    ("name", "card", "changes", "told"),
    [
        ("math-24gb", 22.5, {"learner": {"optimizer": "adamw"}}, ("backward pass: ", "set learner.optimizer to adamw_8bit")),
        ("math-24gb", 22.5, {"grpo": {"gpu_memory_utilization": 0.6}}, ("rollouts: 26.0 GiB", "lower grpo.gpu_memory_util")),
        ("math-h100", 30, {"learner": {"dtype": "float32"}}, ("set learner.dtype to bfloat16, or", "train adapters (lora)")),
        ("gsm8k", 22.5, {"grpo": {"gpu_memory_utilization": 0.2}}, ("one sequence of the model's 40960 tokens needs 4.4",)),
    ],
)
def test_what_does_not_fit_is_told_with_the_remedy(name: str, card: float, changes: Any, told: tuple[str, ...]) -> None:
    study = changed(study_named(name), **changes)
    found = gpu_memory.problems(study, shape_of(study), card)
    assert all(any(text in problem for problem in found) for text in told), found


def test_shares_of_a_model_by_hand() -> None:
    """7.616 billion parameters over eight cards: 3.55 GiB each of float32 weights and 7.09 of moments; gradients are whole."""
    study = changed(study_named("math-7b-8xh100"), **PENALTY)
    large = shape_of(study)
    phases = gpu_memory.phases(study, large, 79.6)
    found = {phase.name: {name: round(gib, 2) for name, gib in phase.parts.items()} for phase in phases}
    n, around, layer = 7_615_616_512, 2 * 152_064 * 3584 + 3584, 233_057_792
    assert (large.parameters, large.parameters - large.in_layers, large.in_layers) == (n, around, 28 * layer)
    held = {"weights": 3.55, "moments": 7.09, "starting weights": 1.77}
    for parts in found.values():
        assert parts.items() >= held.items()
    backward, rollouts = found["backward pass"], found["rollouts"]
    assert backward["gathered weights"] == round(2 * (around + 2 * layer) / 2**30, 2) == 2.9
    assert backward["gradients"] == 28.37
    assert backward["reduced gradients"] == round(4 * (n / 8 + around + layer) / 2**30, 2) == 8.48
    assert "gradients" not in found["optimizer step"] and "gradients" not in rollouts
    assert rollouts["the engine"] == 47.76 and rollouts["gathered weights"] == 1.02  # of which vLLM's own weights are 14.2
    assert gpu_memory.saved_state_bytes(study, large) == 12 * n
    problem = gpu_memory.problems(changed(study, learner={"processes": 2, "gradient_checkpointing": False}), large, 79.6)
    assert any("raise learner.processes" in text for text in problem) and "adamw_8bit" not in " ".join(problem)
    whole = gpu_memory.problems(changed(study, learner={"fully_shard": False}), large, 79.6)
    assert any("set learner.fully_shard" in text for text in whole)


def test_an_engine_on_a_gpu_of_its_own_takes_nothing_of_the_learners() -> None:
    study = changed(study_named("math-2xh100"), **PENALTY)
    devices = {phase.name: (phase.device, "the engine" in phase.parts) for phase in gpu_memory.phases(study, MATH, 80)}
    assert devices["rollouts"] == ("cuda:0", True) and devices["backward pass"] == ("cuda:1", False)
    together = changed(study, learner={"device": "cuda:0"}, engine={"sleep_level": 2})
    sent = 9 * 2 * 1_543_714_304 / 2**30  # an arm has a lag of 8
    assert totals(together, 80)["rollouts"] == pytest.approx(totals(study, 80)["rollouts"] + 20.1 + 2.88 + sent, abs=0.05)
    assert totals(study, 80)["optimizer step"] == pytest.approx(
        totals(changed(study_named("math-h100"), **PENALTY), 80)["optimizer step"] + sent - 20, abs=0.05
    )


def test_adapters_are_counted_as_peft_makes_them_and_leave_room() -> None:
    lora = Lora(rank=32)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(MATH.config)
        add_adapters(model, lora, seed=0)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert MATH.adapter_parameters(lora) == trained == 36_929_536
    study = study_named("math-24gb")
    with_lora = changed(study, **{method: {"lora": lora} for method in ("grpo", "sft", "expert_iteration")})
    only = {name: entry for name, entry in with_lora.experiments.items() if name != "grpo_lora"}
    with_lora = with_lora.model_copy(update={"experiments": only})
    small = totals(with_lora, 22.5)
    assert small["backward pass"] < 0.5 * totals(study, 22.5)["backward pass"]
    assert gpu_memory.USES_REFERENCE not in small
    told = " ".join(gpu_memory.problems(with_lora, MATH, 4))
    assert "use a larger card" in told and "train adapters" not in told


def test_prompts_count_as_long_as_the_study_has_them(workdir: Path, byte_tokenizer: Any) -> None:
    """A tokenizer of bytes: as many tokens as the template with its question has letters."""
    study = study_named("math-first")
    config = study.grpo.model_copy(update={"prompt": "question_only"})
    assert gpu_memory.longest_prompt(study, "question_only") is None and gpu_memory.longest(study, config) == 200 + 1024
    template = study.task("main").formats["question_only"].template.replace("{question}", "")
    write_records(paths.train("main"), [Problem("a", "x" * 300, "1")])
    write_records(paths.validation("main"), [Problem("b", "x" * 400, "1")])
    byte_tokenizer.save_pretrained(paths.model("main"))
    write_json(paths.dataset_report("main"), {"task": "gsm8k"})  # left by another study
    assert gpu_memory.longest_prompt(study, "question_only") is None
    write_json(paths.dataset_report("main"), {"task": "math"})
    assert gpu_memory.longest_prompt(study, "question_only") == len(template) + 400
    assert gpu_memory.longest(study, config) == len(template) + 400 + 1024

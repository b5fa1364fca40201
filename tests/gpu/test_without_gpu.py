"""benchmarks/gpu.py where there is no GPU: it says so, and all that can be is tried on a CPU, before it meets a GPU."""

import json
import os
import subprocess
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.gpu import PARTS, keep, measured
from benchmarks.gpu_parts.step import end_after
from benchmarks.gpu_parts.tools import TINY, Batch, Row, Rows, Setting, make_model, needed_flops, plain_loss, real_tokens
from grpo.learner import microbatches
from grpo.models import packing

ROOT = Path(__file__).parents[2]
ON_CPU = Setting("cpu", TINY, repeats=1)
# What GPU machines often lack; a study needs all of them.
LACKING = (
    *("pydantic", "ruamel", "typer", "mlflow", "dvc", "math_verify", "vllm", "bitsandbytes", "ray", "datasets", "pandas"),
    *("snakemake", "matplotlib", "pyarrow", "xdist", "pytest_timeout"),
)
BARE = f"""
import sys
sys.modules.update(dict.fromkeys({LACKING!r}))  # None: as if it were not installed
from benchmarks import gpu
for part in ("gradients", "profile", "study", "vllm", "asynchronous"):
    sys.argv[1:] = ["--device", "cpu", "--tiny", "--repeats", "1", "--parts", part, "--out", "OUT"]
    assert gpu.main() == 0
"""
# The tests on a GPU need pydantic too.
BARE_TESTS = f"""
import sys
sys.modules.update(dict.fromkeys({LACKING[1:]!r}))
import pytest
sys.exit(pytest.main(["-m", "gpu", "-rs", "tests/gpu/test_gpu.py"]))
"""


@pytest.fixture(autouse=True)
def what_a_part_compiles_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled functions stay in their module. A part has a process of its own, but here other tests would compute by them."""
    for module, name in ((microbatches, "_forward"), (microbatches, "_backward"), (packing, "_attend")):
        monkeypatch.setattr(module, name, getattr(module, name))


def rows(part: str) -> dict[str, Row]:
    return {name: row for name, _, row in measured(PARTS[part], ON_CPU)}


def run(*command: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=os.environ | env, capture_output=True, text=True, check=False, timeout=300
    )


def test_without_a_gpu_each_part_says_that_it_was_skipped_and_nothing_is_claimed(tmp_path: Path) -> None:
    result = run("benchmarks/gpu.py", "--out", str(tmp_path / "gpu.json"), CUDA_VISIBLE_DEVICES="")
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert [line.split(maxsplit=1) for line in lines[:-1]] == [[part, "skipped: torch sees no GPU"] for part in PARTS]
    assert lines[-1] == "Nothing was measured."
    assert not list(tmp_path.iterdir())


@pytest.mark.nightly
@pytest.mark.parametrize("part", ["profile", "optimizer", "state", "throughput", "recompiles"])
def test_no_row_of_a_part_fails(part: str) -> None:
    found = rows(part)
    assert found
    optional = [{"skipped": "not installed: bitsandbytes"}]
    assert not {name: row for name, row in found.items() if ("failed" in row or "skipped" in row) and row not in optional}


@pytest.mark.nightly
def test_packed_and_padded_gradients_are_those_of_a_plain_loss() -> None:
    found = rows("gradients")
    assert max(found["float32"].values()) < 1e-5
    assert 1e-4 < found["bfloat16"]["packed_against_padded"] < 2e-2  # it is rounded, and no copy of the other
    assert 1e-5 < found["float16"]["packed_against_padded"] < 5e-3


@pytest.mark.nightly
def test_on_a_bare_machine_it_skips_by_name_what_needs_more(tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    result = run("-c", BARE.replace("OUT", str(out)))
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count("nothing of a GPU is measured") == 5
    found: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    parts = found["parts"]
    assert parts["study"] == {"": {"skipped": "not installed: pydantic, ruamel, typer, mlflow, dvc, math_verify"}}
    assert parts["vllm"] == {"": {"skipped": "not installed: vllm"}}
    assert parts["asynchronous"] == {"": {"skipped": "not installed: vllm, ray, pydantic"}}
    skipped = {name: row["skipped"] for name, row in parts["profile"].items() if "skipped" in row}
    assert skipped == {f"Learner.update, {way}": "not installed: pydantic" for way in ("packed", "padded")}
    assert not any("skipped" in row for row in parts["gradients"].values())
    assert found["device"] == "cpu" and "nothing of a GPU was measured" in found["note"]
    assert found["versions"]["torch"] == torch.__version__


@pytest.mark.nightly
def test_the_tests_on_a_gpu_start_without_the_packages_of_the_pipeline() -> None:
    result = run("-c", BARE_TESTS, CUDA_VISIBLE_DEVICES="", PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "torch sees no GPU" in result.stdout and "failed" not in result.stdout


def test_random_weights_end_responses_after_a_given_mean() -> None:
    model = make_model(TINY, "cpu", torch.float32).eval()
    end_after(model, 50.0)
    with torch.no_grad():
        logits = model(torch.randint(1, 512, (4, 40))).logits[:, 5:]
    ends = torch.softmax(logits, dim=-1)[..., 0]
    assert 1 / ends.mean().item() == pytest.approx(50, rel=0.02) and ends.std() < 0.1 * ends.mean()


@pytest.mark.slow
def test_each_part_runs_in_a_process_of_its_own_and_all_come_into_one_file(tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    arguments = ("--device", "cpu", "--tiny", "--repeats", "1", "--out", str(out), "--parts", "optimizer,state")
    result = run("benchmarks/gpu.py", *arguments)
    assert result.returncode == 0, result.stdout + result.stderr
    parts = json.loads(out.read_text(encoding="utf-8"))["parts"]
    assert {part: set(rows) for part, rows in parts.items()} == {"optimizer": {"adamw", "adamw_8bit"}, "state": {"state"}}


def test_a_failed_row_is_told_and_the_rows_after_it_are_measured() -> None:
    def part(setting: Setting) -> Rows:
        yield "broken", "", lambda: {"seconds": 1 / 0}
        yield "whole", "", lambda: {"seconds": 1.0}

    failed, whole = (row for _, _, row in measured(part, ON_CPU))
    assert failed == {"failed": "ZeroDivisionError: division by zero"}
    assert whole == {"seconds": 1.0}


def test_results_of_other_software_are_not_mixed_in(tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    for versions, part in (("1", "state"), ("1", "optimizer"), ("2", "state")):
        keep(out, {"versions": {"torch": versions}}, part, {})
        found = json.loads(out.read_text(encoding="utf-8"))
        assert set(found["parts"]) == ({"state"} if part == "state" else {"state", "optimizer"})


def test_the_work_that_must_be_done_is_what_torch_counts() -> None:
    model = make_model(TINY, "cpu", torch.float32)
    model.set_attn_implementation("eager")  # each product is counted
    batch = Batch(1, 1, 1, 40).made(model.config.vocab_size)
    with FlopCounterMode(display=False) as counter:
        plain_loss(model, batch[0]).backward()
    # The mask saves half of attention, which is computed whole here; the first token's logits are not of the response.
    attention = 12 * 2 * 64 * 41**2 / 2
    assert needed_flops(model, batch, 1) + attention == pytest.approx(counter.get_total_flops(), rel=0.03)


def test_prompts_are_counted_once_a_group_and_no_padding() -> None:
    batch = Batch(3, 4, 10, 24).made(100)
    assert real_tokens(batch, 4) == 3 * 10 + sum(range(2, 25, 2))


@pytest.mark.nightly
def test_the_study_is_killed_and_resumed() -> None:
    """(With packed rows, which come after the base model; the last row is the same with padded microbatches.)"""
    *_, (name, _, row) = islice(measured(PARTS["study"], ON_CPU), 2)
    assert name == "packed" and row["killed_by"] == 9 and row["resumed_after"], row


@pytest.mark.vllm
def test_vllm_holds_the_policys_weights() -> None:
    found = rows("vllm")
    assert {name: row["skipped"] for name, row in found.items() if "skipped" in row} == {
        "ten sleeps": "vLLM can only sleep on a GPU"
    }
    assert not [row for row in found.values() if "failed" in row], found
    assert found["weights"]["equal"]


@pytest.mark.vllm
def test_weights_reach_a_vllm_in_another_process() -> None:
    found = rows("asynchronous")
    skipped = {"skipped": "weights are sent between GPUs"}
    assert found.pop("on one GPU (CUDA IPC)") == found.pop("between two GPUs (NCCL)") == skipped
    assert set(found) == {"through Ray"} and "failed" not in found["through Ray"], found


@pytest.mark.vllm
def test_vllm_in_float16() -> None:
    found = rows("vllm_float16")
    assert set(found) == {"start", "weights", "mismatch"}
    assert not [row for row in found.values() if "failed" in row], found
    assert 0 < found["mismatch"]["mean"] < 5e-3  # of which 2e-3 is the end of text, one of 512 tokens, that may not come yet

"""Measure the project on one GPU, part by part, with random weights in the shape of Qwen2.5-Math-1.5B.

``python benchmarks/gpu.py`` runs all parts, each in its own process with a time limit; ``--parts gradients,throughput`` runs
some. It needs no model, no network, and only torch and transformers of the package's dependencies; parts and rows that need
more are skipped. Each row is printed and written to the JSON file at once. ``--device cpu --tiny`` tries the code without a
GPU. docs/gpu.md explains the parts and names the goals.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # the package need not be installed

import torch  # noqa: E402

from benchmarks.gpu_parts.learner import gradients, optimizer, profile, recompiles, state, throughput  # noqa: E402
from benchmarks.gpu_parts.sampling import vllm, vllm_float16  # noqa: E402
from benchmarks.gpu_parts.tools import FULL, TINY, Row, Rows, Setting, Skipped  # noqa: E402
from benchmarks.gpu_parts.transfer import asynchronous  # noqa: E402
from benchmarks.gpu_parts.whole_study import study  # noqa: E402
from grpo.common.files import write_json  # noqa: E402

PACKAGES = ("torch", "transformers", "vllm", "ray", "bitsandbytes", "triton", "pydantic")
PARTS: dict[str, Callable[[Setting], Rows]] = {
    "gradients": gradients,
    "throughput": throughput,
    "profile": profile,
    "recompiles": recompiles,
    "optimizer": optimizer,
    "state": state,
    "study": study,
    "vllm": vllm,
    "vllm_float16": vllm_float16,
    "asynchronous": asynchronous,
}
LIMIT_S = {  # 26 minutes in total
    "gradients": 120,
    "throughput": 420,
    "profile": 120,
    "recompiles": 90,
    "optimizer": 60,
    "state": 90,
    "study": 210,
    "vllm": 210,
    "vllm_float16": 120,
    "asynchronous": 120,
}


def measured(part: Callable[[Setting], Rows], setting: Setting) -> Iterator[tuple[str, str, Row]]:
    """Yield the rows of a part as they finish: name, goal, and numbers, ``skipped`` or ``failed``."""
    rows = part(setting)
    while True:
        try:
            name, goal, measure = next(rows)
        except StopIteration:
            return
        except Skipped as reason:
            yield "", "", {"skipped": str(reason)}
            return
        try:
            row = measure()
        except Skipped as reason:
            row = {"skipped": str(reason)}
        except Exception as error:  # the other rows may well work
            row = {"failed": f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"}
        yield name, goal, row
        gc.collect()
        if setting.on_gpu:
            torch.cuda.empty_cache()


def about(setting: Setting) -> dict[str, Any]:
    """Describe the device, the installed packages and the date, without the machine's name."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    gpu = {}
    if setting.on_gpu:
        properties = torch.cuda.get_device_properties(0)
        gpu = {"device": properties.name, "memory_gib": round(properties.total_memory / 2**30, 1), "cuda": torch.version.cuda}
    return {
        **(gpu or {"device": "cpu", "note": "tried on a CPU; nothing of a GPU was measured"}),
        "versions": {"python": ".".join(map(str, sys.version_info[:3])), **versions},
        "scale": "full" if setting.scale is FULL else "tiny",
        "repeats": setting.repeats,
    }


def keep(out: Path, head: dict[str, Any], part: str, rows: dict[str, Row]) -> None:
    """Add a part's rows to the file; rows of other parts stay if device and software are the same."""
    found = json.loads(out.read_text(encoding="utf-8")) if out.exists() else {}
    same = all(found.get(key) == value for key, value in head.items())
    parts = found.get("parts", {}) if same else {}
    write_json(out, {**head, "date": datetime.now(UTC).date().isoformat(), "parts": {**parts, part: rows}})


def line(part: str, name: str, goal: str, row: Row) -> str:
    """Format a row of the table."""
    shown = [f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in row.items()]
    text = next((f"{key}: {row[key]}" for key in ("skipped", "failed") if key in row), ", ".join(shown))
    return f"{part:13}{name:28}{text}{f'   (goal: {goal})' if goal and 'skipped' not in row else ''}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS), help="parts to run, separated by commas; default: all")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a model of two narrow layers, to try the code only")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, help="JSON file; default: benchmarks/results/gpu.json on a GPU, else none")
    options = parser.parse_args()
    names = options.parts.split(",")
    if wrong := [name for name in names if name not in PARTS]:
        parser.error(f"--parts: {', '.join(wrong)}: unknown. There are {', '.join(PARTS)}.")
    if options.device == "cuda" and not torch.cuda.is_available():
        for name in names:
            print(line(name, "", "", {"skipped": "torch sees no GPU"}))
        print("Nothing was measured.")
        return 0
    if len(names) > 1:
        return max([in_a_process(name) for name in names])
    setting = Setting(options.device, TINY if options.tiny else FULL, options.repeats)
    if not setting.on_gpu:
        print(f"{names[0]:13}on a CPU: the code is tried, and nothing of a GPU is measured")
    out = options.out or (ROOT / "benchmarks/results/gpu.json" if setting.on_gpu and not options.tiny else None)
    rows: dict[str, Row] = {}
    for name, goal, row in measured(PARTS[names[0]], setting):
        print(line(names[0], name, goal, row), flush=True)
        rows[name] = {**row, **({"goal": goal} if goal else {})}
        if out:
            keep(out, about(setting), names[0], rows)
    return int(any("failed" in row for row in rows.values()))


def in_a_process(part: str) -> int:
    """Run this command for one part in a process of its own, so that parts cannot affect each other; return the exit code."""
    arguments = [a for a in sys.argv[1:] if not a.startswith("--parts=")]
    if "--parts" in arguments:
        at = arguments.index("--parts")
        del arguments[at : at + 2]
    process = subprocess.Popen([sys.executable, __file__, *arguments, "--parts", part], start_new_session=True)
    try:
        return process.wait(LIMIT_S[part])
    except subprocess.TimeoutExpired:
        print(line(part, "", "", {"failed": f"ended at its limit of {LIMIT_S[part]} s; its rows until then stand"}), flush=True)
        return 1
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # and what it has started


if __name__ == "__main__":
    sys.exit(main())

"""How busy the machine is while a run goes on, under the names of MLflow's own system metrics (``system/...``).

Sampled by the process that brings runs to MLflow, so that training spends nothing on it.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from grpo.tracking.mlflow_client import milliseconds

FIRST_SECONDS = 2.0  # between two samples of a young run
GROWTH = 0.01  # of a run's age is waited between two: some 100 samples in three minutes, 600 in eight hours
GPU_COLUMNS = ("utilization.gpu", "memory.used", "memory.total")


class SystemMetrics:
    """Samples the machine for one run, and writes lines in the form of metrics.jsonl; their step is the run's age in seconds.

    Args:
        file: that is written.
        started: the run's start, in milliseconds since 1970.
        gpus: the run's CUDA_VISIBLE_DEVICES; None: all.
    """

    def __init__(self, file: Path, started: int, gpus: str | None):
        self.file, self.started, self.gpus = file, started, gpus
        self.busy, self.total = cpu_seconds()
        self.next = milliseconds() + 1000 * FIRST_SECONDS

    def look(self) -> None:
        """Take a sample, when it is time to."""
        now = milliseconds()
        if now < self.next:
            return
        age = (now - self.started) / 1000
        self.next = now + 1000 * max(FIRST_SECONDS, GROWTH * age)
        row = {"time": now, "step": max(0, int(age)), "metrics": self.sample()}
        with self.file.open("a", encoding="ascii") as file:
            file.write(f"\n{json.dumps(row)}\n")  # the first line break ends what a full disk may have left

    def sample(self) -> dict[str, float]:
        """CPU since the last sample, memory now (of the whole machine, in MB as MLflow has it), and the run's GPUs."""
        import psutil

        before, self.busy, self.total = (self.busy, self.total), *cpu_seconds()
        memory = psutil.virtual_memory()
        return {
            "system/cpu_utilization_percentage": 100 * (self.busy - before[0]) / max(1e-9, self.total - before[1]),
            "system/system_memory_usage_megabytes": memory.used / 1e6,
            "system/system_memory_usage_percentage": memory.percent,
            **gpu_metrics(self.gpus),
        }


def cpu_seconds() -> tuple[float, float]:
    """Seconds that all cores have been busy, and seconds in all, since the machine's start."""
    import psutil

    times = psutil.cpu_times()
    idle = times.idle + getattr(times, "iowait", 0.0)
    guests = getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0)  # they count as user and nice too
    total = sum(times) - guests
    return total - idle, total


def gpu_metrics(visible: str | None) -> dict[str, float]:
    """Utilisation and memory of the GPUs that ``visible`` names by their numbers, or else of all; none without nvidia-smi."""
    query = ["nvidia-smi", f"--query-gpu=index,{','.join(GPU_COLUMNS)}", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, check=True, timeout=10).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    return parse_gpus(answer, visible)


def parse_gpus(answer: str, visible: str | None) -> dict[str, float]:
    """What nvidia-smi says (MiB), under MLflow's names; a figure that a GPU does not have is left out."""
    rows = [line.split(", ") for line in answer.splitlines() if line.count(", ") == len(GPU_COLUMNS)]
    wanted = (visible or "").split(",")
    found: dict[str, float] = {}
    for index, *values in [row for row in rows if row[0] in wanted] or rows:
        busy, used, total = (float(value) if value.replace(".", "", 1).isdigit() else None for value in values)
        if busy is not None:
            found[f"system/gpu_{index}_utilization_percentage"] = busy
        if used is not None and total:
            found[f"system/gpu_{index}_memory_usage_megabytes"] = used * 2**20 / 1e6
            found[f"system/gpu_{index}_memory_usage_percentage"] = 100 * used / total
    return found

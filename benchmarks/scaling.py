r"""Measure one update of the learner with packed rows and with padded microbatches, as groups, prompts and responses grow.

``python benchmarks/scaling.py`` prints a table and draws it to benchmarks/results/. Both ways get the same random rollouts and
take turns; the result is the median of a few updates.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import sys
import tempfile
import time
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from grpo.common.cpu import fix_cpu_kernels, share_cpu_fairly, start_threads
from grpo.study.settings import LearnerSettings

fix_cpu_kernels()
share_cpu_fairly()
sys.path.insert(0, str(Path(__file__).parent))

import torch  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402
from step import make_model  # noqa: E402

from grpo.common.records import Completion, Problem, Rollout  # noqa: E402
from grpo.learner.learner import Learner  # noqa: E402
from grpo.models.checkpoint import load_model  # noqa: E402
from grpo.reporting.charts import Curve, draw_curves, frame, legend, panels, powers_of_two, save_figure  # noqa: E402
from grpo.reporting.style import styles  # noqa: E402
from grpo.study.methods import GrpoConfig  # noqa: E402

RESPONSES = 32  # per batch, whatever the group size
USUAL = {"group size": 8, "prompt length": 100, "response length": 100}
VARIED = {
    "group size": [1, 2, 4, 8, 16, 32],
    "prompt length": [1, 100, 300, 1000],
    "response length": [10, 30, 100, 300, 1000],
}


def rollouts(group: int, prompt: int, response: int) -> list[Rollout]:
    """Make random rollouts with random advantages and lengths from 0.5 to 1.5 times ``response``, evenly spread."""
    rng = random.Random(0)
    made = []
    for g in range(RESPONSES // group):
        ids = tuple(rng.randrange(1, 400) for _ in range(prompt))
        for i in range(group):
            n = max(1, round(response * (0.5 + (g * group + i) / max(1, RESPONSES - 1))))
            completion = Completion(tuple(rng.randrange(1, 400) for _ in range(n)), "", (0.0,) * n, "stop")
            advantage = torch.randn(()).item()
            made.append(Rollout(Problem("p", "", ""), ids, completion, {"reward": 1.0}, advantage=advantage))
    return made


def seconds(learners: dict[str, Learner], batch: list[Rollout], repeats: int) -> dict[str, float]:
    """Median seconds of an update by each way, measured in turns."""
    times: dict[str, list[float]] = {name: [] for name in learners}
    for _ in range(repeats + 1):
        for name, learner in learners.items():
            start = time.perf_counter()
            learner.update(batch)
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values[1:]) for name, values in times.items()}


def draw(rows: list[dict[str, Any]]) -> Figure:
    """Draw a panel for each varied length, with logarithmic axes."""
    figure, axes = panels(len(VARIED))
    looks = styles(["packed", "padded"])
    for place, (what, values) in zip(axes, VARIED.items(), strict=True):
        own = [row for row in rows if row["varied"] == what]
        draw_curves(place, [Curve(way, None, tuple(values), tuple(row[way] for row in own)) for way in looks], looks)
        others = ", ".join(f"{name} {value}" for name, value in USUAL.items() if name != what)
        frame(place, f"seconds of an update; {others}", what)
        powers_of_two(place, values)
        place.set_yscale("log")
    legend(figure, looks)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    settings = parser.parse_args()
    start_threads(settings.threads)
    config = GrpoConfig(rollout_batch_size=RESPONSES, train_batch_size=RESPONSES, group_size=8, gradient_accumulation_steps=4)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        make_model(Path(name), context=3000)
        learners = {
            way: Learner(load_model(Path(name)), config, 0, LearnerSettings(max_tokens_per_microbatch=budget))
            for way, budget in (("packed", 4096), ("padded", None))
        }
        print(f"{'':>16}{'':>8}{'packed, s':>11}{'padded, s':>11}{'ratio':>7}")
        for what, values in VARIED.items():
            for value in values:
                group, prompt, response = (USUAL | {what: value}).values()
                batch = rollouts(group, prompt, response)
                took = seconds(learners, batch, settings.repeats)
                rows.append({"varied": what, "value": value, **took})
                ratio = took["padded"] / took["packed"]
                print(f"{what:>16}{value:>8}{took['packed']:>11.3f}{took['padded']:>11.3f}{ratio:>7.2f}", flush=True)
    settings.out.mkdir(parents=True, exist_ok=True)
    save_figure(draw(rows), settings.out / "scaling.png")
    about = {
        "date": datetime.now(UTC).date().isoformat(),
        "machine": f"{platform.processor() or platform.machine()}, {settings.threads} threads",
        "versions": {package: version(package) for package in ("torch", "transformers")},
        "rows": rows,
    }
    (settings.out / "scaling.json").write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

"""Folders of made-up runs in the working folder."""

from __future__ import annotations

import json
from pathlib import Path

from grpo.common.files import write_json, write_text
from grpo.results.runs import Run

CONFIG = {"same_as": None, "overrides": {}, "before": [], "config": {}, "software": {}, "updates_per_rollout_batch": 1}


def write_run(run: Run) -> None:
    """Write a run's folder; ``run.config`` gives what differs from :data:`CONFIG`."""
    folder = Path("data/runs") / run.name
    selecting = {"evaluation": {"selection_problems": run.selection_problems, "last_problems": len(run.last)}}
    write_json(folder / "config.yaml", CONFIG | {"identity": run.name} | selecting | run.config)  # JSON is YAML
    write_json(folder / "metrics.json", run.metrics)
    for name in ("history", "validation"):
        write_text(folder / f"{name}.csv", getattr(run, name).to_csv(index=False))
    lines = [json.dumps({"answer_reward": list(row)}) for row in (*run.outcomes[:-1], run.last)]
    write_text(folder / "outcomes.jsonl", "\n".join(lines) + "\n")

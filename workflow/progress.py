"""Estimate how far the stages are and how long they still take, from the plan, earlier times and the logs of running stages.

A running stage's progress is the last bar that tqdm wrote to its log.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean

from plan import PLAN

# tqdm's bar: `10/30 [00:12<00:24, 1.20s/step, validation answer reward 0.431]`.
BAR = re.compile(r"(?P<step>\d+/\d+) \[[\d:]+<(?P<left>[\d:]+)(?:[^\]\r\n]*reward (?P<reward>[\d.]+))?")
WARNING = re.compile(r"^warning: .*(?:\n  .*)*", re.MULTILINE)
# DVC's messages about a stage that it did not run.
NOT_RUN = {"didn't change, skipping": "unchanged", "is cached - skipping run": "from DVC's cache"}


@dataclass
class Stage:
    """A stage that is to run, and its state."""

    name: str
    log: Path
    runs: Path | None = None  # folder with the results of its runs, if it trains any
    former: float | None = None  # seconds that it took the last time, if known
    started: float | None = None  # time.time() of its start, while it runs or waits in a queue
    seconds: float | None = None  # that it took, once it is done
    failed: bool = False
    warnings: list[str] = field(default_factory=list)

    def finish(self, now: float) -> str:
        """Store how long it took and read its warnings; return its line: time, mean reward over seeds, runs taken over."""
        self.seconds, self.started = now - (self.started or now), None
        _seconds_file(self.log).write_text(f"{self.seconds:.1f}\n")
        text = self.log.read_text(encoding="utf-8", errors="replace") if self.log.exists() else ""
        self.warnings = WARNING.findall(text)
        said = [f"{self.name}, {clock(self.seconds)}"]
        if self.runs:
            rewards = [json.loads(path.read_text())["val/answer_reward"] for path in self.runs.rglob("metrics.json")]
            timings = sorted((Path("data/timing") / self.runs.relative_to("data/runs")).rglob("timing.json"))
            same_as = [run for path in timings if (run := json.loads(path.read_text())["same_as"])]
            said += [f"reward {mean(rewards):.3f}"] if rewards else []
            said += [f"taken over from {', '.join(same_as)}"] if same_as else []
        return ", ".join(said + [why for message, why in NOT_RUN.items() if message in text])

    def progress(self) -> dict[str, str | None]:
        """Read `step`, `left` and `reward` from the end of its log, as far as they are there."""
        with suppress(OSError):  # no log yet, or it was just removed
            text = self.log.read_text(encoding="utf-8", errors="replace")[-2000:]
            if text and self.log.stat().st_mtime >= (self.started or 0):  # not of an earlier attempt
                bars = [*BAR.finditer(text)]
                return bars[-1].groupdict() if bars else {}
        return {"step": "waits"}  # for a GPU, for Slurm, or until its first output


def read_stages(rules: Collection[str]) -> dict[str, Stage]:
    """Read the stages of these rules from the plan, by rule."""
    stages = {}
    for entry in json.loads(PLAN.read_text()):
        if entry["rule"] in rules:
            log = Path(entry["log"])
            former = None
            with suppress(OSError, ValueError):  # there is none, or a kill left a part of it
                former = float(_seconds_file(log).read_text())
            stages[entry["rule"]] = Stage(entry["stage"], log, entry["runs"] and Path(entry["runs"]), former)
    return stages


def _seconds_file(log: Path) -> Path:
    return log.with_suffix(".seconds")


def time_left(stages: Collection[Stage], began: float, now: float) -> float | None:
    """Expected seconds until all stages are done, if as many run in parallel as before; None if nothing is known.

    A stage takes as long as the last time, or else as long as those that are done.
    """
    done = [stage.seconds for stage in stages if stage.seconds is not None]
    ahead, spent = 0.0, sum(done)
    for stage in stages:
        if stage.seconds is None and not stage.failed:
            whole = stage.former or (mean(done) if done else None)
            if whole is None:
                return None
            running = now - stage.started if stage.started is not None else 0.0
            ahead += max(0.0, whole - running)
            spent += running
    return ahead / max(1.0, spent / (now - began) if now > began else 1.0)


def clock(seconds: float) -> str:
    """Format seconds as m:ss or h:mm:ss."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}" if minutes >= 60 else f"{minutes}:{rest:02}"

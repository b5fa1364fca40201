"""Estimate how far the stages are and how long they still take, from the plan, earlier times and the logs of running stages.

A running stage's progress is the last bar that tqdm wrote to its log.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any

from plan import PLAN

# tqdm's bars: `10/30 [00:12<00:24, 1.20s/step, validation answer reward 0.431]`, or `best 566: 12 programs [00:03, ...]`.
BAR = re.compile(r"(?P<step>\d+/\d+) \[[\d:]+<(?P<left>[\d:]+)(?:[^\]\r\n]*reward (?P<reward>[\d.]+))?")
WARNING = re.compile(r"^warning: .*(?:\n  .*)*", re.MULTILINE)
# DVC's messages about a stage that it did not run.
NOT_RUN = {"didn't change, skipping": "unchanged", "is cached - skipping run": "from DVC's cache"}
COUNT = re.compile(r"(?P<step>[^\r\n]*\d \w+) \[[\d:]+, ")


@dataclass
class Stage:
    """A stage that is to run, and its state."""

    name: str
    runs: Path | None  # folder with the results of its runs, if it trains any
    log: Path
    took: Path  # file with the seconds that it took
    former: float | None = None  # seconds that it took the last time
    started: float | None = None  # time.time() of its start, while it runs or waits in a queue
    log_before: float | None = None  # modification time of its log at its start
    seconds: float | None = None  # that it took, once it is done
    failed: bool = False
    told_to_stop: bool = False  # stopped on request, and can be continued
    reward: float | None = None  # last validation answer reward, mean over seeds
    same_as: list[str] = field(default_factory=list)  # runs whose results were taken over
    not_run: str = ""  # why DVC did not run it
    warnings: list[str] = field(default_factory=list)

    @classmethod
    def of_plan(cls, entry: dict[str, Any]) -> Stage:
        """Make a stage from an entry of the plan."""
        stage = cls(entry["stage"], entry["runs"] and Path(entry["runs"]), Path(entry["log"]), Path(entry["took"]))
        with suppress(OSError, ValueError):
            stage.former = float(stage.took.read_text())
        return stage

    def finish(self, now: float) -> None:
        """Store how long it took, and read its warnings and the results of its runs."""
        self.seconds, self.started = now - (self.started or now), None
        self.took.write_text(f"{self.seconds:.1f}\n")
        with suppress(OSError):
            text = self.log.read_text(encoding="utf-8", errors="replace")
            self.warnings = WARNING.findall(text)
            self.not_run = next((why for said, why in NOT_RUN.items() if said in text), "")
        if self.runs is None:
            return
        with suppress(OSError, ValueError, KeyError, TypeError):
            self.reward = mean(json.loads(path.read_text())["val/answer_reward"] for path in self.runs.rglob("metrics.json"))
            timings = sorted((Path("data/timing") / self.runs.relative_to("data/runs")).rglob("timing.json"))
            self.same_as = [run for path in timings if (run := json.loads(path.read_text())["same_as"])]

    def progress(self) -> dict[str, str | None]:
        """Read `step`, `left` and `reward` from the end of its log, as far as they are there."""
        with suppress(OSError):  # no log yet, or it was just removed
            about = self.log.stat()
            if about.st_mtime != self.log_before and about.st_size:
                with self.log.open("rb") as file:
                    file.seek(max(0, about.st_size - 2000))
                    text = file.read().decode(errors="replace")
                bars = [*BAR.finditer(text)] or [*COUNT.finditer(text)]
                return bars[-1].groupdict() if bars else {}
        return {"step": "waits"}  # for a GPU, for Slurm, or until its first output


@dataclass
class Study:
    """The stages that are to run, by rule name."""

    stages: dict[str, Stage]
    began: float = field(default_factory=time.time)

    def done(self) -> list[Stage]:
        """The stages that have succeeded."""
        return [stage for stage in self.stages.values() if stage.seconds is not None]

    def expected(self, stage: Stage) -> float | None:
        """Expected seconds of a stage: its last time scaled by today's pace, or else the mean of finished stages."""
        seconds = [(other.seconds or 0.0, other.former) for other in self.done()]
        if stage.former:
            again = [(now, former) for now, former in seconds if former]
            return stage.former * (sum(now for now, _ in again) / sum(former for _, former in again) if again else 1.0)
        return sum(now for now, _ in seconds) / len(seconds) if seconds else None

    def left(self, now: float) -> float | None:
        """Expected seconds until all stages are done, if as many run in parallel as before; None if nothing is known."""
        ahead, spent = [], sum(stage.seconds or 0.0 for stage in self.done())
        for stage in self.stages.values():
            if stage.seconds is None and not stage.failed:
                running = now - stage.started if stage.started is not None else 0.0
                if (whole := self.expected(stage)) is None:
                    return None
                ahead.append(max(0.0, whole - running))
                spent += running
        side_by_side = spent / (now - self.began) if now > self.began else 1.0
        return sum(ahead) / max(1.0, side_by_side)


def read_study(rules: Collection[str]) -> Study:
    """Read the stages of these rules from the plan."""
    entries = [entry for entry in json.loads(PLAN.read_text()) if entry["rule"] in rules]
    return Study({entry["rule"]: Stage.of_plan(entry) for entry in entries})


def clock(seconds: float) -> str:
    """Format seconds as m:ss or h:mm:ss."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}" if minutes >= 60 else f"{minutes}:{rest:02}"

"""How far the stages are, and how long they still take: from the plan, former seconds, and the logs of running stages.

Stages do nothing for it: how far one is says the last bar that tqdm drew into its log.
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

# As tqdm draws: `10/30 [00:12<00:24, 1.20s/step, validation answer reward 0.431]`, or `best 566: 12 programs [00:03, ...]`.
BAR = re.compile(r"(?P<step>\d+/\d+) \[[\d:]+<(?P<left>[\d:]+)(?:[^\]\r\n]*reward (?P<reward>[\d.]+))?")
WARNING = re.compile(r"^warning: .*(?:\n  .*)*", re.MULTILINE)
# DVC's words for a stage that it did not run.
NOT_RUN = {"didn't change, skipping": "unchanged", "is cached - skipping run": "from DVC's cache"}
COUNT = re.compile(r"(?P<step>[^\r\n]*\d \w+) \[[\d:]+, ")


@dataclass
class Stage:
    """A stage that is to run, and what has become of it. Seconds, where they are a moment, by time.time()."""

    name: str
    runs: Path | None  # where the results of its runs go, if it trains any
    log: Path
    took: Path
    former: float | None = None  # seconds that it took the last time
    started: float | None = None  # while it is running, or waits in a queue
    log_before: float | None = None  # when its log had been written as it started
    seconds: float | None = None  # once it is done
    failed: bool = False
    told_to_stop: bool = False  # and did, so that it goes on later
    reward: float | None = None  # mean over the seeds of the last validation answer reward
    same_as: list[str] = field(default_factory=list)  # the runs whose results were taken over
    not_run: str = ""  # why DVC did not run it
    warnings: list[str] = field(default_factory=list)

    @classmethod
    def of_plan(cls, entry: dict[str, Any]) -> Stage:
        """A stage as plan.py describes it."""
        stage = cls(entry["stage"], entry["runs"] and Path(entry["runs"]), Path(entry["log"]), Path(entry["took"]))
        with suppress(OSError, ValueError):
            stage.former = float(stage.took.read_text())
        return stage

    def finish(self, now: float) -> None:
        """Note how long it took, for the next time too, and what it came to if it was a run."""
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
        """How far it is: `step`, `left` and `reward`, as far as its log says."""
        with suppress(OSError):  # there is no log yet, or it vanishes just now
            about = self.log.stat()
            if about.st_mtime != self.log_before and about.st_size:
                with self.log.open("rb") as file:
                    file.seek(max(0, about.st_size - 2000))
                    text = file.read().decode(errors="replace")
                bars = [*BAR.finditer(text)] or [*COUNT.finditer(text)]
                return bars[-1].groupdict() if bars else {}
        return {"step": "waits"}  # for a GPU, for Slurm, or for its first word


@dataclass
class Study:
    """The stages that are to run, by the names of their rules."""

    stages: dict[str, Stage]
    began: float = field(default_factory=time.time)

    def done(self) -> list[Stage]:
        """The stages that have ended well."""
        return [stage for stage in self.stages.values() if stage.seconds is not None]

    def expected(self, stage: Stage) -> float | None:
        """About how long a stage takes: as the last time, at this time's pace; or else as those that are done, on average."""
        seconds = [(other.seconds or 0.0, other.former) for other in self.done()]
        if stage.former:
            again = [(now, former) for now, former in seconds if former]
            return stage.former * (sum(now for now, _ in again) / sum(former for _, former in again) if again else 1.0)
        return sum(now for now, _ in seconds) / len(seconds) if seconds else None

    def left(self, now: float) -> float | None:
        """About how many seconds all takes yet, if as many stages run side by side as until now. None: nothing is known."""
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
    """The stages of these rules, which are to run, from the plan."""
    entries = [entry for entry in json.loads(PLAN.read_text()) if entry["rule"] in rules]
    return Study({entry["rule"]: Stage.of_plan(entry) for entry in entries})


def clock(seconds: float) -> str:
    """Seconds as m:ss or h:mm:ss."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}" if minutes >= 60 else f"{minutes}:{rest:02}"

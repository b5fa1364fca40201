"""How far the stages are, and how long they still take: from the plan, former seconds, and the logs of running stages.

Stages do nothing for it: how far one is says the last bar that tqdm drew into its log.
"""

from __future__ import annotations

import json
import logging
import re
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from plan import PLAN
from snakemake_interface_logger_plugins.common import LogEvent

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
    needs: dict[str, int]  # by the names in which Snakemake says what there is
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

    def finish(self, now: float) -> None:
        """Note how long it took, as with_gpus.py measured it, and what it came to if it was a run."""
        self.seconds, self.started = seconds_in(self.took) or now - (self.started or now), None
        with suppress(OSError):
            text = self.log.read_text(encoding="utf-8", errors="replace")
            self.warnings = WARNING.findall(text)
            self.not_run = next((why for said, why in NOT_RUN.items() if said in text), "")
        if self.runs is None:
            return
        with suppress(OSError, ValueError, KeyError, TypeError, ZeroDivisionError):
            rewards = [json.loads(path.read_text())["val/answer_reward"] for path in self.runs.rglob("metrics.json")]
            self.reward = sum(rewards) / len(rewards)
            timings = sorted((Path("data/timing") / self.runs.relative_to("data/runs")).rglob("timing.json"))
            self.same_as = [twin for path in timings if (twin := json.loads(path.read_text())["same_as"])]

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
    """The stages that are to run, by the names of their rules, and what there is to run them on."""

    stages: dict[str, Stage]
    offered: dict[str, int]
    began: float = field(default_factory=time.time)

    def done(self) -> list[Stage]:
        """The stages that have ended well."""
        return [stage for stage in self.stages.values() if stage.seconds is not None]

    def ahead(self) -> list[Stage]:
        """The stages that run or are to run."""
        return [stage for stage in self.stages.values() if stage.seconds is None and not stage.failed]

    def expected(self, stage: Stage) -> float | None:
        """About how long a stage takes: as the last time, at this time's pace; or else as its like have taken now."""
        pairs = [(other.seconds or 0.0, other.former) for other in self.done()]
        if stage.former:
            again = [(seconds, former) for seconds, former in pairs if former]
            pace = sum(seconds for seconds, _ in again) / sum(former for _, former in again) if again else 1.0
            return stage.former * pace
        kind = f"{stage.name.split('@')[0]}@"
        alike = [other.seconds or 0.0 for other in self.done() if other.name.startswith(kind)] or [s for s, _ in pairs]
        return sum(alike) / len(alike) if alike else None

    def left(self, now: float) -> float | None:
        """About how many seconds all takes yet, by what is scarcest: cores, GPUs, jobs at a time. None: nothing is known."""
        seconds = []
        for stage in self.ahead():
            if (whole := self.expected(stage)) is None:
                return None
            seconds.append(whole if stage.started is None else max(0.0, whole - (now - stage.started)))
        shares = [
            sum(each * min(1.0, stage.needs.get(what, 0) / count) for each, stage in zip(seconds, self.ahead(), strict=True))
            for what, count in self.offered.items()
        ]
        return max([*seconds, *shares], default=0.0)


def read_study(said: list[logging.LogRecord]) -> Study:
    """The study, from the plan and from what Snakemake says before the first stage starts."""
    resources = " ".join(str(record.msg) for record in said if getattr(record, "event", None) == LogEvent.RESOURCES_INFO)
    rules = next(record.stats for record in said if getattr(record, "event", None) == LogEvent.RUN_INFO)
    stages = {}
    for entry in json.loads(PLAN.read_text()):
        if entry["rule"] in rules:
            log, took = Path(entry["log"]), Path(entry["took"])
            needs = {"cores": entry["threads"], "nodes": 1, **entry["resources"]}
            stages[entry["rule"]] = Stage(
                entry["stage"], entry["runs"] and Path(entry["runs"]), log, took, needs, seconds_in(took)
            )
    # `Provided cores: 2`, `Provided remote nodes: 32`, `Provided resources: gpu=Resource("gpu", 2), …`
    offered = re.findall(r'(\w+)(?:: |", )(\d+)', resources)
    return Study(stages, {name: int(count) for name, count in offered if int(count)})


def seconds_in(path: Path) -> float | None:
    """The seconds that with_gpus.py has noted."""
    with suppress(OSError, ValueError):
        return float(path.read_text())
    return None


def clock(seconds: float) -> str:
    """Seconds as m:ss or h:mm:ss."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}" if minutes >= 60 else f"{minutes}:{rest:02}"

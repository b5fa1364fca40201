"""Show progress while Snakemake runs the stages: a logger plugin of Snakemake that the profiles switch on.

Prints a line for each finished stage. In a terminal it also shows a line for each running stage with its step, reward and time
left, and the progress of all. For a failed stage it prints the end of its log. Of Snakemake's own messages it prints warnings
and errors only. It prints all of them if no stage runs (`--list`, `--unlock`, an error in the Snakefile) and with `--dry-run`,
`--verbose`, `--quiet`.

(snakemake-logger-plugin-rich counts finished jobs per rule. Here each stage is a rule, and steps, rewards and time left are not
among Snakemake's events.)
"""

from __future__ import annotations

import logging
import re
import sys
import time
from collections.abc import Collection
from pathlib import Path

from progress import Stage, Study, clock, read_study
from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text
from snakemake.logging import ColorizingTextHandler, DefaultFilter, DefaultFormatter
from snakemake_interface_logger_plugins.base import LogHandlerBase
from snakemake_interface_logger_plugins.common import LogEvent, logger_plugin_module_prefix
from snakemake_interface_logger_plugins.registry import LoggerPluginRegistry

LOG_LINES_SHOWN = 20
REPORT = Path("reports/index.html")
# Snakemake's messages about a failed stage that repeat what is shown here.
REPEATED = re.compile(r"CalledProcessError in file|Exiting because a job execution failed|At least one job did not complete")
# DVC's message about a full disk or quota.
FULL = re.compile(r"ERROR: .*\[Errno (?:28|122)\](?:.*'(.+)/files/md5/)?")
CACHE_IS_FULL = (
    "\n{}: DVC could not store the results, as the disk of its cache is full. Free space (`dvc gc --workspace` removes what no"
    " stage of the workspace uses), or move the cache (`dvc cache dir --local FOLDER`). Then run the same command again;"
    " finished runs and evaluations are kept."
)
TOLD_TO_STOP = ("Terminating processes on user request", "Will exit after finishing currently running jobs")


class LogHandler(LogHandlerBase):
    """Shows Snakemake's events (see the module)."""

    writes_to_stream, writes_to_file, has_filter, has_formatter, needs_rulegraph = True, False, True, True, False

    def __post_init__(self) -> None:
        """Prepare to print Snakemake's own messages, until the first stage starts."""
        asked = self.common_settings
        stream, quiet = sys.stdout if asked.stdout else sys.stderr, asked.quiet or set()
        wanted = DefaultFilter(quiet, asked.debug_dag, asked.verbose, asked.dryrun, asked.printshellcmds)
        self.words = DefaultFormatter(quiet, asked.show_failed_logs)
        self.as_ever = ColorizingTextHandler(asked.nocolor, stream, self.words, wanted)
        self.off = bool(asked.dryrun or asked.verbose or asked.debug_dag or quiet)
        self.console = Console(file=stream, no_color=asked.nocolor, highlight=False)
        self.in_terminal = stream.isatty() and not self.console.is_dumb_terminal
        self.before: list[logging.LogRecord] = []  # messages before the first stage started
        self.to_run: Collection[str] = ()  # names of rules
        self.study: Study | None = None
        self.live: Live | None = None
        self.jobs: dict[int, Stage] = {}

    def emit(self, record: logging.LogRecord) -> None:
        """Handle one message; Snakemake calls this in a separate thread, one message after the other."""
        try:
            if self.study:
                self.follow(self.study, record)
            elif getattr(record, "event", None) == LogEvent.JOB_STARTED and not self.off:
                self.study = read_study(self.to_run)
                self.before.clear()
                if self.in_terminal:
                    self.live = Live(console=self.console, get_renderable=self.picture, refresh_per_second=1, transient=True)
                    self.live.start()
            else:
                self.before.append(record)
                if getattr(record, "event", None) == LogEvent.RUN_INFO:
                    self.to_run = record.stats
                if self.off or record.levelno >= logging.WARNING:
                    self.say_as_ever()
        except Exception:
            self.handleError(record)

    def say_as_ever(self) -> None:
        """Print Snakemake's messages as they would be without this plugin."""
        for record in self.before:
            self.as_ever.handle(record)
        self.before.clear()

    def say(self, text: str, style: str = "") -> None:
        """Print a line; in a terminal above the running stages."""
        self.console.print(Text(text, style), soft_wrap=True)

    def follow(self, study: Study, record: logging.LogRecord) -> None:
        """Show one of Snakemake's messages while stages run."""
        now, message = record.created, str(record.msg)
        match getattr(record, "event", None):
            case LogEvent.JOB_INFO if stage := study.stages.get(record.rule_name):
                self.jobs[record.jobid] = stage
                stage.log_before = stage.log.stat().st_mtime if stage.log.exists() else None
                stage.started, stage.failed = now, False
            case LogEvent.JOB_FINISHED if stage := self.jobs.get(record.job_id):
                stage.finish(now)
                self.show_done(study, stage)
            case LogEvent.JOB_ERROR if stage := self.jobs.get(record.jobid):
                self.show_failed(stage, clock(now - (stage.started or now)), record)
                stage.started, stage.failed = None, not stage.told_to_stop
            case None if message.startswith("Trying to restart job"):
                self.say(f"{self.jobs[int(message.split()[-1].rstrip('.'))].name}: trying again", "yellow")
            case None if message.startswith(TOLD_TO_STOP):
                self.say("Told to stop: running stages finish their step and save; a second Ctrl-C ends them now.", "yellow")
            case event if record.levelno >= logging.WARNING and event != LogEvent.JOB_ERROR and not REPEATED.search(message):
                self.say(self.words.format(record), "red" if record.levelno >= logging.ERROR else "yellow")

    def show_done(self, study: Study, stage: Stage) -> None:
        """Print the line of a finished stage: its time, the mean reward of its runs, and the runs that they equal."""
        reward = "" if stage.reward is None else f", reward {stage.reward:.3f}"
        equal = f", taken over from {', '.join(stage.same_as)}" if stage.same_as else ""
        not_run = f", {stage.not_run}" if stage.not_run else ""
        done = f"{len(study.done())} of {len(study.stages)}"
        self.say(f"{done}: {stage.name}, {clock(stage.seconds or 0)}{reward}{equal}{not_run}")

    def show_failed(self, stage: Stage, spent: str, record: logging.LogRecord) -> None:
        """Print what failed, the end of its log, and where the log is."""
        text = stage.log.read_text(errors="replace") if stage.log.exists() else ""
        lines = re.split(r"[\r\n]+", text.rstrip())[-LOG_LINES_SHOWN:]
        stage.told_to_stop = lines[-1].startswith("Told to stop")
        if stage.told_to_stop:
            self.say(f"{stage.name}: {lines[-1]}", "yellow")
        else:
            why = f" {record.rule_msg}" if record.rule_msg else ""
            shown = Text(f"{stage.name} failed after {spent}.{why}\nThe end of its log:\n", "red")
            shown.append("".join(f"  | {line}\n" for line in lines), "default")
            shown.append(f"Full log: {', '.join(map(str, record.log))}")
            if full := FULL.search(text):
                shown.append(CACHE_IS_FULL.format(full[1] or ".dvc/cache"))
            self.console.print(shown, soft_wrap=True)

    def picture(self) -> Group:
        """The lines of the running stages and the progress of all."""
        study, now = self.study, time.time()
        assert study
        table = Table("running", box=None, pad_edge=False)
        for name in ("step", "reward", "time", "left"):
            table.add_column(name, justify="right", no_wrap=True)
        for stage in [stage for stage in study.stages.values() if stage.started is not None]:
            at, spent, expected = stage.progress(), now - (stage.started or now), study.expected(stage) or 0.0
            left = at.get("left") or (f"about {clock(expected - spent)}" if expected > spent else "")
            table.add_row(stage.name, at.get("step"), at.get("reward"), clock(spent), left)
        words, left_of_all = [f"{len(study.done())} of {len(study.stages)} stages", clock(now - study.began)], study.left(now)
        words += [] if left_of_all is None else [f"about {clock(left_of_all)} left"]
        bar = Table.grid(padding=(0, 2))
        bar.add_row(ProgressBar(len(study.stages), len(study.done()), width=30), ", ".join(words))
        return Group("", table, bar)

    def close(self) -> None:
        """Restore the terminal and print the summary. Snakemake always calls this; Python calls it again at exit."""
        if self.live:
            self.live.stop()
        if self.study:
            self.end(self.study)
        else:
            self.say_as_ever()
        self.study = None
        super().close()

    def end(self, study: Study) -> None:
        """Print warnings and the summary."""
        done, failed = study.done(), [stage for stage in study.stages.values() if stage.failed]
        alike: dict[str, list[str]] = {}  # warnings by their first line
        for stage in done:
            for warning in stage.warnings:
                alike.setdefault(warning.partition("\n")[0], []).append(f"{stage.name}: {warning}")
        for first, *others in alike.values():
            self.say(first + (f"\n  and {len(others)} more like it, in logs/" if others else ""), "yellow")
        runs = "" if any(line.startswith("warning: MLflow") for line in alike) else "; `make ui` shows the runs"
        report = f" The report is {REPORT}{runs}." if REPORT.exists() else ""
        if len(done) == len(study.stages):
            self.say(f"{len(done)} stages in {clock(time.time() - study.began)}.{report}", "bold green")
        else:
            self.say(
                f"{len(done)} of {len(study.stages)} stages in {clock(time.time() - study.began)}, {len(failed)} failed"
                f"{''.join(f', {stage.name} ({stage.log})' for stage in failed)}. The same command continues from here.",
                "bold red" if failed else "bold yellow",
            )


LoggerPluginRegistry().register_plugin(f"{logger_plugin_module_prefix}study", sys.modules[__name__])

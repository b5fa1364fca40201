"""Show progress while Snakemake runs the stages: a logger plugin of Snakemake that the profiles switch on.

Prints a line for each finished stage. In a terminal it also shows a line for each running stage with its step, reward and time
left, and the progress of all. For a failed stage it prints the end of its log. Of Snakemake's own messages it prints warnings
and errors only. It prints all of them if no stage runs (`--list`, `--unlock`, an error in the Snakefile) and with `--dry-run`,
`--verbose`, `--quiet`.
"""

from __future__ import annotations

import logging
import re
import sys
import time
from logging.handlers import MemoryHandler
from pathlib import Path

from progress import Stage, clock, read_stages, time_left
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
        self.off = bool(asked.dryrun or asked.verbose or asked.debug_dag or quiet)
        as_ever = ColorizingTextHandler(asked.nocolor, stream, self.words, wanted)
        # Messages before the first stage starts: printed if there is a warning among them, or if no stage starts.
        self.before = MemoryHandler(10**6, logging.NOTSET if self.off else logging.WARNING, as_ever)
        self.console = Console(file=stream, no_color=asked.nocolor, highlight=False)
        self.in_terminal = stream.isatty() and not self.console.is_dumb_terminal
        self.began = time.time()
        self.jobs_run = self.told = False
        self.stages: dict[str, Stage] = {}  # by rule
        self.jobs: dict[int, Stage] = {}
        self.live: Live | None = None

    def emit(self, record: logging.LogRecord) -> None:
        """Handle one message; Snakemake calls this in a separate thread, one message after the other."""
        try:
            event = getattr(record, "event", None)
            if self.jobs_run:
                self.follow(record)
            elif event == LogEvent.JOB_STARTED and not self.off:
                self.jobs_run, self.began = True, time.time()
                self.before.buffer.clear()
                if self.in_terminal:
                    self.live = Live(console=self.console, get_renderable=self.picture, refresh_per_second=1, transient=True)
                    self.live.start()
            else:
                self.before.handle(record)
                if event == LogEvent.RUN_INFO:
                    self.stages = read_stages(record.stats)
        except Exception:
            self.handleError(record)

    def say(self, text: str, style: str = "") -> None:
        """Print a line; in a terminal above the running stages."""
        self.console.print(Text(text, style), soft_wrap=True)

    def follow(self, record: logging.LogRecord) -> None:
        """Show one of Snakemake's messages while stages run."""
        now, message = record.created, str(record.msg)
        match getattr(record, "event", None):
            case LogEvent.JOB_INFO if stage := self.stages.get(record.rule_name):
                self.jobs[record.jobid] = stage
                stage.started, stage.failed = now, False
            case LogEvent.JOB_FINISHED if stage := self.jobs.get(record.job_id):
                line = stage.finish(now)
                self.say(f"{len(self.done())} of {len(self.stages)}: {line}")
            case LogEvent.JOB_ERROR if stage := self.jobs.get(record.jobid):
                self.show_failed(stage, record)
            case None if message.startswith(TOLD_TO_STOP):
                if not self.told:  # Snakemake repeats it
                    self.say(
                        "Told to stop: running stages finish their step and save; a second Ctrl-C ends them now.", "yellow"
                    )
                self.told = True
            case event if record.levelno >= logging.WARNING and event != LogEvent.JOB_ERROR and not REPEATED.search(message):
                self.say(self.words.format(record), "red" if record.levelno >= logging.ERROR else "yellow")

    def show_failed(self, stage: Stage, record: logging.LogRecord) -> None:
        """Print what failed, the end of its log, and where the log is; or that it was told to stop."""
        spent, stage.started = clock(record.created - (stage.started or record.created)), None
        text = stage.log.read_text(errors="replace") if stage.log.exists() else ""
        lines = re.split(r"[\r\n]+", text.rstrip())[-LOG_LINES_SHOWN:]
        if lines[-1].startswith("Told to stop"):
            self.say(f"{stage.name}: {lines[-1]}", "yellow")
            return
        stage.failed = True
        why = f" {record.rule_msg}" if record.rule_msg else ""
        end = "\n".join(f"  | {line}" for line in lines)
        full = FULL.search(text)
        remedy = CACHE_IS_FULL.format(full[1] or ".dvc/cache") if full else ""
        log = ", ".join(map(str, record.log))
        self.say(f"{stage.name} failed after {spent}.{why}\nThe end of its log:\n{end}\nFull log: {log}{remedy}", "red")

    def done(self) -> list[Stage]:
        return [stage for stage in self.stages.values() if stage.seconds is not None]

    def picture(self) -> Group:
        """The lines of the running stages and the progress of all."""
        now, done, count = time.time(), len(self.done()), len(self.stages)
        table = Table("running", box=None, pad_edge=False)
        for name in ("step", "reward", "time", "left"):
            table.add_column(name, justify="right", no_wrap=True)
        for stage in [stage for stage in self.stages.values() if stage.started is not None]:
            at, spent = stage.progress(), now - (stage.started or now)
            left = at.get("left") or (f"about {clock(stage.former - spent)}" if (stage.former or 0) > spent else "")
            table.add_row(stage.name, at.get("step"), at.get("reward"), clock(spent), left)
        left_of_all = time_left(self.stages.values(), self.began, now)
        about = "" if left_of_all is None else f", about {clock(left_of_all)} left"
        bar = Table.grid(padding=(0, 2))
        bar.add_row(ProgressBar(count, done, width=30), f"{done} of {count} stages, {clock(now - self.began)}{about}")
        return Group("", table, bar)

    def close(self) -> None:
        """Restore the terminal and print the summary. Snakemake always calls this; Python calls it again at exit."""
        if self.live:
            self.live.stop()
        self.before.close()
        if self.jobs_run:
            self.end()
        self.jobs_run = False
        super().close()

    def end(self) -> None:
        done, failed = self.done(), [stage for stage in self.stages.values() if stage.failed]
        alike: dict[str, list[str]] = {}  # warnings by their first line
        for stage in done:
            for warning in stage.warnings:
                alike.setdefault(warning.partition("\n")[0], []).append(f"{stage.name}: {warning}")
        for first, *others in alike.values():
            self.say(first + (f"\n  and {len(others)} more like it, in logs/" if others else ""), "yellow")
        runs = "" if any(line.startswith("warning: MLflow") for line in alike) else "; `make ui` shows the runs"
        took = clock(time.time() - self.began)
        if len(done) == len(self.stages):
            self.say(
                f"{len(done)} stages in {took}." + (f" The report is {REPORT}{runs}." if REPORT.exists() else ""), "bold green"
            )
        else:
            logs = "".join(f", {stage.name} ({stage.log})" for stage in failed)
            self.say(
                f"{len(done)} of {len(self.stages)} stages in {took}, {len(failed)} failed{logs}. The same command continues "
                "from here.",
                "bold red" if failed else "bold yellow",
            )


LoggerPluginRegistry().register_plugin(f"{logger_plugin_module_prefix}study", sys.modules[__name__])

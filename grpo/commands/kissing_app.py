"""The commands `grpo kissing ...`."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

kissing_app = typer.Typer(
    help="Verify or search kissing configurations in dimension 11: many integer vectors, none closer together than long.",
    no_args_is_help=True,
)
DEFAULT_SECONDS = 60.0


@kissing_app.command("verify")
def verify(
    program: Annotated[Path, typer.Argument(help="Python file with run_code(), get_centers() or a global `points`.")],
    seconds: Annotated[float, typer.Option(min=1, help="Limit of wall-clock and of CPU time, in seconds.")] = 30.0,
    memory_mb: Annotated[int, typer.Option(min=100, help="Limit of memory, in MB.")] = 2000,
) -> None:
    """Run a program in a sandbox and check its points in exact integer arithmetic; exit code 1 if they are not valid."""
    from grpo.discovery.sandbox import Limits, reading_is_restricted
    from grpo.discovery.verifier import verify_program

    if not reading_is_restricted():
        print("warning: on this system a program can read whatever you may read (no Landlock)", file=sys.stderr)
    verdict = verify_program(program, Limits(seconds=seconds, cpu_seconds=seconds, memory_mb=memory_mb))
    print(json.dumps(asdict(verdict), indent=2))
    if not verdict.validity:
        raise typer.Exit(1)


@kissing_app.command("search", epilog="Example: grpo kissing search --calls 200 --out my-search")
def search(
    strategy: Annotated[str, typer.Option(help="best_of_n, conversation or hybrid.")] = "conversation",
    out: Annotated[
        Path, typer.Option(help="Folder for conversation_log.json and program.py; a search in it is continued.")
    ] = Path("kissing_search"),
    calls: Annotated[int | None, typer.Option(min=1, help="Limit of requests to the language model.")] = None,
    tokens: Annotated[int | None, typer.Option(min=1, help="Limit of tokens, prompts and answers together.")] = None,
    seconds: Annotated[
        float | None,
        typer.Option(min=1, help=f"Limit of time to propose and verify; {DEFAULT_SECONDS:.0f} if no limit is given."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the proposals.")] = 0,
) -> None:
    """Let a language model search for a program that constructs many points; an interrupted search is continued.

    The model is that of OPENAI_BASE_URL, OPENAI_MODEL and OPENAI_API_KEY.
    """
    from grpo.commands.kissing_search import language_model
    from grpo.common.files import require_writable
    from grpo.common.lock import exclusive_lock
    from grpo.discovery.log import BEST_PROGRAM, LOG, open_log
    from grpo.discovery.search import Budget
    from grpo.discovery.search import search as run
    from grpo.discovery.verifier import verify_text

    propose, settings = language_model(strategy, seed)
    require_writable(out, "--out")
    with exclusive_lock(out / ".search.lock", f"{out}: another search"):
        log = open_log(out / LOG, settings)
        limits = Budget(calls, tokens, seconds if (calls, tokens, seconds) != (None, None, None) else DEFAULT_SECONDS)
        ended_by = run(propose, verify_text, limits, log)
    if log.best is None:
        print(f"no valid set in {len(log.attempts)} attempts ({ended_by}); {out / LOG} says why")
    else:
        print(f"{log.best.score:.0f} points in {out / BEST_PROGRAM}, from attempt {log.best.index} ({ended_by}); {out / LOG}")

"""`grpo kissing`: verify a program, or search for one."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

kissing_app = typer.Typer(
    help="Kissing configurations in dimension 11: many integer vectors whose distances are no smaller than their lengths.",
    no_args_is_help=True,
)
DEFAULT_SECONDS = 60.0


@kissing_app.command("verify")
def verify(
    program: Annotated[Path, typer.Argument(help="Python, with run_code(), get_centers() or a global `points`.")],
    seconds: Annotated[float, typer.Option(min=1, help="Wall-clock and CPU time that it may take.")] = 30.0,
    memory_mb: Annotated[int, typer.Option(min=100, help="Memory that it may use.")] = 2000,
) -> None:
    """Run a program in a sandbox and check its points in exact integer arithmetic; exit code 1 where they are not valid."""
    from grpo.discovery.sandbox import Limits, unenforced
    from grpo.discovery.verifier import verify_program

    if missing := unenforced():
        print(f"warning: this system does not let the sandbox restrict: {', '.join(missing)}", file=sys.stderr)
    verdict = verify_program(program, Limits(seconds=seconds, cpu_seconds=seconds, memory_mb=memory_mb))
    print(json.dumps(asdict(verdict), indent=2))
    if not verdict.validity:
        raise typer.Exit(1)


@kissing_app.command("search")
def search(
    strategy: Annotated[
        str,
        typer.Option(help="mutation (no language model), or with one: best_of_n, conversation or hybrid."),
    ] = "mutation",
    out: Annotated[Path, typer.Option(help="Folder of conversation_log.json and program.py; a search there goes on.")] = Path(
        "kissing_search"
    ),
    calls: Annotated[int | None, typer.Option(min=1, help="Proposals, or requests to the language model.")] = None,
    tokens: Annotated[int | None, typer.Option(min=1, help="Of prompts and answers together.")] = None,
    seconds: Annotated[
        float | None, typer.Option(min=1, help=f"Of proposing and verifying; {DEFAULT_SECONDS:.0f} where no limit is given.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Two searches with one seed propose the same, as far as a model allows.")] = 0,
    base_url: Annotated[str | None, typer.Option(help="Of an OpenAI-compatible endpoint; else OPENAI_BASE_URL.")] = None,
    model: Annotated[str | None, typer.Option(help="Its name there; else OPENAI_MODEL. The key: OPENAI_API_KEY.")] = None,
) -> None:
    """Search for a program that constructs many points, within a budget; killed and started again, it goes on."""
    from grpo.commands.kissing_search import proposer
    from grpo.common.files import require_writable
    from grpo.common.lock import only_one
    from grpo.discovery.log import BEST_PROGRAM, LOG, open_log
    from grpo.discovery.search import Budget
    from grpo.discovery.search import search as run
    from grpo.discovery.verifier import verify_text

    propose, settings = proposer(strategy, seed, base_url, model)
    require_writable(out, "--out")
    with only_one(out / ".search.lock", f"{out}: another search"):
        log = open_log(out / LOG, settings)
        limits = Budget(calls, tokens, seconds if (calls, tokens, seconds) != (None, None, None) else DEFAULT_SECONDS)
        ended_by = run(propose, verify_text, limits, log)
    if log.best is None:
        print(f"no valid set in {len(log.attempts)} attempts ({ended_by}); {out / LOG} says why")
    else:
        print(f"{log.best.score:.0f} points in {out / BEST_PROGRAM}, from attempt {log.best.index} ({ended_by}); {out / LOG}")

"""Verifier-guided search: propose a program, run and check it, log the score, and repeat until the budget is used up."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from random import Random

from tqdm import tqdm

from grpo.common.errors import UserError
from grpo.common.files import write_text
from grpo.discovery.log import BEST_PROGRAM, Attempt, Log, Proposal
from grpo.discovery.verifier import Verification

Propose = Callable[[Sequence[Attempt], int], Proposal]  # the attempts so far and a seed
Verify = Callable[[str], Verification]  # a program's text

SILENCE = 5  # the search stops after so many attempts in a row without an answer of the endpoint


@dataclass(frozen=True)
class Budget:
    """Limits of a search, which ends at the first that is reached; without one it never does. Earlier attempts count too."""

    calls: int | None = None  # requests to the language model, including failed ones
    tokens: int | None = None  # tokens of prompts and answers together
    seconds: float | None = None  # wall-clock time of proposing and verifying

    def used_up(self, attempts: Sequence[Attempt]) -> str:
        """The limit that is reached, in words; empty if none is."""
        used = {
            "calls": sum(attempt.proposal.calls for attempt in attempts),
            "tokens": sum(attempt.proposal.tokens for attempt in attempts),
            "seconds": sum(attempt.propose_s + attempt.verify_s for attempt in attempts),
        }
        limits = {name: limit for name, limit in asdict(self).items() if limit is not None}
        reached = (f"{used[name]:.0f} of {limit:.0f} {name}" for name, limit in limits.items() if used[name] >= limit)
        return next(reached, "")


def search(propose: Propose, verify: Verify, budget: Budget, log: Log) -> str:
    """Search until the budget is used up, and write the log and the best program after every attempt.

    A search that was killed continues from its log, because seeds depend only on an attempt's index. Returns the limit that
    ended the search. Raises UserError if the endpoint does not answer.
    """
    if log.best is not None:
        _keep(log, log.best)  # it may have been killed between writing the log and the program
    with tqdm(desc="best 0", unit=" programs", initial=len(log.attempts), mininterval=1.0) as progress:
        while not (reason := budget.used_up(log.attempts)):
            before = log.best
            log.add(_attempt(propose, verify, log))
            if log.best is not None and log.best is not before:
                _keep(log, log.best)
            progress.set_description_str(f"best {int(log.best.score) if log.best else 0}", refresh=False)
            progress.update()
            last = [attempt.proposal for attempt in log.attempts[-SILENCE:]]
            if len(last) == SILENCE and all(proposal.answer is None for proposal in last):
                raise UserError(
                    f"{SILENCE} attempts in a row had no answer ({last[-1].problem}). Everything so far is kept; check the "
                    "endpoint and start the same command again."
                )
    return reason


def _attempt(propose: Propose, verify: Verify, log: Log) -> Attempt:
    """Propose, run and check one program."""
    index = len(log.attempts)
    seed = seed_of(log.settings.seed, index)
    started_at, start = datetime.now(UTC).isoformat(timespec="seconds"), time.perf_counter()
    proposal = propose(log.attempts, seed)
    proposed = time.perf_counter()
    program = proposal.program
    verdict = Verification(0, None, 0.0, 0.0, proposal.problem) if program is None else verify(program)
    end = time.perf_counter()
    return Attempt(index, seed, started_at, round(proposed - start, 3), round(end - proposed, 3), proposal, verdict)


def seed_of(seed: int, index: int) -> int:
    """The seed of an attempt: a number of 31 bits, which endpoints accept."""
    return Random(f"{seed}/{index}").getrandbits(31)


def _keep(log: Log, best: Attempt) -> None:
    assert best.proposal.program is not None
    write_text(log.path.with_name(BEST_PROGRAM), best.proposal.program)

"""Proposals without a language model: recipes of parameterised constructions, drawn at random or mutated from good ones.

The constructions (:mod:`grpo.discovery.constructions`) were written by hand, based on the literature; the search varies only
their parameters. Logs and reports say so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

from grpo.discovery import constructions
from grpo.discovery.log import Attempt, Proposal

Recipe = dict[str, Any]

FRESH_AT_FIRST = 8  # the first proposals, all drawn at random, two of each construction
FRESH = 0.15  # share of random draws among later proposals
BEST_OF_ITS_CORE = 0.5  # share of mutations whose parent is the best of a random construction; else it is the best of all
# Vectors with a squared norm of 4; completions add points from their orbits.
COMPLETIONS = ([2.0], [1.0] * 4, [1.5] + [0.5] * 7, [1.0, 1.0, 1.0] + [0.5] * 4, [1.0, 1.0] + [0.5] * 8)


def propose(attempts: Sequence[Attempt], seed: int) -> Proposal:
    """Propose a new recipe, or a mutation of one of the best so far."""
    rng = Random(seed)
    index = len(attempts)
    if index < FRESH_AT_FIRST or rng.random() < FRESH:
        core = list(DRAW)[index % len(DRAW)] if index < FRESH_AT_FIRST else rng.choice(list(DRAW))
        recipe = fresh(core, rng)
        return Proposal(program_of(recipe), recipe=recipe)
    parent = _parent(attempts, rng)
    recipe = mutate(parent.proposal.recipe or {}, rng)
    return Proposal(program_of(recipe), parents=(parent.index,), recipe=recipe)


def program_of(recipe: Recipe) -> str:
    """The program of a recipe: the source of the constructions, then the recipe."""
    library = Path(constructions.__file__).read_text(encoding="utf-8")
    return f"{library}\n\nRECIPE = {recipe!r}\n\n\ndef run_code() -> list[list[int]]:\n    return build(RECIPE)\n"


def _parent(attempts: Sequence[Attempt], rng: Random) -> Attempt:
    """The best attempt so far, overall or of a random construction; of equal ones the latest, which keeps variety."""
    cores = sorted({attempt.proposal.recipe["core"] for attempt in attempts if attempt.proposal.recipe})
    core = rng.choice(cores) if rng.random() < BEST_OF_ITS_CORE else None
    pool = [a for a in attempts if a.proposal.recipe and core in (None, a.proposal.recipe["core"])]
    return max(pool, key=lambda attempt: (attempt.score, attempt.index))


# -------------------------------------------------------------------------------------------------------------- drawing


def fresh(core: str, rng: Random) -> Recipe:
    """Draw a recipe of this construction at random."""
    parameters = {name: draw(rng) for name, draw in DRAW[core].items()}
    return {"core": core, "parameters": _consistent(parameters), "completion": _completion(rng)}


def mutate(recipe: Recipe, rng: Random) -> Recipe:
    """Change one or two values of a recipe: draw them anew, or multiply a size by a factor of up to about 3."""
    parameters = dict(recipe["parameters"])
    completion = recipe["completion"]
    for _ in range(rng.choice((1, 2))):
        name = rng.choice([*parameters, "completion"])
        if name == "completion":
            completion = _completion(rng)
        elif name in STEPPED and rng.random() < 0.7:
            parameters[name] *= 10 ** rng.uniform(-0.5, 0.5)
        else:
            parameters[name] = DRAW[recipe["core"]][name](rng)
    return {"core": recipe["core"], "parameters": _consistent(parameters), "completion": completion}


def _consistent(parameters: dict[str, Any]) -> dict[str, Any]:
    """Make parameters consistent: axes among the used coordinates, and a layer that fits the length and the norm of 16."""
    if "axes" in parameters:
        parameters["axes"] = min(parameters["axes"], parameters["length"])
    if "layer" in parameters:
        layer, rest = parameters["layer"], 16 - parameters["height"] ** 2
        if len(layer) != parameters["length"] or sum(x * x for x in layer) > rest:  # a newly drawn layer is a single number
            parameters["layer"] = _as_squares(rest, parameters["length"], Random(str(layer)))
    return parameters


def _as_squares(total: int, count: int, rng: Random) -> list[int]:
    """Draw ``count`` whole numbers greedily, whose squares sum to at most ``total``."""
    numbers = []
    for _ in range(count):
        numbers.append(rng.choice([x for x in (0, 1, 2) if x * x <= total]))
        total -= numbers[-1] ** 2
    return sorted(numbers, reverse=True)


def _completion(rng: Random) -> dict[str, Any] | None:
    if rng.random() < 0.4:
        return None
    vector = rng.choice(COMPLETIONS)
    padded = vector + [0.0] * (constructions.DIMENSION - len(vector))
    return {"vector": padded, "method": rng.choice(("greedy", "clique")), "seed": _seed(rng)}


def _seed(rng: Random) -> int:
    return rng.randrange(1000)


def _vector(rng: Random) -> list[int]:
    ones = rng.choice((1, 2, 3, 4, 5, 8))
    twos = rng.choice((0, 0, 1))
    return [2] * twos + [1] * ones + [0] * (constructions.DIMENSION - ones - twos)


Draw = Callable[[Random], Any]
STEPPED = ("shrink", "turn")
_STEPS: Draw = lambda rng: round(10 ** rng.uniform(1, 3))  # noqa: E731
DRAW: dict[str, dict[str, Draw]] = {
    "orbit": {"vector": _vector, "seed": _seed},
    "code": {
        "length": lambda rng: rng.randint(8, 11),
        "axes": lambda rng: rng.randint(6, 11),
        "steps": _STEPS,
        "seed": _seed,
    },
    "laminated": {
        "length": lambda rng: rng.randint(8, 10),
        "axes": lambda rng: rng.randint(6, 10),
        "steps": _STEPS,
        "seed": _seed,
        "height": lambda rng: rng.randint(1, 3),
        "layer": lambda rng: [rng.randrange(1000)],
    },
    "frames": {
        "shrink": lambda rng: 10 ** rng.uniform(-6, -1),
        "turn": lambda rng: 10 ** rng.uniform(-4, -0.5),
        "slack": lambda rng: rng.random(),
        "rays": lambda rng: rng.choice(list(constructions.RAYS)),
        "seed": _seed,
    },
}

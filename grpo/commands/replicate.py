"""`grpo replicate`: run the active study again with other seeds in a copy of the project, and compare the two records.

The copy runs only the experiments that claims are about and those that these need (:func:`needed_experiments`). They start from
the winners of the study, so that both compare the same settings. What its claims are judged by is kept in reports/replicates/,
so that the report can judge them by all studies together.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import chdir
from pathlib import Path
from typing import Any

from grpo.common.errors import UserError
from grpo.common.files import atomic_folder, read_text, write_json, write_text
from grpo.common.yaml_file import read_mapping, to_yaml
from grpo.reporting.labels import interval, table
from grpo.reporting.record import Values, arm_of, read_record
from grpo.results.claims import claims_of, key_of, needed_experiments, read_replicates, together
from grpo.results.pairs import Pairs, read_pairs
from grpo.results.verdicts import DECIDED, HOLDS, NOT_TESTED
from grpo.study import paths
from grpo.study.compose import BY_TASK, of_left_out
from grpo.study.schema import Study, load_study, validated
from grpo.study.settings import setting_of
from grpo.study.stages import write_stages

FOLDER = Path("replicates")
SAME, UNDECIDED, TURNED, NOT_TRIED = "same", "undecided", "turned round", "not tried"
EXPLANATION = f"""# On other seeds

The study beside itself with other seeds. *{TURNED}*: in one of the two the claim holds, in the other it does not.
*{UNDECIDED}*: only one of the two decides. *{NOT_TRIED}*: one of the two does not test the claim."""


def replicate(seeds: list[int], base_seed: int | None) -> str:
    """Run or resume a replicate of the active study, and compare all finished ones in reports/replication.md and .json.

    Args:
        base_seed: if given, also pretrain the base model and generate problems and traces anew, with this seed.

    Raises:
        UserError: the seeds are not new, the study is not finished, this is not a git repository, or the pipeline failed.
    """
    study = load_study()
    if not seeds or set(seeds) & set(study.seeds) or len(set(seeds)) < len(seeds):
        raise UserError(f"seeds: {seeds}: not fresh. Name seeds that are not among the study's {study.seeds}, each once.")
    here, own = read_record(), read_pairs(paths.PAIRS)
    name = "-".join(["seeds", *map(str, seeds), *([] if base_seed is None else ["base", str(base_seed)])])
    prefix = f"{key_of(study)}-"  # replicates of another study are not compared
    folder = FOLDER / f"{prefix}{name}"
    if not folder.exists():
        _copy_project(folder, seeds, base_seed, {name: entry["winner"] for name, entry in here["experiments"].items()})
    run_pipeline(folder)
    write_text(paths.REPLICATES / f"{folder.name}.csv", read_text(folder / paths.PAIRS, "tables"))
    found = {
        path.name.removeprefix(prefix): compare(here, read_record(path))
        for path in sorted(FOLDER.glob(f"{prefix}*"))
        if (path / paths.RECORD).is_file()
    }
    write_json(paths.REPORTS / "replication.json", found)
    pooled = all_studies(study, here, own)
    write_text(paths.REPORTS / "replication.md", page(found, pooled))
    return (
        f"{_counts(found[name]['claims'])}\nreports/replication.md: each claim's verdicts and each experiment's highest arm\n"
        f"{paths.REPLICATES}/: commit it; `make repro` then puts the verdicts of all studies together into the report"
    )


def all_studies(study: Study, here: Values, own: Mapping[str, Pairs]) -> list[dict[str, str]]:
    """A row for each claim that two or more studies test: the study's verdict, and that of all of them together."""
    verdicts, rows = {claim["id"]: claim for claim in here["claims"]}, []
    replicates = [*read_replicates(study).values()]
    for claim, _ in claims_of(study):
        found = together(claim, [of for of in (own.get(claim.id), *(other.get(claim.id) for other in replicates)) if of])
        if found:
            words = f"{found['verdict']}: {interval(found['interval'])}, {found['seeds']} seeds of {found['studies']} studies"
            rows.append({"claim": claim.statement, "study": _verdict(verdicts.get(claim.id)), "all studies together": words})
    return rows


def compare(here: Values, there: Values) -> dict[str, list[dict[str, str]]]:
    """Compare two records: a row for each tested claim of ``here``, and one for the highest arm of each experiment of both."""
    verdicts = {claim["id"]: claim for claim in there["claims"]}
    claims = [
        {"claim": claim["statement"], "study": _verdict(claim), "replicate": _verdict(other), "": agreement(claim, other)}
        for claim in here["claims"]
        if claim["kind"]  # the others are claims that no study tests
        for other in [verdicts.get(claim["id"])]
    ]
    pairs = {
        name: (_leader(entry), _leader(there["experiments"][name]))
        for name, entry in here["experiments"].items()
        if name in there["experiments"]
    }
    leaders = [
        {
            "experiment": name,
            "study": _in_words(first),
            "replicate": _in_words(second),
            "": _change(first["arm"], second["arm"]),
        }
        for name, (first, second) in pairs.items()
    ]
    return {"claims": claims, "leaders": leaders}


def agreement(here: Values, there: Values | None) -> str:
    """Compare two verdicts on a claim.

    Two that decide are the same if the claim holds in both or in neither: *same* also says that it does not hold.
    """
    verdicts = [here["verdict"], there["verdict"] if there else NOT_TESTED]
    if NOT_TESTED in verdicts:
        return NOT_TRIED
    if all(verdict in DECIDED for verdict in verdicts):
        return TURNED if verdicts.count(HOLDS) == 1 else SAME
    return SAME if verdicts[0] == verdicts[1] else UNDECIDED


def page(replicates: Mapping[str, dict[str, list[dict[str, str]]]], pooled: Sequence[dict[str, str]] = ()) -> str:
    """Write reports/replication.md from the comparisons with each replicate (:func:`compare`) and :func:`all_studies`."""
    parts = [EXPLANATION, *(["## All studies together", table(pooled).strip()] if pooled else [])]
    for name, rows in replicates.items():
        parts += [f"## {name}", _counts(rows["claims"]), *(table(of).strip() for of in rows.values() if of)]
    return "\n\n".join(parts) + "\n"


def _counts(claims: list[dict[str, str]]) -> str:
    counts = Counter(row[""] for row in claims)
    return f"{len(claims)} claims: {', '.join(f'{number} {word}' for word, number in counts.items())}"


def _verdict(claim: Values | None) -> str:
    return f"{claim['verdict']}: {claim['measured'] or claim['reason']}" if claim else "not one of its claims"


def _leader(experiment: Values) -> Values:
    """The highest arm's entry; a replicate's winners are pinned to the study's."""
    return arm_of(experiment, experiment["leader"])


def _in_words(arm: Values) -> str:
    return f"{arm['arm']} {interval(arm)}"


def _change(here: str, there: str) -> str:
    if here == there:
        return SAME
    return f"{SAME}, at another rate" if setting_of(here) == setting_of(there) else "another"


# ------------------------------------------------------------------------------------------------- the copy that runs


def copy_project(copy: Path) -> None:
    """Copy the working tree but for reports/ to the empty folder ``copy``, a git repository with the same DVC cache.

    Raises:
        UserError: this is not a git repository with DVC.
    """
    _call("git", "clone", "--quiet", "--no-checkout", ".", str(copy))  # a clone, because runs record the git commit
    for name in _call("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard").split("\0"):
        if name and Path(name).exists() and not name.startswith(f"{paths.REPORTS}/"):
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(name, copy / name, follow_symlinks=False)
    _share_cache(copy)
    _call("git", "reset", "--quiet", cwd=copy)


def _copy_project(folder: Path, seeds: list[int], base_seed: int | None, winners: Mapping[str, str]) -> None:
    """Copy the project to ``folder``, with the seeds changed in params.yaml."""
    with atomic_folder(folder) as copy:
        copy_project(copy)
        with chdir(copy):
            params = read_mapping(paths.PARAMS)
            study = validated(params, paths.PARAMS)
            needed = needed_experiments(study)
            left_out = [name for name in study.active_experiments if name not in needed]
            params = _only(params, needed, winners)
            write_text(paths.PARAMS, to_yaml(params | _other_seeds(params, seeds, base_seed)))
            write_stages(validated(read_mapping(paths.PARAMS), paths.PARAMS))
    print(f"{folder}: no claim is about {', '.join([*left_out, 'best of N', 'the kissing number'])}: left out", flush=True)


def _only(params: dict[str, Any], needed: list[str], winners: Mapping[str, str]) -> dict[str, Any]:
    """params.yaml with only these experiments, their tasks, one zero-shot prompt, and no sampling for best of N and no search.

    The study's ``winners`` are pinned, so that later experiments compare the same settings as the study's.

    The name differs, because the study's comments (:mod:`grpo.reporting.comments`) are about its own numbers.
    """
    experiments = {name: entry if name in needed else {**entry, "arms": {}} for name, entry in params["experiments"].items()}
    gone, evaluation = of_left_out(experiments), params["evaluation"]
    evaluation = evaluation | {
        "zero_shot_prompts": evaluation["zero_shot_prompts"][:1],
        "best_of_n": evaluation["best_of_n"] | {"prompts": []},
    }
    pinned = {name: arm for name, arm in winners.items() if name in needed}
    of_tasks = {section: {name: of for name, of in params[section].items() if name not in gone} for section in BY_TASK}
    changes = {"study": "replicate", "experiments": experiments, "evaluation": evaluation, "kissing_number": None}
    return params | changes | of_tasks | {"selection": params["selection"] | {"pinned": pinned}}


def _share_cache(copy: Path) -> None:
    """Let DVC use the same cache in the copy; its folder may be written relative to .dvc/ in the configuration."""
    from dvc.repo import Repo

    with Repo() as repo:
        cache = repo.cache.local_cache_dir
    _call(sys.executable, "-m", "dvc", "cache", "dir", "--local", cache, cwd=copy)


def _other_seeds(params: dict[str, Any], seeds: list[int], base_seed: int | None) -> dict[str, Any]:
    """The values that differ in the copy's params.yaml."""
    if base_seed is None:
        return {"seeds": seeds}
    drawn = {
        section: {name: entry | {"seed": base_seed} if "seed" in entry else entry for name, entry in params[section].items()}
        for section in BY_TASK
    }
    return {"seeds": seeds, **drawn, "evaluation": params["evaluation"] | {"seed": base_seed}}


def run_pipeline(folder: Path) -> None:
    """Run or continue the study of a copied project; UserError if its pipeline fails."""
    print(f"{folder}: running the study. Ctrl-C stops it; the same command continues it.", flush=True)
    environment = os.environ | {"PYTHONPATH": str(folder.absolute())}
    code = subprocess.run([sys.executable, "workflow/repro.py"], cwd=folder, env=environment, check=False).returncode
    if code:
        raise UserError(f"{folder}: its pipeline ended with code {code}; see above. The same command continues it.")


def _call(*command: str, cwd: Path | None = None) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UserError(f"{' '.join(command[:3])}: {done.stderr.strip()}. Only a git repository with DVC can be copied.")
    return done.stdout

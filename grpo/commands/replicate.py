"""`grpo replicate`: run the active study again with other seeds in a copy of the project, and compare the two records.

The copy runs only the experiments that claims are about and those that these need (:func:`needed_experiments`). They start from
the winners and rankings of the study, so that both compare the same settings. What its claims are judged by is kept in
reports/replicates/, so that the report can judge them by all studies together.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from contextlib import chdir
from pathlib import Path
from typing import Any

from grpo.common.errors import UserError
from grpo.common.files import atomic_folder, read_json, read_text, write_json, write_text
from grpo.common.yaml_file import read_mapping, to_yaml
from grpo.reporting.labels import interval, render
from grpo.reporting.record import Values, arm_of, read_record
from grpo.results.claims import key_of, needed_experiments
from grpo.results.verdicts import DECIDED, HOLDS, NOT_TESTED
from grpo.study import paths
from grpo.study.compose import BY_TASK, unused_tasks
from grpo.study.config import setting_of
from grpo.study.schema import load_study, validated
from grpo.study.stages import write_stages

FOLDER = Path("replicates")
SAME, UNDECIDED, TURNED, NOT_TRIED = "same", "undecided", "turned round", "not tried"


def replicate(seeds: list[int], base_seed: int | None) -> str:
    """Run or resume a replicate of the active study, and compare all finished ones in reports/replication.md and .json.

    The comparison with a replicate that was run elsewhere stays as long as the study's own verdicts are the same.

    With ``base_seed`` base model, problems and traces are made anew. UserError if the seeds are not new, the study is not
    finished, this is not a git repository, or the pipeline failed.
    """
    study = load_study()
    if not seeds or set(seeds) & set(study.seeds) or len(set(seeds)) < len(seeds):
        raise UserError(f"seeds: {seeds}: not fresh. Name seeds that are not among the study's {study.seeds}, each once.")
    here = read_record()
    name = "-".join(["seeds", *map(str, seeds), *([] if base_seed is None else ["base", str(base_seed)])])
    prefix = f"{key_of(study)}-"  # replicates of another study are not compared
    folder = FOLDER / f"{prefix}{name}"
    if not folder.exists():
        _copy_project(folder, seeds, base_seed, {name: chosen_arms(name) for name in here["experiments"]})
    run_pipeline(folder)
    write_text(paths.REPLICATES / f"{folder.name}.csv", read_text(folder / paths.PAIRS, "tables"))
    comparisons = {
        path.name.removeprefix(prefix): compare(here, read_record(path))
        for path in sorted(FOLDER.glob(f"{prefix}*"))
        if (path / paths.RECORD).is_file()
    }
    file = paths.REPORTS / "replication.json"
    former = read_json(file, "tables") if file.is_file() else {}
    verdicts_here = [row["study"] for row in comparisons[name]["claims"]]
    elsewhere = {
        other: compared
        for other, compared in former.items()
        if [row["study"] for row in compared["claims"]] == verdicts_here
        and (paths.REPLICATES / f"{prefix}{other}.csv").is_file()
    }
    comparisons = dict(sorted((elsewhere | comparisons).items()))
    write_json(file, comparisons)
    write_text(paths.REPORTS / "replication.md", page(comparisons))
    return (
        f"{_counts(comparisons[name]['claims'])}\nreports/replication.md: each claim's verdicts and each experiment's highest "
        f"arm\n{paths.REPLICATES}/: commit it; `make repro` then puts the verdicts of all studies together into the report"
    )


def chosen_arms(experiment: str) -> list[str]:
    """The winner of a finished experiment, and its off-policy arms from the best on if later experiments use the ranking."""
    selection = read_json(paths.SELECT / f"{experiment}.json", f"select@{experiment}", ["winner"])
    ranking = [entry["arm"] for entry in selection.get("off_policy_ranking", [])]
    return [*dict.fromkeys([selection["winner"], *ranking])]


def compare(here: Values, there: Values) -> dict[str, list[dict[str, str]]]:
    """Compare two records: a row for each tested claim of ``here``, and one for the highest arm of each experiment of both."""
    verdicts = {claim["id"]: claim for claim in there["claims"]}
    claims = []
    for claim in here["claims"]:
        if claim["kind"]:  # the others are claims that no study tests
            both = claim, verdicts.get(claim["id"])
            first, second = (
                f"{of['verdict']}: {of['measured'] or of['reason']}" if of else "none of its claims" for of in both
            )
            claims.append({"claim": claim["statement"], "study": first, "replicate": second, "": agreement(*both)})
    leaders = []
    for name in (name for name in here["experiments"] if name in there["experiments"]):
        # Not the winners: a replicate's are pinned to the study's.
        entries = [record["experiments"][name] for record in (here, there)]
        first, second = (f"{entry['leader']} {interval(arm_of(entry, entry['leader']))}" for entry in entries)
        arms, settings = ({how(entry["leader"]) for entry in entries} for how in (str, setting_of))
        change = SAME if len(arms) == 1 else f"{SAME}, at another rate" if len(settings) == 1 else "another"
        leaders.append({"experiment": name, "study": first, "replicate": second, "": change})
    return {"claims": claims, "leaders": leaders}


def agreement(here: Values, there: Values | None) -> str:
    """Compare two verdicts on a claim: if both decide, they agree if it holds in both or in neither."""
    verdicts = [here["verdict"], there["verdict"] if there else NOT_TESTED]
    if NOT_TESTED in verdicts:
        return NOT_TRIED
    if all(verdict in DECIDED for verdict in verdicts):
        return TURNED if verdicts.count(HOLDS) == 1 else SAME
    return SAME if verdicts[0] == verdicts[1] else UNDECIDED


def page(replicates: Mapping[str, dict[str, list[dict[str, str]]]]) -> str:
    """Write reports/replication.md from the comparisons with each replicate (:func:`compare`)."""
    return render("replication.md.j2", replicates=replicates, counts=_counts)


def _counts(claims: list[dict[str, str]]) -> str:
    counts = Counter(row[""] for row in claims)
    return f"{len(claims)} claims: {', '.join(f'{number} {word}' for word, number in counts.items())}"


def copy_project(copy: Path) -> None:
    """Copy the working tree but for reports/ to the empty folder ``copy``, a git repository with the same DVC cache."""
    from dvc.repo import Repo

    _call("git", "clone", "--quiet", "--no-checkout", ".", str(copy))  # a clone, because runs record the git commit
    for name in _call("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard").split("\0"):
        if name and Path(name).exists() and not name.startswith(f"{paths.REPORTS}/"):
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(name, copy / name, follow_symlinks=False)
    with Repo() as repo:  # its configuration may name the cache's folder relative to .dvc/
        _call(sys.executable, "-m", "dvc", "cache", "dir", "--local", repo.cache.local_cache_dir, cwd=copy)
    _call("git", "reset", "--quiet", cwd=copy)


def _copy_project(folder: Path, seeds: list[int], base_seed: int | None, winners: Mapping[str, list[str]]) -> None:
    """Copy the project to ``folder``, with the seeds changed in params.yaml."""
    with atomic_folder(folder) as copy:
        copy_project(copy)
        with chdir(copy):
            params = read_mapping(paths.PARAMS)
            study = validated(params, paths.PARAMS)
            needed = needed_experiments(study)
            left_out = [name for name in study.active_experiments if name not in needed]
            params = _only(params, needed, winners) | {"seeds": seeds}
            if base_seed is not None:
                params["evaluation"]["seed"] = base_seed
                for entry in (entry for section in BY_TASK for entry in params[section].values() if "seed" in entry):
                    entry["seed"] = base_seed
            write_text(paths.PARAMS, to_yaml(params))
            write_stages(validated(read_mapping(paths.PARAMS), paths.PARAMS))
    print(f"{folder}: no claim is about {', '.join([*left_out, 'best of N', 'the kissing number'])}: left out", flush=True)


def _only(params: dict[str, Any], needed: list[str], winners: Mapping[str, list[str]]) -> dict[str, Any]:
    """Leave only these experiments, their tasks and one zero-shot prompt in params.yaml; no best of N, and no search.

    The study's ``winners`` (:func:`chosen_arms`) are pinned, so that later experiments compare what the study's compare. The
    name differs, because the study's comments (:mod:`grpo.reporting.comments`) are about its own numbers.
    """
    experiments = {name: entry if name in needed else {**entry, "arms": {}} for name, entry in params["experiments"].items()}
    gone, evaluation = unused_tasks({**params, "experiments": experiments}), params["evaluation"]
    evaluation = evaluation | {
        "zero_shot_prompts": evaluation["zero_shot_prompts"][:1],
        "best_of_n": evaluation["best_of_n"] | {"prompts": []},
    }
    pinned = {name: arms if arms[1:] else arms[0] for name, arms in winners.items() if name in needed}
    of_tasks = {section: {name: entry for name, entry in params[section].items() if name not in gone} for section in BY_TASK}
    changes = {"study": "replicate", "experiments": experiments, "evaluation": evaluation, "kissing_number": None}
    return params | changes | of_tasks | {"selection": params["selection"] | {"pinned": pinned}}


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

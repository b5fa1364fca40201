"""`grpo replicate`: run the active study again with fresh seeds, in a folder of its own, and compare the two results."""

from __future__ import annotations

import configparser
import os
import shutil
import subprocess
import sys
from contextlib import chdir
from pathlib import Path
from typing import Any

from grpo.common.errors import UserError
from grpo.common.files import atomic_folder, read_json, write_json, write_text
from grpo.common.yaml_file import read_mapping, to_yaml
from grpo.reporting.comments import COMMENTS
from grpo.reporting.replication import counts, read_replicate, replication_page
from grpo.results.replication import Replicate, study_digest, write_replication
from grpo.study import paths
from grpo.study.schema import load_study, validated
from grpo.study.stages import write_stages

FOLDER = Path("replicates")
MADE_OF = "replicate.json"  # in a replicate's folder: its name, and the digest of the study that it repeats
KEYS = ("name", "study")
LOCAL_CONFIG = Path(".dvc/config.local")


def replicate(seeds: list[int], base_seed: int | None) -> str:
    """Run or resume a replicate of the active study, write reports/replication.md and .json, and say how many verdicts changed.

    Args:
        base_seed: if given, also pretrain the base model and generate problems and traces anew, with this seed.

    Raises:
        UserError: the seeds are not fresh, the study is not finished, this is not a git repository, or the replicate's
            pipeline failed.
    """
    study = load_study()
    if not seeds or set(seeds) & set(study.seeds) or len(set(seeds)) < len(seeds):
        raise UserError(f"seeds: {seeds}: not fresh. Name seeds that are not among the study's {study.seeds}, each once.")
    here = read_replicate(f"seeds {', '.join(map(str, study.seeds))}")
    folder = FOLDER / "-".join(["seeds", *map(str, seeds), *([] if base_seed is None else ["base", str(base_seed)])])
    of_study = study_digest(study)
    _make(folder, seeds, base_seed, of_study)
    _run(folder)
    finished = _finished(of_study)
    write_replication(study, finished)
    write_text(paths.REPORTS / "replication.md", replication_page(of_study, here, finished))
    found = counts(here, next(one for one in finished if one.name == _name(seeds, base_seed)))
    said = ", ".join(f"{number} {how}" for how, number in found.items())
    return (
        f"{len(here.verdicts)} claims: {said}\nreports/replication.md: each claim's verdicts and each experiment's winners\n"
        "`dvc repro --force --single-item tables writeup` puts them into the report"
    )


def _name(seeds: list[int], base_seed: int | None) -> str:
    drawn = "" if base_seed is None else f"; models, problems and traces drawn anew ({base_seed})"
    return f"seeds {', '.join(map(str, seeds))}{drawn}"


def _make(folder: Path, seeds: list[int], base_seed: int | None, of_study: str) -> None:
    """Copy the working tree to ``folder`` and change params.yaml there, unless an earlier call has done so.

    The copy keeps the claims as they are now: a claim that is written later needs seeds that have not run yet.
    """
    made_of = {"name": _name(seeds, base_seed), "study": of_study}
    if folder.exists():
        if not (folder / MADE_OF).is_file() or read_json(folder / MADE_OF, made_by="replicate", keys=KEYS) != made_of:
            raise UserError(
                f"{folder}: already exists, but repeats a study with other settings. Remove it, or name other seeds."
            )
        return
    with atomic_folder(folder) as draft:
        _git("clone", "--quiet", "--no-checkout", ".", str(draft))  # a clone, because runs record the git commit
        for name in _git("ls-files", "-z", "--cached", "--others", "--exclude-standard").split("\0"):
            made = name.startswith(f"{paths.REPORTS}/") and not name.startswith(f"{COMMENTS}/")
            if name and Path(name).exists() and not made:
                (draft / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(name, draft / name, follow_symlinks=False)
        _share_cache(draft)
        with chdir(draft):
            _git("reset", "--quiet")
            values = read_mapping(paths.PARAMS)
            write_text(paths.PARAMS, to_yaml(values | _fresh(values, seeds, base_seed)))
            write_stages(validated(read_mapping(paths.PARAMS), paths.PARAMS))
            write_json(Path(MADE_OF), made_of)


def _fresh(values: dict[str, Any], seeds: list[int], base_seed: int | None) -> dict[str, Any]:
    """Values that differ in the replicate's params.yaml: seeds; with a base seed also those of models, problems and traces."""
    if base_seed is None:
        return {"seeds": seeds}
    drawn = {
        section: {name: entry | {"seed": base_seed} if "seed" in entry else entry for name, entry in values[section].items()}
        for section in ("tasks", "models", "sft_datasets")
    }
    return {"seeds": seeds, **drawn, "evaluation": values["evaluation"] | {"seed": base_seed}}


def _git(*arguments: str) -> str:
    found = subprocess.run(["git", *arguments], capture_output=True, text=True, check=False)
    if found.returncode:
        raise UserError(f"git {arguments[0]}: {found.stderr.strip()}. `grpo replicate` needs a git repository to copy.")
    return found.stdout


def _share_cache(folder: Path) -> None:
    """Share this folder's DVC cache with the replicate, so that shared results, such as the base model, are made once."""
    config = configparser.ConfigParser()
    config.read(LOCAL_CONFIG)
    if not config.has_option("cache", "dir"):
        config.read_dict({"cache": {"dir": str(Path(".dvc/cache").absolute())}})
    with (folder / LOCAL_CONFIG).open("w") as file:
        config.write(file)


def _run(folder: Path) -> None:
    print(f"{folder}: running the study. Ctrl-C stops it; the same command continues it.", flush=True)
    environment = os.environ | {"PYTHONPATH": str(folder.absolute())}
    code = subprocess.run([sys.executable, "workflow/repro.py"], cwd=folder, env=environment, check=False).returncode
    if code:
        raise UserError(
            f"{folder}: its pipeline ended with code {code}; see its messages above. The same command continues it."
        )


def _finished(of_study: str) -> list[Replicate]:
    """Read all finished replicates of the study with this digest."""
    found = []
    for folder in sorted(path for path in FOLDER.iterdir() if (path / MADE_OF).is_file() and (path / paths.RECORD).is_file()):
        made_of = read_json(folder / MADE_OF, made_by="replicate", keys=KEYS)
        if made_of["study"] == of_study:
            found.append(read_replicate(made_of["name"], folder))
    return found

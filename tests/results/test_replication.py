"""Replication: comparison of verdicts and winners, and the making of a replicate."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from grpo.commands import replicate
from grpo.commands.study import composed_text
from grpo.common.errors import UserError
from grpo.reporting.replication import OTHERWISE, SAME, TURNED, UNDECIDED, Findings, agreement, counts, replication_page
from grpo.results.findings import AGREES, CANNOT_TELL, DISAGREES, NO_DIFFERENCE, NOT_TESTED, Verdict, VerdictName
from grpo.study.schema import Study, load_study

REPOSITORY = Path(__file__).parents[2]


def verdict(name: VerdictName, claim: str = "c") -> Verdict:
    return Verdict(claim, "e", f"It is {claim}", name, "because", measured=f"{claim} | 0.5")


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (AGREES, AGREES, SAME),
        (CANNOT_TELL, CANNOT_TELL, SAME),
        (AGREES, DISAGREES, TURNED),
        (NO_DIFFERENCE, AGREES, OTHERWISE),
        (DISAGREES, CANNOT_TELL, UNDECIDED),
        (DISAGREES, NOT_TESTED, UNDECIDED),
        (CANNOT_TELL, NOT_TESTED, ""),
        (NOT_TESTED, NOT_TESTED, ""),
    ],
)
def test_how_two_verdicts_go_together(first: VerdictName, second: VerdictName, expected: str) -> None:
    assert agreement(verdict(first), verdict(second)) == agreement(verdict(second), verdict(first)) == expected


def selection(winner: str, leader: str, *tied: str) -> dict[str, Any]:
    return {"winner": winner, "leader": leader, "tied": list(tied), "value": 0.5, "low": 0.4, "high": 0.6}


def test_the_page_has_both_verdicts_and_both_winners(mini_study: Study) -> None:
    names = mini_study.made
    same = {name: selection("a", "a") for name in names}
    here = Findings("seeds 0", [verdict(AGREES, "x"), verdict(NO_DIFFERENCE, "y")], same)
    winners = same | {names[0]: selection("b", "a", "b"), names[1]: selection("b", "b")}
    here.selections[names[0]] = selection("a", "a", "b")
    other = Findings("seeds 7", [verdict(DISAGREES, "x"), verdict(AGREES, "y")], winners)
    assert counts(here, other) == {TURNED: 1, OTHERWISE: 1}
    page = replication_page(mini_study, here, [other])
    assert r"| It is x | agrees: x \| 0.5 | disagrees: x \| 0.5 | turned round |" in page
    assert f"| {names[0]} | a 0.500 (0.400 to 0.600) | b 0.500 (0.400 to 0.600) | another, tied in both |" in page
    assert f"| {names[1]} | a 0.500 (0.400 to 0.600) | b 0.500 (0.400 to 0.600) | another |" in page
    assert f"Of {len(names)} experiments 2 have another winner." in page and "Of 2 claims 1 turned round" in page


# ------------------------------------------------------------------------------------------- a copy of the working tree


@pytest.fixture
def repository(workdir: Path) -> Study:
    """A git repository with a study, a file that git does not know yet, and one that it ignores."""
    Path("params.yaml").write_text(composed_text(REPOSITORY / "studies" / "smoke.yaml")[0])
    for name in ("tracked", "ignored", ".dvc/config", "reports/old"):
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text(name)
    Path(".gitignore").write_text("/ignored\n/replicates/\n")
    for command in (["init", "-q"], ["add", "."], ["-c", "user.name=n", "-c", "user.email=e", "commit", "-qm", "m"]):
        subprocess.run(["git", *command], check=True)
    Path("new").write_text("new")
    Path("tracked").write_text("edited")
    return load_study()


def test_a_replicate_is_a_copy_of_the_working_tree_with_fresh_seeds(repository: Study, tmp_path: Path) -> None:
    folder = Path("replicates/seeds-7-8")
    replicate._make(folder, [7, 8], None)
    assert {path.name for path in folder.iterdir()} == {
        *(".git", ".gitignore", ".dvc", "tracked", "new", "params.yaml", replicate.MADE_OF)
    }
    assert (folder / "tracked").read_text() == "edited"
    assert f"dir = {tmp_path / '.dvc' / 'cache'}" in (folder / ".dvc/config.local").read_text()
    fresh = load_study(folder / "params.yaml")
    assert fresh.seeds == [7, 8] and fresh.model_copy(update={"seeds": repository.seeds, "runs": repository.runs}) == repository
    (folder / "tracked").write_text("of the replicate")
    replicate._make(folder, [7, 8], None)  # gone on with
    assert (folder / "tracked").read_text() == "of the replicate"
    Path("params.yaml").write_text(Path("params.yaml").read_text().replace("last_k: ", "last_k:  "))
    with pytest.raises(UserError, match=r"seeds-7-8: already exists, but was not made from this params\.yaml"):
        replicate._make(folder, [7, 8], None)


def test_a_fresh_base_draws_all_that_is_generated_anew(repository: Study) -> None:
    folder = Path("replicates/x")
    replicate._make(folder, [7], 5)
    fresh = load_study(folder / "params.yaml")
    assert {task["seed"] for task in fresh.tasks.values() if "seed" in task} == {5}
    assert fresh.evaluation.seed == 5
    assert [getattr(model, "seed", 5) for model in fresh.models.values()] == [5] * len(fresh.models)


def test_a_copy_that_was_stopped_half_way_is_made_anew(repository: Study) -> None:
    Path("replicates/.x.draft").mkdir(parents=True)
    Path("replicates/.x.draft/left").write_text("over")
    replicate._make(Path("replicates/x"), [7], None)
    assert not Path("replicates/x/left").exists() and not Path("replicates/.x.draft").exists()


@pytest.mark.parametrize("seeds", [[], [0, 7], [7, 7]])
def test_seeds_must_be_fresh(repository: Study, seeds: list[int]) -> None:
    with pytest.raises(UserError, match="not fresh"):
        replicate.replicate(seeds, None)


def test_a_study_that_is_not_finished_has_nothing_to_compare(repository: Study) -> None:
    with pytest.raises(UserError, match="dvc repro select@"):
        replicate.replicate([7], None)
    assert not Path("replicates").exists()


def test_a_pipeline_that_fails_leaves_its_folder(repository: Study, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then a page is written of those that are finished."""
    monkeypatch.setattr(replicate, "read_findings", lambda study, name, folder=None: Findings(name, [], {}))
    Path("workflow").mkdir()
    Path("workflow/repro.py").write_text("import sys; sys.exit(3)")
    with pytest.raises(UserError, match="its pipeline ended with code 3"):
        replicate.replicate([7], None)
    script = "import pathlib as p; p.Path('reports').mkdir(); p.Path('reports/claims.json').write_text('{}')"
    Path("replicates/seeds-7/workflow/repro.py").write_text(script)
    monkeypatch.setattr(replicate, "replication_page", lambda study, here, others: json.dumps([one.name for one in others]))
    replicate.replicate([7], None)
    assert json.loads(Path("reports/replication.md").read_text()) == ["seeds 7, the same base"]

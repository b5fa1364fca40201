"""Replication: comparison of verdicts and winners, and the making of a replicate."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from study_parts import with_values

from grpo.commands import replicate
from grpo.commands.study import composed_text
from grpo.common.errors import UserError
from grpo.common.files import write_json
from grpo.reporting.replication import counts, read_replicate, replication_page
from grpo.results.replication import (
    SAME,
    TURNED,
    UNDECIDED,
    Replicate,
    agreement,
    read_replication,
    study_digest,
    write_replication,
)
from grpo.results.verdicts import AGREES, CANNOT_TELL, DISAGREES, NO_DIFFERENCE, NOT_TESTED, VerdictName
from grpo.study import paths
from grpo.study.schema import Study, load_study

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (AGREES, AGREES, SAME),
        (CANNOT_TELL, CANNOT_TELL, SAME),
        (AGREES, DISAGREES, TURNED),
        (NO_DIFFERENCE, AGREES, TURNED),
        (NO_DIFFERENCE, DISAGREES, SAME),  # neither is more by the margin
        (DISAGREES, CANNOT_TELL, UNDECIDED),
        (DISAGREES, NOT_TESTED, "not tried"),
        (NOT_TESTED, NOT_TESTED, "not tried"),
    ],
)
def test_how_two_verdicts_go_together(first: VerdictName, second: VerdictName, expected: str) -> None:
    assert agreement(first, second) == agreement(second, first) == expected


def record(winner: str, low: float, **verdicts: VerdictName) -> dict[str, Any]:
    """A study's record: an experiment whose arms a and b end at .6 and .5, and claims by the digest of their test.

    Args:
        low: lower end of the distance of b from a.
    """
    claims = [
        {"test": test, "verdict": verdict, "statement": f"It is {test}", "measured": f"{test} | 0.5", "reason": ""}
        for test, verdict in verdicts.items()
    ]
    untested = {"test": "", "verdict": NOT_TESTED, "statement": "s", "measured": "", "reason": "no arm has it"}
    ends = (("a", 0.6, None), ("b", 0.5, {"value": 0.1, "low": low, "high": 0.2 - low}))
    arms = [{"arm": a, "value": v, "low": v - 0.1, "high": v + 0.1, "chosen": True, "below": below} for a, v, below in ends]
    return {"claims": [*claims, untested], "experiments": {"e": {"winner": winner, "leader": winner, "arms": arms}}}


@pytest.mark.parametrize(("low", "said"), [(-0.05, "could not be told"), (0.05, "could be told")])
def test_the_page_has_both_verdicts_and_both_winners(workdir: Path, low: float, said: str) -> None:
    write_json(paths.RECORD, record("a", low, x=AGREES, y=AGREES, z=CANNOT_TELL))
    there = record("b", low, x=DISAGREES, y=AGREES)
    there["experiments"]["e"]["arms"].reverse()
    for arm, below in zip(there["experiments"]["e"]["arms"], (None, {"value": 0.1, "low": low, "high": 0.2}), strict=True):
        arm["below"] = below
    write_json("there" / paths.RECORD, there)
    here, there = read_replicate("seeds 0"), read_replicate("seeds 7", Path("there"))
    assert counts(here, there) == {TURNED: 1, SAME: 1, "not tried": 1}
    page = replication_page("abc", here, [there])
    assert r"| It is x | agrees: x \| 0.5 | disagrees: x \| 0.5 | turned round |" in page
    assert "| e | a 0.600 (0.500 to 0.700) | b 0.500 (0.400 to 0.600) | another" in page and said in page
    assert "`abc`" in page and "Of 1 experiments 1 have another winner." in page and "Of 3 claims 1 turned round" in page


def test_the_same_setting_at_another_rate_is_no_other_winner() -> None:
    def replicate(winner: str) -> Replicate:
        return Replicate(winner, {}, {}, {}, {"e": {"winner": winner, "value": 0.5, "low": 0.4, "high": 0.6, "told": True}})

    page = replication_page("abc", replicate("a-rate_half"), [replicate("a-rate_same"), replicate("b-rate_half")])
    assert "Of 1 experiments 0 have another winner." in page and "| same, at another rate |" in page
    assert "Of 1 experiments 1 have another winner." in page and "| another, and here the leader could be told |" in page


def test_the_committed_record_says_the_same_as_itself() -> None:
    here = read_replicate("here", REPOSITORY)
    page = replication_page("abc", here, [here])
    assert len(here.verdicts) > 20 and counts(here, here)[TURNED] == counts(here, here)[UNDECIDED] == 0
    assert f"Of {len(here.winners)} experiments 0 have another winner." in page


def test_replicates_of_another_study_are_stale(workdir: Path, mini_study: Study) -> None:
    """Claims, wording and resources are no part of a study's settings; steps and arms are."""
    assert read_replication(mini_study) == []
    replicate = Replicate("seeds 7", {"x": AGREES}, {}, {}, {})
    write_replication(mini_study, [replicate])
    reworded = with_values(mini_study, {"description": "x", "resources.train.cpus": 7, "claims": [1]})
    assert study_digest(reworded) == study_digest(mini_study) and read_replication(reworded) == [replicate]
    for changes in ({"grpo.n_grpo_steps": 3}, {"seeds": [7]}, {"experiments.grpo_lora.arms": {"full": {}}}):
        assert read_replication(with_values(mini_study, changes)) == []


# ------------------------------------------------------------------------------------------- a copy of the working tree


@pytest.fixture
def repository(workdir: Path) -> Study:
    """A git repository with a study, a file that git does not know yet, and one that it ignores."""
    Path("params.yaml").write_text(composed_text(REPOSITORY / "studies" / "smoke.yaml")[0])
    for name in ("tracked", "ignored", ".dvc/config", "reports/old", "reports/comments/e.md"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(name)
    Path(".gitignore").write_text("/ignored\n/replicates/\n")
    for command in (["init", "-q"], ["add", "."], ["-c", "user.name=n", "-c", "user.email=e", "commit", "-qm", "m"]):
        subprocess.run(["git", *command], check=True)
    Path("new").write_text("new")
    Path("tracked").write_text("edited")
    return load_study()


def test_a_replicate_is_a_copy_of_the_working_tree_with_fresh_seeds(repository: Study, tmp_path: Path) -> None:
    folder = Path("replicates/seeds-7-8")
    replicate._make(folder, [7, 8], None, "digest")
    assert {path.name for path in folder.iterdir()} == {
        *(".git", ".gitignore", ".dvc", "tracked", "new", "params.yaml", "stages.yaml", "reports", replicate.MADE_OF)
    }
    assert (folder / "reports/comments/e.md").exists() and not (folder / "reports/old").exists()
    assert (folder / "tracked").read_text() == "edited"
    assert f"dir = {tmp_path / '.dvc' / 'cache'}" in (folder / ".dvc/config.local").read_text()
    fresh = load_study(folder / "params.yaml")
    assert fresh.seeds == [7, 8] and fresh.model_copy(update={"seeds": repository.seeds}) == repository
    (folder / "tracked").write_text("of the replicate")
    replicate._make(folder, [7, 8], None, "digest")  # gone on with
    assert (folder / "tracked").read_text() == "of the replicate"
    with pytest.raises(UserError, match="seeds-7-8: already exists, but repeats a study with other settings"):
        replicate._make(folder, [7, 8], None, "another")


def test_a_fresh_base_draws_all_that_is_generated_anew(repository: Study) -> None:
    folder = Path("replicates/x")
    replicate._make(folder, [7], 5, "digest")
    fresh = load_study(folder / "params.yaml")
    assert {task["seed"] for task in fresh.tasks.values() if "seed" in task} == {5}
    assert fresh.evaluation.seed == 5
    assert [getattr(model, "seed", 5) for model in fresh.models.values()] == [5] * len(fresh.models)


def test_a_copy_that_was_stopped_half_way_is_made_anew(repository: Study) -> None:
    Path("replicates/.x.draft").mkdir(parents=True)
    Path("replicates/.x.draft/left").write_text("over")
    replicate._make(Path("replicates/x"), [7], None, "digest")
    assert not Path("replicates/x/left").exists() and not Path("replicates/.x.draft").exists()


@pytest.mark.parametrize("seeds", [[], [0, 7], [7, 7]])
def test_seeds_must_be_fresh(repository: Study, seeds: list[int]) -> None:
    with pytest.raises(UserError, match="not fresh"):
        replicate.replicate(seeds, None)


def test_a_study_that_is_not_finished_has_nothing_to_compare(repository: Study) -> None:
    with pytest.raises(UserError, match="dvc repro tables"):
        replicate.replicate([7], None)
    assert not Path("replicates").exists()


def test_a_pipeline_that_fails_leaves_its_folder(repository: Study) -> None:
    """The same command goes on, and writes a page and a file of all replicates that are finished."""
    write_json(paths.RECORD, record("a", 0.05, x=AGREES))
    Path("workflow").mkdir()
    Path("workflow/repro.py").write_text("import sys; sys.exit(3)")
    with pytest.raises(UserError, match="its pipeline ended with code 3"):
        replicate.replicate([7], None)
    there = json.dumps(record("a", 0.05, x=DISAGREES))
    script = f"import pathlib as p; p.Path('reports').mkdir(exist_ok=True); p.Path('reports/record.json').write_text({there!r})"
    Path("replicates/seeds-7/workflow/repro.py").write_text(script)
    assert "1 turned round" in replicate.replicate([7], None)
    found = read_replication(repository)
    assert [(one.name, one.verdicts) for one in found] == [("seeds 7", {"x": DISAGREES})]
    assert study_digest(repository) in (paths.REPORTS / "replication.md").read_text()

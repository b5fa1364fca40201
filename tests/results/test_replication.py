"""Copies of the project that run: a replicate with other seeds, and the comparison of its verdicts; the studies of papers."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from study_parts import ROOT, edit

sys.path.insert(0, str(ROOT / "workflow"))

import literature

from grpo.commands import replicate
from grpo.commands.replicate import SAME, TURNED, UNDECIDED, agreement, compare, page
from grpo.commands.study import composed_text
from grpo.common.errors import UserError
from grpo.common.files import write_json
from grpo.results.claims import key_of, needed_experiments, read_replicates
from grpo.results.pairs import Pairs, write_pairs
from grpo.results.verdicts import DOES_NOT_HOLD, HOLDS, NOT_TESTED, OPEN, VerdictName
from grpo.results.verdicts import SAME as SAME_VERDICT
from grpo.study import paths
from grpo.study.compose import study_path
from grpo.study.schema import Study, load_study


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (HOLDS, HOLDS, SAME),
        (OPEN, OPEN, SAME),
        (HOLDS, DOES_NOT_HOLD, TURNED),
        (SAME_VERDICT, HOLDS, TURNED),
        (SAME_VERDICT, DOES_NOT_HOLD, SAME),  # neither is more by the margin
        (DOES_NOT_HOLD, OPEN, UNDECIDED),
        (DOES_NOT_HOLD, NOT_TESTED, "not tried"),
        (NOT_TESTED, NOT_TESTED, "not tried"),
    ],
)
def test_how_two_verdicts_go_together(first: VerdictName, second: VerdictName, expected: str) -> None:
    here, there = {"verdict": first}, {"verdict": second}
    assert agreement(here, there) == agreement(there, here) == expected


def record(winner: str, **verdicts: VerdictName) -> dict[str, Any]:
    """A study's record: an experiment with arms that end at .6 and .5, and claims by id."""
    texts = {"kind": "beats", "reason": ""}
    claims = [
        {"id": name, "verdict": verdict, "statement": f"It is {name}", "measured": f"{name} | 0.5"} | texts
        for name, verdict in verdicts.items()
    ]
    untested = {"id": "u", "kind": "", "verdict": NOT_TESTED, "statement": "s", "measured": "", "reason": "no arm has it"}
    ends = {"a-rate_half": 0.6, "a-rate_same": 0.6, "b": 0.5}
    arms = [{"arm": arm, "value": value, "low": value - 0.1, "high": value + 0.1} for arm, value in ends.items()]
    experiment = {"winner": winner, "leader": winner, "arms": arms}
    return {"study": "s", "headline": {}, "claims": [*claims, untested], "experiments": {"e": experiment}}


def test_the_page_has_both_verdicts_and_both_winners() -> None:
    here = record("a-rate_half", x=HOLDS, y=HOLDS, z=OPEN)
    found = {
        "seeds-7": compare(here, record("b", x=DOES_NOT_HOLD, y=HOLDS)),
        "seeds-8": compare(here, record("a-rate_same", x=HOLDS)),
    }
    text = page(found)
    assert r"| It is x | holds: x \| 0.5 | does not hold: x \| 0.5 | turned round |" in text
    assert "3 claims: 1 turned round, 1 same, 1 not tried" in text
    assert "| e | a-rate_half 0.600 (0.500 to 0.700) | b 0.500 (0.400 to 0.600) | another |" in text
    assert "| same, at another rate |" in text and text.index("## seeds-7") < text.index("## seeds-8")


# ------------------------------------------------------------------------------------------- a copy of the working tree


@pytest.fixture
def repository(workdir: Path) -> Study:
    """A git repository with a finished study, a file that git does not know yet, and one that it ignores."""
    Path("params.yaml").write_text(composed_text(ROOT / "studies" / "smoke.yaml")[0])
    for name in ("tracked", "ignored", ".dvc/config", "reports/old", "reports/comments/e.md"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text("" if name == ".dvc/config" else name)
    Path(".gitignore").write_text("/ignored\n/replicates/\n/literature/\n")
    for command in (["init", "-q"], ["add", "."], ["-c", "user.name=n", "-c", "user.email=e", "commit", "-qm", "m"]):
        subprocess.run(["git", *command], check=True)
    Path("new").write_text("new")
    Path("tracked").write_text("edited")
    return load_study()


def test_a_replicate_is_a_copy_of_the_working_tree_with_other_seeds(repository: Study, tmp_path: Path) -> None:
    Path("replicates/.x.draft").mkdir(parents=True)
    Path("replicates/.x.draft/left").write_text("of a copy that was stopped")
    Path(".dvc/config.local").write_text("[cache]\n    dir = ../cache-of-mine\n")  # relative to .dvc/
    folder = Path("replicates/x")
    replicate._copy_project(folder, [7, 8], None, {})
    assert {path.name for path in folder.iterdir()} == {
        *(".git", ".gitignore", ".dvc", "tracked", "new", "params.yaml", "stages.yaml", "reports")
    }
    assert not (folder / "reports/comments/e.md").exists() and not (folder / "reports/old").exists()
    assert (folder / "tracked").read_text() == "edited"
    assert f"dir = {tmp_path / 'cache-of-mine'}" in (folder / ".dvc/config.local").read_text()
    other = load_study(folder / "params.yaml")
    assert other.seeds == [7, 8] and other.active_experiments == needed_experiments(repository)
    assert all(other.experiments[name] == repository.experiments[name] for name in other.active_experiments)
    replicate._copy_project(Path("replicates/y"), [7], 5, {})  # a base seed: all that is generated is generated anew
    other = load_study(Path("replicates/y/params.yaml"))
    assert {task["seed"] for task in other.tasks.values() if "seed" in task} == {5}
    assert other.evaluation.seed == 5
    assert [getattr(model, "seed", 5) for model in other.models.values()] == [5] * len(other.models)


def test_a_replicate_leaves_out_what_no_claim_is_about_and_nothing_else_needs(repository: Study) -> None:
    folder = Path("replicates/x")
    left_out = {*repository.active_experiments} - {*needed_experiments(repository)}
    assert left_out == {"grpo_kl_divergence", "grpo_colocate", "leaderboard", "grpo_keyword_inclusion"}
    sweep, ranked = "grpo_off_policy_sweep_focused", ["on_policy", "best_1"]
    ranking = [{"arm": arm, "overrides": {}} for arm in ranked[1:]]
    write_json(paths.SELECT / f"{sweep}.json", {"winner": ranked[0], "off_policy_ranking": ranking})
    write_json(paths.SELECT / "leaderboard.json", {"winner": "best"})
    winners = {"grpo_baselines": ["no_baseline"], **{name: replicate.chosen_arms(name) for name in (sweep, "leaderboard")}}
    replicate._copy_project(folder, [7], 5, winners)
    other = load_study(folder / "params.yaml")
    pinned = {"grpo_baselines": "no_baseline", sweep: ranked}
    assert other.selection.pinned == pinned, "later experiments compare what the study's compare"
    assert [*other.tasks] == [*other.models] == ["main"] and other.kissing_number is None and not other.kl_in
    assert not other.evaluation.best_of_n.prompts and len(other.evaluation.zero_shot_prompts) == 1
    assert other.study != repository.study  # whose comments are about its own numbers
    text = paths.PARAMS.read_text()
    keys = [key_of(repository)]
    changes = (
        ("question: What does the prompt change?", "question: What?"),
        ("zero_shot_problems: ", "zero_shot_problems: 1"),
        ("n_grpo_steps: 3", "n_grpo_steps: 4"),
    )
    for old, new in changes:
        assert old in text
        paths.PARAMS.write_text(text.replace(old, new))
        keys.append(key_of(load_study()))
    assert keys[0] == keys[1] == keys[2] != keys[3]  # neither a question nor zero-shot problems change a run


def test_seeds_are_new_and_the_study_is_finished(repository: Study) -> None:
    for seeds in ([], [0, 7], [7, 7]):
        with pytest.raises(UserError, match="not fresh"):
            replicate.replicate(seeds, None)
    with pytest.raises(UserError, match="dvc repro tables"):
        replicate.replicate([7], None)
    assert not Path("replicates").exists()


def test_a_pipeline_that_fails_is_continued_and_all_finished_replicates_are_compared(repository: Study) -> None:
    claim = "std-normalization"
    write_json(paths.SELECT / "e.json", {"winner": "b"})
    write_json(paths.RECORD, record("b", **{"x": HOLDS, claim: OPEN}))
    write_pairs(paths.PAIRS, {claim: Pairs("a", "b", [0, 1], np.full((2, 9), 0.2), np.empty((2, 0)), "of seed 0")})
    Path("workflow").mkdir()
    Path("workflow/repro.py").write_text("import sys; sys.exit(3)")
    with pytest.raises(UserError, match="its pipeline ended with code 3"):
        replicate.replicate([7], None)
    (folder,) = Path("replicates").glob("*-seeds-7")
    with pytest.raises(UserError, match="its pipeline ended with code 3"):
        replicate.replicate([7], 0)
    (anew,) = Path("replicates").glob("*-seeds-7-base-0")  # zero, too, is a base seed
    models = [load_study(of / "params.yaml").models["main"] for of in (folder, anew)]
    assert [getattr(model, "seed", None) for model in models] == [1, 0]
    there = json.dumps(record("b", x=DOES_NOT_HOLD))
    write_pairs(Path("their_pairs"), {claim: Pairs("a", "b", [7], np.full((1, 9), 0.5), np.empty((1, 0)), "of seed 5")})
    files = {"record.json": there, "pairs.csv": Path("their_pairs").read_text()}
    script = f"import pathlib as p\nfor name, text in {files!r}.items(): (p.Path('reports') / name).write_text(text)"
    (folder / "workflow/repro.py").write_text(script)
    assert "2 claims: 1 turned round, 1 not tried" in replicate.replicate([7], None)
    assert [path.name for path in paths.REPLICATES.glob("*.csv")] == [f"{folder.name}.csv"]
    assert next(iter(read_replicates(repository).values()))[claim].seeds == [7]  # the report judges claims by these, too
    folder.rename(folder.with_name("other-seeds-9"))  # now of another study: that with seed 7 was run elsewhere
    Path("workflow/repro.py").write_text(script)
    replicate.replicate([8], None)
    found = json.loads((paths.REPORTS / "replication.json").read_text())
    assert [*found] == ["seeds-7", "seeds-8"] and len(read_replicates(repository)) == 2
    assert found["seeds-8"]["claims"][0]["replicate"] == "does not hold: x | 0.5"
    assert "## seeds-8" in (paths.REPORTS / "replication.md").read_text()
    (again,) = Path("replicates").glob("*-seeds-8")
    (again / "workflow/repro.py").write_text(script.replace(DOES_NOT_HOLD, HOLDS))
    replicate.replicate([8], None)
    written = (paths.REPORTS / "replication.json").read_text()
    assert [of["claims"][0]["replicate"].split(":")[0] for of in json.loads(written).values()] == [DOES_NOT_HOLD, HOLDS]
    (pairs,) = paths.REPLICATES.glob("*-seeds-7.csv")
    pairs.rename("taken_back")
    replicate.replicate([8], None)
    assert [*json.loads((paths.REPORTS / "replication.json").read_text())] == ["seeds-8"]
    Path("taken_back").rename(pairs)
    (paths.REPORTS / "replication.json").write_text(written)
    write_json(paths.RECORD, record("b", **{"x": OPEN, claim: OPEN}))  # the study was run again
    replicate.replicate([8], None)
    assert [*json.loads((paths.REPORTS / "replication.json").read_text())] == ["seeds-8"]


# ------------------------------------------------------------------------------------------------------- studies of papers


def test_studies_of_papers_run_in_copies_and_once(
    repository: Study, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A stand-in for the pipeline notes which study it runs, fails at first for one, and writes a report by hand."""
    claim = {
        "statement": "It is so",
        "reason": "",
        "measured": "",
        "verdict": HOLDS,
        "own": True,
        "quantity": "difference",
        "interval": {"value": 0.2, "low": 0.1, "high": 0.3},
        "reported": {"Someone 2025": "40 | 20"},
    }
    found = {
        "study": "s",
        "description": "D.",
        "seeds": [0, 1],
        "model": "pretrained in this study",
        "claims": [claim, claim | {"own": False, "statement": "Of another"}],
        "pass_at_k": {"e/a": {"base_ahead_from": 8}},
        "experiments": {
            name: {"kl": kl}
            for name, kl in (("e", kept((0, 0.6), (0.1, 0.4), (0.4, 0.2))), ("f", kept((0, 0.6), (0.2, 0.3))), ("g", None))
        },
    }
    files = dict.fromkeys(("index.html", "writeup.md", "outcomes.csv", "results.csv"), "") | {
        "record.json": json.dumps(found),
        "timing.csv": "run,same_as,total_s\na,,40\nb,a,30\nc,,2.4\n",
    }
    log = tmp_path / "log"
    Path("workflow").mkdir()
    Path("workflow/repro.py").write_text(
        f"import pathlib as p, re, sys\n"
        f"study = re.search('^study: (.*)', p.Path('params.yaml').read_text(), re.M)[1]\n"
        f"print(study, file=open({str(log)!r}, 'a'))\n"
        f"if study == 'fails' and not p.Path('again').exists():\n    p.Path('again').touch()\n    sys.exit(3)\n"
        f"for name in ('tables', 'curves', 'figures'): p.Path('reports', name).mkdir(exist_ok=True)\n"
        f"for name, text in {files!r}.items(): p.Path('reports', name).write_text(text)\n"
    )
    for name in ("done", "fails"):
        path = Path(f"studies/literature/{name}.yaml")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"extends: {ROOT}/studies/smoke.yaml\nheading: The paper {name}\ndescription: D.\n")
    before = paths.PARAMS.read_text()
    assert literature.main() == 2
    assert "literature/fails: its pipeline ended with code 3" in capsys.readouterr().err
    page = Path("reports/literature/README.md").read_text()
    assert "## [The paper done](done/index.html)" in page and "The paper fails" not in page and "Of another" not in page
    assert "| It is so | 40 \\| 20 (Someone 2025) | difference 0.200 (0.100 to 0.300) | holds |" in page
    assert "Base models: 2, pretrained in this study: 2 layers of width 32; 2 runs of 42 seconds in all" in page
    assert "e/a from k = 8" in page
    assert "the means of 3 kept checkpoints the rank correlation of forward KL and old-task reward is -1.00" in page
    assert literature.main() == 0 and log.read_text().split() == ["done", "fails", "fails"], "what is finished stays"
    assert "The paper fails" in Path("reports/literature/README.md").read_text()
    edit("description: D.", "description: D.\nseeds: [5]", Path("studies/literature/done.yaml"))
    assert literature.main() == 0 and log.read_text().split()[3:] == ["done"], "its settings changed"
    assert "seeds: [5]" in Path("reports/literature/done/params.yaml").read_text()
    assert paths.PARAMS.read_text() == before and Path("reports/old").exists(), "the active study stays as it is"


def kept(*steps: tuple[float, float]) -> dict[str, Any]:
    """What a record says of an arm's start and kept checkpoints, by forward KL and reward on the old task."""
    values = [{"forward_per_token": {"value": kl}, "old_task_reward": {"value": reward}} for kl, reward in steps]
    return {"a": [{"step": 8 * place, **of} for place, of in enumerate(values)]}


def test_what_the_page_of_papers_says_of_forgetting_is_so() -> None:
    experiments = json.loads((ROOT / "reports/literature/forgetting/record.json").read_text())["experiments"]
    grpo, others = (
        experiments[name]["kl"][f"{arm}-rate_low"][-1] for name, arm in (("reinforcement", "grpo"), ("fine_tuning", "others"))
    )
    assert abs(grpo["answer_reward"]["value"] - others["answer_reward"]["value"]) < 0.02
    assert others["forward_per_token"]["value"] < grpo["forward_per_token"]["value"]
    assert abs(grpo["old_task_reward"]["value"] - others["old_task_reward"]["value"]) < 0.03


def test_the_committed_page_of_papers_follows_from_its_records(monkeypatch: pytest.MonkeyPatch) -> None:
    """And each was run with the settings that its study has now."""
    monkeypatch.chdir(ROOT)
    names = sorted(path.parent.name for path in literature.REPORTS.glob("*/record.json"))
    page = (literature.REPORTS / "README.md").read_text()
    assert names and page == "\n".join([literature.HEAD, *map(literature.section, names)])
    for name in names:
        composed, _ = literature.composed_text(study_path(f"literature/{name}"))
        assert (literature.REPORTS / name / "params.yaml").read_text() == composed


def test_what_guessing_finds_of_the_answers_of_the_small_task() -> None:
    """The page of papers states it beside pass@k: draws by the answers' frequency, expected over the validation set."""
    task = load_study(ROOT / "params.yaml").task("main")
    answers = Counter(problem.ground_truth for problem in task.problems("validation"))
    shares = [count / answers.total() for count in answers.values()]
    found = [round(sum(share * (1 - (1 - share) ** draws) for share in shares), 2) for draws in (16, 64)]
    assert (
        f"has {len(answers)} different answers, so guessing by their frequency finds {found[0]:.2f} of them in 16"
        in literature.HEAD
    )
    assert f"and {found[1]:.2f} in 64" in literature.HEAD

"""Studies as overlays: what is composed of which files, and that `grpo study use` never overwrites an edit by hand unasked."""

from __future__ import annotations

import copy
import json
import re
import shutil
import sys
from importlib import invalidate_caches
from pathlib import Path
from typing import Any

import pytest
from dvc.utils.serialize import load_yaml, modify_yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pipeline_parts import sh
from ruamel.yaml import YAML
from study_parts import EXPERIMENTS, ROOT, STUDIES, Grpo, activate, edit, study_named, values_of

from grpo.common.errors import UserError
from grpo.common.yaml_file import parse_yaml, to_yaml
from grpo.study import paths
from grpo.study.compose import compose, files_of, merge
from grpo.study.kept import in_cache
from grpo.study.schema import load_study
from grpo.study.stages import write_stages

# --------------------------------------------------------------------------------------------------------------- rules


@pytest.mark.parametrize(
    ("base", "overlay", "composed"),
    [
        ({"grpo": {"a": 1, "b": 2}}, {"grpo": {"b": 3, "c": 4}}, {"grpo": {"a": 1, "b": 3, "c": 4}}),
        ({"seeds": [0, 1, 2], "threads": 1}, {"seeds": [5]}, {"seeds": [5], "threads": 1}),
        ({"divergence": {"patience": 2}}, {"divergence": None}, {"divergence": None}),
        ({"engine": {"name": "a", "x": 1}}, {"engine": {"name": "b", "y": 2}}, {"engine": {"name": "b", "x": 1, "y": 2}}),
        ({"model": {"source": "pretrain", "steps": 9}}, {"model": {"source": "hub"}}, {"model": {"source": "hub"}}),
        ({"task": {"levels": 4}}, {"task": {"use": "math"}}, {"task": {"use": "math"}}),  # the arguments were another's
        ({"grpo": {"reward": {"a": 0.2}}}, {"grpo": {"reward": {"c": 1}}}, {"grpo": {"reward": {"c": 1}}}),
        (  # other data for the same task
            {"task": {"use": "math", "source": {"hub": "a", "revision": "b"}, "drop_overlap": True}},
            {"task": {"source": {"train": "c", "validation": "d"}}},
            {"task": {"use": "math", "source": {"train": "c", "validation": "d"}, "drop_overlap": True}},
        ),
        (
            {"experiments": {"x": {"last_k": 2, "arms": {"a": {"lr": 1}, "b": {}}}}},
            {"experiments": {"x": {"arms": {"a": {"steps": 3}}}}},
            {"experiments": {"x": {"last_k": 2, "arms": {"a": {"steps": 3}}}}},
        ),
    ],
)
def test_an_overlay_is_laid_over_what_it_extends(
    base: dict[str, Any], overlay: dict[str, Any], composed: dict[str, Any]
) -> None:
    assert merge(base, overlay) == composed


scalars = (
    st.none()
    | st.booleans()
    | st.integers(-3, 3)
    | st.floats(-2, 2)
    | st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=4)
)
keys = st.sampled_from(["a", "b", "use", "source", "name", "arms", "3e-5"])
values = st.recursive(
    scalars | st.lists(scalars, max_size=2), lambda inner: st.dictionaries(keys, inner, max_size=4), max_leaves=12
)
mappings = st.dictionaries(keys, values, max_size=5)
reproducibly = settings(deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow])


def exact(value: Any) -> str:
    """Tells 1, 1.0 and True apart, and the order of arms, but not that of other keys."""
    if isinstance(value, dict):
        items = [(key, exact(item)) for key, item in value.items()]
        return str(sorted(items))
    return json.dumps(value)


@reproducibly
@given(mappings, mappings)
def test_merging_changes_neither_and_twice_is_as_once(base: dict[str, Any], overlay: dict[str, Any]) -> None:
    before = copy.deepcopy((base, overlay))
    target = merge(base, overlay)
    assert (base, overlay) == before
    assert list(target) == [*base, *(key for key in overlay if key not in base)]
    assert exact(merge(target, overlay)) == exact(target) and exact(merge(base, {})) == exact(base)


@reproducibly
@given(mappings)
def test_what_is_written_is_what_is_read(tmp_path_factory: pytest.TempPathFactory, mapping: dict[str, Any]) -> None:
    """By both of ruamel.yaml's parsers, of which DVC uses one."""
    path = tmp_path_factory.mktemp("text") / "x.yaml"
    path.write_text(to_yaml({"first": "a: b", **mapping}))
    assert exact(parse_yaml(path)) == exact({"first": "a: b", **mapping})
    assert exact(YAML(typ="safe", pure=True).load(path.read_text())) == exact({"first": "a: b", **mapping})


# --------------------------------------------------------------------------------------------------------------- files


@pytest.fixture
def project(workdir: Path) -> Path:
    """A project folder with the project's studies, smoke the active one, and nothing else."""
    for path in (ROOT / "studies").glob("*.yaml"):
        (workdir / "studies").mkdir(exist_ok=True)
        (workdir / "studies" / path.name).write_text(path.read_text())
    activate("smoke", workdir)
    write_stages(study_named("smoke"), composed=True)
    return workdir


def write(path: str, text: str) -> Path:
    file = Path(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


def test_a_chain_is_laid_one_over_the_other(project: Path) -> None:
    write("studies/middle.yaml", "extends: mini\ndescription: The middle.\ngrpo: {n_grpo_steps: 40, learning_rate: 1e-4}\n")
    path = write("studies/top.yaml", "extends: middle\ngrpo: {learning_rate: 2e-4}\nthreads: 2\n")
    assert files_of(path) == [Path(f"studies/{name}.yaml") for name in ("top", "middle", "mini", "base")]
    study, mini = compose(path), values_of("mini")
    assert (study["grpo"]["n_grpo_steps"], study["grpo"]["learning_rate"], study["threads"]) == (40, 2e-4, 2)
    assert study["study"] == "top" and study["description"] == "As middle, but for: grpo, threads."
    assert study["models"] == mini["models"] and study["experiments"] == mini["experiments"]
    assert [*study][2:] == [*mini][3:], "sections stand in the order of base.yaml"


@pytest.fixture
def lab(project: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder beside the project with a study of its own: its module, its data and two study files. A path has a space."""
    folder, inside = project / "our lab", project / "clone"
    inside.mkdir()
    (project / "studies").rename(inside / "studies")
    for name in ("params.yaml", "stages.yaml"):
        (project / name).rename(inside / name)
    monkeypatch.chdir(inside)
    monkeypatch.delitem(sys.modules, "lab_verifier", raising=False)
    write("../our lab/lab_verifier.py", "def close(answers, problems):\n    return [0.25] * len(answers)\n")
    for split, asked in (("train", "1 + 1?"), ("validation", "1 + 2?")):
        rows = [asked, *(f"{split} {n}?" for n in range(999))]
        write(f"../our lab/rows/{split}.jsonl", "".join(json.dumps({"q": row, "a": "2"}) + "\n" for row in rows))
    write(
        "../our lab/ours.yaml",
        "extends: mini\nexperiments: {only: [grpo_learning_rate]}\nsft_datasets: {}\n"
        "models: {main: {source: local, path: model}}\n"
        "tasks: {main: {use: dataset, question: q, answer: a, verify: 'lab_verifier:close',"
        " files: {train: rows/train.jsonl, validation: rows/validation.jsonl}}}\n",
    )
    write("../our lab/later/next.yml", "extends: ../ours.yaml\nseeds: [7]\n")
    return folder


def test_a_study_may_lie_outside_the_project(lab: Path, grpo: Grpo) -> None:
    """Its module and its data are found beside it, in each process by params.yaml."""
    code, _, error = grpo("study", "use", "../our lab/ours.yaml")
    assert code == 0, error
    study = load_study()
    assert (study.folder, study.file) == ("../our lab", "../our lab/ours.yaml")
    assert study.task("main").verify(["2"], []) == [0.25]
    assert study.task("main").problems("train")[0].question == "1 + 1?"
    assert grpo("study", "check")[1].endswith("params.yaml is as composed from ../our lab/ours.yaml\n")
    edit("seeds: [0, 1, 2, 3, 4]", "seeds: [5]")
    assert "params.yaml: edited since `grpo study use` wrote it; `git diff params.yaml`" in grpo("study", "check")[1]
    Path("rows").mkdir()
    asked = ["ours?", *(f"train {n}?" for n in range(999))]
    Path("rows/train.jsonl").write_text("".join(json.dumps({"q": row, "a": "2"}) + "\n" for row in asked))
    with pytest.raises(UserError, match=r"stages.yaml: is not that of params.yaml, which was edited \(main-0\)"):
        load_study()
    code, _, error = grpo("study", "check")
    assert code == 0, error
    assert load_study().task("main").problems("train")[0].question == "ours?", "a path from the project's folder comes first"


def test_a_study_whose_stages_could_not_run_is_not_called_right(project: Path, grpo: Grpo) -> None:
    write("rows.jsonl", '{"question": "1", "answer": "1"}\n')
    task = "{use: dataset, question: question, answer: answer, files: {train: rows.jsonl, validation: rows.jsonl}}"
    write("studies/bare.yaml", f"extends: smoke\nexperiments: {{only: [grpo_learning_rate]}}\ntasks: {{main: {task}}}\n")
    code, _, said = grpo("study", "check", "bare")
    assert code == 2 and "models.main.documents: Dataset has no documents" in said
    for folder in ("..", ".", "studies/..", str(project)):
        activate("smoke", project)
        edit("folder: studies", f"folder: {folder}")
        code, _, said = grpo("study", "check")
        assert code == 2 and f"folder: {folder} contains the project" in said


def test_a_study_is_checked_from_its_own_folder(project: Path, grpo: Grpo, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which is no project; its module lies beside it."""
    arms = "arms: {plain: {}, own: {loss_type: 'beside_it:loss'}}"
    text = f"extends: smoke\nexperiments: {{only: [grpo_learning_rate], grpo_learning_rate: {{{arms}}}}}\n"
    text += "claims: [{arm: own, beats: plain, metric: token_entropi, by: 1.25}]\n"  # the loss may log it
    write("elsewhere/mine.yaml", text)
    write("elsewhere/beside_it.py", "def loss(inputs):\n    return -inputs.advantages * inputs.log_probs, {}\n")
    for folder, path in ((project, "elsewhere/mine.yaml"), (project / "elsewhere", "mine.yaml")):
        monkeypatch.chdir(folder)
        code, said, error = grpo("study", "check", path)
        assert code == 0 and "own: loss_type beside_it:loss" in said, error
        assert "note: claims.0.metric: no run logs 'token_entropi'. Near: token_entropy" in said
        assert "grpo_learning_rate: 2 arms, 1 seeds\n  plain: no setting changed; 3 steps, 1 update(s)" in said
        assert f"left out of what it extends: {len(EXPERIMENTS) - 1} experiments\n" in said
        assert "claim own-1, grpo_learning_rate: token_entropi of own is at least 1.25 times that of plain (end)\n" in said
    write("mine.yaml", text.replace("beside_it", "gone"))
    code, _, error = grpo("study", "check", "mine.yaml")
    assert code == 2 and "gone:loss: no such module. Give MODULE:NAME of a Python file in the study's folder (here " in error


def test_pins_that_a_study_takes_back_or_whose_experiments_it_leaves_out_are_dropped(project: Path) -> None:
    write(
        "studies/pins.yaml", 'extends: smoke\nselection: {pinned: {grpo_learning_rate: "3e-4", grpo_baselines: no_baseline}}\n'
    )
    write("studies/fewer.yaml", "extends: pins\nexperiments: {without: [grpo_baselines]}\n")
    assert compose(Path("studies/fewer.yaml"))["selection"]["pinned"] == {"grpo_learning_rate": "3e-4"}
    write("studies/free.yaml", "extends: pins\nselection: {pinned: {grpo_learning_rate: null}}\n")
    assert compose(Path("studies/free.yaml"))["selection"]["pinned"] == {"grpo_baselines": "no_baseline"}


def test_a_study_of_several_folders_extends_by_relative_paths(lab: Path, grpo: Grpo) -> None:
    """Modules and data are looked for in the folder of the study itself, not of those that it extends."""
    code, _, error = grpo("study", "use", "../our lab/later/next.yml")
    assert code == 2 and "lab_verifier:close: no such module" in error and "in the study's folder (here " in error
    for name in ("lab_verifier.py", "rows"):
        (lab / name).rename(lab / "later" / name)
    invalidate_caches()
    code, _, error = grpo("study", "use", "../our lab/later/next.yml")
    assert code == 0 and load_study().seeds == [7] and load_study().file == "../our lab/later/next.yml", error
    assert "as composed from ../our lab/later/next.yml" in grpo("study", "check")[1]


def test_a_machine_without_the_studys_folder_is_told(lab: Path, grpo: Grpo) -> None:
    assert grpo("study", "use", "../our lab/ours.yaml")[0] == 0
    lab.rename(lab.with_name("moved"))
    code, _, error = grpo("study", "check")
    assert code == 2 and "params.yaml: folder: no folder ../our lab with the study's own modules" in error
    assert grpo("study", "use", "../moved/ours.yaml", "--force")[0] == 0 and load_study().folder == "../moved"


def test_a_study_file_beside_params_yaml_is_told_from_its_edits(project: Path, grpo: Grpo) -> None:
    """Its modules lie in studies/, as the project's whole folder cannot be what stages depend on."""
    write("own.yaml", "extends: smoke\nseeds: [3]\n")
    assert grpo("study", "use", "own.yaml")[0] == 0
    assert (load_study().folder, load_study().file) == ("studies", "own.yaml")
    assert grpo("study", "check")[1].endswith("params.yaml is as composed from own.yaml\n")


KEPT = ["grpo_learning_rate", "grpo_baselines"]


@pytest.mark.parametrize("word", ["only", "without"])
def test_experiments_are_left_out(project: Path, word: str) -> None:
    names = KEPT if word == "only" else [name for name in EXPERIMENTS if name not in KEPT]
    study = load_study(write("studies/few.yaml", f"extends: mini\nexperiments: {{{word}: {json.dumps(names)}}}\n"))
    assert study.active_experiments == KEPT
    assert study.experiments["grpo_learning_rate"] == load_study(Path("studies/mini.yaml")).experiments["grpo_learning_rate"]
    assert list(study.experiments) == list(EXPERIMENTS), "DVC needs each, with arms or `arms: {}`"


def test_experiments_are_left_out_of_what_is_extended_and_arms_bring_one_back(project: Path) -> None:
    write("studies/few.yaml", "extends: mini\nexperiments: {only: [grpo_learning_rate, sft_experiment]}\n")
    path = write("studies/more.yaml", "extends: few\nexperiments: {grpo_baselines: {arms: {no_baseline: {}}}}\n")
    assert load_study(path).active_experiments == ["sft_experiment", *KEPT]
    less = load_study(write("studies/less.yaml", "extends: more\nexperiments: {without: [sft_experiment]}\n"))
    assert less.active_experiments == KEPT
    values = compose(write("studies/new.yaml", "extends: mini\nexperiments: {grpo_own: {arms: {a: {}}}}\n"))
    assert list(values["experiments"]) == [*EXPERIMENTS, "grpo_own"], "a new one comes last"


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("tasks: {main: {levels: 2}}", True),
        ("tasks: {main: {use: gsm8k}}", False),
        ("models: {main: {source: local, path: m}}", False),
        ("tasks: {keyword: {use: keyword, seed: 1}}", True),
    ],
)
def test_what_is_by_design_of_a_task_or_model_goes_with_it(project: Path, text: str, kept: bool) -> None:
    found = compose(write("studies/own.yaml", f"extends: mini\n{text}\n"))["by_design"]
    assert found == (values_of("mini")["by_design"] if kept else [])
    claims = compose(write("studies/own.yaml", f"extends: tools\n{text}\n"))["claims"]
    assert sum(claim.get("by_design") is not None for claim in claims) == (2 if kept else 0)


@pytest.mark.parametrize("name", ["grpo_baselines", "grpo_prompt_ablation", "leaderboard"])
def test_an_experiment_runs_alone(project: Path, name: str) -> None:
    """It drags no experiment before it along, and its arms start from the study's own values."""
    alone = f"{{only: [{name}], {name}: {{builds_on: null}}}}"
    study = load_study(write("studies/alone.yaml", f"extends: mini\nexperiments: {alone}\n"))
    assert (study.active_experiments, study.needed_selections(name)) == ([name], [])
    runs = study.runs_table().values()
    assert {run["arm"] for run in runs} == {*study.experiments[name].arms}
    assert {run["after"] for run in runs} == {"data/training_inputs/software.json"}


@pytest.mark.parametrize(
    "path", [path for path in STUDIES if path.stem.startswith(("math", "gsm8k"))], ids=lambda path: path.stem
)
def test_each_study_of_a_real_model_can_be_rehearsed(path: Path, tmp_path: Path) -> None:
    """With the overlay as it is, on the CPU, whatever engine, optimizer and processes the study has."""
    text = (ROOT / "studies/math-rehearsal.yaml").read_text()
    own = tmp_path / "rehearsal.yaml"
    own.write_text(text.replace("extends: math-h100", f"extends: {path.absolute()}"))
    study = load_study(own)
    devices = [(each.engine.device, each.learner.device) for each in map(study.for_task, study.tasks)]
    assert {*devices} == {("cpu", "cpu")} and not any(kind.gpus for kind in study.resources.values())
    assert (study.learner.processes, study.learner.optimizer) == (1, "adamw")


def test_a_task_that_only_experiments_left_out_are_about_is_left_out_too(project: Path) -> None:
    """Nobody waits for a model that no run starts from."""
    own = project / "studies/own.yaml"
    own.write_text("extends: mini\nexperiments: {only: [grpo_learning_rate]}\n")
    composed = compose(own)
    assert [list(composed[section]) for section in ("tasks", "models", "sft_datasets")] == [["main"]] * 3
    assert load_study(own).experiments["grpo_keyword_inclusion"].task == "keyword"
    own.write_text("extends: mini\nexperiments: {only: [grpo_keyword_inclusion]}\n")
    assert list(compose(own)["tasks"]) == ["main", "keyword"]
    own.write_text("extends: mini\nexperiments: {only: [grpo_learning_rate]}\ntasks: {other: {use: arithmetic}}\n")
    assert list(compose(own)["tasks"]) == ["main", "other"]  # which no experiment names: whoever adds it wants its dataset


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("extends: nosuch\n", "studies/bad.yaml: extends: studies/nosuch.yaml: no such study. Choose one of "),
        ("extends: [mini]\n", "studies/bad.yaml: extends: expected the name or path of a study, but it is ['mini']."),
        ("extends: other\n", "extends itself (studies/bad.yaml extends studies/other.yaml extends studies/bad.yaml)."),
        (
            "extends: mini\nexperiments: {only: [grpo_x]}\n",
            "studies/bad.yaml: experiments.only: no such experiment: 'grpo_x' (k",
        ),
        (
            "extends: mini\nexperiments: {only: [sft_experiment], leaderboard: {arms: {a: {}}}}\n",
            "experiments.leaderboard: has arms here, but `only` or `without` leaves it out: remove one of the two.",
        ),
        (
            "extends: quickstart\nexperiments: {only: [leaderboard]}\n",
            "experiments.only: leaderboard has no arms in the extended study: give it some.",
        ),
        ("extends: mini\nexperiments: {without: [grpo_baselines]}\n", "experiments.grpo_baselines.arms: left out, but grpo_"),
        (
            "extends: mini\nexperiments: {only: [grpo_prompt_ablation]}\n",
            "Leave grpo_prompt_ablation out too, or run it from the study's values: "
            "experiments.grpo_prompt_ablation.builds_on: null.",
        ),
        (
            "extends: mini\nexperiments: {grpo_learning_rate: {arms: {3e-4: {learning_rate: 3e-4}}}}\n",
            "studies/bad.yaml: experiments.grpo_learning_rate.arms: 0.0003 is a name here, which YAML reads as a number",
        ),
    ],
)
def test_a_wrong_study_is_told_in_one_message_and_changes_nothing(project: Path, grpo: Grpo, text: str, message: str) -> None:
    write("studies/other.yaml", "extends: bad\n")
    write("studies/bad.yaml", text)
    before, files = Path("params.yaml").read_bytes(), sorted(project.rglob("*"))
    code, out, error = grpo("study", "use", "bad", "--force")
    assert code == 2 and out == "" and message in error and error.count("error:") == 1, error
    assert Path("params.yaml").read_bytes() == before
    assert sorted(project.rglob("*")) == files, "nothing half written"


def test_a_copy_of_params_yaml_is_a_study(project: Path) -> None:
    """Its name, folder and list of experiments follow from where it lies and what it holds."""
    text = Path("params.yaml").read_text()
    without = re.sub(r"    arms:\n      best:\n        keep_steps: .*", "    arms: {}", text)
    assert without != text
    study = load_study(write("mine/copy.yaml", without))
    assert (study.study, study.folder) == ("copy", "mine")
    assert study.active_experiments == [name for name in EXPERIMENTS if name != "grpo_kl_divergence"] and study.kl_in == []


def test_the_old_task_stays_and_its_checkpoints_are_those_of_all_methods(project: Path) -> None:
    """Where all experiments on it are left out; without an old task only GRPO runs are measured."""
    chosen = "experiments: {only: [sft_experiment, grpo_kl_divergence], grpo_kl_divergence: {builds_on: null}}"
    text, old = f"extends: smoke\ndescription: D.\n{chosen}\n", "evaluation: {old_task: {task: keyword, prompt: keyword}}\n"
    without = load_study(write("studies/without.yaml", text))
    assert "keyword" not in without.tasks and without.kl_in == ["grpo_kl_divergence"]
    study = load_study(write("studies/with.yaml", text + old))
    assert "keyword" in study.tasks and study.kl_in == ["sft_experiment", "grpo_kl_divergence"]
    assert study.prompt_formats("keyword") == ["keyword"]
    for right, wrong, message in (
        ("task: k", "task: x", "no task 'xeyword'"),
        ("prompt: k", "prompt: x", "no format 'xeyword'"),
    ):
        with pytest.raises(UserError, match=message):
            load_study(write("studies/wrong.yaml", text + old.replace(right, wrong)))


@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.stem)
def test_each_study_is_written_as_it_is_composed(path: Path, tmp_path: Path) -> None:
    """Through text and back, with arms in their order; the text names its study and the files that it is composed of."""
    written = activate(path.stem, tmp_path)
    composed, values, text = values_of(path.stem), parse_yaml(written), written.read_text()
    assert exact({**values, "folder": ""}) == exact({**composed, "folder": ""}) and list(values) == list(composed)
    for name, experiment in composed["experiments"].items():
        assert list(values["experiments"][name]["arms"]) == list(experiment["arms"])
    study = study_named(path.stem)
    assert load_study(written).model_copy(update={"folder": "studies"}) == study
    assert text.startswith(f"# The study {path.stem}, ") and "docs/settings.md" in text and "studies/base.yaml" in text


def test_the_committed_params_yaml_and_stages_yaml_are_those_of_mini(workdir: Path) -> None:
    activate("mini", workdir)
    write_stages(study_named("mini"), composed=True)
    for name in ("params.yaml", "stages.yaml"):
        assert (ROOT / name).read_text() == Path(name).read_text()


# ------------------------------------------------------------------------------------------------------------ controls


def test_controls_are_arms_on_the_last_winner_that_others_take(project: Path) -> None:
    text = "extends: smoke\ndescription: With controls.\ncontrols: [random_reward, format_only, best_prompt]\n"
    study = load_study(write("studies/own.yaml", text))
    added = study.experiments["controls"]
    assert added.builds_on == "grpo_prompt_ablation" and [*added.arms] == ["full_reward", "random_reward", "format_only"]
    assert added.arms["format_only"] == {"reward": "format_reward"} and study.metric == "answer_reward"
    without = study_named("smoke")
    assert {name: of for name, of in study.experiments.items() if name != "controls"} == without.experiments
    assert without.controls == [] and "controls" not in without.model_dump()
    own = write(
        "studies/mine.yaml", text + "experiments:\n  controls: {builds_on: grpo_baselines, seeds: 1, arms: {more: {}}}\n"
    )
    mine = load_study(own).experiments["controls"]
    assert (mine.builds_on, mine.seeds, [*mine.arms][-1]) == ("grpo_baselines", 1, "more")
    only = load_study(write("studies/few.yaml", text + "experiments: {only: [grpo_learning_rate]}\n")).experiments["controls"]
    assert only.builds_on == "grpo_learning_rate"
    for kept, own_arms in (("only: [sft_experiment]", []), ("only: [controls], controls: {arms: {more: {}}}", ["more"])):
        text_of_these = text + "experiments: {" + kept + "}\n"
        alone = load_study(write("studies/alone.yaml", text_of_these)).experiments["controls"]  # no GRPO to build on
        assert alone.builds_on is None and [*alone.arms] == [*added.arms, *own_arms]
    before = "grpo_learning_rate, grpo_baselines, grpo_length_normalization, grpo_group_standard_deviation"
    sweeps = f"experiments: {{only: [{before}, grpo_off_policy_sweep_broad, grpo_off_policy_sweep_focused]}}\n"
    of_sweeps = load_study(write("studies/sweeps.yaml", text + sweeps)).experiments["controls"]
    assert of_sweeps.builds_on == "grpo_group_standard_deviation"  # of the broad sweep the focused one takes the ranking
    for wrong, message in (
        ("controls: [chance]", "controls: no control 'chance'"),
        ("evaluation: {best_of_n: {checkpoints: [grpo_lora/none]}}", "best_of_n.checkpoints: no arm 'grpo_lora/none'"),
    ):
        with pytest.raises(UserError, match=re.escape(message)):
            load_study(write("studies/wrong.yaml", f"extends: smoke\ndescription: Wrong.\n{wrong}\n"))


@pytest.mark.parametrize("path", sorted((ROOT / "studies/literature").glob("*.yaml")), ids=lambda path: path.stem)
def test_a_study_of_a_paper_is_used_by_its_name(path: Path, project: Path, grpo: Grpo) -> None:
    """It has at most 60 lines, its own heading, and claims written before its runs."""
    text = path.read_text()
    write(f"studies/literature/{path.name}", text)
    for module in (ROOT / "studies").glob("*.py"):  # a copied study takes its module along
        shutil.copy(module, "studies/literature")
    assert len(text.splitlines()) <= 60 and "arXiv" in text and "were written before any run" in text and "\nheading: " in text
    assert grpo("study", "use", f"literature/{path.stem}")[0] == 0
    values = parse_yaml(Path("params.yaml"))
    assert (values["study"], values["file"]) == (path.stem, f"studies/literature/{path.name}")
    assert grpo("study", "check")[0] == grpo("plan")[0] == 0
    assert load_study(Path("params.yaml")).own_claims


# ------------------------------------------------------------------------------------------------------------ commands


def test_use_makes_a_study_the_active_one(project: Path, grpo: Grpo) -> None:
    code, out, error = grpo("study", "use", "math-24gb")
    assert code == 0, error
    assert load_study() == study_named("math-24gb")
    assert out.startswith("params.yaml is now the study math-24gb: ") and len(out.splitlines()) < 8
    assert grpo("study", "show", "math-24gb")[1] == Path("params.yaml").read_text()
    code, shown, error = grpo("study", "show", "base")  # the common part of all, which is no study
    assert code == 0 and error == "" and "group_size: 8" in shown
    assert grpo("study", "use", "smoke")[0] == 0, "what was composed is no edit by hand"


def test_use_removes_only_what_dvc_can_bring_back(project: Path, grpo: Grpo) -> None:
    """Not what git tracks; and nothing where DVC's cache is empty, as in a fresh clone, or lacks a file.

    The stage's output is an arm with its seeds.
    """
    cached, uncached, of_both = (paths.RUNS / f"grpo_learning_rate/{arm}/0" for arm in ("9e-9", "8e-8", "1e-6"))
    write_result(paths.SELECT / "grpo_async_offpolicy.json")
    Path(".gitignore").write_text("/data/\n")
    make = f"mkdir -p {cached} && echo 1 > {cached}/a && echo 2 > {cached}/b"
    Path("dvc.yaml").write_text(f"stages: {{made: {{cmd: '{make}', outs: [{cached.parent}]}}}}\n")
    for command in (["git", "init"], ["dvc", "init"], ["dvc", "repro"]):
        sh(project, *command, "--quiet")
    for run in (uncached, of_both):
        write_result(run / "metrics.json")
    kept = Path(".dvc/cache").rename("kept")
    for lacking in ("all", "one file"):
        if lacking == "one file":
            shutil.copytree(kept, ".dvc/cache")
            next(path for path in Path(".dvc/cache/files/md5").glob("*/*") if path.read_bytes() == b"2\n").unlink()
        assert f"remove them by hand:\n  {uncached}\n  {cached}\n" in grpo("study", "use", "gsm8k")[1], lacking
        assert (cached / "b").exists() and uncached.exists()
    shutil.rmtree(".dvc/cache")
    kept.rename(".dvc/cache")
    text = "removed results of runs that this study does not have; DVC's cache keeps them:\n"
    assert f"{text}  {cached}\n" in grpo("study", "use", "math-24gb")[1]
    assert {path.name for path in cached.parents[1].iterdir()} == {"8e-8", "1e-6"}, "and its empty folder"
    assert uncached.exists() and (paths.SELECT / "grpo_async_offpolicy.json").exists()
    sh(project, "dvc", "checkout", "--quiet")
    assert (cached / "b").read_text() == "2\n"
    of_output = [cached.parent, cached, cached / "a"]
    assert in_cache([cached.with_name("1"), *of_output, cached.parents[1]]) == of_output  # a seed of which it has no file
    Path("dvc.lock").write_text("stages: 3\n")
    assert in_cache(of_output) == []


def test_use_says_where_the_report_stays_that_another_study_replaces(project: Path, grpo: Grpo) -> None:
    def said() -> list[str]:
        return grpo("study", "use", "mini")[1].partition("reports/: holds the report of ")[2].splitlines()[:1]

    write(str(paths.RECORD), '{"study": "gsm8k"}')
    told, lost, kept = (
        "the study gsm8k, which `make repro` replaces. ",
        "Commit it first; or work in ",
        "The last commit has it.",
    )
    assert said()[0].startswith(told + lost)  # no repository
    sh(project, "git", "init", "--quiet")
    assert said()[0].startswith(told + lost)
    for command in (["add", "."], ["-c", "user.name=n", "-c", "user.email=e", "commit", "--quiet", "--message", "m"]):
        sh(project, "git", *command)
    assert said() == [told + kept]
    for of_none in ('{"study": "mini"}', "{"):
        write(str(paths.RECORD), of_none)
        assert said() == []


def write_result(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("{}")


def test_use_does_not_overwrite_an_edit_unasked(project: Path, grpo: Grpo) -> None:
    """Neither one by hand nor one by `dvc exp run -S`, nor when stages.yaml was renewed after it."""
    edit("seeds: [0]", "seeds: [0, 1]")
    before = Path("params.yaml").read_bytes()
    for _ in range(2):
        code, out, error = grpo("study", "use", "mini")
        assert code == 2 and out == "" and "git diff params.yaml" in error and "`grpo study use mini --force`" in error, error
        assert Path("params.yaml").read_bytes() == before
        grpo("study", "check")
    assert grpo("study", "use", "mini", "--force")[0] == 0 and load_study().study == "mini"
    with modify_yaml("params.yaml") as params:
        params["grpo"]["learning_rate"] = 1.0
    assert grpo("study", "use", "smoke")[0] == 2
    assert grpo("study", "use", "mini")[0] == 2
    Path("params.yaml").write_text(grpo("study", "show", "mini")[1])
    assert grpo("study", "use", "smoke")[0] == 0, "the edit was taken back"


def test_stages_follow_from_edits_of_arms_and_seeds(project: Path, grpo: Grpo) -> None:
    edit("      '3e-4': {learning_rate: 0.0003}\n", "      # not this time\n")
    with pytest.raises(UserError, match=r"stages.yaml: .*\(grpo_learning_rate-3e-4\)\. Run `make repro`"):
        load_study()
    assert "stages train, 0 of them new" in grpo("study", "check")[1]
    assert "grpo_learning_rate-3e-4" not in parse_yaml(paths.STAGES)["runs"]
    assert "      # not this time\n" in Path("params.yaml").read_text(), "comments of one's own stay"
    assert "1e-3" in load_study().experiments["grpo_learning_rate"].arms


def test_a_study_with_import_paths_can_be_changed_by_dvc_exp(lab: Path, grpo: Grpo) -> None:
    """DVC drops quotes, and does not read `close:close` in a mapping or list on one line."""
    write(
        "../our lab/paths.yaml",
        "extends: ours\ngrpo: {reward: {'lab_verifier:close': 0.5, answer_reward: 1}}\n"
        "tasks: {main: {answers: ['a:b', {'c:d': [1, 'e:f']}]}}\n"
        "experiments: {only: [grpo_baselines], grpo_baselines: {arms: {plain: {}, own: {reward: 'lab_verifier:close'}}}}\n",
    )
    Path("params.yaml").write_text(to_yaml(compose(Path("../our lab/paths.yaml"))))
    before = parse_yaml(Path("params.yaml"))
    with modify_yaml("params.yaml") as params:
        params["grpo"]["group_size"] = 16
    assert load_yaml("params.yaml") == {**before, "grpo": {**before["grpo"], "group_size": 16}}


def test_a_study_whose_file_was_edited_can_be_used_again(project: Path, grpo: Grpo) -> None:
    write("studies/own.yaml", "extends: smoke\nseeds: [1]\n")
    assert grpo("study", "use", "own")[0] == 0
    write("studies/own.yaml", "extends: smoke\nseeds: [2]\n")
    assert "studies/own.yaml: edited since `grpo study use`" in grpo("study", "check")[1]
    code, _, error = grpo("study", "use", "own")
    assert code == 0 and load_study().seeds == [2], error
    Path("studies/own.yaml").unlink()
    assert grpo("study", "use", "mini")[0] == 0, "nor is it an edit by hand that the file has gone"


def test_list_marks_the_active_study_and_leaves_the_base_out(project: Path, grpo: Grpo) -> None:
    write("studies/own.yaml", "extends: smoke\nseeds: [1]\n")
    lines = grpo("study", "list")[1].splitlines()
    assert [line.split()[0] for line in lines if line[0] == " "] == [
        "gsm8k", "literature/few_prompts", "literature/forgetting", "literature/length_bias", "literature/pass_at_k",
        "literature/spurious_rewards", "literature/spurious_rewards_smollm2",
        "lora", "math-24gb", "math-24gb-first", "math-24gb-turing", "math-2xh100", "math-7b-8xh100", "math-first",
        "math-h100", "math-one-instance", "math-rehearsal", "mini", "objectives", "own", "quickstart", "real", "smollm2",
        "smollm2-gsm8k", "smollm2-kl", "smollm2-numbers", "smollm2-sentences", "tools",
    ]  # fmt: skip
    assert [line.split()[1] for line in lines if line[0] == "*"] == ["smoke"]
    assert (
        f"  {'own':<35} As smoke, but for: seeds. [smoke, mini, base]" in lines
    )  # literature/spurious_rewards_smollm2 has 35 letters

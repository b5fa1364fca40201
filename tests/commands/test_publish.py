"""`grpo publish`: the card's numbers are those of the result files, the folder loads, mistakes are told, and the upload."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from contextlib import chdir
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
from huggingface_hub import HfApi, ModelCard
from scipy.stats import binomtest
from study_parts import Grpo, activate, with_values

from grpo.common.files import files_digest, read_json, write_json, write_text
from grpo.models.checkpoint import load_tokenizer
from grpo.pretraining.base_model import make_base_model
from grpo.results.selection import select, winner_file
from grpo.study import paths
from grpo.study.effective import effective_run, read_selections
from grpo.study.schema import load_study
from grpo.tasks.build import build_dataset
from grpo.training.run import train_run

RUN, TWIN = "grpo_learning_rate/3e-4/0", "grpo_baselines/reinforce_with_baseline/0"
RIGHT = {0: 3, 2: 20, 3: 40}  # at each evaluation; the last one's first 16 problems select, of which 12 are right
ASKED = {0: 32, 2: 32, 3: 64}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of the smoke study, one of them taken over; their rewards are made up, as so small a model answers nothing right."""
    folder = tmp_path_factory.mktemp("trained")
    activate("smoke", folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{folder}/mlflow.db")
        study = load_study()
        build_dataset(study.task("main"), paths.DATASETS / "main", {})
        make_base_model(with_values(study, {"models.main.steps": 2}), "main")
        for arm in ("3e-4", "1e-3"):
            train_run(study, effective_run(study, "grpo_learning_rate", arm, 0, []))
        chosen = winner_file(select(study, "grpo_learning_rate")) | {"winner": "3e-4", "overrides": {"learning_rate": 3e-4}}
        write_json(paths.SELECT / "grpo_learning_rate.json", chosen)
        before = read_selections(study, "grpo_baselines")
        train_run(study, effective_run(study, "grpo_baselines", "reinforce_with_baseline", 0, before))
    for run in (RUN, TWIN):
        made_up_rewards(folder, run)
    return folder


def made_up_rewards(project: Path, run: str) -> None:
    results, checkpoints = project / paths.RUNS / run, project / paths.CHECKPOINTS / run
    outcomes = [{"step": step, "answer_reward": [1.0] * n + [0.0] * (ASKED[step] - n)} for step, n in RIGHT.items()]
    outcomes[-1]["answer_reward"] = [1.0] * 12 + [0.0] * 4 + [1.0] * 28 + [0.0] * 20
    write_text(results / "outcomes.jsonl", "".join(json.dumps(record) + "\n" for record in outcomes))
    validation = pd.read_csv(results / "validation.csv")
    assert list(validation["step"]) == list(RIGHT)
    validation["val/answer_reward"] = [n / ASKED[step] for step, n in RIGHT.items()]
    validation.to_csv(results / "validation.csv", index=False, lineterminator="\n")
    for kind, step in {"best": 2, "last": 3}.items():
        if (checkpoints / kind).exists():
            metadata = read_json(checkpoints / kind / "metadata.json", "")
            write_json(
                checkpoints / kind / "metadata.json", metadata | {"step": step, "answer_reward": RIGHT[step] / ASKED[step]}
            )


@pytest.fixture
def project(trained: Path, workdir: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy, in which no token is known and the Hub is never asked."""
    shutil.copytree(trained, workdir, dirs_exist_ok=True, ignore=shutil.ignore_patterns("mlflow.db*", "state"))
    monkeypatch.setenv("HF_HOME", str(workdir / "hub"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr("grpo.commands.publish.get_token", lambda: None)
    return workdir


def interval(step: int) -> str:
    """Value and Wilson interval by scipy, and the number of problems."""
    right, asked = RIGHT[step], ASKED[step]
    ends = binomtest(right, asked).proportion_ci(method="wilson")
    return f"{right / asked:.3f} ({ends.low:.3f} to {ends.high:.3f}) | {asked}"


def test_the_card_says_what_the_result_files_say(project: Path, grpo: Grpo) -> None:
    code, told, _ = grpo("publish", RUN, "--out", "shared", "--license", "apache-2.0")
    assert code == 0 and "shared: best checkpoint of" in told
    card, text = ModelCard.load("shared/README.md"), Path("shared/README.md").read_text()
    (result,) = card.data.eval_results
    metadata = read_json(paths.CHECKPOINTS / RUN / "best/metadata.json", "")
    assert result.metric_value == metadata["answer_reward"] == RIGHT[2] / 32
    assert card.data.license == "apache-2.0" and card.data.base_model is None
    rows = dict(line.strip("| ").split(" | ", 1) for line in text.splitlines() if line.startswith("| "))
    assert rows["**this checkpoint** (step 2)"] == interval(2)
    assert rows["the run's last evaluation (step 3)"] == interval(3)
    assert rows["before training"] == interval(0)
    counted = rows["the part of it by which the study compares runs"]
    assert counted.startswith("0.583 (") and counted.endswith(" | 48")  # 28 of 48
    assert "the highest of 2 evaluations" in text
    assert rows["`learning_rate`"] == "`0.0003` | `1e-05` | arm 3e-4"
    assert rows["`n_grpo_steps`"] == "`3` | `200` | study" and "`cliprange`" not in rows  # 0.2 is the default
    digests = rows["digests (SHA-256, first 16 digits)"]
    of_data = (("model", paths.model("main")), ("train", paths.train("main")), ("validation", paths.validation("main")))
    for name, path in of_data:
        assert f"{name} `{files_digest(path)}`" in digests
    timing = read_json(paths.run_timing(RUN), "")
    assert (
        rows["MLflow run"] == f"`{timing['mlflow_run_id']}`"
        and rows["started from"] == "pretrained by the study (data/model/main)"
    )
    assert rows["commit"] == "not known" and "git checkout" not in text  # the project of this test is in no repository
    assert "dvc repro train@grpo_learning_rate-3e-4\ngrpo publish grpo_learning_rate/3e-4/0 --kind best" in text
    assert load_study().task("main").formats["r1_zero"].template in text
    assert Path("shared/curve.png").read_bytes().startswith(b"\x89PNG")


def test_the_folder_loads_and_is_the_checkpoint(project: Path, grpo: Grpo) -> None:
    assert grpo("publish", RUN, "--kind", "last")[0] == 0
    folder = Path("published/grpo_learning_rate--3e-4--0-last")
    weights = paths.CHECKPOINTS / RUN / "last/model.safetensors"
    assert (folder / "model.safetensors").read_bytes() == weights.read_bytes()
    text = (folder / "README.md").read_text()
    loaded: dict[str, Any] = {}
    with chdir(folder):
        exec(text.partition("```python\n")[2].partition("```")[0], loaded)
    theirs, ours = loaded["tokenizer"], load_tokenizer(folder)
    for asked in ("1 + 1", load_study().task("main").formats["r1_zero"].prompt("How many are 12 and 7?")):
        assert tuple(theirs(asked)["input_ids"]) == ours.prompt_ids(asked)
        assert loaded["model"](**theirs(asked, return_tensors="pt")).logits.isfinite().all()
    assert (theirs.eos_token_id, loaded["model"].generation_config.eos_token_id) == (ours.eos_token_id,) * 2
    assert f"**this checkpoint** (step 3) | {interval(3)}" in text and "not chosen by its reward" in text
    assert ModelCard.load(folder / "README.md").data.license is None and "| licence of these weights | not stated |" in text
    assert not (folder / "metadata.json").exists()  # it may name folders of this machine


def test_of_a_run_that_was_taken_over_the_weights_are_its_twins(project: Path, grpo: Grpo) -> None:
    code, told, _ = grpo("publish", TWIN, "--out", "shared")
    assert code == 0 and f"{TWIN} equals {RUN}; this is the checkpoint of that run" in told
    weights = paths.CHECKPOINTS / RUN / "best/model.safetensors"
    assert Path("shared/model.safetensors").read_bytes() == weights.read_bytes()
    text = Path("shared/README.md").read_text()
    assert f"these are the weights of `{RUN}`" in text and "winner of grpo_learning_rate (3e-4)" in text


def test_a_base_model_of_the_hub_is_named_and_its_licence_not_invented(project: Path, grpo: Grpo) -> None:
    revision = "0123456789abcdef0123456789abcdef01234567"
    text = Path("params.yaml").read_text()
    start, end = text.index("  main:\n    source: pretrain"), text.index("  keyword:", text.index("models:"))
    hub = f"  main: {{source: hub, repo: someone/model, revision: {revision}}}\n"
    Path("params.yaml").write_text(text[:start] + hub + text[end:])
    metadata = paths.CHECKPOINTS / RUN / "best/metadata.json"
    assert grpo("publish", RUN, "--out", "from-another")[0] == 0  # what the run started from is not the model that is named now
    assert ModelCard.load("from-another/README.md").data.base_model is None
    write_json(metadata, read_json(metadata, "") | {"started_from": f"someone/model at {revision}"})
    assert grpo("publish", RUN, "--out", "shared")[0] == 0
    card = ModelCard.load("shared/README.md")
    assert card.data.base_model == "someone/model" and card.data.license is None
    assert "licence of the base model | see its page" in card.text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["grpo_learning_rate/5e-4/0"], "no arm '5e-4' (known: 3e-4, 1e-3)"),
        ([RUN, "--out", "data"], "data: already exists and is not empty"),
        ([RUN, "--repo", "someone/model"], "no token for the Hub. Set HF_TOKEN"),
    ],
)
def test_mistakes_are_told_and_nothing_is_written(project: Path, grpo: Grpo, arguments: list[str], message: str) -> None:
    code, _, error = grpo("publish", *arguments)
    assert code == 2 and message in error and "Traceback" not in error
    assert not Path("published").exists()


def test_a_checkpoint_that_is_not_kept_or_not_the_runs_own(project: Path, grpo: Grpo) -> None:
    metadata = paths.CHECKPOINTS / RUN / "last/metadata.json"
    write_json(metadata, read_json(metadata, "") | {"answer_reward": 0.9})
    code, _, error = grpo("publish", RUN, "--kind", "last")
    assert code == 2 and "damaged (it differs from validation.csv at this step)" in error
    shutil.rmtree(paths.CHECKPOINTS / RUN / "best")
    code, _, error = grpo("publish", TWIN)
    assert code == 2 and "no checkpoint. Choose another with --kind: last" in error
    assert not Path("published").exists()


def test_a_link_in_a_checkpoint_is_not_published(project: Path, grpo: Grpo) -> None:
    (project / "id_rsa").write_text("PRIVATE KEY")
    link = paths.CHECKPOINTS / RUN / "best/more/notes.txt"
    link.parent.mkdir()
    link.symlink_to(project / "id_rsa")
    code, _, error = grpo("publish", RUN)
    assert code == 2 and "notes.txt is a symbolic link to a file elsewhere" in error
    assert not Path("published").exists()


def test_the_folder_is_uploaded_to_a_private_repository(project: Path, grpo: Grpo, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, dict[str, Any]] = {}

    def upload(_: HfApi, **how: Any) -> SimpleNamespace:
        asked["upload"] = how
        return SimpleNamespace(commit_url="https://huggingface.co/someone/model/commit/1")

    monkeypatch.setattr("grpo.commands.publish.get_token", lambda: "hf_of_the_test")
    monkeypatch.setattr(HfApi, "create_repo", lambda _, repo, **how: asked.update(create={"repo": repo, **how}))
    monkeypatch.setattr(HfApi, "upload_folder", upload)
    code, told, error = grpo("publish", RUN, "--out", "shared", "--repo", "someone/model")
    assert code == 0 and "uploaded: https://huggingface.co/someone/model/commit/1" in told, error
    assert asked["create"] == {"repo": "someone/model", "private": True, "exist_ok": True}
    assert (asked["upload"]["repo_id"], asked["upload"]["folder_path"]) == ("someone/model", Path("shared"))
    assert {"README.md", "curve.png", "model.safetensors"} <= {path.name for path in Path("shared").iterdir()}


def test_an_upload_that_fails_leaves_the_folder_and_says_how_to_go_on(project: Path) -> None:
    env = os.environ | {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_TOKEN": "hf_of_the_test"}  # where nothing listens
    program = [sys.executable, "-m", "grpo", "publish", RUN, "--out", "shared", "--repo", "someone/model"]
    told = subprocess.run(program, env=env, capture_output=True, text=True, check=False)
    assert told.returncode == 2 and "Traceback" not in told.stderr and "hf_of_the_test" not in told.stderr
    assert "the upload failed" in told.stderr and "`hf upload someone/model shared`" in told.stderr
    assert Path("shared/README.md").exists()

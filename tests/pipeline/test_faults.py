"""Full disks, damaged files, exhausted memory: nothing lost, nothing half-written. The disk is a limit on the size of files."""

import re
import resource
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from study_parts import activate

from grpo import cli
from grpo.common.errors import IN_PHASE, UserError
from grpo.common.files import files_digest
from grpo.models.checkpoint import load_model, load_tokenizer
from grpo.study import paths
from grpo.study.schema import load_study

Grpo = Callable[..., tuple[int, str, str]]  # to exit code, stdout, stderr


@pytest.fixture(scope="module")
def smoke_project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project folder with the smoke study, its dataset and both its models, hardly trained."""
    from grpo.pretraining.base_model import make_base_model
    from grpo.tasks.build import build_dataset

    folder = tmp_path_factory.mktemp("smoke") / "project"
    (folder / "studies").mkdir(parents=True)
    params = activate("smoke", folder)
    params.write_text(re.sub(r"(?m)^( +steps:) \d+$", r"\1 2", params.read_text()))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{folder.parent}/mlflow.db")
        study = load_study()
        for task in study.tasks:
            build_dataset(study.task(task), paths.DATASETS / task, {})
            make_base_model(study, task)
    return folder


@pytest.fixture
def project(smoke_project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(smoke_project, tmp_path / "project")
    monkeypatch.chdir(tmp_path / "project")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    return tmp_path / "project"


def contents(project: Path) -> dict[str, str]:
    """The digest of every file of the project but those that are in nobody's way, as states and what MLflow has."""
    files = [path for path in sorted(project.rglob("*")) if path.is_file() and not {"state", "mlruns"} & {*path.parts}]
    return {str(path.relative_to(project)): files_digest(path) for path in files}


def drafts(project: Path) -> list[Path]:
    return [*project.rglob(".*.draft*")]


EVALUATE = ("evaluate", "data/model/main", "--out", "data/evaluations", "--prompt", "question_only", "--problems", "32")


@pytest.mark.parametrize("command", [("dataset", "main"), ("model", "main"), EVALUATE])
def test_a_disk_that_refuses_loses_nothing(project: Path, grpo: Grpo, command: tuple[str, ...]) -> None:
    """Python ignores the signal, and the write fails, as where a quota is used up."""
    before, (soft, hard) = contents(project), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        code, _, stderr = grpo(*command)
        assert code == 2 and "File too large" in stderr
        assert contents(project) == before and drafts(project) == []
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    code, _, stderr = grpo(*command)
    assert code == 0, stderr
    assert drafts(project) == []


@pytest.mark.parametrize(
    ("kind", "phase", "key"),
    [
        ("cpu", "training", "learner.max_tokens_per_microbatch"),
        ("cuda", "rollout", "engine.max_batch_size"),
        ("cuda", "evaluation", "evaluation.max_tokens"),
        ("__cause__", "rollout", "engine.max_batch_size"),
        ("__context__", "training", "learner.max_tokens_per_microbatch"),
        ("cpu", None, "a smaller model"),
    ],
)
def test_memory_that_runs_out_is_told_with_its_phase(
    kind: str, phase: str | None, key: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By torch's allocator: the processor's own exception, and a GPU's as it is worded, also below that of the run."""
    if kind == "cpu":
        with pytest.raises(RuntimeError) as caught:
            torch.empty(2**60, dtype=torch.uint8)
        error: BaseException = caught.value
    else:
        error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has 23.6 GiB.")
    if kind.startswith("__"):
        exhausted, error = error, RuntimeError("the engine has ended")
        setattr(error, kind, exhausted)
    if phase:
        error.add_note(f"{IN_PHASE}{phase}")

    def app() -> None:
        raise error

    monkeypatch.setattr(cli, "app", app)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    told = capsys.readouterr().err
    assert ended.value.code == 2 and told.startswith("error: out of memory") and "llocate" in told
    assert (f"in the {phase} phase" in told) == (phase is not None) and key in told


def test_a_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def bug() -> None:
        raise KeyError("ours")

    monkeypatch.setattr(cli, "app", bug)
    with pytest.raises(KeyError, match="ours"):
        cli.main()


DAMAGE: list[Callable[[bytes], bytes]] = [
    lambda content: content[: len(content) // 2],
    lambda content: bytes((7 * i + 130) % 256 for i in range(len(content))),
    lambda _: b"{}",
]
LOADED_FROM = {
    "model.safetensors": load_model,
    "config.json": load_model,
    "tokenizer.json": load_tokenizer,
    "tokenizer_config.json": load_tokenizer,
}
# where a model is, and what brings it back
PLACES = {
    "data/model/main": "docs/faults.md.* `dvc repro -f -s model@main`",
    "data/checkpoints/e/a/0/last": "docs/faults.md.* `dvc repro -f -s train@e-a-0`",
    "mine": "Get it anew from where it came from",
}


@pytest.mark.parametrize(("place", "remedy"), PLACES.items(), ids=PLACES)
def test_a_damaged_checkpoint_is_named_with_its_remedy(project: Path, place: str, remedy: str) -> None:
    whole = project / "whole"
    shutil.copytree(project / "data/model/main", whole)
    for name, load in LOADED_FROM.items():
        for damage in DAMAGE:
            shutil.rmtree(project / place, ignore_errors=True)
            shutil.copytree(whole, project / place)
            (project / place / name).write_bytes(damage((whole / name).read_bytes()))
            for folder in (Path(place), project / place):
                with pytest.raises(UserError, match=rf"{place}.*{remedy}") as caught:
                    load(folder)
                assert "\n" not in str(caught.value)

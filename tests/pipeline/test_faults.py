"""Full disks, folders that must not be written, files that must not be read: one message, nothing lost, nothing half-written.

The faults are real ones: a file system of a few hundred kilobytes, or a limit on the size of files where mounting is not
allowed; a file system mounted read-only; permissions, and a root user without the right to pass over them.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import resource
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from mount_parts import can_mount, tmpfs
from pipeline_parts import sh
from study_parts import activate

from grpo import cli
from grpo.common.errors import IN_PHASE, UserError, explain_os_error, explain_out_of_memory
from grpo.common.files import files_digest
from grpo.models.checkpoint import load_model, load_tokenizer
from grpo.study import paths
from grpo.study.schema import load_study

Ended = tuple[int, str, str]  # exit code, stdout, stderr
Grpo = Callable[..., Ended]
KEPT = "run the same command again; finished work is kept."


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
    return {str(path.relative_to(project)): files_digest(path) for path in files if path.name != "filler"}


def drafts(project: Path) -> list[Path]:
    return [*project.rglob(".*.draft*")]


def assert_told(ended: Ended, *parts: str) -> None:
    """One message, which says all of ``parts``, and exit code 2."""
    code, _, stderr = ended
    assert code == 2, stderr
    assert "Traceback" not in stderr
    (message,) = [line for line in stderr.splitlines() if line.startswith("error: ")]
    assert all(part in message for part in parts), message


EVALUATE = ("evaluate", "data/model/main", "--out", "data/evaluations", "--prompt", "question_only", "--problems", "32")
COMMANDS = [("dataset", "main"), ("model", "main"), EVALUATE]
# command, how many kilobytes are left for it, what it was writing
LITTLE = {
    "dataset": (COMMANDS[0], 20, "data/dataset/main"),
    "model: its weights": (COMMANDS[1], 100, "data/model/main"),
    "model: its tokenizer": (COMMANDS[1], 210, "data/model/main"),
    "keyword model": (("model", "keyword"), 60, "data/model/keyword"),
    "evaluate": (EVALUATE, 4, "data/"),
    "math_baseline": (("math_baseline",), 4, "data/"),
}
# Where a full disk can be had, that each command tells what it was writing is shown there.
TOO_LARGE = ["dataset", "model: its weights"] if can_mount() else [name for name in LITTLE if name != "model: its tokenizer"]


@contextmanager
def full(data: Path, kilobytes: int) -> Iterator[None]:
    """Fill the disk but for so many kilobytes."""
    disk = os.statvfs(data)
    (data / "filler").write_bytes(bytes(disk.f_bavail * disk.f_frsize - kilobytes * 1024))
    yield
    (data / "filler").unlink()


@contextmanager
def no_file_larger(_: Path, kilobytes: int) -> Iterator[None]:
    """Python ignores the signal, and the write fails, as where a quota is used up."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (kilobytes * 1024, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextmanager
def read_only(data: Path, _: int) -> Iterator[None]:
    subprocess.run(["mount", "-o", "remount,ro", data], check=True)
    yield
    subprocess.run(["mount", "-o", "remount,rw", data], check=True)


@contextmanager
def without_roots_rights() -> Iterator[None]:
    """Permissions count in this thread, even for root: without CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH and CAP_FOWNER."""
    libc = ctypes.CDLL(None)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # the version of the call, and this thread
    all_rights = (ctypes.c_uint32 * 6)()  # effective, permitted and inheritable, the lower 32 of each first
    assert libc.capget(header, all_rights) == 0
    fewer = type(all_rights)(*all_rights)
    fewer[0] &= ~0b1110
    assert libc.capset(header, fewer) == 0
    try:
        yield
    finally:
        assert libc.capset(header, all_rights) == 0


@contextmanager
def no_permission(data: Path, _: int) -> Iterator[None]:
    folders = [data, *data.iterdir()]
    for folder in folders:
        folder.chmod(0o555)
    with without_roots_rights():
        yield
    for folder in folders:
        folder.chmod(0o755)


REFUSALS = [
    *((full, *LITTLE[name], "no space left on the disk") for name in LITTLE),
    *((no_file_larger, *LITTLE[name], "larger than is allowed") for name in TOO_LARGE),
    *((read_only, command, 0, "data", ": cannot be written, since the disk is read-only") for command in COMMANDS[:2]),
    *((no_permission, command, 0, "data", ": permission denied. Change who may read and write it") for command in COMMANDS),
]


@pytest.mark.parametrize(("refusal", "command", "kilobytes", "writing", "message"), REFUSALS)
def test_a_disk_that_refuses_loses_nothing(
    project: Path, grpo: Grpo, refusal: Any, command: tuple[str, ...], kilobytes: int, writing: str, message: str
) -> None:
    data = project / "data"
    with ExitStack() as mounts:
        if refusal in (full, read_only):
            if not can_mount():
                pytest.skip("mounting is not allowed: see the limits on the size of files, and permissions")
            content = data.rename(project / "content")
            data.mkdir()
            mounts.enter_context(tmpfs(data, 4))
            shutil.copytree(content, data, dirs_exist_ok=True)
        before = contents(project)
        with refusal(data, kilobytes):
            assert_told(grpo(*command), f"error: {writing}", message, KEPT)
            assert contents(project) == before and drafts(project) == []
        code, _, stderr = grpo(*command)
        assert code == 0, stderr
        assert drafts(project) == []


@pytest.mark.parametrize(
    "name",
    [
        *(f"model/main/{file}" for file in ("config.json", "model.safetensors", "tokenizer.json")),
        "dataset/main/validation.jsonl",
    ],
)
def test_a_file_that_must_not_be_read(project: Path, grpo: Grpo, name: str) -> None:
    (project / "data" / name).chmod(0)
    with without_roots_rights():
        assert_told(grpo(*EVALUATE), f"error: data/{name}: permission denied", KEPT)


# ----------------------------------------------------------------------------------------------- what is explained, and how


def _raised(error: BaseException, while_handling: BaseException) -> BaseException:
    """What torch.save does: its own error comes while that of the file is handled."""
    try:
        try:
            raise while_handling
        except BaseException:
            raise error  # noqa: B904
    except BaseException as caught:
        return caught


def _caused(error: BaseException, by: BaseException | None) -> BaseException:
    error.__cause__ = by  # as `raise error from by` does; None hides what was being handled
    return error


FULL_DISK = OSError(errno.ENOSPC, "No space left on device")
EXPLAINED = {
    "with a path": (OSError(errno.ENOSPC, "full", "data/x/y.csv"), "data/x/y.csv: no space left"),
    "a long name": (OSError(errno.ENAMETOOLONG, "long", "studies/aaaa.yaml"), "studies/aaaa.yaml: the name is too long for a"),
    "a draft": (OSError(errno.ENOSPC, "full", "data/.model.draft/config.json"), "data/model/config.json: no space"),
    "a file's draft": (OSError(errno.ENOSPC, "full", "data/.model.json.draft.17"), "data/model.json: no space"),
    "a lock": (OSError(errno.ENOSPC, "full", "data/.model.draft.lock"), "data/model: no space"),
    "quota": (OSError(errno.EDQUOT, "quota", "data/x"), "data/x: the disk quota is used up"),
    "not permitted": (PermissionError(errno.EPERM, "no", "there"), "there: permission denied"),
    "in a folder that must not be written": (PermissionError(errno.EACCES, "no", "there/deep/new"), "there: permission denied"),
    "in Rust": (RuntimeError("I/O error: No space left on device (os error 28)"), "no space left"),
    "in Rust, with a path": (RuntimeError('(os error 30) at path "there/.tmpXY"'), "there: cannot be written"),
    "as Ray passes it on": (RuntimeError("OSError: [Errno 28] No space left on device: 'data/x'"), "data/x: no space left"),
    "as a cause": (_caused(UserError("data/model: damaged"), by=FULL_DISK), "no space left"),
    "as a context": (_raised(RuntimeError("unexpected pos"), while_handling=_raised(KeyError(), FULL_DISK)), "no space left"),
}
NOT_EXPLAINED = {
    "another mistake": UserError("data/model: damaged"),
    "a bug": KeyError("x"),
    "no such file": FileNotFoundError(errno.ENOENT, "none", "data/x"),
    "a connection": PermissionError(errno.EACCES, "denied"),
    "a connection's text": RuntimeError("NewConnectionError: [Errno 13] Permission denied"),
    "a device": PermissionError(errno.EACCES, "denied", "/dev/nvidia0"),
    "an error that hides another": _caused(_raised(UserError("the lock is held"), FULL_DISK), by=None),
}


@pytest.mark.parametrize(("error", "message"), EXPLAINED.values(), ids=EXPLAINED)
def test_what_the_disk_refuses_is_explained(
    error: BaseException, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").mkdir()
    told = explain_os_error(error)
    assert told is not None and message in told and told.endswith(KEPT)
    assert told.startswith((message, f"{tmp_path}: "))  # the working folder, where nothing else is known


@pytest.mark.parametrize("error", NOT_EXPLAINED.values(), ids=NOT_EXPLAINED)
def test_other_errors_are_not(error: BaseException) -> None:
    assert explain_os_error(error) is None and explain_out_of_memory(error) is None


def out_of_memory(kind: str) -> BaseException:
    """The exception of torch's allocator: the processor's own, and a GPU's as it is worded."""
    if kind == "cpu":
        with pytest.raises(RuntimeError) as caught:
            torch.empty(2**60, dtype=torch.uint8)
        return caught.value
    return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 23.6 GiB.")


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
@pytest.mark.parametrize(
    ("phase", "keys"),
    [
        ("training", ["learner.max_tokens_per_microbatch", "learner.gradient_checkpointing"]),
        ("rollout", ["engine.max_batch_size", "sampling_max_tokens"]),
        ("evaluation", ["engine.max_batch_size", "evaluation.max_tokens"]),
        (None, ["a smaller model"]),
    ],
)
def test_memory_that_runs_out_is_told_with_its_phase_and_what_to_lower(
    kind: str, phase: str | None, keys: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    error = out_of_memory(kind)
    if phase:
        error.add_note(f"{IN_PHASE}{phase}")

    def app() -> None:
        raise error

    monkeypatch.setattr(cli, "app", app)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    told = capsys.readouterr().err
    assert ended.value.code == 2 and told.startswith("error: out of memory") and "llocate" in told
    assert (f"in the {phase} phase" in told) == (phase is not None) and all(key in told for key in keys)


def test_a_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def bug() -> None:
        raise KeyError("ours")

    monkeypatch.setattr(cli, "app", bug)
    with pytest.raises(KeyError, match="ours"):
        cli.main()


# -------------------------------------------------------------------------------------------------------- damaged checkpoints


def _half(content: bytes) -> bytes:
    return content[: len(content) // 2]


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "cut in half": _half,
    "empty": lambda _: b"",
    "garbage": lambda content: bytes((7 * i + 130) % 256 for i in range(len(content))),
    "zeros": lambda content: bytes(len(content)),
    "of another kind": lambda _: b"{}",
}
LOADED_FROM = {
    "model.safetensors": load_model,
    "config.json": load_model,
    "tokenizer.json": load_tokenizer,
    "tokenizer_config.json": load_tokenizer,
}
# the kind of model, where it is, and what brings it back
PLACES = [
    ("data/model/main", "data/model/main", "`dvc checkout --force data/model/main` .* `dvc repro -f -s model@main`"),
    (
        "data/model/main",
        "data/checkpoints/e/a/0/last",
        r"`dvc checkout --force data/checkpoints/e/a/0` .* `dvc repro -f -s train@e-a-0`",
    ),
    ("data/model/main", "mine", "Get it anew from where it came from"),
    (
        "data/model/keyword",
        "data/model/keyword",
        "`dvc checkout --force data/model/keyword` .* `dvc repro -f -s model@keyword`",
    ),
]


@pytest.mark.parametrize(("kind", "place", "remedy"), PLACES, ids=[place for _, place, _ in PLACES])
@pytest.mark.parametrize("name", LOADED_FROM)
def test_a_damaged_checkpoint_is_named_with_its_remedy(project: Path, kind: str, place: str, remedy: str, name: str) -> None:
    whole = project / "whole"
    shutil.copytree(project / kind, whole)
    for damage in DAMAGE.values():
        shutil.rmtree(project / place, ignore_errors=True)
        shutil.copytree(whole, project / place)
        (project / place / name).write_bytes(damage((whole / name).read_bytes()))
        for folder in (Path(place), project / place):
            with pytest.raises(UserError, match=rf"{place}.*{remedy}") as caught:
                LOADED_FROM[name](folder)
            assert "\n" not in str(caught.value)
            assert explain_os_error(caught.value) is None


@pytest.mark.slow
def test_the_remedies_bring_damaged_checkpoints_back(project: Path) -> None:
    """With real DVC; and making one anew does not run the stages before it again."""
    shutil.copytree(project / "data/model/main", project / "source")
    shutil.rmtree(project / "data")
    copy = "cmd: mkdir -p data/checkpoints/e/a && cp -r source"
    (project / "dvc.yaml").write_text(
        "stages:\n  model:\n    foreach: {main: 1}\n    do:\n"
        "      cmd: mkdir -p data/model && cp -r source data/model/main\n      outs: [data/model/main]\n"
        f"  train:\n    foreach: {{e-a: 1}}\n    do:\n      {copy} data/checkpoints/e/a/0\n"
        "      deps: [data/model/main]\n      outs: [data/checkpoints/e/a]\n"
    )
    sh(project, "sh", "-ec", "git init -q; dvc init -q; dvc repro -q")
    for place in ("data/model/main", "data/checkpoints/e/a/0"):
        weights = project / place / "model.safetensors"
        whole = weights.read_bytes()
        for number in (0, 1):
            weights.write_bytes(_half(whole))
            with pytest.raises(UserError) as caught:
                load_model(Path(place))
            remedies = re.findall("`(dvc [^`]+)`", str(caught.value))
            assert len(remedies) == 2
            said = sh(project, *remedies[number].split()).stdout
            assert weights.read_bytes() == whole
            assert said.count("Running stage") == number
            load_model(Path(place))

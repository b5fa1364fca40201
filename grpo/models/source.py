"""Existing models: on the Hugging Face Hub at a pinned revision, or in a local folder."""

from __future__ import annotations

from pathlib import Path

from grpo.common.errors import UserError
from grpo.common.imports import named_file
from grpo.study.settings import HubModel, LocalModel


def folder_of(model: HubModel | LocalModel, where: str) -> Path:
    """Return the folder of a model, after downloading it if it is on the Hub.

    Args:
        where: the model's key in params.yaml, for messages.

    Raises:
        UserError: the download fails.
    """
    if isinstance(model, LocalModel):
        return named_file(model.path)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    try:
        wanted = ["*.json", "*.txt", "*.model", "*.jinja", "*.safetensors"]
        return Path(snapshot_download(model.repo, revision=model.revision, allow_patterns=wanted))
    except (HfHubHTTPError, OSError, ValueError) as error:
        raise UserError(
            f"params.yaml: {where}.repo: {model.repo} at revision {model.revision} could not be downloaded "
            f"({type(error).__name__}). Check the network and HF_TOKEN, or download it elsewhere "
            "and use `{source: local, path: FOLDER}`."
        ) from error

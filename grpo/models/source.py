"""Models that are made elsewhere: on the Hugging Face Hub at a pinned revision, or in a folder."""

from __future__ import annotations

from pathlib import Path

from grpo.common.errors import UserError
from grpo.common.imports import named_file
from grpo.study.settings import HubModel, LocalModel


def folder_of(model: HubModel | LocalModel, where: str, weights: bool = True) -> Path:
    """The folder that holds a model, downloaded where it is on the Hub.

    Args:
        where: the model's place in params.yaml, for messages.
        weights: download them too, and not only what says how the model is built and its tokenizer.

    Raises:
        UserError: it cannot be downloaded.
    """
    if isinstance(model, LocalModel):
        return named_file(model.path)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    try:
        wanted = ["*.json", "*.txt", "*.model", "*.jinja", *(["*.safetensors"] if weights else [])]
        return Path(snapshot_download(model.repo, revision=model.revision, allow_patterns=wanted))
    except (HfHubHTTPError, OSError, ValueError) as error:
        raise UserError(
            f"params.yaml: {where}.repo: {model.repo} at revision {model.revision} could not be downloaded "
            f"({type(error).__name__}). Check the network and HF_TOKEN, or download it elsewhere "
            "and use `{source: local, path: FOLDER}`."
        ) from error

"""The ``model`` stage: the base model that every run starts from."""

from __future__ import annotations

import time
from pathlib import Path

from tqdm import tqdm

from grpo import paths
from grpo.cpu import start_threads
from grpo.errors import UserError
from grpo.files import files_digest, whole_folder
from grpo.models.checkpoint import load_model, load_tokenizer, save_checkpoint
from grpo.study import ArithmeticTask, HubModel, LocalModel, PretrainedHere, Study
from grpo.tracking import MlflowRun
from grpo.training.pretrain import pretrain

LOG_EVERY = 10


def make_base_model(study: Study) -> None:
    """Pretrain, download or copy the base model into ``data/model``.

    Raises:
        UserError: a download that fails, a folder that holds no model, or a task the mini model cannot be pretrained for.
    """
    start_threads(study.threads)
    match study.model:
        case PretrainedHere() as settings:
            if not isinstance(study.task, ArithmeticTask):
                raise UserError(
                    f"params.yaml: model.source: a model can be pretrained for the arithmetic task only, "
                    f"not for {study.task.name}. Use source hub or local."
                )
            _pretrain(settings, study.task.levels)
        case HubModel() as hub:
            _copy(_download(hub))
        case LocalModel() as local:
            _copy(Path(local.path))


def _pretrain(settings: PretrainedHere, levels: int) -> None:
    mlflow = MlflowRun("model", f"pretrain-{settings.seed}", settings.model_dump(), {"stage": "model"})
    start = time.perf_counter()
    try:
        with (
            whole_folder(paths.MODEL) as folder,
            tqdm(total=settings.steps, desc="pretraining", unit="step", mininterval=1.0) as bar,
        ):

            def on_step(step: int, loss: float, rate: float) -> None:
                bar.update()
                if step % LOG_EVERY == 0 or step == settings.steps:
                    bar.set_postfix_str(f"loss {loss:.3f}", refresh=False)
                    mlflow.log({"loss": loss, "learning_rate": rate}, step)

            model, tokenizer = pretrain(settings, levels, on_step)
            save_checkpoint(folder, model, tokenizer)
    except BaseException:
        mlflow.finish("FAILED")
        raise
    mlflow.tag(model_digest=files_digest(paths.MODEL))
    mlflow.finish()
    n = sum(parameter.numel() for parameter in model.parameters())
    print(f"{paths.MODEL}: {n:,} parameters, {len(tokenizer)} tokens, {time.perf_counter() - start:.0f} s")


def _download(hub: HubModel) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    try:
        wanted = ["*.json", "*.safetensors", "*.txt", "*.model"]
        return Path(snapshot_download(hub.repo, revision=hub.revision, allow_patterns=wanted))
    except (HfHubHTTPError, OSError, ValueError) as error:
        raise UserError(
            f"params.yaml: model.repo: {hub.repo} at revision {hub.revision} could not be downloaded "
            f"({type(error).__name__}). Check the network and HF_TOKEN, or download it elsewhere "
            "and use `model: {source: local, path: FOLDER}`."
        ) from error


def _copy(source: Path) -> None:
    """Check that ``source`` loads, and write it anew in one format."""
    model, tokenizer = load_model(source), load_tokenizer(source)
    with whole_folder(paths.MODEL) as folder:
        save_checkpoint(folder, model, tokenizer)

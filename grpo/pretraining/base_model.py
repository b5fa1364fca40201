"""The stages ``model`` and ``keyword_model``: the models that runs start from."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tqdm import tqdm

from grpo.common.cpu import start_threads
from grpo.common.errors import UserError
from grpo.common.files import files_digest, whole_folder
from grpo.models.checkpoint import load_model, load_tokenizer, save_checkpoint
from grpo.pretraining.documents import documents as math_documents
from grpo.pretraining.pretrain import pretrain
from grpo.study import paths
from grpo.study.schema import Study
from grpo.study.sections import ArithmeticTask, HubModel, LocalModel, PretrainedHere, Pretraining
from grpo.tasks import keyword
from grpo.tracking.mlflow_client import MlflowRun
from grpo.tracking.mlflow_study import study_tags

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
            stream = math_documents(settings, study.task.levels)
            tags = study_tags(study)
            _pretrain("model", paths.MODEL, settings, tags, lambda on_step: pretrain(settings, stream, on_step))
        case HubModel() as hub:
            _copy(_download(hub))
        case LocalModel() as local:
            _copy(Path(local.path))


def make_keyword_model(study: Study) -> None:
    """Pretrain the project's own Transformer on the keyword task's generated text, into ``data/keyword/model``."""
    start_threads(study.threads)
    settings = study.keyword.model
    # The task's seed decides which pairs of keywords are held out, and so which the text may ask for.
    stream = keyword.documents(study.keyword.seed, settings.keyword_share, settings.steps_in_full * settings.batch_size)
    _pretrain(
        "keyword_model",
        paths.KEYWORD_MODEL,
        settings,
        study_tags(study, keyword=True),
        lambda on_step: pretrain(settings, stream, on_step, settings.tie_word_embeddings, keyword.pieces),
    )


OnStep = Callable[[int, float, float], None]


def _pretrain(
    stage: str, target: Path, settings: Pretraining, tags: dict[str, str], train: Callable[[OnStep], tuple[Any, Any]]
) -> None:
    """Call ``train`` with progress shown and tracked, and save the model and the tokenizer that it returns."""
    mlflow = MlflowRun(stage, f"pretrain-{settings.seed}", settings.model_dump(), tags | {"stage": stage})
    start = time.perf_counter()
    try:
        with (
            whole_folder(target) as folder,
            tqdm(total=settings.steps, desc="pretraining", unit="step", mininterval=1.0) as bar,
        ):

            def on_step(step: int, loss: float, rate: float) -> None:
                bar.update()
                if step % LOG_EVERY == 0 or step == settings.steps:
                    bar.set_postfix_str(f"loss {loss:.3f}", refresh=False)
                    mlflow.log({"loss": loss, "learning_rate": rate}, step)

            model, tokenizer = train(on_step)
            save_checkpoint(folder, model, tokenizer)
    except BaseException:
        mlflow.finish("FAILED")
        raise
    mlflow.tag(model_digest=files_digest(target))
    mlflow.finish()
    n = sum(parameter.numel() for parameter in model.parameters())
    print(f"{target}: {n:,} parameters, {len(tokenizer)} tokens, {time.perf_counter() - start:.0f} s")


def _download(hub: HubModel) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    try:
        wanted = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]
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

"""The ``model`` stage: the base model of each task."""

from __future__ import annotations

import time
from concurrent.futures import ProcessPoolExecutor
from itertools import repeat
from multiprocessing import get_context
from pathlib import Path

from tqdm import tqdm

from grpo.common.cpu import start_threads
from grpo.common.files import atomic_folder, files_digest
from grpo.common.imports import call_with
from grpo.models.checkpoint import load_model, load_tokenizer, save_checkpoint
from grpo.models.source import folder_of
from grpo.pretraining.pretrain import pretrain
from grpo.study import paths
from grpo.study.schema import Study
from grpo.study.settings import HubModel, LocalModel, PretrainedHere, RandomModel
from grpo.tracking.mlflow_run import MlflowRun
from grpo.tracking.mlflow_study import study_state, study_tags

LOG_EVERY = 10


def make_base_model(study: Study, task: str) -> None:
    """Make the base model of a task in ``data/model/TASK``: pretrained, downloaded, copied, or with random weights.

    With ``one_per_seed``, the models of the study's other seeds are in its subfolders ``seed-SEED``. As many processes as the
    stage's cores pretrain them.

    Raises:
        UserError: a download fails, a folder holds no model, or a task has no documents for pretraining.
    """
    start_threads(study.threads)
    match study.models[task]:
        case PretrainedHere() as settings:
            _pretrain_all(study, task, settings)
        case RandomModel() as random:
            _draw(random, folder_of(random.like, f"models.{task}.like", weights=False), paths.model(task))
        case HubModel() | LocalModel() as elsewhere:
            _copy(folder_of(elsewhere, f"models.{task}"), paths.model(task))


def _pretrain_all(study: Study, name: str, settings: PretrainedHere) -> None:
    """Pretrain the task's model, or one for each seed, that of the first seed as the task's."""
    own = (
        [settings.model_copy(update={"seed": settings.seed + seed}) for seed in study.seeds]
        if settings.one_per_seed
        else [settings]
    )
    with atomic_folder(paths.model(name)) as folder:
        if len(own) == 1:
            _pretrain(study, name, own[0], folder)
            return
        targets = [folder / f"seed-{seed}" for seed in study.seeds]
        cores = study.resources["model"].cpus // study.threads
        with ProcessPoolExecutor(max(1, cores), mp_context=get_context("spawn")) as pool:
            list(pool.map(_pretrain, repeat(study), repeat(name), own, targets))
        for file in targets[0].iterdir():
            file.rename(folder / file.name)
        targets[0].rmdir()


def _pretrain(study: Study, name: str, settings: PretrainedHere, target: Path) -> None:
    """Pretrain on the task's documents with a progress bar and MLflow, and save model and tokenizer."""
    start_threads(study.threads)
    target.mkdir(exist_ok=True)
    task = study.task(name)
    documents = call_with(task.documents, {"seed": settings.seed, **settings.documents}, f"models.{name}.documents")
    tags = study_tags(study, name) | {"experiment": "model", "stage": f"model@{name}"}
    mlflow = MlflowRun(study.study, f"model/{name}-{settings.seed}", settings.model_dump(), tags, study_state(study))
    start = time.perf_counter()
    try:
        with tqdm(total=settings.steps, desc="pretraining", unit="step", mininterval=1.0) as bar:

            def on_step(step: int, loss: float, rate: float) -> None:
                bar.update()
                if step % LOG_EVERY == 0 or step == settings.steps:
                    bar.set_postfix_str(f"loss {loss:.3f}", refresh=False)
                    mlflow.log({"loss": loss, "learning_rate": rate}, step)

            model, tokenizer = pretrain(settings, documents, task.pieces, on_step)
            save_checkpoint(target, model, tokenizer)
    except BaseException:
        mlflow.finish("FAILED")
        raise
    mlflow.tag(model_digest=files_digest(target))
    mlflow.finish()
    n, seconds = sum(parameter.numel() for parameter in model.parameters()), time.perf_counter() - start
    print(f"{paths.model(name)}, seed {settings.seed}: {n:,} parameters, {len(tokenizer)} tokens, {seconds:.0f} s")


def _copy(source: Path, target: Path) -> None:
    """Load the checkpoint ``source`` and save it in its own precision, which checks it and gives all checkpoints one format."""
    model, tokenizer = load_model(source, dtype=None), load_tokenizer(source)
    with atomic_folder(target) as folder:
        save_checkpoint(folder, model, tokenizer)


def _draw(settings: RandomModel, like: Path, target: Path) -> None:
    """Save a model with random weights in the architecture of a checkpoint, and that checkpoint's tokenizer."""
    from grpo.models.hugging_face import random_model  # imports transformers, which is slow

    model, tokenizer = random_model(like, settings), load_tokenizer(like)
    with atomic_folder(target) as folder:
        save_checkpoint(folder, model, tokenizer)
    print(f"{target}: {model.num_parameters():,} random weights in the architecture of {like.name}")

"""The ``model`` stage: the base model of each task, and pretraining of small models on generated documents."""

from __future__ import annotations

import itertools
import math
import random
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import repeat
from multiprocessing import get_context
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from grpo.common.files import atomic_folder, files_digest
from grpo.common.imports import call_with
from grpo.common.process import start_threads
from grpo.learner.microbatches import chunked_log_probs, pad_and_shift
from grpo.learner.optimizer import Optimizer
from grpo.models.checkpoint import load_model, load_tokenizer, save_checkpoint
from grpo.models.source import ORIGIN, folder_of
from grpo.models.tokenizer import Tokenizer, train_tokenizer
from grpo.models.transformer import TransformerConfig, TransformerLM
from grpo.study import paths
from grpo.study.config import PretrainedHere
from grpo.study.schema import Study
from grpo.tracking.mlflow_run import MlflowRun
from grpo.tracking.mlflow_study import study_state, study_tags

SHAPE = {
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"),
    *("max_position_embeddings", "tie_word_embeddings"),
}
LOG_EVERY = 10
TOKENIZER_DOCUMENTS = 8000
WARMUP_STEPS = 50
FINAL_RATE_SHARE = 0.05
MAX_GRADIENT_NORM = 1.0
WEIGHT_DECAY = 0.01
BATCHES_SORTED_TOGETHER = 16
INITIALIZER_RANGE = 0.08  # a model of this width learns the task in half the steps that the usual 0.02 needs


def make_base_model(study: Study, task: str) -> None:
    """Make the base model of a task in ``data/model/TASK``: pretrained, downloaded or copied.

    With ``one_per_seed``, the models of the study's other seeds are in its subfolders ``seed-SEED``. As many processes as the
    stage's cores pretrain them. Raises UserError: a download fails, a folder holds no model, or a task has no documents for
    pretraining.
    """
    start_threads(study.threads)
    match study.models[task]:
        case PretrainedHere() as settings:
            _pretrain_all(study, task, settings)
        case elsewhere:
            with folder_of(elsewhere, f"models.{task}") as source:
                # Loading and saving it in its own precision checks it, and gives all checkpoints one format.
                model, tokenizer = load_model(source, dtype=None), load_tokenizer(source)
                with atomic_folder(paths.model(task)) as folder:
                    save_checkpoint(folder, model, tokenizer)
                    if (source / ORIGIN).exists():
                        shutil.copy(source / ORIGIN, folder)


def _pretrain_all(study: Study, name: str, settings: PretrainedHere) -> None:
    """Pretrain the task's model, or one for each seed; the first seed's is then the task's model."""
    seeds = study.seeds if settings.one_per_seed else [0]
    by_seed = [settings.model_copy(update={"seed": settings.seed + seed}) for seed in seeds]
    with atomic_folder(paths.model(name)) as folder:
        if len(by_seed) == 1:
            _pretrain(study, name, by_seed[0], folder)
            return
        targets = [folder / f"seed-{seed}" for seed in study.seeds]
        cores = study.resources["model"].cpus // study.threads
        with ProcessPoolExecutor(max(1, cores), mp_context=get_context("spawn")) as pool:
            list(pool.map(_pretrain, repeat(study), repeat(name), by_seed, targets))
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


def pretrain(
    settings: PretrainedHere,
    documents: Iterator[tuple[str, str]],
    pieces: Callable[[str], list[str]],
    on_step: Callable[[int, float, float], None],
) -> tuple[TransformerLM, Tokenizer]:
    """Train a tokenizer and a model from scratch.

    The loss counts response tokens only, because the questions are random and there is nothing to learn from them. Returns
    model (float32) and tokenizer.

    Args:
        documents: an endless stream of (prompt, response).
        pieces: splits a text into the pieces that the tokenizer is trained on.
        on_step: called after each step with its number (from 1), loss (nats per token) and learning rate.
    """
    corpus = list(itertools.islice(documents, settings.steps * settings.batch_size))
    texts = (piece for p, r in corpus[:TOKENIZER_DOCUMENTS] for piece in pieces(p + r))
    tokenizer = train_tokenizer(texts, settings.vocab_size)
    torch.manual_seed(settings.seed)
    model = TransformerLM(
        TransformerConfig(
            **settings.model_dump(include=SHAPE),
            vocab_size=len(tokenizer),
            num_key_value_heads=settings.num_attention_heads,
            initializer_range=INITIALIZER_RANGE,
            eos_token_id=0,  # end of text, in a tokenizer of train_tokenizer
            pad_token_id=0,
        )
    )
    optimizer = Optimizer(model, settings.learning_rate, weight_decay=WEIGHT_DECAY)
    for step, batch in enumerate(_batches(settings, corpus, tokenizer), start=1):
        cosine = 0.5 * (1 + math.cos(math.pi * step / settings.steps))  # after a linear warm-up
        decayed = FINAL_RATE_SHARE + (1 - FINAL_RATE_SHARE) * cosine
        optimizer.learning_rate = settings.learning_rate * min(1.0, step / WARMUP_STEPS) * decayed
        mask = batch["response_mask"]
        predicting = model.base_model(batch["input_ids"]).last_hidden_state[mask]
        log_probs, _ = chunked_log_probs(predicting, model.get_output_embeddings().weight, batch["labels"][mask])
        loss = -log_probs.mean()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step(MAX_GRADIENT_NORM)
        on_step(step, loss.item(), optimizer.learning_rate)
    return model, tokenizer


def _batches(settings: PretrainedHere, corpus: list[tuple[str, str]], tokenizer: Tokenizer) -> Iterator[dict[str, Tensor]]:
    """Yield batches of documents of similar length, which need little padding, in seeded random order."""
    prompts, responses = (tokenizer([text[part] for text in corpus], add_special_tokens=False)["input_ids"] for part in (0, 1))
    responses = [[*ids, tokenizer.eos_token_id] for ids in responses]
    rng = random.Random(f"batches {settings.seed}")
    size = settings.batch_size
    for start in range(0, len(corpus), size * BATCHES_SORTED_TOGETHER):
        block = range(start, min(len(corpus), start + size * BATCHES_SORTED_TOGETHER))
        ordered = sorted(block, key=lambda i: len(prompts[i]) + len(responses[i]))
        batches = [ordered[i : i + size] for i in range(0, len(ordered), size)]
        rng.shuffle(batches)
        for batch in batches:
            yield pad_and_shift([prompts[i] for i in batch], [responses[i] for i in batch], tokenizer.pad_token_id)

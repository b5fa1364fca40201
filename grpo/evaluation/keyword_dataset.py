"""The ``keyword_dataset`` stage: prompts with answers that hold all keywords, in two splits, and reading them back."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from grpo.common.errors import UserError
from grpo.common.files import files_digest, read_jsonl, whole_folder, write_json, write_text
from grpo.common.records import Problem, Rollout
from grpo.study import paths
from grpo.study.schema import Study
from grpo.tasks.keyword import Pair, degenerate, keyword_pairs, keywords_of, keywords_of_prompt, problems, reference_examples


def build_keyword_dataset(study: Study) -> dict[str, Any]:
    """Write train.jsonl and validation.jsonl with the columns ``prompt`` and ``answer``, and a report.

    The held-out fifth of the pairs is for validation. Answers come from the grammar, or from the keyword model through the
    study's engine, on the CPU; pairs without an answer that holds both keywords are left out.

    Returns:
        the report: who answered, how many pairs were asked, how many answers each split kept, and the digests.
    """
    settings = study.keyword
    splits = dict(zip(("train", "validation"), keyword_pairs(settings.seed), strict=True))
    kept: dict[str, list[dict[str, str]]] = {}
    for split, pairs in splits.items():
        if settings.answers == "grammar":
            kept[split] = reference_examples(pairs, settings.seed)
        else:
            kept[split] = _answers_of_model(study, pairs, split)
    with whole_folder(paths.KEYWORD_TRAIN.parent) as folder:
        for split, examples in kept.items():
            lines = "".join(json.dumps(example, ensure_ascii=False) + "\n" for example in examples)
            write_text(folder / f"{split}.jsonl", lines)
    report = {
        "answers": settings.answers,
        **{
            split: {"pairs": len(splits[split]), "examples": len(kept[split]), "digest": files_digest(path)}
            for split, path in (("train", paths.KEYWORD_TRAIN), ("validation", paths.KEYWORD_VALIDATION))
        },
    }
    write_json(paths.KEYWORD_REPORT, report)
    return report


def _answers_of_model(study: Study, pairs: Sequence[Pair], split: str) -> list[dict[str, str]]:
    """The first of ``grpo.group_size`` answers to each prompt that holds all keywords, where there is one."""
    from grpo.evaluation.checkpoint import CheckpointEvaluator

    evaluator = CheckpointEvaluator(study.on_cpu(), paths.KEYWORD_MODEL)
    groups = evaluator.sample(problems(pairs, split), "keyword", n=study.grpo.group_size)
    right = [next((r for r in group if r.rewards["reward"] == 1.0), None) for group in groups]
    examples = [
        {"prompt": evaluator.tokenizer.decode(rollout.prompt_ids), "answer": rollout.completion.text}
        for rollout in right
        if rollout is not None
    ]
    evaluator.forget_chunks()
    if not examples:
        raise UserError(
            f"params.yaml: keyword.answers: the model held all keywords in none of its answers to the {split} prompts. "
            "Train it longer (keyword.model), or use `answers: grammar`."
        )
    return examples


def read_keyword_problems(path: Path) -> list[Problem]:
    """The problems of a split: the keywords of each prompt are its ground truth.

    Raises:
        UserError: the file is missing or empty, or a line is no such record.
    """
    pairs = read_jsonl(path, "keyword_dataset", lambda record: tuple(keywords_of_prompt(record["prompt"])))
    return problems(pairs, path.stem)


def degenerate_shares(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Shares of responses that only list the keywords, that repeat the prompt, and that are sentences of the grammar."""
    flags = [degenerate(r.completion.text, keywords_of(r.problem.ground_truth)) for r in rollouts]
    return {key: sum(flag[key] for flag in flags) / len(flags) for key in flags[0]}

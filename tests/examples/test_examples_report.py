"""The studies that the docs print, as they stand there, run to the report: through DVC, with few and short steps."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from model_parts import tiny_checkpoint
from pipeline_parts import ROOT, fresh_clone, sh

pytestmark = pytest.mark.slow

# Laid over the study of the docs: less of everything, as only whether it comes to its end counts here.
SHORT = """\
extends: {study}
seeds: [0]
grpo: {{n_grpo_steps: 2, rollout_batch_size: 16, train_batch_size: 16, sampling_min_tokens: 0, sampling_max_tokens: 8}}
evaluation: {{every: 1, problems: 16, zero_shot_problems: 16, max_tokens: 8}}
selection: {{last_k: 1}}
kissing_number: null
experiments: {{grpo_learning_rate: {{arms: {{"1e-3": {{learning_rate: 1e-3}}, "1e-2": {{learning_rate: 1e-2}}}}}}}}
"""
SHORTER = {"backwards": "models: {main: {steps: 40}}\n", "digits": ""}


def files_in(page: str) -> dict[str, str]:
    """The files that a page of the docs prints, by the name in their first line."""
    text = (ROOT / "docs" / page).read_text()
    return dict(re.findall(r"^```(?:python|yaml)\n# (studies/\w+\.(?:py|yaml))\n(.*?)^```$", text, re.M | re.S))


@pytest.mark.parametrize(
    ("page", "study", "place"), [("extending.md", "backwards", "../our lab"), ("models.md", "digits", "studies")]
)
def test_a_study_of_the_docs_gets_its_report(page: str, study: str, place: str, tmp_path: Path) -> None:
    """From studies/, and from a folder outside the repository."""
    folder = fresh_clone(tmp_path / "clone")
    (folder / place).mkdir(exist_ok=True)
    printed = files_in(page)
    for ending in ("py", "yaml"):
        (folder / f"{place}/{study}.{ending}").write_text(printed[f"studies/{study}.{ending}"])
    (folder / f"{place}/short.yaml").write_text(SHORT.format(study=study) + SHORTER[study])
    if study == "digits":
        tiny_checkpoint(folder / "my-model", "llama", "like_llama3", ["Say number 12 in digits.", "You are a calculator."])
    sh(folder, "grpo", "study", "use", f"{place}/short.yaml")
    sh(folder, "dvc", "repro")

    claims = {claim["id"]: claim for claim in json.loads((folder / "reports/claims.json").read_text())["claims"]}
    near_zero = claims["zero-shot-r1-zero"]
    asked = "r1_zero" in json.loads((folder / "reports/math_baseline.json").read_text())
    assert asked == (study == "backwards")
    assert (near_zero["verdict"] == "not measured") == (not asked)
    assert asked or near_zero["note"] == "the study has no zero-shot evaluation under r1_zero"
    for made in ("index.html", "writeup.md", "answers.md", "sections/grpo_learning_rate.md", "summary.json"):
        assert (folder / "reports" / made).stat().st_size > 100, made
    assert "up to date" in sh(folder, "dvc", "status").stdout

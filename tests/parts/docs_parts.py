"""A study that a page of the docs prints, run to its report through DVC, with few and short steps."""

import json
import re
from pathlib import Path

from pipeline_parts import ROOT, fresh_clone, sh

# Laid over the study of the docs: less of everything, as only whether it comes to its end counts here.
SHORT = """\
extends: {study}
seeds: [0]
grpo: {{n_grpo_steps: 2, rollout_batch_size: 16, train_batch_size: 16, sampling_min_tokens: 0, sampling_max_tokens: 8}}
evaluation: {{every: 1, problems: 8, last_problems: 16, selection_problems: 4, zero_shot_problems: 16, max_tokens: 8}}
kissing_number: null
experiments: {{grpo_learning_rate: {{arms: {{"1e-3": {{learning_rate: 1e-3}}, "1e-2": {{learning_rate: 1e-2}}}}}}}}
"""


def clone_with_study(target: Path, page: str, study: str, place: str = "studies", shorter: str = "") -> Path:
    """A clone with the files of a study that a page of the docs prints, or that are in examples/, in ``place``.

    Beside them is short.yaml, which extends the study.

    Args:
        shorter: what else short.yaml says.
    """
    folder = fresh_clone(target)
    (folder / place).mkdir(exist_ok=True)
    text = (ROOT / "docs" / page).read_text()
    for name, content in re.findall(rf"^```(?:python|yaml)\n# studies/({study}\.(?:py|yaml))\n(.*?)^```$", text, re.M | re.S):
        (folder / place / name).write_text(content)
    for file in (ROOT / "examples").glob(f"{study}.*"):
        (folder / place / file.name).write_bytes(file.read_bytes())
    (folder / place / "short.yaml").write_text(SHORT.format(study=study) + shorter)
    return folder


def run_to_the_report(folder: Path, place: str = "studies") -> None:
    """Run short.yaml. The report is whole, and judges a task of one's own by nothing that was published of another."""
    sh(folder, "grpo", "study", "use", f"{place}/short.yaml")
    sh(folder, "dvc", "repro")
    for made in ("index.html", "writeup.md", "record.json", "tables/grpo_learning_rate.md", "figures/grpo_learning_rate.svg"):
        assert (folder / "reports" / made).stat().st_size > 100, made
    claims = json.loads((folder / "reports/record.json").read_text())["claims"]
    assert claims and {claim["verdict"] for claim in claims} == {"not tested"} and all(claim["reason"] for claim in claims)
    assert "up to date" in sh(folder, "dvc", "status").stdout

"""What the documentation names exists, and what it draws is so."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from grpo.common.yaml_file import parse_yaml

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [*sorted(ROOT.glob("*.md")), *sorted(DOCS.glob("*.md"))]


def prose(page: Path) -> str:
    """A page without its blocks of code."""
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S)


def anchors(page: Path) -> set[str]:
    """The names by which a page's headings can be linked to, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", prose(page), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_link_leads_somewhere() -> None:
    broken, followed = [], 0
    for page in PAGES:
        for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
            if re.match(r"[a-z]+:", target):  # on the web
                continue
            path, _, anchor = target.partition("#")
            file, followed = (page.parent / path if path else page), followed + 1
            if not file.exists() or (anchor and anchor not in anchors(file)):
                broken.append(f"{page.relative_to(ROOT)}: {target}")
    assert not broken
    assert followed > 100


def test_every_experiment_is_described() -> None:
    """One that somebody adds need not be."""
    described = re.findall(r"^- `(\w+)`: ", (DOCS / "study.md").read_text(), re.M)
    assert set(parse_yaml(ROOT / "params.yaml")["experiments"]) <= set(described)


def test_the_reward_the_advantage_and_the_loss_of_the_docs_do_what_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    from grpo.learner.advantages import own_advantages
    from grpo.learner.losses import LossInputs, bind_loss
    from grpo.tasks.rewards import find_reward

    for name, code in re.findall(
        r"^```python\n# studies/(\w+\.py)\n(.*?)^```$", (DOCS / "extending.md").read_text(), re.M | re.S
    ):
        (tmp_path / name).write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    rewards = find_reward("my_rewards:short")(completion_ids=[[1, 2, 3], [1]], answer_reward=[1.0, 0.0], prompts=["", ""])
    assert rewards == pytest.approx([0.997, -0.001])
    groups, lengths = torch.tensor([[1.0, 1.0, 0.0], [0.0, 0.0, 0.0]]), torch.tensor([[2.0, 8.0, 2.0], [1.0, 2.0, 3.0]])
    advantages = own_advantages("my_advantages:shorter_first", {"weight": 0.5}, groups, lengths)
    assert advantages.tolist() == pytest.approx([2 - 3.25 / 3, 1.25 - 3.25 / 3, -3.25 / 3, 0, 0, 0])  # 1 + 0.5 * 4 / 2, * 4 / 8
    loss, measured = bind_loss("my_losses:clip_higher", {"clip_high": 0.28})
    log_ratios, ones = torch.log(torch.tensor([[1.5, 1.25, 0.5]])), torch.ones(1, 1)
    inputs = LossInputs(log_ratios, torch.zeros(1, 3), ones, ones, torch.ones(1, 3, dtype=torch.bool), cliprange=0.2)
    per_token, metrics = loss(inputs)
    assert per_token[0].tolist() == pytest.approx([-1.28, -1.25, -0.5])
    assert metrics["clipped"].tolist() == [[True, False, False]] and measured == ()

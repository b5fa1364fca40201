"""The replay buffer: scored groups that are kept for several steps and trained on again."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from grpo.common.records import Rollout
from grpo.rollout.engine import derive_seed
from grpo.study.config import GrpoConfig


@dataclass
class Group:
    """A group of scored rollouts, the policy version that sampled it, and how often it has been drawn."""

    rollouts: list[Rollout]
    version: int
    uses: int = 0


class ReplayBuffer:
    """Buffer of scored groups, limited by ``replay_capacity`` (rollout batches) and ``replay_max_age`` (versions of lag).

    The batch of a step is drawn uniformly without replacement from all groups in the buffer, the newest included. A group that
    stays for ``replay_capacity`` steps is drawn once on average; :meth:`metrics` counts those drawn several times and those
    never drawn. With a capacity of one batch, the draw is that batch in its order. Each rollout carries the log-probs of the
    policy that sampled it, for the ratio. ``seed``: of the draws.
    """

    def __init__(self, config: GrpoConfig, seed: int):
        settings = config.asynchronous
        assert settings is not None
        self.group_size, self.groups_per_batch = config.group_size, config.n_prompts_per_rollout_batch
        self.capacity, self.max_age, self.seed = settings.replay_capacity * self.groups_per_batch, settings.replay_max_age, seed
        self.groups: list[Group] = []  # oldest first
        self.left: list[int] = []  # how often each group that has left was drawn

    def add(self, rollouts: list[Rollout]) -> None:
        """Add a scored rollout batch; beyond the capacity, the oldest groups leave."""
        for start in range(0, len(rollouts), self.group_size):
            group = rollouts[start : start + self.group_size]
            self.groups.append(Group(group, group[0].completion.policy_version))
        self._keep(self.groups[-self.capacity :])

    def draw(self, step: int, version: int) -> list[Rollout]:
        """Draw the batch of a step; groups that are too old for ``version`` leave first."""
        if self.max_age is not None:
            self._keep([group for group in self.groups if version - group.version <= self.max_age])
        chosen = random.Random(derive_seed(self.seed, "replay", step)).sample(range(len(self.groups)), self.groups_per_batch)
        drawn = [self.groups[i] for i in sorted(chosen)]
        for group in drawn:
            group.uses += 1
        return [rollout for group in drawn for rollout in group.rollouts]

    def state(self) -> tuple[list[Group], list[int]]:
        """The groups in the buffer, and the number of uses of each group that has left."""
        return [replace(group) for group in self.groups], list(self.left)

    def restore(self, state: tuple[list[Group], list[int]]) -> None:
        self.groups, self.left = state

    def metrics(self) -> dict[str, float]:
        """Number of groups in the buffer; number of those that have left, their uses, and the share never drawn."""
        left = len(self.left)
        return {
            "replay/groups": len(self.groups),
            "replay/left": left,
            "replay/uses_mean": sum(self.left) / max(1, left),
            "replay/uses_max": max(self.left, default=0),
            "replay/never_drawn": self.left.count(0) / max(1, left),
        }

    def _keep(self, groups: list[Group]) -> None:
        kept = set(map(id, groups))
        self.left += [group.uses for group in self.groups if id(group) not in kept]
        self.groups = groups

"""Our grader as a reward of TRL: `GRPOTrainer(reward_funcs=right, …)` with a column `answer`."""

from grpo import question_only_reward_fn


def right(completions, answer, **columns):
    return [question_only_reward_fn(text, truth)["reward"] for text, truth in zip(completions, answer, strict=True)]

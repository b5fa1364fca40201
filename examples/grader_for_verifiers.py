"""Our grader as a reward of `verifiers`: `--env.taskset.task.rewards.right.fn grader_for_verifiers:right`."""

from grpo import question_only_reward_fn


async def right(task, trace) -> float:
    return question_only_reward_fn(trace.last_reply, str(task.answer))["reward"]

"""The reward: one number for each completion, in the signature of TRL's reward functions."""

import re


def letters_in_place(completions, ground_truth, **columns):
    """The share of letters that are in the right place."""
    answers = [re.search(r"<answer>(.*)</answer>", completion) for completion in completions]
    pairs = zip(answers, ground_truth, strict=True)
    return [sum(map(str.__eq__, answer[1].strip(), truth)) / len(truth) if answer else 0.0 for answer, truth in pairs]

"""The formats of the handouts: prompt templates, used byte for byte as their files hold them, and readers of answers."""

from __future__ import annotations

from dataclasses import replace
from importlib.resources import files

from grpo.grader.extract import boxed_answer
from grpo.tasks.task import Format

_ANSWER_FORM = "</think> <answer>"
_EXAMPLE = "</think> <answer> answer here </answer>"
"""The example in the r1_zero prompt. A response may repeat it; the answer comes after."""


def packaged(name: str) -> str:
    """The template of a handout's prompt file, byte for byte."""
    return files("grpo.tasks").joinpath("prompts", f"{name}.prompt").read_bytes().decode()


def tagged_answer(response: str) -> str | None:
    r"""Read the answer in the last pair of answer tags; None unless the response has the r1_zero form.

    The form is right if ``</think> <answer>`` occurs and the last ``<answer>`` is followed by ``</answer>``. The text between
    these two is the answer; if it contains a ``\boxed{}``, the content of the last one is. ``</answer>`` may be repeated, as
    the course's own function allows, but text between two of them makes the answer empty, and so wrong. Text up to a copy of
    the prompt's example, ``<answer> answer here </answer>``, is ignored.
    """
    response = response.rpartition(_EXAMPLE)[2]
    if _ANSWER_FORM not in response:
        return None
    before_end, *after_end = response[response.rindex("<answer>") + len("<answer>") :].split("</answer>")
    if not after_end:
        return None
    if "".join(after_end[:-1]).strip():  # the end of the answer is ambiguous; an empty answer equals nothing
        return ""
    answer = before_end.strip()
    boxed = boxed_answer(answer)
    return answer if boxed is None else boxed


def boxed_or_whole(response: str) -> str:
    r"""The content of the last ``\boxed{}``, or else the whole response after its last ``</think>``."""
    boxed = boxed_answer(response)
    return response.rpartition("</think>")[2].strip() if boxed is None else boxed


R1_ZERO = Format(packaged("r1_zero"), stop=("</answer>",), read=tagged_answer)
QUESTION_ONLY = Format(packaged("question_only"), read=boxed_answer)
# For chat models. The second asks models that can think first for an immediate answer, by an option of Qwen3's chat template
# that other templates ignore.
CHAT = Format("{question}\n\nReason step by step, and put the final answer into \\boxed{}.", read=boxed_answer, chat=True)
CHAT_WITHOUT_THINKING = replace(CHAT, options={"enable_thinking": False})
PLAIN_CHAT = Format("{question}", read=boxed_or_whole, chat=True)  # adds nothing to the question

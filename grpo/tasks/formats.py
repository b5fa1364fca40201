"""The formats of the handouts: prompt templates, used byte for byte as their files hold them, and readers of answers."""

from __future__ import annotations

from dataclasses import replace
from importlib.resources import files
from pathlib import Path

from grpo.common.errors import UserError
from grpo.grader.extract import boxed_answer
from grpo.tasks.task import PLACEHOLDER, Format

PROMPTS = Path(str(files("grpo.tasks"))) / "prompts"

_ANSWER_FORM = "</think> <answer>"
_EXAMPLE = "</think> <answer> answer here </answer>"
"""How the r1_zero prompt shows the form. Where a response repeats the prompt, what counts comes after."""


def load_template(path: Path) -> str:
    """Read a template.

    Raises:
        UserError: no such file, it is not UTF-8, or it does not hold ``{question}``.
    """
    if not path.is_file():
        raise UserError(f"{path}: no such prompt file. Name an existing one.")
    try:
        # Not read as text: that would turn \r\n into \n.
        template = path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text ({error}). Save it as UTF-8.") from error
    if PLACEHOLDER not in template:
        raise UserError(f"{path}: does not contain {PLACEHOLDER}. Put it where the question belongs.")
    return template


def tagged_answer(response: str) -> str | None:
    r"""What the last pair of answer tags encloses; None unless the response has the r1_zero form.

    The form is right if ``</think> <answer>`` occurs and the last ``<answer>`` is followed by ``</answer>``. What stands
    between these two is the answer or, if it holds a ``\boxed{}``, the content of the last one. ``</answer>`` may be repeated,
    as the course's own function allows, but with text between two of them no answer is right. Whatever precedes a copy of
    the prompt's own example, ``<answer> answer here </answer>``, does not count.
    """
    response = response.rpartition(_EXAMPLE)[2]
    if _ANSWER_FORM not in response:
        return None
    before_end, *after_end = response[response.rindex("<answer>") + len("<answer>") :].split("</answer>")
    if not after_end:
        return None
    if "".join(after_end[:-1]).strip():  # which tag ends the answer would be ours to choose, and an empty answer equals nothing
        return ""
    answer = before_end.strip()
    boxed = boxed_answer(answer)
    return answer if boxed is None else boxed


R1_ZERO = Format(load_template(PROMPTS / "r1_zero.prompt"), stop=("</answer>",), read=tagged_answer)
QUESTION_ONLY = Format(load_template(PROMPTS / "question_only.prompt"), read=boxed_answer)
# For models that were trained to chat. Of those that can think before they answer the second asks an answer at once, by the
# option of Qwen3's template; other templates take no notice of it.
CHAT = Format("{question}\n\nReason step by step, and put the final answer into \\boxed{}.", read=boxed_answer, chat=True)
CHAT_WITHOUT_THINKING = replace(CHAT, options={"enable_thinking": False})

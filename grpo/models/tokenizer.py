"""Tokenizers of checkpoints, and the one of the mini model.

transformers reads the files. Its import takes a second, so it happens where the first tokenizer is loaded.
"""

from __future__ import annotations

import json
import re
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers

from grpo.common.errors import UserError, library_errors
from grpo.common.files import read_bytes, require_own
from grpo.common.records import TOOL_CALL, is_text

END_OF_TEXT = "<|endoftext|>"
TOKENIZER, CONFIG = "tokenizer.json", "tokenizer_config.json"
GENERATION_CONFIG, CHAT_TEMPLATE = "generation_config.json", "chat_template.jinja"
MODEL_CONFIG = "config.json"
# What chat templates get for today (``strftime_now``), so that a prompt does not change from day to day. Llama's templates fall
# back to this date.
CHAT_DATE = datetime(2024, 7, 26)
# The most characters that a chat template may make of a chat: so many times its own, and some.
LONGER, SPARE_CHARACTERS = 100, 100_000
# The tokenizer files of any version of transformers, and the file that names the tokens that end a response.
FILES = (
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab*", "merges.txt", "*.model"),
    *("chat_template*", "additional_chat_templates/*", GENERATION_CONFIG),
)


class Tokenizer:
    """A fast tokenizer of transformers, with all tokens that end a response and the encoding of chats.

    It saves the files that it was loaded from, byte for byte. ``eos_token_id``: end of text. ``pad_token_id``: end of text
    unless the files name another token. Padding is found by lengths, never by this token.

    ``files``: contents of :data:`FILES` by path in the checkpoint, at least tokenizer.json. ``model_config``: content of
    config.json, which names the tokens that end a response if generation_config.json names none. Raises ValueError: a file is
    missing or damaged, no file names the end-of-text token, or a token that ends a response is not in the vocabulary of the
    tokenizer or of the model. (For a damaged tokenizer.json the library raises any error.)
    """

    def __init__(self, files: Mapping[str, bytes], model_config: bytes = b"{}"):
        from transformers import PreTrainedTokenizerFast

        if TOKENIZER not in files:
            raise ValueError(f"{TOKENIZER} is missing")
        self._files = dict(files)
        with TemporaryDirectory() as folder:  # from_pretrained reads a folder
            self._write(Path(folder))
            self._fast: Any = PreTrainedTokenizerFast.from_pretrained(folder)
        self._backend: Backend = self._fast.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        self._added = self._backend.get_added_tokens_decoder()
        # The tokens before every text according to tokenizer.json; ``add_bos_token`` has no effect.
        bare, whole = (self("a", add_special_tokens=added)["input_ids"] for added in (False, True))
        self._begin = whole[: next((i for i in range(len(whole)) if whole[i : i + len(bare)] == bare), 0)]

        if self._fast.eos_token is None:
            raise ValueError(f"{CONFIG} names no eos_token")
        self.eos_token: str = self._fast.eos_token
        self.eos_token_id: int = self._fast.eos_token_id
        self.pad_token_id: int = self.eos_token_id if self._fast.pad_token is None else self._fast.pad_token_id
        self._named_ends = _ends_in(self._files.get(GENERATION_CONFIG, b"{}")) or _ends_in(model_config)
        ids, size = set(self._backend.get_vocab().values()), _value(model_config, "vocab_size")
        for end in (self.eos_token_id, *self._named_ends):
            if type(end) is not int or end not in ids or (size is not None and end >= size):
                raise ValueError(
                    f"eos_token_id names {end!r}, which is no token of {TOKENIZER}, or beyond vocab_size in {MODEL_CONFIG}"
                )

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """All tokens that end a response.

        These are end of text, the tokens in generation_config.json (Llama 3 has three) or else in config.json, and the token
        that ends a turn in chats.
        """
        turn = () if self.end_of_turn_id is None else (self.end_of_turn_id,)
        return tuple(dict.fromkeys((self.eos_token_id, *self._named_ends, *turn)))

    @cached_property
    def end_of_turn_id(self) -> int | None:
        """The added token that the chat template puts after a reply; None if there is none or no template."""
        try:
            text = self._render([{"role": "user", "content": "x"}, {"role": "assistant", "content": "reply"}], ask=False)
        except UserError:
            return None
        ids = self(text.rpartition("reply")[2].lstrip(), add_special_tokens=False)["input_ids"]
        return next((i for i in ids[:1] if i in self._added), None)

    def prompt_ids(self, text: str) -> tuple[int, ...]:
        """Encode a prompt, with a beginning-of-text token if the tokenizer uses one and the text has none."""
        ids: list[int] = self(text, add_special_tokens=False)["input_ids"]
        return (*(() if ids[: len(self._begin)] == self._begin else self._begin), *ids)

    def chat_ids(self, messages: Sequence[Mapping[str, str]], **options: Any) -> tuple[int, ...]:
        """Encode a chat up to the start of the model's turn with the chat template.

        The ids equal those of ``apply_chat_template(messages, add_generation_prompt=True)`` of transformers on CHAT_DATE.
        Raises UserError if there is no chat template, or it refuses the messages or fails.

        ``messages``: each with ``role`` and ``content``. ``options``: ``tools``, a list of their JSON schemas, and further
        variables of the template, such as Qwen3's ``enable_thinking``.
        """
        return tuple(self(self._render(messages, ask=True, **options), add_special_tokens=False)["input_ids"])

    def next_turns(self, written: Sequence[Sequence[dict[str, str]]], **options: Any) -> list[tuple[int, ...]]:
        """Encode what stands between two turns of the model in a chat, by the chat template.

        The template fills a short chat, of which the part after the model's turn is taken. So no earlier turn is rendered, or
        encoded, again. Returns for each chat the ids from the end of the model's turn, whose last token is left out, to the
        start of the next one. Raises UserError: as :meth:`chat_ids`; or the template does not end the model's turn with a
        token.

        ``written``: for each chat the messages after the model's turn, each with ``role`` (``tool`` or ``user``) and
        ``content``; for tools also ``name``. Their contents are encoded as plain text. ``options``: as in :meth:`chat_ids`.
        """
        end = None if self.end_of_turn_id is None else self._added[self.end_of_turn_id].content
        endings = []
        for messages in written:
            calls = [{"type": "function", "function": {"name": m["name"], "arguments": {}}} for m in messages if "name" in m]
            turn: dict[str, Any] = {"role": "assistant", "content": "a reply"} | ({"tool_calls": calls[:1]} if calls else {})
            chat = [{"role": "user", "content": "x"}, turn]
            safe = [message | {"content": self.as_text(message["content"])} for message in messages]
            ends = 0 if end is None else self._render(chat, ask=True, **options).count(end)  # up to the end of the model's turn
            if not ends:
                raise UserError(
                    "environment: the model's chat template ends no turn with a token of its own, so no turn can follow. "
                    "Use a model that was trained for chats of several turns, or a format that is no chat."
                )
            endings.append(self._render([*chat, *safe], ask=True, **options).split(end, ends)[-1])
        return [tuple(ids) for ids in self(endings, add_special_tokens=False)["input_ids"]]

    def tool_calls(
        self, texts: Sequence[str], before: Sequence[Sequence[int]], tools: Sequence[Mapping[str, Any]]
    ) -> list[list[Any]]:
        """Read the calls of tools in turns: by the tokenizer's ``response_template``, else as ``<tool_call>JSON</tool_call>``.

        Calls between ``<think>`` and ``</think>`` are thoughts. Returns for each turn its calls, each a dictionary with
        ``name`` and ``arguments``, or what stands there instead. ``before``: ids of each turn's prompt and history. ``tools``:
        their JSON schemas.
        """
        if self._fast.response_template is None:
            return [_calls_in(text) for text in texts]
        turns: list[list[Any]] = []
        for text, ids in zip(texts, before, strict=True):
            calls: Any = None
            with suppress(ValueError, TypeError, KeyError):  # half a call, or none
                calls = self._fast.parse_response(text, prefix=self.decode(ids), tools=list(tools)).get("tool_calls")
            turns.append([call.get("function", call) if isinstance(call, dict) else call for call in calls or []])
        return turns

    def as_text(self, text: str) -> str:
        """Put a space into each added token of a text, as in ``< |im_end|>``, so that it is encoded as text.

        Raises UserError if the text has a control token of one character.
        """
        for i, token in self._added.items():
            content = token.content
            if len(content.strip()) > 1:
                text = text.replace(content, f"{content[0]} {content[1:]}")
            elif content in text and (token.special or i in self.stop_token_ids):
                raise UserError(
                    f"prompt: a question has {content!r}, a control token of the model, which no space can turn into text: "
                    f"{reprlib.repr(text)}. Leave the question out, or use another model."
                )
        return text

    def _render(self, messages: Sequence[Mapping[str, Any]], ask: bool, **options: Any) -> str:
        """Render a chat as text. ``ask``: end with the start of the model's turn."""
        if self._fast.chat_template is None:
            raise UserError(
                "prompt: the model's tokenizer has no chat template, so it cannot be asked in a chat. Use a format such as "
                "r1_zero or question_only, or a model that was trained for chats."
            )
        options |= {"add_generation_prompt": ask, "strftime_now": CHAT_DATE.strftime}
        most = SPARE_CHARACTERS + LONGER * len(json.dumps([*messages, options], default=str))
        roles = ", ".join(message["role"] for message in messages)
        with library_errors(lambda why: f"prompt: the model's chat template refuses messages of {roles}: {why}"):
            text = str(self._fast.apply_chat_template(list(messages), tokenize=False, **options))
            if len(text) > most:
                raise ValueError(f"it makes a text of {len(text):,} characters, at most {most:,} are read")
            if not is_text(text):
                raise ValueError("it makes half a character")
        return text

    @classmethod
    def from_folder(cls, folder: Path) -> Tokenizer:
        """Load the tokenizer of a checkpoint.

        Raises OSError: a file cannot be read. Raises ValueError: as the constructor and :func:`tokenizer_files`.
        """
        files = {path.relative_to(folder).as_posix(): read_bytes(path) for path in tokenizer_files(folder)}
        config = folder / MODEL_CONFIG
        return cls(files, read_bytes(config) if config.is_file() else b"{}")

    def save_pretrained(self, folder: Path) -> None:
        """Save the files for transformers and vLLM, with all stop tokens in generation_config.json."""
        self._write(folder)
        path = folder / GENERATION_CONFIG  # one of the files, or saved with the model
        generation = path.read_bytes() if path.exists() else b"{}"
        if (path.exists() or len(self.stop_token_ids) > 1) and set(_ends_in(generation)) != set(self.stop_token_ids):
            values = json.loads(generation) | {"eos_token_id": list(self.stop_token_ids)}
            path.write_text(json.dumps(values, indent=2) + "\n")

    def _write(self, folder: Path) -> None:
        for name, content in self._files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)

    @property
    def is_byte_level(self) -> bool:
        """Whether a text is the bytes of its tokens side by side, at least one each, as with GPT-2, Qwen and Llama 3."""
        return isinstance(self._backend.decoder, decoders.ByteLevel)

    def __len__(self) -> int:
        return len(self._fast)

    def __call__(self, texts: str | list[str], add_special_tokens: bool = True) -> dict[str, Any]:
        """Encode a text, or each text of a list; the ids are under ``input_ids``.

        ``add_special_tokens``: add the tokens that tokenizer.json puts at the start and end of a text.
        """
        many = [texts] if isinstance(texts, str) else texts
        ids = [encoded.ids for encoded in self._backend.encode_batch_fast(many, add_special_tokens=add_special_tokens)]
        return {"input_ids": ids[0] if isinstance(texts, str) else ids}

    def decode(self, token_ids: Sequence[int]) -> str:
        """Decode token ids; bytes that are not UTF-8 become U+FFFD."""
        return self._backend.decode(token_ids, skip_special_tokens=False)

    def batch_decode(self, sequences: Sequence[Sequence[int]]) -> list[str]:
        return self._backend.decode_batch(sequences, skip_special_tokens=False)


def tokenizer_files(folder: Path) -> list[Path]:
    """List a checkpoint's :data:`FILES`, which are copied with the model.

    Raises ValueError: see :func:`grpo.common.files.require_own`.
    """
    paths = sorted({path for pattern in FILES for path in folder.glob(pattern) if path.is_file()})
    require_own(folder, paths)
    return paths


def chat_date(folder: Path) -> str | None:
    """The date in a checkpoint's chats (:data:`CHAT_DATE`); None if its chat template writes no date."""
    templates = [path for path in tokenizer_files(folder) if path.name in (CONFIG, CHAT_TEMPLATE)]
    return CHAT_DATE.date().isoformat() if any(b"strftime_now" in path.read_bytes() for path in templates) else None


def _calls_in(text: str) -> list[Any]:
    head, closed, rest = text.partition("</think>")
    said = rest if closed and "<think>" not in head else text  # the prompt may have begun a thought
    calls = list[Any]()
    for part in re.sub(r"<think>.*?(</think>|\Z)", "", said, flags=re.DOTALL).split(TOOL_CALL[0])[1:]:
        content, closed, _ = part.partition(TOOL_CALL[1])
        if closed:
            try:
                value = json.loads(content)
            except (ValueError, RecursionError):
                value = content
            calls += value if isinstance(value, list) else [value]
    return calls


def _value(config: bytes, name: str) -> Any:
    """A value of a model's configuration, which may have it under ``text_config``."""
    values = json.loads(config)
    return values.get(name, (values.get("text_config") or {}).get(name))


def _ends_in(config: bytes) -> tuple[Any, ...]:
    """Tokens that end a response according to a model's configuration."""
    ends = _value(config, "eos_token_id")
    return tuple(ends) if isinstance(ends, list) else () if ends is None else (ends,)


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train the mini model's tokenizer: byte-level BPE that merges across spaces, but never digits.

    Merges across spaces turn the long, constant text of the r1_zero prompt into a few tokens, which makes training on a CPU
    possible within minutes. Every byte is in the vocabulary, so encoding is lossless. The end-of-text token (id 0) is also the
    padding token.
    """
    tokenizer = Backend(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    config = {"eos_token": END_OF_TEXT, "pad_token": END_OF_TEXT, "tokenizer_class": "PreTrainedTokenizerFast"}
    return Tokenizer({TOKENIZER: tokenizer.to_str(pretty=True).encode(), CONFIG: f"{json.dumps(config, indent=2)}\n".encode()})

"""End and text of responses for several kinds of tokenizers, and completions that no engine may return."""

import json
import random
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast

import pytest
from model_parts import byte_level as byte_level_bpe
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from grpo.common.records import Completion, Problem
from grpo.models.tokenizer import Tokenizer
from grpo.rollout.engine import SamplingParams
from grpo.rollout.responses import Responses
from grpo.rollout.sampling import Sampler, sample_rollouts
from grpo.tasks.formats import R1_ZERO
from grpo.tasks.task import Format

TAGS = ("<think>", "</think>", "<answer>", "</answer>")
TEXTS = ["the answer is 4 END of it", "Q: what A: 42 so Q: next A: 7", "END END", "a b c \n d"]


def made_of(backend: Backend, stop_tokens: list[str]) -> Tokenizer:
    ends = {"eos_token_id": [backend.token_to_id(token) for token in stop_tokens]}
    files = {"tokenizer.json": backend.to_str(), "tokenizer_config.json": json.dumps({"eos_token": stop_tokens[0]})}
    return Tokenizer({name: text.encode() for name, text in (files | {"generation_config.json": json.dumps(ends)}).items()})


def byte_level(special_tags: bool = False, stop_tokens: tuple[str, ...] = ("</s>",)) -> Tokenizer:
    """A tokenizer like GPT-2's, with the tags of r1_zero as added tokens."""
    backend = byte_level_bpe(TEXTS * 5, ["</s>", "<|im_end|>"])
    backend.add_tokens([AddedToken(tag, special=special_tags, normalized=False) for tag in TAGS])
    return made_of(backend, list(stop_tokens))


def like_llama2(prepend_scheme: str = "always") -> Tokenizer:
    """A tokenizer in which a space is part of the next token, and a text's first space is dropped."""
    backend = Backend(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme=prepend_scheme, split=True)
    strip = decoders.Strip(" ", 1, 0)
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), strip])
    special = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=420, special_tokens=special, show_progress=False)
    backend.train_from_iterator(TEXTS * 5, trainer)
    return made_of(backend, ["</s>"])


def said(tokenizer: Tokenizer, ids: list[int], stop: tuple[str, ...]) -> Completion:
    """The completion that an engine makes of a sequence of tokens."""
    responses, reason, length = Responses(tokenizer, stop), "length", len(ids)
    for n in range(1, len(ids) + 1):
        if responses.has_ended(ids[:n]):
            reason, length = "stop", n
            break
    return responses.completion(ids[:length], [-1.0] * length, reason, 3)


@pytest.mark.parametrize("tokenizer", [byte_level(), like_llama2("always"), like_llama2("first")], ids=["bytes", "▁", "▁first"])
@pytest.mark.parametrize(
    ("text", "stop"),
    [
        ("the answer is 4 END of it", " END"),
        ("so Q: next", "Q: "),
        ("so Q: next", ": n"),
        ("4 END of it", "END "),
        ("a b", " "),
        ("so 4 \n d", "\n"),
        ("the é is é 漢字, then", "漢字"),
        ("so 🧮 it is", "🧮 i"),
        ("nothing ends it", "END"),
    ],
)
def test_a_response_ends_where_its_text_first_holds_a_stop_string(tokenizer: Tokenizer, text: str, stop: str) -> None:
    """The text, decoded whole and cut there, is the truth."""
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    whole = tokenizer.decode(ids)
    assert whole == text
    one = said(tokenizer, ids, (stop,))
    before, found, _ = whole.partition(stop)
    assert one.text == before + found
    assert one.finish_reason == ("stop" if found else "length")
    # No token more than it takes.
    assert stop not in tokenizer.decode(one.token_ids[:-1]) or not found


@pytest.mark.parametrize("stop", [("</answer>",), ("é", "42"), ("d END", "->"), ("n",)])
def test_the_newest_tokens_of_a_byte_level_tokenizer_tell_what_the_whole_text_tells(stop: tuple[str, ...]) -> None:
    """For tokens in any order, of which many are parts of characters, and others tags."""
    rng, tokenizer = random.Random(0), byte_level()
    assert tokenizer.is_byte_level and not like_llama2().is_byte_level
    newest, whole = Responses(tokenizer, stop), Responses(tokenizer, stop)
    whole._newest = slice(None)
    pieces = [tokenizer(text)["input_ids"] for text in (*TEXTS, *TAGS, "é", "42", "d END", "- >", "->", "n")]
    ends = 0
    for _ in range(300):
        ids = [token for _ in range(8) for token in rng.choice([rng.choice(pieces), [rng.randrange(len(tokenizer))]])]
        found = [[one.has_ended(ids[:n]) for n in range(1, len(ids) + 1)] for one in (newest, whole)]
        assert found[0] == found[1]
        assert [newest.text(ids[:n], "stop") for n in range(1, 9)] == [whole.text(ids[:n], "stop") for n in range(1, 9)]
        ends += sum(found[0])
    assert ends > 50


def test_which_stop_string_counts() -> None:
    """Of two that one token completes, the first in the text; and none that was complete before the newest token, as where it
    stands within the first ``min_tokens``.
    """
    tokenizer = byte_level()
    for stop in (("N", "D"), ("D", "N")):
        one = said(tokenizer, tokenizer("so END of it")["input_ids"], stop)
        assert (one.text, tokenizer.decode(one.token_ids)) == ("so EN", "so END")
    ids, responses = tokenizer("so END")["input_ids"], Responses(tokenizer, ("END",))
    assert responses.has_ended(ids) and not responses.has_ended([*ids, *tokenizer("!")["input_ids"]])


@pytest.mark.parametrize("special", [False, True])
def test_tags_that_are_tokens_of_their_own_are_read_in_the_text(special: bool) -> None:
    tokenizer = byte_level(special)
    ids = tokenizer("so 3 </think> <answer> 42 </answer> and more")["input_ids"]
    one = said(tokenizer, ids, R1_ZERO.stop)
    assert (one.text, one.finish_reason) == ("so 3 </think> <answer> 42 </answer>", "stop")
    assert R1_ZERO.read(one.text) == "42"


@pytest.mark.parametrize(
    ("stop_tokens", "stop", "text", "tokens"),
    [
        (("</s>",), (), "a<|im_end|> b", None),  # no end: all is text
        (("</s>",), ("<|im_end|>",), "a<|im_end|>", 2),  # a stop string stays
        (("</s>", "<|im_end|>"), (), "a", 2),  # a stop token does not
        (("</s>", "<|im_end|>"), ("<|im_end|>",), "a<|im_end|>", 2),
        (("</s>", "<|im_end|>"), (">",), "a", 2),  # which only happens to be in the stop token
        (("</s>",), ("<|im",), "a<|im", 2),  # cut within the token
    ],
)
def test_the_text_holds_every_token_but_the_one_that_ends_it(
    stop_tokens: tuple[str, ...], stop: tuple[str, ...], text: str, tokens: int | None
) -> None:
    tokenizer = byte_level(stop_tokens=stop_tokens)
    ids = tokenizer("a<|im_end|> b")["input_ids"]
    one = said(tokenizer, ids, stop)
    assert one.text == text
    assert len(one.token_ids) == (tokens or len(ids))
    assert one.finish_reason == ("stop" if tokens else "length")


def test_a_stop_token_within_the_minimum_stays_in_the_text() -> None:
    """With an engine that lets one through, and a response that the limit cuts after it."""
    for text in ("a</s>b", "a</s>"):
        ids = (tokenizer := byte_level())(text)["input_ids"]
        assert Responses(tokenizer, ()).completion(ids, [0.0] * len(ids), "length", 0).text == text


@pytest.mark.parametrize("reason", ["abort", "error", "repetition", None])
def test_a_response_that_the_engine_did_not_finish_is_no_completion(reason: Any) -> None:
    with pytest.raises(ValueError, match=rf"ended a response with {reason!r}"):
        Completion((5, 6), "4", (-0.1, -0.2), reason)
    with pytest.raises(ValueError, match=rf"ended a response with {reason!r}"):
        Responses(byte_level(), ("x",)).completion([], [], reason, 0)


def test_each_token_of_a_completion_has_a_log_probability() -> None:
    for tokens, log_probs in ((2, 1), (1, 2), (0, 1)):
        with pytest.raises(ValueError, match=f"gave {tokens} tokens with {log_probs} log-probabilities"):
            Completion((5,) * tokens, "", (0.0,) * log_probs, "stop")


@pytest.mark.parametrize(
    ("sizes", "length", "message"),
    [
        ([3, 5], 2, r"groups of 4 responses, and returned groups of \[3, 5\]"),
        ([4], 2, r"groups of \[4\]"),
        ([4, 4, 4], 2, r"groups of \[4, 4, 4\]"),
        ([4, 4], 0, "asked for 1 to 8 tokens, and returned a response of 0"),
        ([4, 4], 9, "asked for 1 to 8 tokens, and returned a response of 9"),
        ([4, 4], 1, None),
        ([4, 4], 8, None),
    ],
)
def test_what_an_engine_returns_is_what_it_was_asked_for(sizes: list[int], length: int, message: str | None) -> None:
    group = [Completion((5,) * length, "4", (-0.1,) * length, "stop")] * 5
    engine = SimpleNamespace(generate=lambda *_, **__: [group[:size] for size in sizes])
    sampler = Sampler(cast(Any, engine), byte_level(), Format("{question}"), cast(Any, None))
    with pytest.raises(ValueError, match=message) if message else nullcontext():
        rollouts = sample_rollouts(sampler, [Problem(name, name, "") for name in "ab"], SamplingParams(max_tokens=8), 4, 0)
        assert [rollout.problem.id for rollout in rollouts] == [*"aaaabbbb"]

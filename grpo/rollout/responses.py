"""End and text of a response, for every engine.

Both are derived from the token ids with the project's tokenizer, so that the text that ends a response is the text that is
rewarded, in every engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, lru_cache

from grpo.common.records import Completion
from grpo.models.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"  # what incomplete UTF-8 decodes to


class Responses:
    """The rules that end a response of one model: its stop tokens and a set of stop strings. ``stop``: the stop strings."""

    def __init__(self, tokenizer: Tokenizer, stop: tuple[str, ...]):
        self.tokenizer, self.stop = tokenizer, stop
        # Where each token has bytes, a stop string lies in no more tokens than it has bytes.
        longest = max((len(string.encode()) for string in stop), default=0)
        self._newest = slice(-longest if tokenizer.is_byte_level else None, None)

    @cached_property
    def may_end_with(self) -> frozenset[int]:
        """The tokens that can end a response: stop tokens, and tokens that can complete a stop string.

        Only responses whose newest token is one of these need decoding, which keeps decoding off the hot path.
        """
        # Each token is decoded twice in a row, because some tokenizers write a space only between two tokens.
        pieces = self.tokenizer.batch_decode([[i, i] for i in range(len(self.tokenizer))]) if self.stop else []
        # A part of a character decodes to the replacement character, and may complete any stop string.
        ends = (*{string[-1] for string in self.stop}, REPLACEMENT)
        completing = (i for i, piece in enumerate(pieces) if any(end in piece for end in ends))
        return frozenset((*self.tokenizer.stop_token_ids, *completing))

    def has_ended(self, token_ids: Sequence[int]) -> bool:
        """Whether the newest token is a stop token or completes a stop string."""
        newest = token_ids[-1]
        if newest not in self.may_end_with:
            return False
        return newest in self.tokenizer.stop_token_ids or self._past_stop(token_ids) is not None

    def completion(
        self, token_ids: Sequence[int], log_probs: Sequence[float], finish_reason: str, policy_version: int
    ) -> Completion:
        """Build the completion of an engine's response, with its text. Raises ValueError if the response is not finished."""
        ids = tuple(token_ids)
        return Completion(ids, self.text(ids, finish_reason), tuple(log_probs), finish_reason, policy_version)

    def text(self, token_ids: Sequence[int], finish_reason: str) -> str:
        """Text of a response, without a stop token at its end or text after the stop string that ended it."""
        text = self.tokenizer.decode(token_ids)
        if finish_reason != "stop":
            return text
        if self._ends_with_stop_token(token_ids, text):
            return self.tokenizer.decode(token_ids[:-1])
        return text[: len(text) - (self._past_stop(token_ids) or 0)]

    def _ends_with_stop_token(self, token_ids: Sequence[int], text: str) -> bool:
        """Whether a stop token ended the response, rather than a stop string that contains this token."""
        if not token_ids or token_ids[-1] not in self.tokenizer.stop_token_ids:
            return False
        token = self.tokenizer.decode(token_ids[-1:])
        return not any(string.endswith(token) and text.endswith(string) for string in self.stop)

    def _past_stop(self, token_ids: Sequence[int]) -> int | None:
        """Number of characters after the first stop string that the newest token completes; None if it completes none.

        It decodes the whole response if a token's text may depend on the tokens before it, else the newest tokens.
        """
        if not self.stop:
            return None
        token_ids = token_ids[self._newest]
        before, text = (self.tokenizer.decode(ids) for ids in (token_ids[:-1], token_ids))
        known = len(before.rstrip(REPLACEMENT))
        # A stop string that was complete before the newest token (within min_tokens) does not count again.
        ends = [text.find(string, max(0, known - len(string) + 1)) + len(string) for string in self.stop]
        ends = [end for end, string in zip(ends, self.stop, strict=True) if end >= len(string)]
        return len(text) - min(ends) if ends else None


@lru_cache(maxsize=8)
def responses_of(tokenizer: Tokenizer, stop: tuple[str, ...]) -> Responses:
    """Make :class:`Responses` once, as finding the tokens that may end a response decodes the whole vocabulary."""
    return Responses(tokenizer, stop)

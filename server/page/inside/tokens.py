"""The tokens of an answer: their texts, their places in it, and what could have stood there. No I/O in here."""

import codecs
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from server.client.openai_answers import Alternative, TokenLogprob

_SPELLED_BYTES = re.compile(r"bytes:(?:\\x[0-9a-f]{2})+")
_MARK = re.compile(r"<\|[^<>]*\|>|<｜[^<>]*｜>|</?s>|<(?:eos|bos|pad|unk|start_of_turn|end_of_turn)>")
"""How models of all kinds write the tokens that are no text. The API does not tell them from others."""


@dataclass(frozen=True, slots=True)
class Token:
    """One of an answer's."""

    place: int
    """From 0 on."""
    logprob: TokenLogprob
    source: str | None
    """`drawn`, `forced` or `draft:METHOD`; None where the server does not tell."""
    start: int
    """How many whole characters stand before it."""
    is_within: bool
    """Whether it begins within a character."""
    ends: str
    """The characters that end with it."""
    unfinished: bytes = b""
    """What of it belongs to a character that ends with a later one."""

    @property
    def text(self) -> str:
        """The characters that end with it, and the bytes of one that does not."""
        return self.ends + (_hex(self.unfinished) if self.unfinished else "")

    @property
    def rank(self) -> int | None:
        """1 for the most probable; None if it is not among those that the server tells of."""
        for rank, other in enumerate(self.logprob.top_logprobs, 1):
            if raw(other) == raw(self.logprob):
                return rank
        return None

    @property
    def rest(self) -> float:
        """The probability of all tokens that the server does not tell of."""
        told = sum(probability(other) for other in self.logprob.top_logprobs)
        return max(0.0, 1 - told - (0 if self.rank else probability(self.logprob)))


class Tokens:
    """Those of an answer, as they come."""

    def __init__(self, prefix: str = "") -> None:
        """`prefix` is the text that the answer had to begin with."""
        self.all: list[Token] = []
        self.text = prefix
        """Of all whole characters so far."""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, logprobs: Sequence[TokenLogprob], sources: Sequence[str] | None) -> None:
        """More of them. Without a source for each of them there are none."""
        known = sources if sources is not None and len(sources) == len(logprobs) else [None] * len(logprobs)
        for logprob, source in zip(logprobs, known, strict=True):
            is_within = bool(self._decoder.getstate()[0])
            ends = self._decoder.decode(raw(logprob))
            unfinished = self._decoder.getstate()[0][-len(raw(logprob)) :]
            self.all.append(Token(len(self.all), logprob, source, len(self.text), is_within, ends, unfinished))
            self.text += ends

    def cut(self, num_characters: int) -> None:
        """Forget those after so many characters."""
        self.all = [token for token in self.all if token.start < num_characters]
        self.text = self.text[:num_characters]

    def at(self, num_characters: int) -> int | None:
        """The place of the token that goes on after so many characters; None if there is none."""
        return next((one.place for one in self.all if one.start + max(1, len(one.ends)) > num_characters), None)

    def branch(self, token: Token, alternative: Alternative) -> str:
        """The text up to the token, and the alternative in its place."""
        return self.text[: token.start] + raw(alternative).decode()

    def obstacle(self, token: Token, alternative: Alternative, content: str) -> str:
        """Why an answer cannot go on from there, for people; empty if it can. `content` is the text of the answer."""
        if token.is_within:
            return "The token before it is a part of a character, so that no text ends here."
        if is_part(alternative):
            return "It is a part of a character, and an answer can go on from text alone."
        if _MARK.fullmatch(alternative.token):
            return "It is a mark of the model's format, no text."
        if not content.startswith(self.text[: token.start]):
            return "What stands before it is not the text of the answer, but reasoning, a call or a mark."
        return ""


def probability(token: Alternative) -> float:
    """From 0 to 1."""
    return math.exp(min(0.0, token.logprob))


def raw(token: Alternative) -> bytes:
    r"""Its bytes, which stand in its text, as in `bytes:\xe2\x80`, where the server does not tell them apart."""
    if token.bytes is not None:
        return bytes(token.bytes)
    if _SPELLED_BYTES.fullmatch(token.token):
        return bytes.fromhex(token.token.removeprefix("bytes:").replace("\\x", ""))
    return token.token.encode()


def is_part(token: Alternative) -> bool:
    """Whether it is no whole characters."""
    try:
        raw(token).decode()
    except UnicodeDecodeError:
        return True
    return False


def spelled(token: Alternative) -> str:
    """Its text; its bytes, as in ⟨f0 9f⟩, where it is no whole characters."""
    return _hex(raw(token)) if is_part(token) else raw(token).decode()


def _hex(data: bytes) -> str:
    return f"⟨{data.hex(' ')}⟩"

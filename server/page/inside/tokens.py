"""The tokens of an answer: texts, places, alternatives, and statistics. No I/O in here."""

import codecs
import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from server.client.openai_answers import Alternative, TokenLogprob
from server.page.answer import count, raw

_MARK = re.compile(r"<\|[^<>]*\|>|<｜[^<>]*｜>|</?s>|<(?:eos|bos|pad|unk|start_of_turn|end_of_turn)>")
"""How models write control tokens, which the API does not distinguish from text."""
_BITS_SHOWN = 10
"""Surprise of at least so many bits has the strongest colour."""
_MOST_PERPLEXITY = 1e6
_COLOURS = 6
"""Colours for methods of speculation; further methods share them."""


@dataclass(frozen=True, slots=True)
class Token:
    """A token of an answer."""

    place: int
    """Counted from 0."""
    logprob: TokenLogprob
    source: str | None
    """`drawn`, `forced` or `draft:METHOD`; None where the server does not return it."""
    start: int
    """The number of whole characters before it."""
    is_within: bool
    """Whether it begins within a character."""
    ends: str
    """The characters that it completes."""
    unfinished: bytes = b""
    """Its bytes of a character that a later token completes."""

    @property
    def text(self) -> str:
        """The characters that it completes, and the bytes of an incomplete one."""
        return self.ends + (_hex(self.unfinished) if self.unfinished else "")

    @property
    def rank(self) -> int | None:
        """1 for the most probable; None if it is not among the alternatives."""
        for rank, other in enumerate(self.logprob.top_logprobs, 1):
            if raw(other) == raw(self.logprob):
                return rank
        return None

    @property
    def rest(self) -> float:
        """The probability of all tokens that the server does not return."""
        told = sum(probability(other) for other in self.logprob.top_logprobs)
        return max(0.0, 1 - told - (0 if self.rank else probability(self.logprob)))


class Tokens:
    """The tokens of an answer that grows."""

    def __init__(self, prefix: str = "") -> None:
        """`prefix` is the given text that the answer begins with."""
        self.all: list[Token] = []
        self.text = prefix
        """All whole characters so far."""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, logprobs: Sequence[TokenLogprob], sources: Sequence[str] | None) -> None:
        """Append tokens. Their sources count only if there is one for each."""
        known = sources if sources is not None and len(sources) == len(logprobs) else [None] * len(logprobs)
        for logprob, source in zip(logprobs, known, strict=True):
            is_within = bool(self._decoder.getstate()[0])
            ends = self._decoder.decode(raw(logprob))
            unfinished = self._decoder.getstate()[0][-len(raw(logprob)) :]
            self.all.append(Token(len(self.all), logprob, source, len(self.text), is_within, ends, unfinished))
            self.text += ends

    def cut(self, num_characters: int) -> None:
        """Remove the tokens after so many characters."""
        self.all = [token for token in self.all if token.start < num_characters]
        self.text = self.text[:num_characters]

    def at(self, num_characters: int) -> int | None:
        """The place of the token after so many characters; None if there is none."""
        return next((one.place for one in self.all if one.start + max(1, len(one.ends)) > num_characters), None)

    def branch(self, token: Token, alternative: Alternative) -> str:
        """The text up to the token, and the alternative in its place."""
        return self.text[: token.start] + raw(alternative).decode()

    def obstacle(self, token: Token, alternative: Alternative, content: str) -> str:
        """Why an answer cannot continue from an alternative; empty if it can. `content` is the answer's text."""
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


def is_part(token: Alternative) -> bool:
    """Whether a token is not made of whole characters."""
    try:
        raw(token).decode()
    except UnicodeDecodeError:
        return True
    return False


def spelled(token: Alternative) -> str:
    """A token's text, or its bytes, as in ⟨f0 9f⟩, if it is not made of whole characters."""
    return _hex(raw(token)) if is_part(token) else raw(token).decode()


def _hex(data: bytes) -> str:
    return f"⟨{data.hex(' ')}⟩"


class TokenStatistics:
    """Statistics of tokens."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self.sources: Counter[str] = Counter()
        """The number of tokens by source, in the order of their first token."""
        self._probability = 0.0
        self._logprob = 0.0

    def add(self, tokens: Iterable[Token]) -> None:
        for token in tokens:
            self.num_tokens += 1
            self._probability += probability(token.logprob)
            self._logprob += token.logprob.logprob
            if token.source is not None:
                self.sources[token.source] += 1

    @property
    def perplexity(self) -> float:
        mean = self._logprob / self.num_tokens if self.num_tokens else 0.0
        return math.exp(-mean) if -mean < math.log(_MOST_PERPLEXITY) else math.inf

    @property
    def summary(self) -> str:
        """All statistics in one line."""
        if not self.num_tokens:
            return ""
        perplexity = "∞" if math.isinf(self.perplexity) else f"{self.perplexity:.2f}"
        found = [
            count(self.num_tokens, "token"),
            f"mean probability {percent(self._probability / self.num_tokens)}",
            f"perplexity {perplexity}",
        ]
        drafted = [source for source in self.sources if source.startswith("draft:")]
        return " · ".join(found + [f"{percent(self.share(source))} {source_name(source)}" for source in drafted])

    def share(self, source: str) -> float:
        """The share of tokens from this source."""
        return self.sources[source] / self.num_tokens if self.num_tokens else 0.0

    def legend(self) -> list[tuple[str, int]]:
        """A text and a number of a colour for each source."""
        return [
            (f"{source_name(source)}: {number:,}, {percent(self.share(source))}", self.colour(source))
            for source, number in self.sources.items()
        ]

    def colour(self, source: str | None) -> int:
        """0 for drawn tokens, 1 for forced ones, then the methods in the order of their first token."""
        if source in (None, "drawn"):
            return 0
        if source == "forced":
            return 1
        methods = [one for one in self.sources if one not in ("drawn", "forced")]
        return 2 + methods.index(source) % _COLOURS if source in methods else 0


def source_name(source: str) -> str:
    """A token's source in words."""
    kind, _, method = source.partition(":")
    return f"drafted by {method}" if kind == "draft" and method else source


def surprise(token: Token) -> float:
    """From 0 to 1: each halving of the probability adds the same."""
    return min(1.0, max(0.0, -token.logprob.logprob / math.log(2)) / _BITS_SHOWN)


def percent(share: float) -> str:
    """A share with three significant digits."""
    return "under 0.01 %" if 0 < share < 1e-4 else f"{100 * share:.3g} %"

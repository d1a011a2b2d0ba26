"""An answer's tokens: texts, positions, alternatives and statistics. No I/O."""

import codecs
import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from server.client.openai_answers import Alternative, TokenLogprob
from server.page.answer import count, token_bytes

_MARK = re.compile(r"<\|[^<>]*\|>|<｜[^<>]*｜>|</?s>|<(?:eos|bos|pad|unk|start_of_turn|end_of_turn)>")
"""Common control tokens, which the API does not distinguish from text."""
_BITS_SHOWN = 10
"""Surprise in bits from which a token has the strongest colour."""
_MOST_PERPLEXITY = 1e6
_COLOURS = 6
"""Number of colours for speculation methods; they repeat if there are more methods."""


@dataclass(frozen=True, slots=True)
class Token:
    """A token of an answer."""

    place: int
    """Index in the answer, from 0."""
    logprob: TokenLogprob
    source: str | None
    """`drawn`, `forced` or `draft:METHOD`; None if the server does not return it."""
    start: int
    """Number of complete characters before the token."""
    is_within: bool
    """Whether the token starts in the middle of a character."""
    ends: str
    """The characters that the token completes."""
    unfinished: bytes = b""
    """The token's bytes of a character that a later token completes."""

    @property
    def text(self) -> str:
        """The characters that the token completes, then the bytes of an incomplete one."""
        return self.ends + (_hex(self.unfinished) if self.unfinished else "")

    @property
    def rank(self) -> int | None:
        """Rank by probability, 1 for the best; None if the token is not among the alternatives."""
        for rank, other in enumerate(self.logprob.top_logprobs, 1):
            if token_bytes(other) == token_bytes(self.logprob):
                return rank
        return None

    @property
    def rest(self) -> float:
        """Total probability of the tokens that the server does not return."""
        returned = sum(probability(other) for other in self.logprob.top_logprobs)
        return max(0.0, 1 - returned - (0 if self.rank else probability(self.logprob)))


class Tokens:
    """The tokens of a growing answer."""

    def __init__(self, prefix: str = "") -> None:
        """`prefix` is given text that the answer starts with."""
        self.all: list[Token] = []
        self.text = prefix
        """All complete characters so far."""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, logprobs: Sequence[TokenLogprob], sources: Sequence[str] | None) -> None:
        """Append tokens. `sources` is used only if it has one entry per token."""
        known = sources if sources is not None and len(sources) == len(logprobs) else [None] * len(logprobs)
        for logprob, source in zip(logprobs, known, strict=True):
            is_within = bool(self._decoder.getstate()[0])
            ends = self._decoder.decode(token_bytes(logprob))
            unfinished = self._decoder.getstate()[0][-len(token_bytes(logprob)) :]
            self.all.append(Token(len(self.all), logprob, source, len(self.text), is_within, ends, unfinished))
            self.text += ends

    def cut(self, num_characters: int) -> None:
        """Remove the tokens after the first `num_characters` characters."""
        self.all = [token for token in self.all if token.start < num_characters]
        self.text = self.text[:num_characters]

    def at(self, num_characters: int) -> int | None:
        """Index of the token that follows `num_characters` characters; None if there is none."""
        return next((one.place for one in self.all if one.start + max(1, len(one.ends)) > num_characters), None)

    def branch(self, token: Token, alternative: Alternative) -> str:
        """The text before the token, followed by the alternative."""
        return self.text[: token.start] + token_bytes(alternative).decode()

    def obstacle(self, token: Token, alternative: Alternative, content: str) -> str:
        """Why an answer cannot continue from an alternative; empty if it can. `content` is the answer's text."""
        if token.is_within:
            return "This position is inside a character."
        if is_part(alternative):
            return "This token is only part of a character; an answer can continue only from complete text."
        if _MARK.fullmatch(alternative.token):
            return "This is a control token, not text."
        if not content.startswith(self.text[: token.start]):
            return "The tokens before it contain reasoning, a tool call or a control token, not only text."
        return ""


def probability(token: Alternative) -> float:
    """The token's probability, from 0 to 1."""
    return math.exp(min(0.0, token.logprob))


def is_part(token: Alternative) -> bool:
    """Whether a token contains an incomplete character."""
    try:
        token_bytes(token).decode()
    except UnicodeDecodeError:
        return True
    return False


def spelled(token: Alternative) -> str:
    """A token's text; its bytes, as in ⟨f0 9f⟩, if it contains an incomplete character."""
    return _hex(token_bytes(token)) if is_part(token) else token_bytes(token).decode()


def _hex(data: bytes) -> str:
    return f"⟨{data.hex(' ')}⟩"


class TokenStatistics:
    """Mean probability, perplexity and sources of an answer's tokens."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self.sources: Counter[str] = Counter()
        """Number of tokens by source, in order of first appearance."""
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
        """Fraction of tokens from this source."""
        return self.sources[source] / self.num_tokens if self.num_tokens else 0.0

    def legend(self) -> list[tuple[str, int]]:
        """Text and colour number for each source."""
        return [
            (f"{source_name(source)}: {number:,}, {percent(self.share(source))}", self.colour(source))
            for source, number in self.sources.items()
        ]

    def colour(self, source: str | None) -> int:
        """Colour number: 0 for drawn tokens, 1 for forced ones, from 2 for methods in order of first appearance."""
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
    """Surprise in bits, scaled to 0..1 by `_BITS_SHOWN`."""
    return min(1.0, max(0.0, -token.logprob.logprob / math.log(2)) / _BITS_SHOWN)


def percent(share: float) -> str:
    """A fraction as a percentage with three significant digits."""
    return "under 0.01 %" if 0 < share < 1e-4 else f"{100 * share:.3g} %"

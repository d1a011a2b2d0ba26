"""An answer that is made again in order to be looked at. No I/O in here."""

import math
from collections import Counter
from dataclasses import dataclass

from server.page.answers import Alternative, Choice, Chunk, TokenLogprob
from server.page.conversation import Turn

DRAWN = "drawn"
"""The source of a token that no draft had."""


@dataclass(frozen=True, slots=True)
class Token:
    """One token of an answer."""

    seen: TokenLogprob
    source: str | None
    """`drawn`, or `draft:` and a method; None if the server does not tell."""

    @property
    def probability(self) -> float:
        return math.exp(self.seen.logprob)

    @property
    def rank(self) -> int | None:
        """1 is the most probable; None beyond those that the server tells."""
        others = self.seen.top_logprobs
        if all(other.token != self.seen.token for other in others) and others:
            return None
        return 1 + sum(other.logprob > self.seen.logprob for other in others)

    @property
    def alternatives(self) -> list[Alternative]:
        """What it might have been, itself included, the most probable first."""
        others = [other for other in self.seen.top_logprobs if other.token != self.seen.token]
        return sorted([self.seen, *others], key=lambda one: -one.logprob)

    @property
    def rest(self) -> float:
        """The probability of all that is in no list."""
        return max(0.0, 1 - sum(math.exp(one.logprob) for one in self.alternatives))


class Replay:
    """What has come of it so far."""

    def __init__(self, turn: Turn) -> None:
        """`turn` is the answer that is made again."""
        self._turn = turn
        self.tokens: list[Token] = []
        self.content = turn.prefix or ""
        self.reasoning = ""
        self.fingerprint: str | None = None

    def add(self, chunk: Chunk) -> None:
        """Take in what has come."""
        self.fingerprint = chunk.system_fingerprint or self.fingerprint
        for choice in chunk.choices:
            if choice.index == 0:
                self._add(choice)

    @property
    def is_long_enough(self) -> bool:
        """Whether there is as much as there was of an answer that did not come to its end."""
        turn = self._turn
        was_cut = turn.problem is not None or turn.finish_reason in (None, "stopped")
        return was_cut and len(self.content) >= len(turn.content) and len(self.reasoning) >= len(turn.reasoning)

    @property
    def difference(self) -> int | None:
        """How many characters, reasoning and text, are the same until the two part; None if they are equal."""
        before, now = self._turn.reasoning + self._turn.content, self.reasoning + self.content
        if self.is_long_enough:
            now = now[: len(before)]  # the last piece may be longer
        if before == now:
            return None
        pairs = zip(before, now, strict=False)
        return next((at for at, (one, other) in enumerate(pairs) if one != other), min(len(before), len(now)))

    @property
    def verdict(self) -> str:
        """Whether the same came again, in words."""
        at = self.difference
        if at is None:
            return f"The same came again, equal to the last character: {len(self.tokens):,} tokens."
        text = f"Not the same: equal for {at:,} characters, then they part."
        then = self._turn.fingerprint
        if then != self.fingerprint:
            return f"{text} The server is not what it was: its fingerprint is {self.fingerprint}, then {then}."
        return f"{text} This server does not give the same answer for the same seed."

    @property
    def perplexity(self) -> float | None:
        """Of the answer, to the model; None without tokens."""
        if not self.tokens:
            return None
        return math.exp(-sum(token.seen.logprob for token in self.tokens) / len(self.tokens))

    @property
    def sources(self) -> dict[str, int]:
        """How many tokens came from where, the most first; empty if the server does not tell."""
        return dict(Counter(token.source for token in self.tokens if token.source is not None).most_common())

    def prefix(self, index: int, instead: Alternative) -> str | None:
        """The text before a token, with another one in its place.

        None where there is no such text: some token is no whole characters, or the answer was not all text.
        """
        if self._turn.reasoning or self._turn.tool_calls:
            return None
        pieces = [*(token.seen for token in self.tokens[:index]), instead]
        if any(piece.bytes is None and piece.token.startswith("bytes:") for piece in pieces):
            return None
        told = b"".join(_bytes_of(piece) for piece in pieces)
        try:
            return (self._turn.prefix or "") + told.decode()
        except UnicodeDecodeError:
            return None

    def _add(self, choice: Choice) -> None:
        self.content += choice.delta.content or choice.delta.refusal or ""
        self.reasoning += choice.delta.thought
        seen = (choice.logprobs and choice.logprobs.content) or []
        sources = choice.token_sources or []
        self.tokens += [Token(one, sources[at] if at < len(sources) else None) for at, one in enumerate(seen)]


def shown(text: str) -> str:
    """A token's text, so that what cannot be seen can be."""
    return text.replace("\n", "↵").replace("\t", "→").replace(" ", "␣") or "(empty)"


def source_in_words(source: str) -> str:
    """For people."""
    kind, _, method = source.partition(":")
    return f"drafted by {method}" if kind == "draft" else kind


def _bytes_of(piece: Alternative) -> bytes:
    return piece.token.encode() if piece.bytes is None else bytes(piece.bytes)

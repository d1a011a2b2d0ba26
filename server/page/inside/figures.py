"""What can be said of the tokens of an answer, in numbers. No I/O in here."""

import math
from collections import Counter
from collections.abc import Iterable

from server.page.inside.tokens import Token, probability
from server.page.wording import count

_BITS_SHOWN = 10
"""Of surprise; whoever is more surprised shows it as much as this."""
_MOST_PERPLEXITY = 1e6
_COLOURS = 6
"""Of methods of speculation; those beyond them share colours."""


class Figures:
    """Sums over tokens as they come."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self.sources: Counter[str] = Counter()
        """How many tokens came from where, in the order in which they first did."""
        self._probability = 0.0
        self._logprob = 0.0

    def add(self, tokens: Iterable[Token]) -> None:
        """More of them."""
        for token in tokens:
            self.num_tokens += 1
            self._probability += probability(token.logprob)
            self._logprob += token.logprob.logprob
            if token.source is not None:
                self.sources[token.source] += 1

    @property
    def perplexity(self) -> float:
        """Among how many equally probable tokens each was chosen, as it were."""
        mean = self._logprob / self.num_tokens if self.num_tokens else 0.0
        return math.exp(-mean) if -mean < math.log(_MOST_PERPLEXITY) else math.inf

    @property
    def summary(self) -> str:
        """All of it in a line."""
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
        """Of the tokens that came from there."""
        return self.sources[source] / self.num_tokens if self.num_tokens else 0.0

    def legend(self) -> list[tuple[str, int]]:
        """For each source what is said of it, and the number of its colour."""
        return [
            (f"{source_name(source)}: {number:,}, {percent(self.share(source))}", self.colour(source))
            for source, number in self.sources.items()
        ]

    def colour(self, source: str | None) -> int:
        """0 for what the model drew, 1 for what was forced, then the methods, by when each was first seen."""
        if source in (None, "drawn"):
            return 0
        if source == "forced":
            return 1
        methods = [one for one in self.sources if one not in ("drawn", "forced")]
        return 2 + methods.index(source) % _COLOURS if source in methods else 0


def source_name(source: str) -> str:
    """In words."""
    kind, _, method = source.partition(":")
    return f"drafted by {method}" if kind == "draft" and method else source


def surprise(token: Token) -> float:
    """From 0 to 1, as it is felt: each halving of the probability adds as much."""
    return min(1.0, max(0.0, -token.logprob.logprob / math.log(2)) / _BITS_SHOWN)


def percent(share: float) -> str:
    """Three digits, of what is not too small to say."""
    return "under 0.01 %" if 0 < share < 1e-4 else f"{100 * share:.3g} %"

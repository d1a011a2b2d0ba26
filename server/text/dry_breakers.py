"""DRY's sequence breakers: strings, and the token sequences that spell them."""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import lru_cache

from model_runner.contract import Breaker

_CACHED = 256
"""Strings whose spellings are cached."""


class BreakerSpellings:
    """Finds the token sequences that end a repetition.

    As in llama.cpp, a breaker is spelled by each single token whose text contains it. It is also spelled by each token
    whose text ends with a prefix of it, followed by the tokens of the rest.
    """

    def __init__(self, texts: Sequence[bytes], encode: Callable[[str], Sequence[int]]) -> None:
        """`texts` is the bytes of each token of the vocabulary."""
        self._texts = texts
        self._encode = encode
        self._by_last: dict[int, list[int]] = {}  # tokens by the last byte of their text
        for token, text in enumerate(texts):
            if text:
                self._by_last.setdefault(text[-1], []).append(token)
        self._spell = lru_cache(_CACHED)(self._find)

    def __call__(self, breakers: Sequence[str], vocab_size: int) -> tuple[Breaker, ...]:
        """The spellings of all these breakers that a model with `vocab_size` tokens can write.

        No two have the same rest. Their first tokens are in ascending order.
        """
        by_rest: dict[tuple[int, ...], set[int]] = {}
        for breaker in breakers:
            for one in self._spell(breaker):
                by_rest.setdefault(one.rest, set()).update(one.first)
        spellings = []
        for rest, tokens in by_rest.items():
            first = sorted(tokens)
            first = first[: bisect_left(first, vocab_size)]
            if first and max(rest, default=0) < vocab_size:
                spellings.append(Breaker(tuple(first), rest))
        return tuple(spellings)

    def forget(self) -> None:
        """Clear the cache."""
        self._spell.cache_clear()

    def _find(self, breaker: str) -> tuple[Breaker, ...]:
        """One spelling for the whole string, and one for each of its prefixes."""
        whole = breaker.encode()
        single = {token for token, text in enumerate(self._texts) if whole in text}
        spellings = [Breaker(tuple(single))]
        for length in range(1, len(breaker)):
            beginning = breaker[:length].encode()
            first = tuple(
                token
                for token in self._by_last.get(beginning[-1], ())
                if token not in single and self._texts[token].endswith(beginning)
            )
            if first:
                spellings.append(Breaker(first, tuple(self._encode(breaker[length:]))))
        return tuple(spellings)

"""DRY's sequence breakers: strings, and the token sequences that spell them."""

from collections.abc import Callable, Sequence
from functools import lru_cache

_CACHED = 256
"""Breakers whose spellings are remembered."""

TokenSequence = tuple[int, ...]


class BreakerSpellings:
    """Finds the token sequences over which no repetition reaches.

    As in llama.cpp, a breaker is spelled by each single token whose text contains it, and by each token whose text ends
    with the beginning of it, followed by the tokens into which the rest is encoded.
    """

    def __init__(self, texts: Sequence[bytes], encode: Callable[[str], Sequence[int]]) -> None:
        """`texts` is what each token of the vocabulary stands for."""
        self._texts = texts
        self._encode = encode
        self._by_last: dict[int, list[int]] = {}  # tokens by the last byte of their text
        for token, text in enumerate(texts):
            if text:
                self._by_last.setdefault(text[-1], []).append(token)
        self._spell = lru_cache(_CACHED)(self._find)

    def __call__(self, breakers: Sequence[str]) -> tuple[TokenSequence, ...]:
        """The spellings of all these breakers, each once."""
        return tuple(dict.fromkeys(spelling for breaker in breakers for spelling in self._spell(breaker)))

    def _find(self, breaker: str) -> tuple[TokenSequence, ...]:
        whole = breaker.encode()
        spellings: list[TokenSequence] = [(token,) for token, text in enumerate(self._texts) if whole in text]
        single = {spelling[0] for spelling in spellings}
        for length in range(1, len(breaker)):
            beginning, rest = breaker[:length].encode(), tuple(self._encode(breaker[length:]))
            spellings += [
                (token, *rest)
                for token in self._by_last.get(beginning[-1], ())
                if token not in single and self._texts[token].endswith(beginning)
            ]
        return tuple(spellings)

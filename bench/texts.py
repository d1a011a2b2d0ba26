"""Text that Python ships: the help topics of its documentation (pydoc_data.topics).

English prose about a programming language, the same on every machine with the same Python.
"""

# Short: several benches read the same texts.
from pydoc_data.topics import topics

from tokenizers import Tokenizer


def longest_topics(tokenizer: Tokenizer, count: int, length: int) -> list[tuple[int, ...]]:
    """The first `length` tokens of the `count` longest topics, without those that have fewer tokens."""
    longest = sorted(topics.values(), key=len, reverse=True)[:count]
    encoded = [tuple(tokenizer.encode(text).ids[:length]) for text in longest]
    return [text for text in encoded if len(text) == length]

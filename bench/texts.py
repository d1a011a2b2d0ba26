"""Text for benchmarks: the help topics that Python ships (pydoc_data.topics).

This is English prose about programming, and the same on every machine with the same Python version.
"""

# Short: shared by several benchmarks.
from pydoc_data.topics import topics

from tokenizers import Tokenizer


def longest_topics(tokenizer: Tokenizer, count: int, length: int) -> list[tuple[int, ...]]:
    """The first `length` tokens of the `count` longest topics, without topics that have fewer tokens."""
    longest = sorted(topics.values(), key=len, reverse=True)[:count]
    encoded = [tuple(tokenizer.encode(text).ids[:length]) for text in longest]
    return [text for text in encoded if len(text) == length]

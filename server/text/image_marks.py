"""Private marks for images in the text of messages.

A mark is one surrogate character. Surrogates cannot be in a client's text, because requests are UTF-8 and lone
surrogates in JSON are refused. So no one can type a mark, and a message's content stays one string.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

_FIRST, _LAST = 0xD800, 0xDFFE
_TYPED = "\udfff"
"""Stands in a text between the first and the second character of a token that the client has typed."""
MAX_IMAGES = _LAST - _FIRST + 1
"""The most images of one conversation."""
_MARK = re.compile(f"([{chr(_FIRST)}-{chr(_LAST)}])")


def mark_of(index: int) -> str:
    """The mark of the image with this index, which is below MAX_IMAGES."""
    return chr(_FIRST + index)


def index_of(mark: str) -> int:
    """The index of a mark's image."""
    return ord(mark) - _FIRST


def is_mark(text: str) -> bool:
    """Whether the text is one mark."""
    return len(text) == 1 and _FIRST <= ord(text) <= _LAST


def marks_in(text: str) -> list[str]:
    """The marks in a text, in order."""
    return [] if text.isascii() else _MARK.findall(text)


def split_at_marks(text: str) -> list[str]:
    """The texts between the marks, and the marks, in turn; begins and ends with a text, which may be empty."""
    return _MARK.split(text)


def without_marks(text: str) -> str:
    """The text without marks, with typed tokens as they were typed."""
    return text if text.isascii() else _MARK.sub("", text).replace(_TYPED, "")


def joined(parts: Iterable[str]) -> str:
    """The parts of a message as one string: texts that follow each other are separated by a line break."""
    text, was_text = "", False
    for part in parts:
        is_text = not is_mark(part)
        text += f"\n{part}" if is_text and was_text else part
        was_text = is_text
    return text


def parts_of(content: str) -> list[dict[str, str]]:
    """A content as the list of parts that chat templates for images expect."""
    pieces = (piece for piece in split_at_marks(content) if piece)
    return [{"type": "image"} if is_mark(piece) else {"type": "text", "text": piece} for piece in pieces]


def guard(value: Any, tokens: Sequence[str]) -> Any:
    """A JSON value in which these tokens, which clients have typed, are no tokens any more. See `split_at_typed`."""
    if isinstance(value, str):
        for token in tokens:
            value = value.replace(token, _guarded(token))
        return value
    if isinstance(value, Mapping):
        return {guard(key, tokens): guard(item, tokens) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(guard(item, tokens) for item in value)
    return value


def split_at_typed(text: str, tokens: Sequence[str]) -> list[str]:
    """The texts between typed tokens, and the typed tokens, in turn, after `guard` with the same tokens."""
    if _TYPED not in text:
        return [text]
    found = [guarded for guarded in map(_guarded, tokens) if guarded in text]
    pieces = re.split("|".join(f"({re.escape(guarded)})" for guarded in found), text)
    return [without_marks(piece) for piece in pieces if piece is not None]


def _guarded(token: str) -> str:
    return token[0] + _TYPED + token[1:]

"""Whether llguidance takes a grammar."""

import re
from functools import cache, lru_cache

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from server.errors import shorten
from server.generation.constraints.errors import ConstraintError
from server.generation.constraints.schema.numbers import MAX_MULTIPLE, multiple_size

_PLACE = re.compile(r"^at (?:\d+\(\d+\)|EOF): ")
_PREFIXES = ("failed to compile JSON schema: ", "Unsatisfiable schema: ")
_LONGEST = 300
_KEPT = 256
"""Verdicts on grammars: clients send the same ones again and again."""
_MULTIPLE = re.compile(r'"multipleOf": ([0-9][-+.0-9e]*)')
"""As schemas are written again."""


def check_grammar(grammar: str, path: str) -> None:
    """Raises ConstraintError with the path for a grammar that does not compile.

    Needs no tokenizer: it takes special tokens by name and by id as they are.
    """
    error = grammar_error(grammar)
    if error is not None:
        raise ConstraintError(path, error)


@lru_cache(_KEPT)
def grammar_error(grammar: str) -> str | None:
    """What is wrong with the grammar, in a line. That a sum is too large is found for all schemas in it together."""
    if sum(multiple_size(float(number)) for number in _MULTIPLE.findall(grammar)) > MAX_MULTIPLE:
        return "The sum of all 'multipleOf' is too large."
    try:
        is_error, messages = LLMatcher.validate_grammar_with_warnings(grammar, None)
    except (ValueError, RuntimeError) as error:
        return _readable(str(error))
    return _readable(messages[0]) if is_error else None


def begins(grammar: str, text: str) -> bool:
    """Whether something that a grammar without tokens by id allows begins with this text."""
    matcher = LLMatcher(_byte_tokenizer(), grammar, log_level=0)
    data = list(text.encode())
    return int(matcher.try_consume_tokens(data)) == len(data)


class _Bytes:
    """A vocabulary of single bytes, as llguidance asks for one."""

    eos_token_id = 256
    bos_token_id = None
    tokens = (*(bytes([byte]) for byte in range(256)), b"")
    special_token_ids = (256,)

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


@cache
def _byte_tokenizer() -> LLTokenizer:
    return LLTokenizer(TokenizerWrapper(_Bytes()))


def _readable(message: str) -> str:
    """The first line of a message that goes on with the grammar, without the place in text that no client wrote."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    first = _PLACE.sub("", lines[0]) if lines else "The grammar does not compile."
    for prefix in _PREFIXES:
        first = first.removeprefix(prefix)
    return shorten(first, _LONGEST)

"""Checks that llguidance compiles a grammar."""

import json
import re
from functools import cache, lru_cache

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from model_runner.read_numbers import decimal_number
from server.errors import shorten
from server.generation.constraints.fragment import Constraint, ConstraintError, whole
from server.generation.constraints.values import MAX_MULTIPLE, multiple_size
from server.generation.notices import Notice

_PLACE = re.compile(r"^at (?:\d+\(\d+\)|EOF): ")
_PREFIXES = ("failed to compile JSON schema: ", "Unsatisfiable schema: ")
_REGEX_ERROR = re.compile(r"regex parse error:.*?^error: ([^\n]+)", re.DOTALL | re.MULTILINE)
_ANCHOR = "lookarounds not supported yet; "
_LONGEST = 300
_KEPT = 256
"""Cached results, because clients send the same grammars again and again."""
_MULTIPLE = re.compile(r'"multipleOf": ([0-9][-+.0-9e]*)')
"""Finds each `multipleOf` in the schemas that `json_schema` writes."""


def grammar_of(constraint: Constraint, path: str, notices: list[Notice] | None = None) -> str:
    """The complete grammar of an answer that has only this constraint. Adds the constraint's notices to `notices`.

    Raises ConstraintError if the constraint cannot be enforced, or does not compile; the latter with `path`.
    """
    fragment = constraint.fragment("answer")
    grammar = whole(fragment)
    check_grammar(grammar, path)
    if notices is not None:
        notices += fragment.notices
    return grammar


def check_grammar(grammar: str, path: str) -> None:
    """Raises ConstraintError with the path if the grammar does not compile.

    Needs no tokenizer: special tokens are accepted by name and by id without a check.
    """
    error = grammar_error(grammar)
    if error is not None:
        raise ConstraintError(path, error)


@lru_cache(_KEPT)
def grammar_error(grammar: str) -> str | None:
    """Why the grammar does not compile, in one line; None if it does."""
    multiples = (decimal_number(text) for text in _MULTIPLE.findall(grammar))
    if sum(multiple_size(number) for number in multiples if number is not None) > MAX_MULTIPLE:
        return "The sum of all 'multipleOf' is too large."
    return compile_error(grammar)


def compile_error(grammar: str) -> str | None:
    """Why a grammar does not compile, uncached, for parts of schemas; None if it does."""
    try:
        is_error, messages = LLMatcher.validate_grammar_with_warnings(grammar, None)
    except (ValueError, RuntimeError) as error:
        return _readable(str(error))
    except BaseException as error:  # a panic of llguidance's has a class that cannot be imported
        if type(error).__name__ != "PanicException":
            raise
        return "llguidance cannot compile this."
    return _readable(messages[0]) if is_error else None


def begins(grammar: str, text: str) -> bool:
    """Whether an answer can begin with this text. The grammar must not have tokens by id."""
    matcher = LLMatcher(_byte_tokenizer(), grammar, log_level=0)
    data = list(text.encode())
    return int(matcher.try_consume_tokens(data)) == len(data)


def matches(pattern: str, text: str) -> bool:
    """Whether a text matches a pattern of a JSON schema, as `texts` translates it."""
    return compile_error(f"start: %json {json.dumps({'const': text, 'pattern': pattern})}") is None


def ends_in(grammar: str, text: str) -> bool:
    """Whether the grammar leads into a dead end: it allows this text and then nothing, not even the end."""
    matcher = LLMatcher(_byte_tokenizer(), grammar, log_level=0)
    data = list(text.encode())
    if int(matcher.try_consume_tokens(data)) < len(data):
        return False
    return not any(matcher.compute_logit_bias()) or matcher.is_error()


class _Bytes:
    """A vocabulary of single bytes, with the interface that llguidance expects."""

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
    """The first line of a message, without a position in a grammar that the client did not write."""
    in_regex = _REGEX_ERROR.search(message)
    if in_regex is not None:
        return f"The pattern is not valid: {in_regex[1]}."
    if _ANCHOR in message:
        return "The pattern has an anchor ('^' or '$') in its middle, which is not supported."
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    first = _PLACE.sub("", lines[0]) if lines else "The grammar does not compile."
    for prefix in _PREFIXES:
        first = first.removeprefix(prefix)
    return shorten(first, _LONGEST)

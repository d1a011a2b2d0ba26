"""Code in colours, for no longer than one may wait for it. No I/O in here."""

import html
import io
import time
from collections.abc import Iterator

from pygments.formatters import HtmlFormatter
from pygments.lexer import Lexer
from pygments.lexers import get_lexer_by_name
from pygments.token import Text, _TokenType

MAX_CHARACTERS = 4_000
_LONGEST_S = 0.02
_LANGUAGES = (
    *("bash", "c", "cpp", "csharp", "css", "dart", "diff", "docker", "go", "graphql", "html", "java", "javascript"),
    *("json", "kotlin", "lua", "perl", "php", "python", "ruby", "rust", "scala", "sql", "swift", "toml"),
    *("typescript", "xml", "yaml"),
)
"""Those whose single tokens are found in linear time, whatever the code is; many others' are not."""
_LEXERS = {alias: lexer for lexer in map(get_lexer_by_name, _LANGUAGES) for alias in lexer.aliases}
"""Made beforehand: to make one takes long."""
_FORMATTER = HtmlFormatter(nowrap=True)


class Highlighter:
    """For one step of the event loop: what it has no time for stays plain.

    Whoever writes code can make most lexers take a time that grows with the square of its length.
    """

    def __init__(self) -> None:
        self._left_s = _LONGEST_S

    def html(self, code: str, language: str) -> str:
        """Of the code, as far as there is a lexer and time."""
        lexer = _LEXERS.get(language.lower())
        if lexer is None or len(code) > MAX_CHARACTERS or self._left_s <= 0:
            return html.escape(code)
        written = io.StringIO()
        started = time.perf_counter()
        _FORMATTER.format(_tokens(lexer, code, started + self._left_s), written)
        self._left_s -= time.perf_counter() - started
        return written.getvalue()


def _tokens(lexer: Lexer, code: str, until: float) -> Iterator[tuple[_TokenType, str]]:
    """Until it is so late; the rest in one piece."""
    end = 0
    for _, kind, text in lexer.get_tokens_unprocessed(code):
        if time.perf_counter() > until:
            break
        yield kind, text
        end += len(text)
    yield Text, code[end:]

"""Converts Markdown to HTML block by block, so that only the end of a growing answer is parsed again. No I/O."""

import html
import io
import re
import time
from collections.abc import Iterator, Sequence
from itertools import islice

from markdown_it import MarkdownIt
from markdown_it.renderer import RendererHTML
from markdown_it.token import Token
from markdown_it.utils import EnvType, OptionsDict
from pygments.formatters import HtmlFormatter
from pygments.lexer import Lexer
from pygments.lexers import get_lexer_by_name
from pygments.token import Text, _TokenType

MAX_BLOCK = 2_000
"""Characters of a block. A longer block is split, because parsing it again would take too long."""
MAX_FENCE = 16_000
"""Characters of a code block, which is faster to parse."""
_PIECE = 2_000
"""Characters parsed at once."""
_MAX_OPENING = 100
"""Opening lines of fences up to this length are repeated when a code block is split."""
_LINE_END = re.compile(r"\r\n|\r|\n")
_FOREIGN = "noopener noreferrer nofollow"
"""Value of `rel` for links, which open in new tabs."""
MAX_CHARACTERS = 4_000
_LONGEST_S = 0.02
_LANGUAGES = (
    *("bash", "c", "cpp", "csharp", "css", "dart", "diff", "docker", "go", "graphql", "html", "java", "javascript"),
    *("json", "kotlin", "lua", "perl", "php", "python", "ruby", "rust", "scala", "sql", "swift", "toml"),
    *("typescript", "xml", "yaml"),
)
"""Languages whose lexers need at most linear time per token for any code."""
_LEXERS = {alias: lexer for lexer in map(get_lexer_by_name, _LANGUAGES) for alias in lexer.aliases}
"""Built at import, because building a lexer is slow."""
_FORMATTER = HtmlFormatter(nowrap=True)


class Highlighter:
    """Highlights code within a time limit, because it blocks the event loop; the rest stays plain.

    Most lexers need quadratic time for code that is crafted for it.
    """

    def __init__(self) -> None:
        self._left_s = _LONGEST_S

    def html(self, code: str, language: str) -> str:
        """The code as HTML, highlighted if there is a lexer, until the time is used up."""
        lexer = _LEXERS.get(language.lower())
        if lexer is None or len(code) > MAX_CHARACTERS or self._left_s <= 0:
            return html.escape(code)
        written = io.StringIO()
        started = time.perf_counter()
        _FORMATTER.format(_tokens(lexer, code, started + self._left_s), written)
        self._left_s -= time.perf_counter() - started
        return written.getvalue()


def _tokens(lexer: Lexer, code: str, until: float) -> Iterator[tuple[_TokenType, str]]:
    """Yield tokens until the time `until`, then the rest of the code as one token."""
    end = 0
    for _, kind, text in lexer.get_tokens_unprocessed(code):
        if time.perf_counter() > until:
            break
        yield kind, text
        end += len(text)
    yield Text, code[end:]


class _Renderer(RendererHTML):
    """Renders code with a copy button, links without referrer, and links instead of images."""

    def fence(self, tokens: Sequence[Token], idx: int, options: OptionsDict, env: EnvType) -> str:
        token = tokens[idx]
        language = token.info.split(maxsplit=1)[0] if token.info.strip() else ""
        if env["is_final"] or _is_closed(token):
            return _code(env["highlighter"].html(token.content, language), language)
        return _code(html.escape(token.content), language)

    def code_block(self, tokens: Sequence[Token], idx: int, options: OptionsDict, env: EnvType) -> str:
        return _code(html.escape(tokens[idx].content), "")

    def link_open(self, tokens: Sequence[Token], idx: int, options: OptionsDict, env: EnvType) -> str:
        tokens[idx].attrs["rel"] = _FOREIGN
        return self.renderToken(tokens, idx, options, env)

    def image(self, tokens: Sequence[Token], idx: int, options: OptionsDict, env: EnvType) -> str:
        """Render a link, because loading the image would reveal the reader to another host."""
        token = tokens[idx]
        text = html.escape(token.content or "picture")
        source = html.escape(str(token.attrs.get("src", "")), quote=True)
        return f'<a href="{source}" rel="{_FOREIGN}">{text}</a>'

    def table_open(self, tokens: Sequence[Token], idx: int, options: OptionsDict, env: EnvType) -> str:
        return '<div class="table" tabindex="0" role="region" aria-label="Table"><table>'

    def table_close(self, tokens: Sequence[Token], idx: int, options: OptionsDict, env: EnvType) -> str:
        return "</table></div>"


_MARKDOWN = MarkdownIt("commonmark", {"html": False, "breaks": True}, renderer_cls=_Renderer).enable(
    ["table", "strikethrough"]
)


class GrowingText:
    """Growing Markdown as blocks of HTML, of which only the last may still change, or the last two.

    A block is final once another block follows it, whatever comes next. A line that is not complete does not decide
    that: `---` after a quote is a rule, and `---a` is more of the quote. A table begins with the line before its rule.
    """

    def __init__(self) -> None:
        self._tail = ""
        """Markdown of the blocks that may change."""
        self.num_final = 0
        """Number of blocks that will not change any more."""

    def feed(self, text: str) -> list[str]:
        """Append text; returns the blocks from index `num_final` (its value before this call) to the end."""
        blocks: list[str] = []
        before = self.num_final
        highlighter = Highlighter()
        for start in range(0, len(text), _PIECE):
            blocks[self.num_final - before :] = self._read(text[start : start + _PIECE], highlighter)
        return blocks

    def _read(self, text: str, highlighter: Highlighter) -> list[str]:
        """Append a piece; returns the blocks from `num_final` (its value before this call) on, at least one."""
        source = self._tail + text
        tokens = _MARKDOWN.parse(source)
        starts: list[int] = []
        blocks: list[str] = []
        begin = 0
        for at, token in enumerate(tokens):
            if token.level == 0 and token.nesting <= 0:
                starts.append((tokens[begin].map or [0])[0])
                env = {"highlighter": highlighter, "is_final": at + 1 < len(tokens)}
                blocks.append(_MARKDOWN.renderer.render(tokens[begin : at + 1], _MARKDOWN.options, env))
                begin = at + 1
        fence = tokens[-1] if tokens and tokens[-1].type == "fence" else None
        return self._finish(source, starts, blocks, fence)

    def _finish(self, source: str, starts: list[int], blocks: list[str], fence: Token | None) -> list[str]:
        """Decide which of the blocks, which begin in these lines, are final."""
        longest = MAX_BLOCK if fence is None else MAX_FENCE
        num_final = max(0, len(blocks) - 1)
        self._tail = _from_line(starts[num_final], source) if num_final else source
        if num_final and starts[num_final] >= _first_undecided(source):
            tail = _from_line(starts[num_final - 1], source) if num_final > 1 else source
            if len(tail) <= longest:
                num_final, self._tail = num_final - 1, tail
        if len(self._tail) > longest:
            num_final = len(blocks)  # text with only link definitions has no blocks
            self._tail = _opening(fence)
            blocks.append("")
        self.num_final += num_final
        return blocks or [""]


def _first_undecided(text: str) -> int:
    """The first line at which a block may begin only because a line is not complete yet."""
    num_complete = sum(1 for _ in _LINE_END.finditer(text))
    return num_complete if text.endswith(("\r", "\n")) else num_complete - 1


def _is_closed(fence: Token) -> bool:
    """Whether the fence has a closing line, rather than ending with the text so far."""
    begin, end = fence.map or (0, 0)
    return len(fence.content.splitlines()) == end - begin - 2


def _opening(fence: Token | None) -> str:
    """The start of the next block when a block is split: the fence's opening line, if it is short."""
    opening = "" if fence is None else f"{fence.markup}{fence.info}\n"
    return opening if len(opening) <= _MAX_OPENING else ""


def _from_line(number: int, text: str) -> str:
    """The text without its first `number` lines. str.splitlines() splits at characters that Markdown does not."""
    ends = [line.end() for line in islice(_LINE_END.finditer(text), number)]
    return text[ends[-1] :] if ends else text


def _code(shown: str, language: str) -> str:
    """A code block; `shown` is HTML."""
    return (
        f'<figure class="code"><figcaption>{html.escape(language) or "text"}'
        f'<button type="button" class="copy">Copy</button></figcaption>'
        f'<pre tabindex="0"><code>{shown}</code></pre></figure>'
    )

"""Markdown as HTML, block by block, so that of an answer that grows only its end is looked at again. No I/O in here."""

import html
import re
from collections.abc import Sequence
from itertools import islice

from markdown_it import MarkdownIt
from markdown_it.renderer import RendererHTML
from markdown_it.token import Token
from markdown_it.utils import EnvType, OptionsDict

from server.page.highlighting import Highlighter

MAX_BLOCK = 2_000
"""Characters of a paragraph, list or the like: a longer one is read as several, or it would take too long again."""
MAX_FENCE = 16_000
"""The same of code, which takes little time."""
_PIECE = 2_000
"""Characters that are read at once."""
_MAX_OPENING = 100
"""Characters of a fence that is opened again in the next block."""
_LINE = re.compile(r"[^\r\n]*(?:\r\n|\r|\n)")
_FOREIGN = "noopener noreferrer nofollow"
"""Of links: the page opens them in tabs of their own."""


class _Renderer(RendererHTML):
    """Code with a button that copies it; links that tell nothing of the page; no pictures of other hosts."""

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
        """A link: to load it would tell another host who reads this."""
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
    """Text that grows at its end, as blocks of HTML of which all but the last stay as they are."""

    def __init__(self) -> None:
        self._tail = ""
        """The text of the last block, which may still change."""
        self.num_final = 0
        """Blocks that will not change any more."""

    def feed(self, text: str) -> list[str]:
        """The blocks from number `num_final`, as it was before this call, to the end of the text so far."""
        blocks: list[str] = []
        highlighter = Highlighter()
        for start in range(0, len(text), _PIECE):
            *final, last = self._read(text[start : start + _PIECE], highlighter)
            blocks = [*blocks[:-1], *final, last]
        return blocks

    def _read(self, text: str, highlighter: Highlighter) -> list[str]:
        """The same, of what is short enough to be read at once."""
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
        self.num_final += max(0, len(blocks) - 1)
        self._tail = source if len(blocks) < 2 else _from_line(starts[-1], source)
        fence = tokens[-1] if tokens and tokens[-1].type == "fence" else None
        if len(self._tail) > (MAX_BLOCK if fence is None else MAX_FENCE):
            self.num_final += bool(blocks)  # link targets alone are none
            self._tail = _opening(fence)
            blocks.append("")
        return blocks or [""]


def _is_closed(fence: Token) -> bool:
    """Whether its end was written, and is not only that of the text so far."""
    begin, end = fence.map or (0, 0)
    return len(fence.content.splitlines()) == end - begin - 2


def _opening(fence: Token | None) -> str:
    """What the rest of this block begins with, once it has become too long for one."""
    opening = "" if fence is None else f"{fence.markup}{fence.info}\n"
    return opening if len(opening) <= _MAX_OPENING else ""


def _from_line(number: int, text: str) -> str:
    """The text without its first lines. Markdown knows fewer ends of lines than str.splitlines()."""
    ends = [line.end() for line in islice(_LINE.finditer(text), number)]
    return text[ends[-1] :] if ends else text


def _code(shown: str, language: str) -> str:
    """`shown` is HTML."""
    return (
        f'<figure class="code"><figcaption>{html.escape(language) or "text"}'
        f'<button type="button" class="copy">Copy</button></figcaption>'
        f'<pre tabindex="0"><code>{shown}</code></pre></figure>'
    )

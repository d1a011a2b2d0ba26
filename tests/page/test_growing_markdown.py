from html.parser import HTMLParser

import hypothesis.strategies as st
import pytest
from hypothesis import example, given

from server.page import markdown
from server.page.markdown import GrowingText

FRAGMENTS = (
    *("a", " ", "  ", "\n", "\n\n", "\r\n", "\u2028", "\x0c", "# ", "- ", "1. ", "> ", "    ", "\t", "*", "**", "_"),
    *("`", "```", "```python\n", "~~~", "~~", "|", "|-|-|", "---", "===", "[", "](", ")", "![", "<", ">", "&", "\\"),
    *('"', "'", "<script>alert(1)</script>", "<img src=x onerror=alert(1)>", "<svg onload=alert(1)>", "<!--", "]]>"),
    *("javascript:alert(1)", "data:text/html,x", "https://other.example/", "&#106;avascript:", " onclick=x ", "<b"),
)
TEXTS = st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=4), max_size=40).map("".join)
UNBOUND = TEXTS.filter(lambda text: "]:" not in text)
"""Without definitions of links, which would change what came before."""
TAGS = {
    *("p", "br", "hr", "strong", "em", "s", "code", "pre", "figure", "figcaption", "button", "div", "span", "table"),
    *("thead", "tbody", "tr", "th", "td", "a", "ul", "ol", "li", "blockquote", "h1", "h2", "h3", "h4", "h5", "h6"),
}
ATTRIBUTES = {"class", "type", "tabindex", "role", "aria-label", "href", "title", "rel", "start", "style"}


class Elements(HTMLParser):
    """All that begins in some HTML."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: dict[str, set[str]] = {}
        self.others: list[str] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        for name, value in attrs:
            self.attributes.setdefault(name, set()).add(value or "")

    def handle_comment(self, data: str) -> None:
        self.others.append(data)

    handle_decl = handle_pi = unknown_decl = handle_comment


def shown(pieces: list[str]) -> list[str]:
    """As the browser has it in the end."""
    growing = GrowingText()
    blocks: list[str] = []
    for piece in pieces:
        start = growing.num_final
        blocks = blocks[:start] + growing.feed(piece)
    return blocks


@given(UNBOUND, st.integers(1, 9))
@example("a\u2028\u2028\u2028\u2028\x0cb\n\nc\n\nd and more", 1)
@example("a\r\rb\r\nc\r\rd and more", 1)
@example(">a\n---a", 1)
@example(">a\n#a\n\n> b\n***b\n\n>c\n```c`\n\nd", 1)
@example("1. a\n\n2. b\n\n- c\n\n- d\n\ne", 1)
@example(">a\nb|c\n-|-d\n\n>a\nb|c\n-|-\ne|f\n\ng", 1)
def test_it_makes_no_difference_how_a_text_comes(text: str, length: int) -> None:
    pieces = [text[at : at + length] for at in range(0, len(text), length)]
    assert "".join(shown(pieces)) == "".join(shown([text]))


@given(TEXTS)
def test_only_known_elements_come_out(text: str) -> None:
    found = Elements("".join(shown([text])))
    assert found.tags <= TAGS
    assert found.attributes.keys() <= ATTRIBUTES
    assert found.others == []
    assert found.attributes.get("style", set()) <= {"text-align:left", "text-align:right", "text-align:center"}
    for address in found.attributes.get("href", ()):
        assert not address.lower().strip().startswith(("javascript:", "vbscript:", "data:", "file:"))


@pytest.mark.parametrize("text", ["[", "a", "> ", "`", "*_", "a\n", "- a\n", "|a|b|\n|-|-|\n"])
def test_a_growing_text_is_not_read_from_its_start_again(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: list[int] = []
    parse = markdown._MARKDOWN.parse
    monkeypatch.setattr(markdown._MARKDOWN, "parse", lambda source: [lengths.append(len(source)), parse(source)][1])
    long = text * (20_000 // len(text))
    shown([long[at : at + 1000] for at in range(0, len(long), 1000)] + [long])
    assert max(lengths) <= markdown.MAX_FENCE + markdown._PIECE
    assert len(lengths) <= 2 * len(long) // 1000


def test_a_fence_goes_on_in_the_next_block() -> None:
    blocks = shown(["```python\n" + "x = 1\n" * 4_000, "y = 2\n```\nThe end."])
    assert all('<figure class="code">' in block for block in blocks[:-1] if block)
    assert blocks[-1] == "<p>The end.</p>\n"

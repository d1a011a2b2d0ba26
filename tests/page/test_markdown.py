"""Rendering of growing text, and its duration."""

import re
import time

import pytest

from server.page.markdown import MAX_BLOCK, MAX_CHARACTERS, MAX_FENCE, GrowingText, Highlighter


def shown(pieces: list[str]) -> list[str]:
    """All blocks in the end."""
    growing = GrowingText()
    blocks: list[str] = []
    for piece in pieces:
        start = growing.num_final
        blocks[start:] = growing.feed(piece)
    return blocks


def test_code_has_colours_once_it_is_closed() -> None:
    growing = GrowingText()
    assert "<span" not in growing.feed("```python\ndef f():")[0]
    assert "<span" not in growing.feed("\n    pass\n")[0]
    assert "<span" in growing.feed("```")[0]


def test_code_that_its_quote_ends_has_colours_once_something_follows() -> None:
    growing = GrowingText()
    assert "<span" not in growing.feed("> ```python\n> pass\n")[0]
    assert "<span" in growing.feed("\nand on")[0]


def test_long_code_is_one_figure() -> None:
    code = "x = 1\n" * (MAX_FENCE // 7)
    (block,) = shown(["```python\n", *[code[:600]] * (len(code) // 600), code[: len(code) % 600], "```\n"])
    assert code in block


def test_longer_code_goes_on_in_another_figure() -> None:
    blocks = shown(["```python\n", *["x = 1\n" * 20] * 300, "```\n"])
    assert sum(re.sub("<.*?>", "", block).count("x = 1\n") for block in blocks) == 6_000
    assert all(block.count("<figure") == 1 for block in blocks)


def test_link_targets_may_have_no_end() -> None:
    assert shown(["[a]: b\n" * MAX_BLOCK])


def test_code_is_whole_though_there_is_no_time_for_it() -> None:
    highlighter = Highlighter()
    code = "(" * MAX_CHARACTERS
    for _ in range(10):
        assert highlighter.html(code, "python").count("(") == MAX_CHARACTERS
    assert highlighter.html("def f", "python") == "def f"


def test_unknown_languages_stay_plain() -> None:
    assert Highlighter().html("a < b", "basemake") == "a &lt; b"


@pytest.mark.parametrize("hostile", ["![", "a\n", "[", "```c\n" + "  \n" * 1_200 + "\n```\n"])
def test_no_step_takes_long(hostile: str) -> None:
    text = hostile * (8_000 // len(hostile))
    # The best of three, for others work on this machine, too. Half a second and more, were it not for the limits.
    assert min(_longest_step(text) for _ in range(3)) < 0.2


def _longest_step(text: str) -> float:
    growing = GrowingText()
    longest = 0.0
    for start in range(0, len(text), 200):
        began = time.thread_time()
        growing.feed(text[start : start + 200])
        longest = max(longest, time.thread_time() - began)
    return longest

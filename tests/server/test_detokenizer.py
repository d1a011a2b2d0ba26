"""Text that comes token by token must be the text of the whole, in whole characters."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as TokenizerModel

from server.text.detokenizer import make_detokenizer
from server.text.stop_strings import StopMatcher, StopSearch
from server.text.tokenizer import Tokenizer
from tests.server.tiny_model import BOS, END, byte_level_tokenizer, sentencepiece_tokenizer

BYTE_LEVEL = Tokenizer(byte_level_tokenizer(), {}, None)
SENTENCEPIECE = Tokenizer(sentencepiece_tokenizer(), {}, None)
TEXTS = st.text(max_size=12) | st.sampled_from(["é", "你好", "👩‍👩‍👧", " the low", "\ufffd", "e\u0301"])


def push_all(tokenizer: Tokenizer, tokens: list[int], context: list[int] | None = None, **options: bool) -> list[str]:
    detokenizer = make_detokenizer(tokenizer, context or [], **options)
    return [*(detokenizer.push(token) for token in tokens), detokenizer.flush()]


@given(st.lists(TEXTS, max_size=4).map("".join))
def test_text_comes_back_in_whole_characters(text: str):
    pieces = push_all(BYTE_LEVEL, BYTE_LEVEL.encode(text, add_special_tokens=False))
    assert "".join(pieces) == text
    assert "\ufffd" in text or not any("\ufffd" in piece for piece in pieces)


@given(st.lists(st.integers(0, 261) | st.sampled_from([0xE4, 0xBD, 0xA0, 0xFF, BOS, END]), max_size=40), st.booleans())
def test_any_bytes_add_up_to_the_whole(tokens: list[int], skip: bool):
    whole = byte_level_tokenizer().decode(tokens, skip_special_tokens=skip)
    assert "".join(push_all(BYTE_LEVEL, tokens, skip_special_tokens=skip)) == whole


@given(st.text(max_size=20), st.text(max_size=20))
def test_continues_a_prompt(before: str, after: str):
    tokens = BYTE_LEVEL.encode(before + after, add_special_tokens=False)
    for cut in range(len(tokens) + 1):
        prompt = BYTE_LEVEL.decode(tokens[:cut], skip_special_tokens=True)
        pieces = "".join(push_all(BYTE_LEVEL, tokens[cut:], tokens[:cut]))
        assert (prompt.rstrip("\ufffd") + pieces == before + after) or "\ufffd" in before + after


def ids(model: TokenizerModel, *pieces: str) -> list[int]:
    found = [model.token_to_id(piece) for piece in pieces]
    assert None not in found
    return found


@pytest.mark.parametrize(
    ("context", "pieces", "texts"),
    [
        ((), ("▁hello", "▁world"), ["hello", " world"]),
        (("▁hello",), ("▁world", "."), [" world", "."]),
        (("</s>",), ("▁hello", "o"), ["hello", "o"]),
        (("▁a",), ("▁the", "<0xE4>", "<0xBD>", "<0xA0>", "b"), [" the", "", "", "你", "b"]),
        (("▁a",), ("<0xF0>", "<0x9F>", "<0x98>", "<0x80>"), ["", "", "", "😀"]),
        (("▁a", "<0xC3>"), ("<0xA9>", "▁é"), ["é", " é"]),
    ],
)
def test_sentencepiece_conventions(context: tuple[str, ...], pieces: tuple[str, ...], texts: list[str]):
    model = sentencepiece_tokenizer()
    assert push_all(SENTENCEPIECE, ids(model, *pieces), ids(model, *context)) == [*texts, ""]


def test_unfinished_character_at_the_end():
    assert push_all(BYTE_LEVEL, [ord("a"), 0xE4, 0xBD]) == ["a", "", "", "\ufffd"]


@pytest.mark.parametrize(("tokenizer", "first"), [(BYTE_LEVEL, 0), (SENTENCEPIECE, 3)])
def test_forks_go_their_own_ways_from_the_middle_of_a_character(tokenizer: Tokenizer, first: int):
    """As beams do. `first` is the token of byte 0."""
    begun = [first + byte for byte in "aé😀".encode()[:5]]
    ends = [[first + byte for byte in end] for end in ("😀o".encode()[2:], "👍é".encode()[2:])]
    one = make_detokenizer(tokenizer)
    text = "".join(one.push(token) for token in begun)
    forks = [one.fork() for _ in ends]
    texts = [text] * len(ends)
    for place in range(4):  # in turns, so that each would meet what another did
        for index, (fork, end) in enumerate(zip(forks, ends, strict=True)):
            texts[index] += "".join(fork.push(token) for token in end[place : place + 1])
    texts = [text + fork.flush() for text, fork in zip(texts, forks, strict=True)]
    assert texts == [tokenizer.decode([*begun, *end], skip_special_tokens=True) for end in ends]


def test_window_stays_small():
    """Decoding everything again for each token would take time that grows with the square of the length."""
    lengths = []

    class Counting(Tokenizer):
        def decode(self, ids, *, skip_special_tokens):
            lengths.append(len(ids))
            return super().decode(ids, skip_special_tokens=skip_special_tokens)

    tokenizer = Counting(sentencepiece_tokenizer(), {}, None)
    pieces = ids(sentencepiece_tokenizer(), "▁hello", "<0xE4>", "<0xBD>", "<0xA0>", "é", "▁a", "o")
    push_all(tokenizer, pieces * 50)
    assert 0 < max(lengths) < 12


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, SENTENCEPIECE])
def test_bytes_that_are_no_text_take_no_longer_each(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch):
    """8,000 of them: what is looked at for each must not grow, or the time grows with the square."""
    lengths = [1]
    decode = Tokenizer.decode
    monkeypatch.setattr(
        Tokenizer, "decode", lambda self, ids, **options: (lengths.append(len(ids)), decode(self, ids, **options))[1]
    )
    token = next(token for token in range(tokenizer.vocab_size) if tokenizer.token_bytes(token) == b"\xff")
    pieces = push_all(tokenizer, [token] * 8000)
    assert "".join(pieces) == "\ufffd" * 8000
    assert max(lengths) < 32
    assert len(lengths) < 4 * 8000


def test_tokens_without_text_do_not_fill_the_window(monkeypatch: pytest.MonkeyPatch):
    """A model's vocabulary may be padded: such tokens after an unfinished character leave it unfinished."""
    lengths = []
    decode = Tokenizer.decode
    monkeypatch.setattr(
        Tokenizer, "decode", lambda self, ids, **options: (lengths.append(len(ids)), decode(self, ids, **options))[1]
    )
    begun, *rest = ids(sentencepiece_tokenizer(), "<0xE4>", "<0xBD>", "<0xA0>")
    pieces = push_all(SENTENCEPIECE, [begun, *[SENTENCEPIECE.vocab_size] * 500, *rest])
    assert "".join(pieces) == "你"
    assert max(lengths) < 32


def test_token_bytes():
    assert [BYTE_LEVEL.token_bytes(token) for token in (0xE4, 32, 257, 261, BOS)] == [
        b"\xe4", b" ", b"the", "é".encode(), b"<|bos|>",
    ]  # fmt: skip
    model = sentencepiece_tokenizer()
    pieces = ids(model, "▁hello", "<0xE4>", "é", "</s>")
    assert [SENTENCEPIECE.token_bytes(piece) for piece in pieces] == [b" hello", b"\xe4", "é".encode(), b"</s>"]
    assert BYTE_LEVEL.token_text(0xE4) == "bytes:\\xe4"
    assert BYTE_LEVEL.token_bytes(10**9) == b""


def reference_stop(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """Character by character: the first prefix of the text that ends with a stop string."""
    for end in range(1, len(text) + 1):
        matches = [stop for stop in stops if text[:end].endswith(stop)]
        if matches:
            stop = max(matches, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


@given(
    st.lists(st.text("abc", max_size=4), max_size=12),
    st.lists(st.text("abc", min_size=1, max_size=4), max_size=4),
    st.booleans(),
)
def test_stop_strings_do_not_depend_on_the_pieces(pieces: list[str], stops: list[str], include: bool):
    matcher = StopMatcher(stops, include_stop=include)
    shown, stop = "", None
    for piece in pieces:
        found = matcher.push(piece)
        shown, stop = shown + found.text, found.stop
        if stop is not None:
            break
        held = len("".join(pieces)[: len(shown)])
        assert held == len(shown)
    else:
        shown += matcher.flush()
    assert (shown, stop) == reference_stop("".join(pieces), stops, include)


def test_stop_matcher_holds_back_no_more_than_it_must():
    matcher = StopMatcher(["abcd"])
    assert [matcher.push(piece).text for piece in ("xab", "c", "x", "aba", "b")] == ["x", "", "abcx", "ab", ""]
    assert matcher.flush() == "ab"


def test_disarmed_stop_strings_are_passed_over():
    matcher = StopMatcher(["ab"])
    assert matcher.push("ab", armed=False).text == "ab"
    assert matcher.push("a", armed=False).text == ""
    found = matcher.push("b")
    assert (found.text, found.stop) == ("", "ab")


def test_a_stop_string_that_was_passed_over_does_not_end_a_later_piece():
    """Its text is still held back, because it may begin a longer one."""
    matcher = StopMatcher(["ab", "abcd"])
    assert matcher.push("xab", armed=False).text == "x"
    assert matcher.push("c") == StopSearch("")
    assert matcher.push("e") == StopSearch("abce")

"""A tokenizer of bytes and a few longer tokens, and what a grammar accepts with it."""

import json
from functools import cache
from random import Random

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask

_LONGER = ('{"', '":', '", "', '"}', "</", "tool", "ab", "12", "true", "  ", "\n  ", "<a", "é€")
END, MARKER = 256 + len(_LONGER), 257 + len(_LONGER)
_VOCABULARY = MARKER + 1
_CLOSING = tuple(b'"]}')


def _byte_letters() -> list[str]:
    """The letters that stand for bytes in tokenizers of bytes."""
    kept = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in kept else chr(next(others)) for byte in range(256)]


@cache
def tokenizer() -> LLTokenizer:
    letters = _byte_letters()
    texts = [bytes([byte]) for byte in range(256)] + [text.encode() for text in _LONGER]
    vocabulary = {"".join(letters[byte] for byte in text): index for index, text in enumerate(texts)}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    added = [{"id": END, "content": "<|end|>", **flags}, {"id": MARKER, "content": "<|marker|>", **flags}]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    model = {"type": "BPE", "vocab": vocabulary, "merges": []}
    whole = {"version": "1.0", "added_tokens": added, "normalizer": None, "pre_tokenizer": byte_level}
    return LLTokenizer(
        json.dumps({**whole, "post_processor": None, "decoder": byte_level, "model": model}),
        n_vocab=_VOCABULARY,
        eos_token=[END],
    )


def matcher(grammar: str) -> LLMatcher:
    made = LLMatcher(tokenizer(), grammar, log_level=0)
    assert not made.is_error(), made.get_error()
    return made


def allowed_tokens(state: LLMatcher) -> list[int]:
    mask = allocate_token_bitmask(1, _VOCABULARY)
    fill_next_token_bitmask(state, mask, 0)
    assert not state.is_error(), state.get_error()
    bits = np.unpackbits(mask[0].view(np.uint8), bitorder="little")
    return [int(token) for token in np.flatnonzero(bits[:_VOCABULARY])]


def accepts(grammar: str, text: str) -> bool:
    """The whole text, byte by byte."""
    return accepts_tokens(grammar, list(text.encode()))


def accepts_tokens(grammar: str, tokens: list[int]) -> bool:
    """Asks the mask before each token too: the two must agree."""
    state = matcher(grammar)
    for token in tokens:
        is_allowed = token in allowed_tokens(state)
        assert state.try_consume_tokens([token]) == is_allowed
        if not is_allowed:
            return False
    return state.is_accepting()


def begins(grammar: str, text: str) -> bool:
    """The text is the beginning of one that fits."""
    data = list(text.encode())
    return matcher(grammar).try_consume_tokens(data) == len(data)


def walk(grammar: str, seed: int, *, patience: int = 60, limit: int = 1500) -> str | None:
    """A random text that fits; None if it found no end. It looks for one from the start, and in earnest at last."""
    random = Random(seed)
    state = matcher(grammar)
    tokens: list[int] = []
    while len(tokens) < limit:
        allowed = allowed_tokens(state)
        assert MARKER not in allowed
        earnest = len(tokens) > patience
        if END in allowed and (earnest or len(allowed) == 1 or random.random() < 0.2):
            return tokenizer().decode_bytes(tokens).decode()
        choices = [token for token in allowed if token != END]
        closing = [token for token in _CLOSING if token in choices]
        if closing and (earnest or random.random() < 0.3):
            choices = closing
        tokens.append(random.choice(choices))
        assert state.try_consume_tokens(tokens[-1:]) == 1
    return None

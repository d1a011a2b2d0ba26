"""Tokenizers of the tokenizers library, made of what files of vocabularies have."""

from collections.abc import Iterable, Sequence
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from model_runner.refusal import UnsupportedModelError, few

SPACE = "\u2581"
"""Stands for a space in the vocabularies of sentencepiece."""

UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4
"""Sentencepiece's types of tokens that are found in text whole, which GGUF files have, too; others are ordinary."""

Token = tuple[str, int]
"""A token's text in the vocabulary, and its id."""


def make_bpe(tokens: Sequence[str], merges: Sequence[Any], **options: Any) -> Tokenizer:
    """A tokenizer that only merges. Raises UnsupportedModelError if a merge has a part that is no token."""
    vocabulary = {token: index for index, token in enumerate(tokens)}
    try:
        return Tokenizer(models.BPE(vocabulary, merges, **options))
    except Exception as error:  # the library raises nothing more special
        raise UnsupportedModelError(f"its vocabulary and merges do not fit: {error}") from error


def merges_by_score(tokens: Sequence[str], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Every way to make a token of two others, the token with the highest score first."""
    ids = {token: index for index, token in enumerate(tokens)}
    found = []
    for token, score in zip(tokens, scores, strict=True):
        pairs = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        found += [(-score, ids[left], ids[right]) for left, right in pairs if left in ids and right in ids]
    return [(tokens[left], tokens[right]) for _, left, right in sorted(found)]


def make_sentencepiece(
    tokens: Sequence[str], merges: Sequence[Any], unknown: str | None, *, begins_with_space: bool
) -> Tokenizer:
    """Sentencepiece's BPE: spaces are visible, and characters without a token become bytes."""
    tokenizer = make_bpe(tokens, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    spaces = normalizers.Replace(" ", SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spaces]) if begins_with_space else spaces
    strip = [decoders.Strip(" ", 1, 0)] if begins_with_space else []
    parts = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    tokenizer.decoder = decoders.Sequence(parts)
    return tokenizer


def split_bytes(tokenizer: Tokenizer, *expressions: str) -> None:
    """Let a tokenizer of bytes split text by expressions, one after the other, before it merges."""
    words = [pre_tokenizers.Split(Regex(expression), behavior="isolated") for expression in expressions]
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*words, bytes_only])


def whole_token(text: str, kind: int) -> AddedToken | None:
    """A token of one of sentencepiece's types that is found in text whole; None for ordinary ones."""
    if kind not in (UNKNOWN, CONTROL, USER_DEFINED):
        return None
    # The normalizer spells spaces before tokens of several are found.
    return AddedToken(text, normalized=set(text) == {SPACE}, special=kind != USER_DEFINED)


def add_known(tokenizer: Tokenizer, added: Iterable[AddedToken]) -> None:
    """Find these tokens whole in every text. Raises UnsupportedModelError if the vocabulary lacks one."""
    vocabulary = tokenizer.get_vocab()
    tokens = list(added)
    if strange := [token.content for token in tokens if token.content not in vocabulary]:
        raise UnsupportedModelError(f"it has added tokens that are not in its vocabulary: {few(strange)}")
    tokenizer.add_tokens(tokens)


def surround(tokenizer: Tokenizer, first: Token | None, last: Token | None) -> None:
    """Put a token before and one after every text."""
    if first is None and last is None:
        return
    single = [*(() if first is None else (f"{first[0]}:0",)), "$A:0", *(() if last is None else (f"{last[0]}:0",))]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=single, pair=[*single, "$B:1"], special_tokens=[token for token in (first, last) if token is not None]
    )


def byte_characters() -> str:
    """The printable character for each byte in a byte-level vocabulary (GPT-2's table)."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = (byte for byte in range(256) if byte not in printable)
    stand_in = {byte: 256 + index for index, byte in enumerate(others)}
    return "".join(chr(stand_in.get(byte, byte)) for byte in range(256))

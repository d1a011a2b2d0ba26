"""A tokenizer for models of any small vocabulary: single characters first, those that JSON needs before all others."""

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

SPECIALS = ("<pad>", "<s>", "</s>")
"""Ids 0 to 2; the last one ends outputs."""
EOS = 2
_FIRST = '{}[]":,ab0123 -.entrufl'
_LONGER = [
    '{"',
    '":',
    '",',
    '"}',
    ',"',
    '": ',
    '", "',
    "true",
    "false",
    "null",
    "ab",
    "ba",
    "12",
    "00",
    "abc",
    "]}",
    "}}",
]
"""Tokens of several characters; nothing is ever encoded to them, but a model may choose them."""


def tokens(vocab_size: int) -> list[str]:
    """The text of each token, as characters that stand for bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    first = [character.replace(" ", "Ġ") for character in _FIRST]
    longer = [token.replace(" ", "Ġ") for token in _LONGER]
    rest = [character for character in alphabet if character not in first]
    texts = [*SPECIALS, *first, *rest, *longer]
    return (texts + [f"<unused{index}>" for index in range(len(texts), vocab_size)])[:vocab_size]


def tokenizer(vocab_size: int) -> Tokenizer:
    """For models with so many tokens."""
    vocab = {text: index for index, text in enumerate(tokens(vocab_size))}
    made = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIALS])
    return made


def spelled(vocab_size: int) -> list[bytes]:
    """The bytes of each token, by the alphabet of GPT-2; nothing for those that stand for no text."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}
    return [b"" if text in SPECIALS else bytes(letters[one] for one in text) for text in tokens(vocab_size)]

"""A tokenizer, as grammars need it."""

from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import llguidance

Mask = NDArray[np.int32]
"""A bit for each token of the vocabulary: token t is bit t % 32 of word t // 32."""
_PRINTABLE: Final = range(0x20, 0x7F)
_CONTROL: Final = b"\xff"


class Vocabulary:
    """What its tokens spell."""

    def __init__(self, tokenizer: "llguidance.LLTokenizer") -> None:
        self.tokenizer = tokenizer
        self.num_words = -(-tokenizer.vocab_size // 32)
        spelled = {character: tokenizer.greedy_tokenize(chr(character)) for character in _PRINTABLE}
        single = {character: tokens[0] for character, tokens in spelled.items() if len(tokens) == 1}
        self._single = single
        self._characters = np.array(list(single), dtype=np.uint8)
        self._tokens = np.array(list(single.values()), dtype=np.int32)

    def spelled(self, token: int) -> bytes:
        """The token's bytes; after 0xFF if it is a control token."""
        text: bytes = self.tokenizer.decode_bytes([token])
        return _CONTROL + text if self.tokenizer.is_special_token(token) else text

    def first_of(self, text: bytes) -> int:
        """The first token of a text in this spelling."""
        head, _, rest = text.partition(_CONTROL)
        return int(self.tokenizer.tokenize_bytes(head or rest)[0])

    def token_of(self, character: int) -> int | None:
        """The token that is this printable character of ASCII, if there is one."""
        return self._single.get(character)

    def characters(self, mask: Mask) -> bytes:
        """The printable ones of ASCII, as far as they are tokens by themselves, that a mask allows, in order."""
        is_allowed = (mask[self._tokens // 32] >> self._tokens % 32) & 1
        return self._characters[is_allowed.astype(np.bool_)].tobytes()


def is_in(mask: Mask, token: int) -> bool:
    """Whether a mask has the token."""
    return bool(mask[token // 32] >> (token % 32) & 1)

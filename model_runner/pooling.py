"""What can be asked of the engine in place of tokens: numbers that the model makes of a prompt. Imports no torch."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Pooling:
    """Which numbers."""

    by: Literal["last", "mean", "logits", "classes"] = "last"
    """last: the hidden state of the last token, after the model's final norm. mean: the mean of those of all tokens.
    logits: of `tokens`, after the last token. classes: what the model's classification head makes of the last token's
    hidden state."""
    dimensions: int | None = None
    """Keep so many of the first numbers; None keeps all."""
    normalizes: bool = False
    """Divide by the Euclidean length of what is kept."""
    tokens: tuple[int, ...] = ()

    @property
    def needs_every_token(self) -> bool:
        """Whether no token may be skipped because others computed it."""
        return self.by == "mean"

"""What a model was made for: generating, embedding, scoring."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from server.errors import InvalidRequestError


@dataclass(frozen=True, slots=True)
class Embedding:
    """How a vector is made of a text."""

    by: Literal["last", "mean"] = "last"
    normalizes: bool = True
    is_trained: bool = False
    """Whether the model was trained for that; any other gives the state of its last token."""
    prompts: Mapping[str, str] = field(default_factory=dict)
    """By name, what goes before a text."""
    default_prompt: str | None = None
    """Name of the one that texts have if nothing is said."""
    shortens: bool = False
    """Whether the first numbers of a vector are a vector as well (Matryoshka), of ..."""
    dimensions: tuple[int, ...] = ()
    """... these lengths, or of any if none are listed."""


@dataclass(frozen=True, slots=True)
class Scoring:
    """How well a document answers a query."""

    by: Literal["classes", "logits"]
    tokens: tuple[int, ...] = ()
    """Of `logits`: the token that says yes and, if there is one, the token that says no."""
    is_probability: bool = True
    """Whether the number is put through a sigmoid."""
    instruction: str | None = None
    """What is asked of a document, by default."""
    opens_turn: bool = False
    """Whether the template that knows queries and documents is to open the answer."""

    def value(self, numbers: Sequence[float], *, is_raw: bool) -> float:
        """The score, from what the engine found: one number, or those of yes and no. A raw one is no probability."""
        raw = numbers[0] - sum(numbers[1:])
        if is_raw or not self.is_probability:
            return raw
        return 1 / (1 + math.exp(-raw)) if raw >= 0 else math.exp(raw) / (1 + math.exp(raw))


@dataclass(frozen=True, slots=True)
class Abilities:
    """Of a model, and why it lacks others."""

    generates: bool = True
    embedding: Embedding | None = None
    no_embedding: str = "It is not made for embeddings."
    scoring: Scoring | None = None
    no_scoring: str = "It is not made for scores: its configuration names neither a classification head nor tokens."

    def check_generates(self, model: str) -> None:
        """Raises InvalidRequestError if the model, which has this name, was not made to write."""
        if not self.generates:
            raise unable(model, "generate text", f"It can {' and '.join(self.names) or 'do nothing else, either'}.")

    @property
    def names(self) -> Sequence[str]:
        """Of all that it can do."""
        known = {"generate": self.generates, "embed": self.embedding is not None, "score": self.scoring is not None}
        return [name for name, is_there in known.items() if is_there]

    def __str__(self) -> str:
        """For people."""
        untrained = " (not trained for that)"
        is_guess = self.embedding is not None and not self.embedding.is_trained
        return ", ".join(f"{name}{untrained if name == 'embed' and is_guess else ''}" for name in self.names)


def unable(model: str, what: str, why: str) -> InvalidRequestError:
    """The error for what a model was not made for."""
    return InvalidRequestError(f"The model `{model}` cannot {what}. {why}", param="model", code="unsupported_model")

"""What is asked for in place of an answer, whichever API it came through."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from server.generation.notices import Notice
from server.generation.request import Conversation, TextPrompt, TokenPrompt

_BYTES_EACH = 512
"""What a prompt costs beside its own text, as bytes of text that take as long."""


@dataclass(frozen=True, slots=True)
class Embed:
    """A vector of each of these."""

    inputs: Sequence[TextPrompt | TokenPrompt | Conversation]
    dimensions: int | None = None
    """Its length, where that is not the model's."""
    prompt_name: str | None = None
    """Of what goes before each text."""
    truncate: int | None = None
    """How many tokens at the end of each input are used; -1: as many as fit."""
    normalizes: bool | None = None
    """Whether its length is 1, where that is not as the model has it."""

    @property
    def num_bytes(self) -> int:
        """Of text that take about as long to read as all of this."""
        return sum(_BYTES_EACH + _size(one) for one in self.inputs)


def _size(prompt: TextPrompt | TokenPrompt | Conversation) -> int:
    """The characters or tokens of a prompt, without what a chat template adds."""
    if isinstance(prompt, TextPrompt):
        return len(prompt.text)
    if isinstance(prompt, TokenPrompt):
        return len(prompt.tokens)
    return sum(len(message["content"]) for message in prompt.messages)


@dataclass(frozen=True, slots=True)
class Pair:
    """A query and what may answer it."""

    query: str
    document: str
    query_path: str
    """Of the query, in the request, and ..."""
    path: str
    """... of the document."""


@dataclass(frozen=True, slots=True)
class Score:
    """How well the document of each pair answers its query."""

    pairs: Sequence[Pair]
    instruction: str | None = None
    """What is asked of a document."""
    max_document_tokens: int | None = None
    """So many at the beginning of each document are used."""

    @property
    def num_bytes(self) -> int:
        """See Embed."""
        shared = _BYTES_EACH + len(self.instruction or "")
        return sum(shared + len(pair.query) + len(pair.document) for pair in self.pairs)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingRequest:
    """Numbers are asked for."""

    model: str | None
    """As the client named it; None: it did not."""
    may_omit_model: bool = False
    """Whether clients of this form usually name no model, so that none is reported as missing."""
    asks: Embed | Score
    id_prefix: str
    priority: int = 0
    cache_salt: str = ""
    paths: Mapping[str, str] = field(default_factory=dict)
    """How the API calls what errors may name, where it is not by the name here."""
    notices: Sequence[Notice] = ()
    """Of what the API has left out already."""

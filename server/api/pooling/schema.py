"""Request schemas of POST /v1/embeddings, /embed, /v1/score, /v1/rerank and /v1/classify."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import Discriminator, Field, Tag, model_validator

from server.api.completions.schema import TokenIds
from server.api.fields.foreign import ForeignHints, own_id
from server.api.fields.generation import CACHE_SALT, MODEL, PRIORITY
from server.api.fields.messages import ConversationFields
from server.api.fields.openai import EndUser
from server.api.fields.rules import (
    SUPPORTED_ONLY,
    EchoedModel,
    Refused,
    hint,
    no_effect,
    problem,
    refused,
    related,
    shape,
)

MAX_TEXTS = 2048
"""The most inputs, pairs or documents of a request."""


class PoolingFields(ForeignHints):
    """Fields of all requests for embeddings, scores, rankings and classes."""

    model: str | None = Field(None, description=MODEL)
    request_id: str | None = own_id()
    user: EndUser | None = no_effect("Your own id of the end user.")
    priority: int | None = Field(None, ge=-(2**31), le=2**31 - 1, description=PRIORITY)
    cache_salt: str | None = Field(None, min_length=1, max_length=128, description=CACHE_SALT)
    learn: bool | None = hint(
        "Whether draft heads may be trained on this request.", "Heads are trained only on generated answers."
    )
    truncate_prompt_tokens: int | None = Field(
        None, ge=-1, le=2**31 - 1,
        description="Keep this many tokens of each text, at its end or, with an encoder, at its beginning; -1: as many "
        "as fit. Of a query and its document, the document is cut at its end.",
    )  # fmt: skip

    @model_validator(mode="after")
    def _check_truncation(self) -> Self:
        if self.truncate_prompt_tokens == 0:
            message = "Invalid '{path}': Expected -1 or a value >= 1, but got 0 instead."
            raise problem("integer_below_min_value", message, "truncate_prompt_tokens")
        return self


class TeiFields(PoolingFields):
    """Fields of requests to Text Embeddings Inference (TEI)."""

    truncate: bool | None = Field(
        None, description="TEI: `true` is the same as `truncate_prompt_tokens: -1`.",
        json_schema_extra=related(excludes=["truncate_prompt_tokens"]),
    )  # fmt: skip
    truncation_direction: Literal["left", "right", "Left", "Right"] | None = hint(
        "TEI: the end at which texts are truncated.",
        "They are truncated as with `truncate_prompt_tokens`.",
        off=["right", "Right"],
    )

    @property
    def num_kept(self) -> int | None:
        """The tokens to keep of each prompt; -1: as many as fit; None: all."""
        return -1 if self.truncate else self.truncate_prompt_tokens


class ScoringFields(PoolingFields):
    """Fields of requests for scores and rankings."""

    instruction: str | None = Field(
        None, min_length=1, description="The question that documents are judged by, for models that take one."
    )
    use_activation: bool | None = Field(
        None,
        description="`false`: scores are the model's raw numbers, without the sigmoid that makes them probabilities.",
    )


def _input_shape(value: object) -> str | None:
    """Whether an array holds inputs or is one, by its first item."""
    if isinstance(value, list) and value and not isinstance(value[0], str | list):
        return "<tokens>"
    return shape(value)


Text = Annotated[str, Field(min_length=1)]
OneInput = Annotated[Annotated[Text, Tag("<string>")] | Annotated[TokenIds, Tag("<array>")], Discriminator(shape)]
Input = Annotated[
    Annotated[Text, Tag("<string>")]
    | Annotated[TokenIds, Tag("<tokens>")]
    | Annotated[list[OneInput], Field(min_length=1, max_length=MAX_TEXTS, fail_fast=True), Tag("<array>")],
    Discriminator(_input_shape),
]


class TextFields(PoolingFields):
    """Fields of requests for numbers of single texts."""


class EmbeddingRequest(ConversationFields, TextFields):
    """Request schema for POST /v1/embeddings: fields of OpenAI, vLLM and sentence-transformers."""

    input: Input | None = Field(
        None, description="One or several texts, as text or token ids. Either this or `messages` is required.",
        json_schema_extra=related(excludes=["messages"]),
    )  # fmt: skip
    encoding_format: Literal["float", "base64"] | None = Field(
        None, description="`float` by default; `base64`: the numbers as little-endian float32, in base64."
    )
    dimensions: int | None = Field(
        None, ge=1, description="Length of the vectors, for models whose vectors can be shortened (Matryoshka)."
    )
    use_activation: bool | None = Field(
        None, description="Whether vectors have length 1; by default as in the model's configuration."
    )
    prompt_name: str | None = Field(
        None,
        description="Which of the model's prompts, such as `query` or `document`, precedes the texts; by default the "
        "one that its configuration names.",
    )

    @model_validator(mode="after")
    def _check_input(self) -> Self:
        if self.input is None and self.messages is None:
            raise problem("missing_required_parameter", "Missing required parameter: 'input'.", "input")
        return self


class TeiEmbedRequest(TeiFields):
    """Request schema for POST /embed: fields of Text Embeddings Inference (TEI)."""

    inputs: Input = Field(description="One or several texts, as text or token ids.")
    normalize: bool | None = Field(None, description="Whether vectors have length 1; on by default.")
    dimensions: int | None = Field(None, ge=1, description="Same as in `/v1/embeddings`.")
    prompt_name: str | None = Field(None, description="Same as in `/v1/embeddings`.")


class ClassifyRequest(TextFields):
    """Request schema for POST /v1/classify: fields of vLLM."""

    input: Input = Field(description="One or several texts, as text or token ids.")
    use_activation: bool | None = Field(
        None, description="`false`: the numbers of the model's head are returned in place of probabilities."
    )


Texts = Annotated[
    Annotated[str, Tag("<string>")]
    | Annotated[list[str], Field(min_length=1, max_length=MAX_TEXTS, fail_fast=True), Tag("<array>")],
    Discriminator(shape),
]


_OTHER_NAMES = (("text_1", "text_2"), ("data_1", "data_2"))
"""Other names of `queries` and `documents`."""


def _the_same_as(name: str, *, requires: str = "", excludes: Sequence[str]) -> Any:
    """The default of a field that is another of vLLM's names for the field `name`."""
    relations = related(requires=[requires] if requires else (), excludes=excludes)
    return Field(None, description=f"Same as `{name}`.", json_schema_extra=relations)


class ScoreRequest(ScoringFields):
    """Request schema for POST /v1/score: one query for all documents, or one for each, under any of vLLM's names."""

    queries: Texts | None = Field(None, description="One or several texts.")
    documents: Texts | None = Field(
        None, description="One or several texts.", json_schema_extra=related(requires=["queries"])
    )
    items: Texts | None = _the_same_as("documents", requires="queries", excludes=["documents"])
    text_1: Texts | None = _the_same_as("queries", excludes=["queries", "documents", "items"])
    text_2: Texts | None = _the_same_as("documents", requires="text_1", excludes=["queries", "documents", "items"])
    data_1: Texts | None = _the_same_as("queries", excludes=["queries", "documents", "items", "text_1", "text_2"])
    data_2: Texts | None = _the_same_as(
        "documents", requires="data_1", excludes=["queries", "documents", "items", "text_1", "text_2"]
    )

    @model_validator(mode="after")
    def _check_pairs(self) -> Self:
        first, second = self.names
        for name in (first, second):
            if getattr(self, name) is None:
                message = f"Missing required parameter: '{name}'."
                raise problem("missing_required_parameter", message, name)
        queries, documents = self.texts
        if len(queries) not in (1, len(documents)):
            message = f"Invalid '{{path}}': {len(queries)} texts for {len(documents)} of '{second}'. Expected one text "
            raise problem("invalid_value", message + "for all of them, or one for each.", first)
        return self

    @property
    def names(self) -> tuple[str, str]:
        """The names of the two fields that the client used."""
        for names in _OTHER_NAMES:
            if any(getattr(self, name) is not None for name in names):
                return names
        return ("queries", "documents" if self.items is None else "items")

    @property
    def texts(self) -> tuple[Sequence[str], Sequence[str]]:
        """The queries and the documents."""
        first, second = ([text] if isinstance(text, str) else text for text in map(self.__getattribute__, self.names))
        return first, second


class DocumentObject(EchoedModel):
    """A document as an object. Other fields than its text are ignored and reported."""

    text: str = Field(description="The document's text.")


Document = Annotated[
    Annotated[str, Tag("<string>")] | Annotated[DocumentObject, Tag("<object>")],
    Discriminator(lambda value: "<string>" if isinstance(value, str) else "<object>"),
]


class RerankRequest(TeiFields, ScoringFields):
    """Request schema for POST /v1/rerank: fields of Jina and Cohere, or of Text Embeddings Inference (TEI)."""

    query: str = Field(description="The query that the documents may answer.")
    documents: list[Document] | None = Field(
        None, min_length=1, max_length=MAX_TEXTS, fail_fast=True,
        description="Texts, or objects with a `text`; either this or `texts` is required.",
        json_schema_extra=related(excludes=["texts"]),
    )  # fmt: skip
    texts: list[str] | None = Field(
        None, min_length=1, max_length=MAX_TEXTS, fail_fast=True,
        description="TEI's name for `documents`; the answer then has TEI's format.",
    )  # fmt: skip
    top_n: int | None = Field(None, ge=1, description="The number of best documents to return; by default all.")
    return_documents: bool | None = Field(
        None, description="Whether results include the documents; on by default.",
        json_schema_extra=related(requires=["documents"]),
    )  # fmt: skip
    return_text: bool | None = Field(
        None,
        description="Whether results include `texts`; off by default.",
        json_schema_extra=related(requires=["texts"]),
    )
    raw_scores: bool | None = Field(
        None, description="With `texts`: `true` is the same as `use_activation: false`.",
        json_schema_extra=related(requires=["texts"], excludes=["use_activation"]),
    )  # fmt: skip
    max_tokens_per_doc: int | None = Field(
        None, ge=1, description="The number of tokens to use from the beginning of each document; by default all."
    )
    max_chunks_per_doc: Refused = refused("The most separately scored parts of a document.")
    rank_fields: Annotated[list[Literal["text"]] | None, SUPPORTED_ONLY] = refused(
        "The fields to use of documents with several fields, unless it is `text`."
    )

    @model_validator(mode="after")
    def _check_documents(self) -> Self:
        if self.documents is None and self.texts is None:
            raise problem("missing_required_parameter", "Missing required parameter: 'documents'.", "documents")
        return self

    @property
    def is_tei(self) -> bool:
        """Whether the request and its answer have TEI's format."""
        return self.texts is not None

    @property
    def named(self) -> str:
        """The name of the field that has the documents."""
        return "texts" if self.is_tei else "documents"

    @property
    def written(self) -> Sequence[str]:
        """The texts of the documents."""
        documents = self.texts or self.documents or ()
        return [document if isinstance(document, str) else document.text for document in documents]

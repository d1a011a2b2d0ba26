"""The request of POST /v1/rerank, and its answer."""

from collections.abc import Sequence
from typing import Annotated, Literal, Self

from pydantic import Discriminator, Field, Tag, model_validator

from server.api.fields.pooling import ScoringFields
from server.api.fields.rules import Refused, RequestModel, hint, no_effect, problem, refused, related
from server.api.openai.numbers import PromptUsage
from server.api.openai.objects import WARNINGS, ReportedNotice, ResponseModel

MAX_DOCUMENTS = 2048


class DocumentObject(RequestModel):
    """A document."""

    text: str = Field(description="Its text.")


Document = Annotated[
    Annotated[str, Tag("<string>")] | Annotated[DocumentObject, Tag("<object>")],
    Discriminator(lambda value: "<string>" if isinstance(value, str) else "<object>"),
]


class RerankRequest(ScoringFields):
    """The fields of Jina and Cohere, or those of Text Embeddings Inference (TEI), which has `texts`."""

    query: str = Field(description="What the documents are to answer.")
    documents: list[Document] | None = Field(
        None, min_length=1, max_length=MAX_DOCUMENTS, fail_fast=True,
        description="Texts, or objects with one; either this or `texts` is required.",
        json_schema_extra=related(excludes=["texts"]),
    )  # fmt: skip
    texts: list[str] | None = Field(
        None, min_length=1, max_length=MAX_DOCUMENTS, fail_fast=True,
        description="The same as `documents`, as TEI calls them: the answer has TEI's form then.",
    )  # fmt: skip
    top_n: int | None = Field(None, ge=1, description="How many of the best are returned; by default all.")
    return_documents: bool | None = Field(
        None, description="Whether results have the documents; on by default.",
        json_schema_extra=related(requires=["documents"]),
    )  # fmt: skip
    return_text: bool | None = Field(
        None, description="Of `texts`: whether the answer has them.", json_schema_extra=related(requires=["texts"])
    )
    raw_scores: bool | None = Field(
        None, description="Of `texts`: the same as `use_activation` that is off.",
        json_schema_extra=related(requires=["texts"], excludes=["use_activation"]),
    )  # fmt: skip
    truncate: bool | None = hint(
        "Of TEI: whether documents that are too long may be cut.", "Documents that are too long are refused."
    )
    truncation_direction: Literal["left", "right", "Left", "Right"] | None = no_effect("Of TEI: at which end.")
    max_tokens_per_doc: int | None = Field(
        None, ge=1, description="So many tokens at the beginning of each document are used; by default all."
    )
    max_chunks_per_doc: Refused = refused("Parts of a document that are scored by themselves.")
    rank_fields: Refused = refused("Which fields of documents count, where these have several.")

    @model_validator(mode="after")
    def _check_documents(self) -> Self:
        if self.documents is None and self.texts is None:
            raise problem("missing_required_parameter", "Missing required parameter: 'documents'.", "documents")
        return self

    @property
    def named(self) -> str:
        """The field with the documents, as the client wrote it."""
        return "documents" if self.texts is None else "texts"

    @property
    def written(self) -> Sequence[str]:
        """The texts of the documents."""
        documents = self.texts or self.documents or ()
        return [document if isinstance(document, str) else document.text for document in documents]


class RankedDocument(ResponseModel):
    """A document as it was given."""

    text: str = Field(description="Its text.")


class RerankResult(ResponseModel):
    """Where a document stands."""

    index: int = Field(description="Which of the request's documents.")
    relevance_score: float = Field(
        description="The higher, the better; from 0 to 1 unless the model's configuration says else."
    )
    document: RankedDocument | None = Field(None, description="Unless `return_documents` is off.")


class Reranked(ResponseModel):
    """Answer of POST /v1/rerank."""

    id: str = Field(description="Of the answer.")
    model: str = Field(description="As the request named it.")
    results: list[RerankResult] = Field(description="The best first; of equally good ones, that with the lower index.")
    usage: PromptUsage
    warnings: list[ReportedNotice] | None = Field(None, description=WARNINGS)


class RankedText(ResponseModel):
    """Where a text stands, in TEI's form."""

    index: int = Field(description="Which of the request's texts.")
    score: float = Field(description="The same as `relevance_score`.")
    text: str | None = Field(None, description="The text, with `return_text`.")

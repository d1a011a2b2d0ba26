"""The request of POST /v1/score, and its answer."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import Discriminator, Field, Tag, model_validator

from server.api.fields.pooling import ScoringFields
from server.api.fields.rules import problem, related, shape
from server.api.openai.numbers import PromptUsage
from server.api.openai.objects import WARNINGS, ReportedNotice, ResponseModel

MAX_PAIRS = 2048
Texts = Annotated[
    Annotated[str, Tag("<string>")]
    | Annotated[list[str], Field(min_length=1, max_length=MAX_PAIRS, fail_fast=True), Tag("<array>")],
    Discriminator(shape),
]


_OTHER_NAMES = (("text_1", "text_2"), ("data_1", "data_2"))
"""Of `queries` and `documents`."""


def _the_same_as(name: str, *, requires: str = "", excludes: Sequence[str]) -> Any:
    """A field under another of vLLM's names."""
    relations = related(requires=[requires] if requires else (), excludes=excludes)
    return Field(None, description=f"The same as `{name}`.", json_schema_extra=relations)


class ScoreRequest(ScoringFields):
    """Queries and documents under any of vLLM's names: one query for all documents, or one for each."""

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
            message = f"Invalid '{{path}}': {len(queries)} texts for the {len(documents)} of '{second}'. Expected one "
            raise problem("invalid_value", message + "for all of them, or one for each.", first)
        return self

    @property
    def names(self) -> tuple[str, str]:
        """Of the two fields, as the client wrote them."""
        for names in _OTHER_NAMES:
            if any(getattr(self, name) is not None for name in names):
                return names
        return ("queries", "documents" if self.items is None else "items")

    @property
    def texts(self) -> tuple[Sequence[str], Sequence[str]]:
        """Queries and documents."""
        first, second = ([text] if isinstance(text, str) else text for text in map(self.__getattribute__, self.names))
        return first, second


class Score(ResponseModel):
    """Of one pair."""

    object: Literal["score"] = "score"
    index: int = Field(description="Which of the documents.")
    score: float = Field(description="The higher, the better; from 0 to 1 unless the model's configuration says else.")


class ScoreList(ResponseModel):
    """Answer of POST /v1/score."""

    id: str = Field(description="Of the answer.")
    object: Literal["list"] = "list"
    created: int = Field(description="Unix time in seconds.")
    model: str = Field(description="As the request named it.")
    data: list[Score] = Field(description="In the order of the documents.")
    usage: PromptUsage
    warnings: list[ReportedNotice] | None = Field(None, description=WARNINGS)

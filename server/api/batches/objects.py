"""What clients send and get of batches: OpenAI's objects."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from server.api.answer_object import AnswerObject, doc
from server.api.fields.openai import Metadata
from server.api.fields.rules import RequestModel
from server.api.files import ExpiresAfter

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings")
Endpoint = Literal["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings"]
Status = Literal["validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"]
OPEN: frozenset[Status] = frozenset({"validating", "in_progress", "finalizing", "cancelling"})
"""In which something is left to do."""


class OutputExpiresAfter(ExpiresAfter):
    """When what a batch writes is deleted, in JSON."""

    model_config = ConfigDict(strict=True)


class CreateBatch(RequestModel):
    """The request of POST /v1/batches."""

    input_file_id: str = Field(description="A file of purpose `batch`, with a request on each line.")
    endpoint: Endpoint = Field(description="To which all of them go.")
    completion_window: Literal["24h"] = Field(description="What is not answered by then is given up.")
    metadata: Metadata = Field(None, description="Up to 16 pairs of strings.")
    output_expires_after: OutputExpiresAfter | None = Field(
        None, description="When the files that the batch writes are deleted; by default after 30 days."
    )


class RequestCounts(AnswerObject):
    """Of the lines."""

    total: Annotated[int, doc("All, once they are counted.")]
    completed: Annotated[int, doc("Those that were answered.")]
    failed: Annotated[int, doc("Those that ended with an error.")]


class BatchError(AnswerObject):
    """Why a batch cannot be run, or does not go on."""

    code: Annotated[str, doc("What is wrong, for programs.")]
    line: Annotated[int | None, doc("Of the file, from 1.")]
    message: Annotated[str, doc("The same for people.")]
    param: Annotated[str | None, doc("The field of the line.")]


class BatchErrors(AnswerObject):
    """The first of them."""

    object: Literal["list"] = "list"
    data: Annotated[Sequence[BatchError], doc("At most 20.")]


class BatchObject(AnswerObject):
    """A batch as it is now."""

    id: Annotated[str, doc("Begins with `batch_`.")]
    object: Literal["batch"] = "batch"
    endpoint: Annotated[Endpoint, doc("Of its requests.")]
    input_file_id: Annotated[str, doc("With the requests.")]
    completion_window: Annotated[Literal["24h"], doc("Always this.")]
    status: Annotated[Status, doc("How far it is.")]
    errors: Annotated[BatchErrors | None, doc("Why it cannot be run, or does not go on for now.")]
    output_file_id: Annotated[str | None, doc("With the answers, in the order of the requests, when it has ended.")]
    error_file_id: Annotated[str | None, doc("With the errors.")]
    request_counts: Annotated[RequestCounts, doc("Of the lines.")]
    metadata: Annotated[Mapping[str, str] | None, doc("As it was given.")]
    created_at: Annotated[int, doc("Unix time in seconds, as are the others.")]
    expires_at: Annotated[int, doc("When what is not answered is given up.")]
    in_progress_at: Annotated[int | None, doc("When its lines had been checked.")]
    finalizing_at: Annotated[int | None, doc("When the last line had ended.")]
    completed_at: Annotated[int | None, doc("When its files were written.")]
    failed_at: Annotated[int | None, doc("When it was found that it cannot be run.")]
    expired_at: Annotated[int | None, doc("When its time was over.")]
    cancelling_at: Annotated[int | None, doc("When its end was asked for.")]
    cancelled_at: Annotated[int | None, doc("When it had ended for that.")]


class BatchList(AnswerObject):
    """A page of batches."""

    object: Literal["list"] = "list"
    data: Annotated[Sequence[BatchObject], doc("The newest first.")]
    first_id: Annotated[str | None, doc("Of the page.")]
    last_id: Annotated[str | None, doc("Of the page, for `after`.")]
    has_more: Annotated[bool, doc("Whether there are others behind it.")]

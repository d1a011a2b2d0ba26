"""Request and response schemas of OpenAI's Batch API."""

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
"""Statuses of batches that have not ended."""


class OutputExpiresAfter(ExpiresAfter):
    """When the output files of a batch expire."""

    model_config = ConfigDict(strict=True)


class CreateBatch(RequestModel):
    """Request schema for POST /v1/batches."""

    input_file_id: str = Field(description="Id of a file with purpose `batch`, which has a request on each line.")
    endpoint: Endpoint = Field(description="The endpoint of all requests.")
    completion_window: Literal["24h"] = Field(description="Requests that are not answered by then expire.")
    metadata: Metadata = Field(None, description="Up to 16 pairs of strings.")
    output_expires_after: OutputExpiresAfter | None = Field(
        None, description="When the output files expire; by default after 30 days."
    )


class RequestCounts(AnswerObject):
    """Numbers of lines of a batch."""

    total: Annotated[int, doc("All lines; 0 until they are counted.")]
    completed: Annotated[int, doc("Lines that were answered.")]
    failed: Annotated[int, doc("Lines that failed.")]


class BatchError(AnswerObject):
    """Why a batch cannot be run, or waits."""

    code: Annotated[str, doc("What is wrong, for programs.")]
    line: Annotated[int | None, doc("Line of the file, from 1; null: not about a line.")]
    message: Annotated[str, doc("What is wrong, for people.")]
    param: Annotated[str | None, doc("The wrong field of the line.")]


class BatchErrors(AnswerObject):
    """The first errors of a batch."""

    object: Literal["list"] = "list"
    data: Annotated[Sequence[BatchError], doc("At most 20 errors.")]


class BatchObject(AnswerObject):
    """A batch, with its current status."""

    id: Annotated[str, doc("Id of the batch.")]
    object: Literal["batch"] = "batch"
    endpoint: Annotated[Endpoint, doc("The endpoint of all requests.")]
    input_file_id: Annotated[str, doc("Id of the file with the requests.")]
    completion_window: Annotated[Literal["24h"], doc("Always `24h`.")]
    status: Annotated[Status, doc("Status of the batch.")]
    errors: Annotated[BatchErrors | None, doc("Why the batch cannot be run, or waits.")]
    output_file_id: Annotated[str | None, doc("Id of the file with the answers, in the order of the requests.")]
    error_file_id: Annotated[str | None, doc("Id of the file with the errors.")]
    request_counts: Annotated[RequestCounts, doc("Numbers of lines.")]
    metadata: Annotated[Mapping[str, str] | None, doc("The metadata of the request.")]
    created_at: Annotated[int, doc("When the batch was created. All times are Unix times in seconds.")]
    expires_at: Annotated[int, doc("When requests that are not answered expire.")]
    in_progress_at: Annotated[int | None, doc("When all lines had been checked.")]
    finalizing_at: Annotated[int | None, doc("When the last line had ended.")]
    completed_at: Annotated[int | None, doc("When the output files were written.")]
    failed_at: Annotated[int | None, doc("When the batch failed.")]
    expired_at: Annotated[int | None, doc("When the batch had expired.")]
    cancelling_at: Annotated[int | None, doc("When the cancellation was requested.")]
    cancelled_at: Annotated[int | None, doc("When the batch was cancelled.")]


class BatchList(AnswerObject):
    """A page of batches."""

    object: Literal["list"] = "list"
    data: Annotated[Sequence[BatchObject], doc("The batches, newest first by default.")]
    first_id: Annotated[str | None, doc("Id of the first batch on the page.")]
    last_id: Annotated[str | None, doc("Id of the last batch on the page, for `after`.")]
    has_more: Annotated[bool, doc("Whether there is another page.")]

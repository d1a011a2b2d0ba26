"""What clients send and get of batches: OpenAI's objects."""

from typing import Literal

from pydantic import ConfigDict, Field

from server.api.fields.openai import Metadata
from server.api.fields.rules import RequestModel
from server.api.files.upload import ExpiresAfter
from server.api.openai.objects import ResponseModel

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


class RequestCounts(ResponseModel):
    """Of the lines."""

    total: int = Field(description="All, once they are counted.")
    completed: int = Field(description="Those that were answered.")
    failed: int = Field(description="Those that ended with an error.")


class BatchError(ResponseModel):
    """Why a batch cannot be run, or does not go on."""

    code: str = Field(description="What is wrong, for programs.")
    line: int | None = Field(description="Of the file, from 1.")
    message: str = Field(description="The same for people.")
    param: str | None = Field(description="The field of the line.")


class BatchErrors(ResponseModel):
    """The first of them."""

    object: Literal["list"] = Field("list", description="Always this.")
    data: list[BatchError] = Field(description="At most 20.")


class BatchObject(ResponseModel):
    """A batch as it is now."""

    id: str = Field(description="Begins with `batch_`.")
    object: Literal["batch"] = Field("batch", description="Always this.")
    endpoint: Endpoint = Field(description="Of its requests.")
    input_file_id: str = Field(description="With the requests.")
    completion_window: Literal["24h"] = Field(description="Always this.")
    status: Status = Field(description="How far it is.")
    errors: BatchErrors | None = Field(description="Why it cannot be run, or does not go on for now.")
    output_file_id: str | None = Field(description="With the answers, in the order of the requests, when it has ended.")
    error_file_id: str | None = Field(description="With the errors.")
    request_counts: RequestCounts = Field(description="Of the lines.")
    metadata: dict[str, str] | None = Field(description="As it was given.")
    created_at: int = Field(description="Unix time in seconds, as are the others.")
    expires_at: int = Field(description="When what is not answered is given up.")
    in_progress_at: int | None = Field(description="When its lines had been checked.")
    finalizing_at: int | None = Field(description="When the last line had ended.")
    completed_at: int | None = Field(description="When its files were written.")
    failed_at: int | None = Field(description="When it was found that it cannot be run.")
    expired_at: int | None = Field(description="When its time was over.")
    cancelling_at: int | None = Field(description="When its end was asked for.")
    cancelled_at: int | None = Field(description="When it had ended for that.")


class BatchList(ResponseModel):
    """A page of batches."""

    object: Literal["list"] = Field("list", description="Always this.")
    data: list[BatchObject] = Field(description="The newest first.")
    first_id: str | None = Field(description="Of the page.")
    last_id: str | None = Field(description="Of the page, for `after`.")
    has_more: bool = Field(description="Whether there are others behind it.")

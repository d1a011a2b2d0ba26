"""What requests for files ask, and what they get."""

from typing import Literal

from pydantic import Field

from server.api.openai.objects import ResponseModel
from server.api.openai.pages import ListQuery
from server.storage.files import FileRecord

MAX_LISTED = 10000


class FilesQuery(ListQuery):
    """Which files to list."""

    limit: int = Field(MAX_LISTED, ge=1, le=MAX_LISTED, description="So many.")
    purpose: str | None = Field(None, description="Only those with this purpose.")


class FileObject(ResponseModel):
    """A file."""

    id: str = Field(description="By which other requests name it.")
    object: Literal["file"] = Field("file", description="Always this.")
    bytes: int = Field(description="Of its content.")
    created_at: int = Field(description="Unix time in seconds.")
    expires_at: int | None = Field(description="From then on it is gone; null: when it is deleted.")
    filename: str = Field(description="As it was uploaded.")
    purpose: Literal["batch", "batch_output"] = Field(description="`batch_output`: the server has made it.")
    status: Literal["processed"] = Field("processed", description="Always this.")
    status_details: None = Field(description="Always null.")


class FileList(ResponseModel):
    """The client's files."""

    object: Literal["list"] = Field("list", description="Always this.")
    data: list[FileObject] = Field(description="The files.")
    first_id: str | None = Field(description="Of the first of them.")
    last_id: str | None = Field(description="Of the last: `after` of the next request.")
    has_more: bool = Field(description="Whether there are more behind them.")


class FileDeleted(ResponseModel):
    """A file that was deleted."""

    id: str
    object: Literal["file"] = Field("file", description="Always this.")
    deleted: Literal[True]


def object_of(record: FileRecord) -> dict[str, object]:
    """The file as its object's JSON has it."""
    return {
        "id": record.id,
        "object": "file",
        "bytes": record.num_bytes,
        "created_at": record.created_at,
        "expires_at": record.expires_at,
        "filename": record.filename,
        "purpose": record.purpose,
        "status": "processed",
        "status_details": None,
    }

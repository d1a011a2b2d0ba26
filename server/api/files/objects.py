"""What requests for files ask, and what they get."""

from collections.abc import Sequence
from typing import Annotated, Literal, cast

from pydantic import Field

from server.api.answer_object import AnswerObject, doc
from server.api.openai.pages import ListQuery
from server.storage.files import FileRecord

MAX_LISTED = 10000
Purpose = Literal["batch", "batch_output"]


class FilesQuery(ListQuery):
    """The query of GET /v1/files."""

    limit: int = Field(MAX_LISTED, ge=1, le=MAX_LISTED, description="So many.")
    purpose: str | None = Field(None, description="Only those with this purpose.")


class FileObject(AnswerObject):
    """A file."""

    id: Annotated[str, doc("By which other requests name it.")]
    object: Literal["file"] = "file"
    bytes: Annotated[int, doc("Of its content.")]
    created_at: Annotated[int, doc("Unix time in seconds.")]
    expires_at: Annotated[int | None, doc("From then on it is gone; null: when it is deleted.")]
    filename: Annotated[str, doc("As it was uploaded.")]
    purpose: Annotated[Purpose, doc("`batch_output`: the server has made it.")]
    status: Literal["processed"] = "processed"
    status_details: Annotated[None, doc("Always null.")] = None


class FileList(AnswerObject):
    """The client's files."""

    object: Literal["list"] = "list"
    data: Annotated[Sequence[FileObject], doc("The files.")]
    first_id: Annotated[str | None, doc("Of the first of them.")]
    last_id: Annotated[str | None, doc("Of the last: `after` of the next request.")]
    has_more: Annotated[bool, doc("Whether there are more behind them.")]


class FileDeleted(AnswerObject):
    """A file that was deleted."""

    id: str
    object: Literal["file"] = "file"
    deleted: Literal[True] = True


def file_object(record: FileRecord) -> FileObject:
    """The object of a file."""
    return FileObject(
        id=record.id,
        bytes=record.num_bytes,
        created_at=record.created_at,
        expires_at=record.expires_at,
        filename=record.filename,
        purpose=cast("Purpose", record.purpose),
    )

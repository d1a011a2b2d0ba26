"""OpenAI's files API: upload, list, download and delete files."""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Annotated, Literal, cast
from urllib.parse import quote

from fastapi import APIRouter, Request, Response
from fastapi.responses import StreamingResponse
from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, ValidationError

from server.api.answer_object import AnswerObject, doc
from server.api.dialect import Dialect
from server.api.fields.rules import RequestModel, problem
from server.api.jobs import Work
from server.api.openai.pages import ListQuery, ends_of, no_such_item, query_of
from server.api.openapi import answers, documented_errors, takes_form
from server.api.services import FilesDep, Services, ServicesDep
from server.errors import InvalidRequestError, NotFoundError, shorten
from server.http.body import read_form
from server.http.middleware import record_of
from server.http.responses import json_response
from server.http.validation import from_validation
from server.storage.files import Draft, FileRecord, FileStore, NewFile, Selection
from server.storage.storage import NotStoredError

MAX_LISTED = 10000
Purpose = Literal["batch", "batch_output", "vision", "user_data"]
_UPLOADED = ("batch", "vision", "user_data")
MAX_NAME = 255
LIVES_S = 30 * 86400
"""Default lifetime of uploaded files in seconds, as in OpenAI's API for the purpose `batch`."""
SWEEP_S = 600.0
"""Seconds between deletions of expired files. Expired files are not found, even before they are deleted."""
_ALL = "/v1/files"
_ONE = "/v1/files/{file_id}"
_BYTES = {"content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}}
_ERRORS = (400, 401, 404, 500)
_logger = logging.getLogger("samewise.files")


class FilesQuery(ListQuery):
    """Query of GET /v1/files."""

    limit: int = Field(MAX_LISTED, ge=1, le=MAX_LISTED, description="The most files to return.")
    purpose: str | None = Field(None, description="Return only files with this purpose.")


class FileObject(AnswerObject):
    """A file that a client uploaded or the server made."""

    id: Annotated[str, doc("The file's id.")]
    object: Literal["file"] = "file"
    bytes: Annotated[int, doc("Size of the content in bytes.")]
    created_at: Annotated[int, doc("Unix time in seconds.")]
    expires_at: Annotated[int | None, doc("When the file expires: Unix time in seconds; null: never.")]
    filename: Annotated[str, doc("Name of the uploaded file.")]
    purpose: Annotated[
        Purpose,
        doc("`batch`: input of a batch; `batch_output`: made by the server; `vision`, `user_data`: an image."),
    ]
    status: Literal["processed"] = "processed"
    status_details: Annotated[None, doc("Always null.")] = None


class FileList(AnswerObject):
    """Response schema for GET /v1/files."""

    object: Literal["list"] = "list"
    data: Annotated[Sequence[FileObject], doc("The files of the page.")]
    first_id: Annotated[str | None, doc("Id of the first file on the page.")]
    last_id: Annotated[str | None, doc("Id of the last file on the page, for `after`.")]
    has_more: Annotated[bool, doc("Whether there is another page.")]


class FileDeleted(AnswerObject):
    """Response schema for DELETE /v1/files/{file_id}."""

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


def _check_name(name: str) -> str:
    if len(name) > MAX_NAME:
        raise problem("invalid_value", f"Invalid '{{path}}': the file's name is longer than {MAX_NAME} characters.")
    return name


def _check_purpose(purpose: object) -> object:
    if isinstance(purpose, str) and purpose not in _UPLOADED:
        supported = ", ".join(f"'{one}'" for one in _UPLOADED)
        message = (
            f"Unsupported value: '{{path}}' does not support '{shorten(purpose)}' with this server, only {supported}."
        )
        raise problem("unsupported_value", message)
    return purpose


class ExpiresAfter(RequestModel):
    """When a file expires. The form has it as `expires_after[anchor]` and `expires_after[seconds]`."""

    model_config = ConfigDict(strict=False)

    anchor: Literal["created_at"] = Field(description="Start of the lifetime: the file's creation.")
    seconds: int = Field(ge=3600, le=LIVES_S, description="Lifetime in seconds, from one hour to 30 days.")


class UploadFile(RequestModel):
    """The form of POST /v1/files."""

    model_config = ConfigDict(strict=False)

    file: Annotated[str, AfterValidator(_check_name)] = Field(
        description="The file, with a name of at most 255 characters.", json_schema_extra={"format": "binary"}
    )
    purpose: Annotated[Literal["batch", "vision", "user_data"], BeforeValidator(_check_purpose)] = Field(
        description="The file's purpose: `batch`, the input of a batch; `vision` or `user_data`, an image that "
        "requests name by its `file_id`."
    )
    expires_after: ExpiresAfter | None = Field(None, description="When the file expires; by default after 30 days.")


async def _store(request: Request, files: FileStore, max_bytes: int) -> FileRecord:
    """Store the file that a request uploads. If anything fails, nothing is stored.

    Raises InvalidRequestError, BodyTooLargeError, MediaTypeError, NotStoredError, and ClientDisconnect.
    """
    async with files.draft() as draft:
        asked = _validated(await read_form(request, "file", max_bytes, draft.write))
        _check_content(draft)
        lives_s = LIVES_S if asked.expires_after is None else asked.expires_after.seconds
        return await draft.keep(NewFile(record_of(request).client, asked.file, asked.purpose, lives_s))


def _validated(fields: Mapping[str, str]) -> UploadFile:
    try:
        return UploadFile.model_validate(_nested(fields))
    except ValidationError as error:
        raise from_validation(error.errors(include_url=False)) from None


def _nested(fields: Mapping[str, str]) -> dict[str, object]:
    """The fields of a form: `a[b]` is the property `b` of an object `a`, unless `a` is also a plain field."""
    values: dict[str, object] = {}
    objects: dict[str, dict[str, str]] = {}
    for name, value in fields.items():
        outer, bracket, inner = name.partition("[")
        if bracket and inner.endswith("]"):
            values.setdefault(outer, objects.setdefault(outer, {}))
            objects[outer][inner[:-1]] = value
        else:
            values[name] = value
    return values


def _check_content(draft: Draft) -> None:
    if not draft.num_bytes:
        raise InvalidRequestError("Invalid 'file': the file is empty.", param="file", code="invalid_value")


router = APIRouter(tags=["OpenAI"])


@router.post(
    _ALL,
    responses=answers(FileObject, 400, 401, 413, 415, 429, 500),
    openapi_extra=takes_form(UploadFile),
)
async def upload(request: Request, services: ServicesDep, files: FilesDep) -> Response:
    """Upload a file, as a form (`multipart/form-data`)."""
    record = await _store(request, files, int(services.settings.max_file_mib * (1 << 20)))
    return json_response(file_object(record))


@router.get(_ALL, responses=answers(FileList, 400, 401, 500))
async def list_files(request: Request, files: FilesDep) -> Response:
    """List the key's files, a page at a time."""
    asked = query_of(FilesQuery, request)
    selection = Selection(asked.purpose, asked.after, asked.order == "desc", asked.limit + 1)
    found = await files.list(record_of(request).client, selection)
    if found is None:
        raise no_such_item(asked)
    listed = [file_object(one) for one in found[: asked.limit]]
    return json_response(FileList(data=listed, **ends_of(listed), has_more=len(found) > asked.limit))


@router.get(_ONE, responses=answers(FileObject, *_ERRORS))
async def retrieve(file_id: str, request: Request, files: FilesDep) -> Response:
    """A file's metadata."""
    record = await files.find(record_of(request).client, file_id)
    if record is None:
        raise _not_found(file_id)
    return json_response(file_object(record))


@router.get(f"{_ONE}/content", response_class=StreamingResponse, responses={**documented_errors(*_ERRORS), 200: _BYTES})
async def content(file_id: str, request: Request, files: FilesDep) -> Response:
    """The content of a file."""
    record = await files.find(record_of(request).client, file_id)
    pieces = None if record is None else await files.read(record)
    if record is None or pieces is None:
        raise _not_found(file_id)
    headers = {
        "content-length": str(record.num_bytes),
        "content-disposition": f"attachment; {_name_for_header(record.filename)}",
        "x-content-type-options": "nosniff",
    }
    return StreamingResponse(pieces, media_type="application/octet-stream", headers=headers)


@router.delete(_ONE, responses=answers(FileDeleted, *_ERRORS))
async def delete(file_id: str, request: Request, files: FilesDep) -> Response:
    """Delete a file. Downloads in progress still complete."""
    if not await files.delete(record_of(request).client, file_id):
        raise _not_found(file_id)
    return json_response(FileDeleted(id=file_id))


async def resume(services: Services) -> Work:
    """Return the work that deletes leftover and expired files."""
    return lambda: sweep(services)


async def sweep(services: Services) -> None:
    """Delete leftovers once, and expired files every SWEEP_S seconds."""
    if services.files is None:
        return
    has_swept_leftovers = False
    while True:
        try:
            if not has_swept_leftovers:
                await services.files.sweep_leftovers()
                has_swept_leftovers = True
            await services.files.sweep()
        except NotStoredError as error:
            _logger.error("cannot delete expired files, will retry: %s", error.message)
        await asyncio.sleep(SWEEP_S)


def _name_for_header(filename: str) -> str:
    quoted = quote(filename, safe="")
    return f'filename="{filename}"' if quoted == filename else f"filename*=utf-8''{quoted}"


def _not_found(file_id: str) -> NotFoundError:
    return NotFoundError(f"No such File object: {shorten(file_id, 128)}", param="id", code="not_found")


DIALECT = Dialect(router, requests={_ALL: UploadFile}, resume=resume)

"""The paths of files."""

import asyncio
import logging
from urllib.parse import quote

from fastapi import APIRouter, Request, Response
from fastapi.responses import StreamingResponse

from server.api.dialect import Dialect
from server.api.files.objects import FileDeleted, FileList, FileObject, FilesQuery, file_object
from server.api.files.upload import UploadFile, take_in
from server.api.jobs import Work
from server.api.openai.pages import ends_of, no_such_item, query_of
from server.api.openapi import answers, documented_errors, takes_form
from server.api.services import FilesDep, Services, ServicesDep
from server.errors import NotFoundError, shorten
from server.http.middleware import record_of
from server.http.responses import json_response
from server.storage.files import Selection
from server.storage.storage import NotStoredError

SWEEP_S = 600.0
"""Between two times that expired files are deleted; they are not found before that, either."""
_ALL = "/v1/files"
_ONE = "/v1/files/{file_id}"
_BYTES = {"content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}}
_ERRORS = (400, 401, 404, 500)
_logger = logging.getLogger("samewise.files")

router = APIRouter(tags=["OpenAI"])


@router.post(
    _ALL,
    responses=answers(FileObject, 400, 401, 413, 415, 429, 500),
    openapi_extra=takes_form(UploadFile),
)
async def upload(request: Request, services: ServicesDep, files: FilesDep) -> Response:
    """Upload a file, as a form (`multipart/form-data`)."""
    record = await take_in(request, files, int(services.settings.max_file_mib * (1 << 20)))
    return json_response(file_object(record))


@router.get(_ALL, responses=answers(FileList, 400, 401, 500))
async def list_files(request: Request, files: FilesDep) -> Response:
    """The key's files, a page at a time."""
    asked = query_of(FilesQuery, request)
    selection = Selection(asked.purpose, asked.after, asked.order == "desc", asked.limit + 1)
    found = await files.list(record_of(request).client, selection)
    if found is None:
        raise no_such_item(asked)
    listed = [file_object(one) for one in found[: asked.limit]]
    return json_response(FileList(data=listed, **ends_of(listed), has_more=len(found) > asked.limit))


@router.get(_ONE, responses=answers(FileObject, *_ERRORS))
async def retrieve(file_id: str, request: Request, files: FilesDep) -> Response:
    """A file, without its content."""
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
    """Delete a file; whoever is reading its content gets all of it."""
    if not await files.delete(record_of(request).client, file_id):
        raise _not_found(file_id)
    return json_response(FileDeleted(id=file_id))


async def resume(services: Services) -> Work:
    """Nothing is promised; files that nobody needs any more are deleted. See Dialect."""
    return lambda: sweep(services)


async def sweep(services: Services) -> None:
    """Delete what was left behind at the start, and from time to time what has expired."""
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
            _logger.error("expired files are not deleted yet: %s", error.message)
        await asyncio.sleep(SWEEP_S)


def _name_for_header(filename: str) -> str:
    quoted = quote(filename, safe="")
    return f'filename="{filename}"' if quoted == filename else f"filename*=utf-8''{quoted}"


def _not_found(file_id: str) -> NotFoundError:
    return NotFoundError(f"No such File object: {shorten(file_id, 128)}", param="id", code="not_found")


DIALECT = Dialect(router, requests={_ALL: UploadFile}, resume=resume)

"""Taking in a file that a client uploads."""

from collections.abc import Mapping
from typing import Annotated, Literal

from fastapi import Request
from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, ValidationError

from server.api.fields.rules import RequestModel, problem
from server.errors import InvalidRequestError, shorten
from server.http.middleware import record_of
from server.http.multipart import check_size, form_of, pieces_of
from server.http.validation import from_validation
from server.storage.files import Draft, FileRecord, FileStore, NewFile

MAX_NAME = 255
DAY_S = 86400
LIVES_S = 30 * DAY_S
"""Of files with the purpose `batch`, where nothing is said: as OpenAI has it."""


def _check_name(name: str) -> str:
    if len(name) > MAX_NAME:
        raise problem("invalid_value", f"Invalid '{{path}}': the file's name is longer than {MAX_NAME} characters.")
    return name


def _check_purpose(purpose: object) -> object:
    if isinstance(purpose, str) and purpose != "batch":
        message = f"Unsupported value: '{{path}}' does not support '{shorten(purpose)}' with this server, only 'batch'."
        raise problem("unsupported_value", message)
    return purpose


class ExpiresAfter(RequestModel):
    """When a file goes by itself. In the form, the fields `expires_after[anchor]` and `expires_after[seconds]`."""

    model_config = ConfigDict(strict=False)

    anchor: Literal["created_at"] = Field(description="From when on: when the file was created.")
    seconds: int = Field(ge=3600, le=LIVES_S, description="How long after that.")


class UploadFile(RequestModel):
    """The form of POST /v1/files."""

    model_config = ConfigDict(strict=False)

    file: Annotated[str, AfterValidator(_check_name)] = Field(
        description="The file, with a name of at most 255 characters.", json_schema_extra={"format": "binary"}
    )
    purpose: Annotated[Literal["batch"], BeforeValidator(_check_purpose)] = Field(
        description="What it is for: the input of a batch."
    )
    expires_after: ExpiresAfter | None = Field(None, description="When it goes by itself; by default after 30 days.")


async def take_in(request: Request, files: FileStore, max_bytes: int) -> FileRecord:
    """Keep the file that the request brings. Whatever happens before all is there, nothing stays of it.

    Raises InvalidRequestError, BodyTooLargeError, MediaTypeError, NotStoredError, and ClientDisconnect.
    """
    form = form_of(request, "file")
    async with files.draft() as draft:
        async for piece in pieces_of(request, max_bytes):
            if content := form.feed(piece):
                check_size(draft.num_bytes + len(content), max_bytes)
                await draft.write(content)
        form.finish()
        asked = _validated(form.fields, form.filename)
        _check_content(draft)
        lives_s = LIVES_S if asked.expires_after is None else asked.expires_after.seconds
        return await draft.keep(NewFile(record_of(request).client, asked.file, asked.purpose, lives_s))


def _validated(fields: Mapping[str, str], filename: str | None) -> UploadFile:
    values = {} if filename is None else {"file": filename}
    try:
        return UploadFile.model_validate(values | _nested(fields))
    except ValidationError as error:
        raise from_validation(error.errors(include_url=False)) from None


def _nested(fields: Mapping[str, str]) -> dict[str, object]:
    """The fields of a form, of which `a[b]` is what an object `a` has as `b`; one that is a text, too, is no object."""
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

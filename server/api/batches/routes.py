"""Endpoints of /v1/batches."""

import asyncio
import logging
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response
from msgspec.structs import replace

from server.api.batches.job import BatchJob
from server.api.batches.lines import batch_error
from server.api.batches.objects import OPEN, BatchErrors, BatchList, BatchObject, CreateBatch, RequestCounts
from server.api.dialect import Dialect
from server.api.endpoint import body_as
from server.api.files import SWEEP_S
from server.api.jobs import Work
from server.api.openai.pages import ListQuery, ends_of, no_such_item, query_of
from server.api.openapi import answers, takes
from server.api.services import FilesDep, Services, ServicesDep
from server.errors import InvalidRequestError, NotFoundError, shorten
from server.http.middleware import record_of
from server.http.responses import json_response
from server.storage.batches import Batch, BatchTable
from server.storage.storage import NotStoredError

_ALL = "/v1/batches"
_ONE = "/v1/batches/{batch_id}"
MAX_OPEN = 100
"""The most open batches of a key."""
_DAY_S = 86400
_KEPT_S = 30 * _DAY_S
"""Seconds until ended batches are deleted."""
_ERRORS = (400, 401, 404, 500)
_NOT_YET = (
    "errors", "output_file_id", "error_file_id", "in_progress_at", "finalizing_at", "completed_at", "failed_at",
    "expired_at", "cancelling_at", "cancelled_at",
)  # fmt: skip
_logger = logging.getLogger("samewise.batches")
Fields = Mapping[str, Any]

router = APIRouter(tags=["OpenAI"])


@router.post(
    _ALL,
    responses=answers(BatchObject, 400, 401, 404, 413, 415, 429, 500),
    openapi_extra=takes(CreateBatch),
)
async def create_batch(request: Request, services: ServicesDep, files: FilesDep) -> Response:
    """Answer all requests in a file within a day, with idle capacity."""
    asked = await body_as(CreateBatch, request, services)
    client = record_of(request).client
    found = await files.find(client, asked.input_file_id)
    if found is None or found.purpose != "batch":
        message = f"Invalid 'input_file_id': there is no file '{shorten(asked.input_file_id)}' of purpose 'batch'."
        raise InvalidRequestError(message, param="input_file_id", code="invalid_value")
    now = int(time.time())
    after = asked.output_expires_after
    fields: Fields = {
        "id": f"batch_{uuid.uuid4().hex}",
        "object": "batch",
        "endpoint": asked.endpoint,
        "input_file_id": asked.input_file_id,
        "completion_window": asked.completion_window,
        "status": "validating",
        "request_counts": {"total": 0, "completed": 0, "failed": 0},
        "metadata": asked.metadata,
        "created_at": now,
        "expires_at": now + _DAY_S,
        **dict.fromkeys(_NOT_YET),
        "output_expires_after": None if after is None else after.model_dump(),
    }
    batch = Batch(client, fields, is_open=True)
    await services.storage.on(BatchTable, lambda table: _add(table, batch))
    services.jobs.start(batch.id, BatchJob(batch, services, files))
    return json_response(_object(batch))


@router.get(_ALL, responses=answers(BatchList, *_ERRORS))
async def list_batches(request: Request, services: ServicesDep, _: FilesDep) -> Response:
    """List the key's batches, a page at a time."""
    asked, client = query_of(ListQuery, request), record_of(request).client
    found = await services.storage.on(
        BatchTable,
        lambda table: table.of_client(
            client, after=asked.after, newest_first=asked.order == "desc", limit=asked.limit + 1
        ),
    )
    if found is None:
        raise no_such_item(asked)
    listed = [await _now(batch, services) for batch in found[: asked.limit]]
    return json_response(BatchList(data=listed, **ends_of(listed), has_more=len(found) > asked.limit))


@router.get(_ONE, responses=answers(BatchObject, *_ERRORS))
async def retrieve_batch(batch_id: str, request: Request, services: ServicesDep, _: FilesDep) -> Response:
    """Retrieve a batch."""
    client = record_of(request).client
    batch = await services.storage.on(BatchTable, lambda table: _find(table, batch_id, client))
    return json_response(await _now(batch, services))


@router.post(f"{_ONE}/cancel", responses=answers(BatchObject, *_ERRORS))
async def cancel_batch(batch_id: str, request: Request, services: ServicesDep, _: FilesDep) -> Response:
    """Cancel a batch. Its output file has the answers until then."""
    client = record_of(request).client
    batch = await services.storage.on(BatchTable, lambda table: _cancel(table, batch_id, client))
    job = services.jobs.get(batch_id, client)
    if isinstance(job, BatchJob):
        job.cancel()
    return json_response(await _now(batch, services))


def _add(table: BatchTable, batch: Batch) -> None:
    if table.num_open(batch.client) >= MAX_OPEN:
        message = f"This key has {MAX_OPEN} open batches, the most that are allowed. Wait for one to end, or cancel it."
        raise InvalidRequestError(message, code="too_many_batches")
    table.put(batch)


def _cancel(table: BatchTable, batch_id: str, client: str) -> Batch:
    batch = _find(table, batch_id, client)
    status = batch.fields["status"]
    if status == "cancelling":
        return batch
    if status not in ("validating", "in_progress"):
        message = f"Cannot cancel a batch with status '{status}'."
        raise InvalidRequestError(message, param="batch_id", code="invalid_value")
    stopping = Batch(client, {**batch.fields, "status": "cancelling", "cancelling_at": int(time.time())}, is_open=True)
    table.put(stopping)
    return stopping


def _find(table: BatchTable, batch_id: str, client: str) -> Batch:
    batch = table.get(batch_id, client)
    if batch is None:
        raise NotFoundError(f"No batch found with id '{shorten(batch_id, 128)}'.", param="batch_id", code="not_found")
    return batch


async def _now(batch: Batch, services: Services) -> BatchObject:
    """The current object, with the counts and the error for which the batch waits."""
    made = _object(batch)
    if batch.fields["status"] not in OPEN:
        return made
    answered, failed = await services.storage.on(BatchTable, lambda table: table.counts(batch.id))
    counts = RequestCounts(total=made.request_counts.total, completed=answered, failed=failed)
    made = replace(made, request_counts=counts)
    job = services.jobs.get(batch.id, batch.client)
    if isinstance(job, BatchJob) and job.error:
        made = replace(made, errors=BatchErrors(data=[batch_error("not_stored", job.error)]))
    return made


def _object(batch: Batch) -> BatchObject:
    """The object for clients."""
    return msgspec.convert({name: batch.fields[name] for name in BatchObject.__struct_fields__}, BatchObject)


async def resume(services: Services) -> Work:
    """Find the batches that were open when the server stopped. Returns the work that continues them."""
    batches = [] if services.files is None else await services.storage.on(BatchTable, BatchTable.open)
    return lambda: _continue(batches, services)


async def _continue(batches: Sequence[Batch], services: Services) -> None:
    """Continue these batches, and delete old ones every SWEEP_S seconds."""
    if services.files is None:
        return
    for batch in batches:
        services.jobs.start(batch.id, BatchJob(batch, services, services.files))
    while True:
        before = int(time.time()) - _KEPT_S
        try:
            await services.storage.on(BatchTable, lambda table, before=before: table.drop_ended(before))  # type: ignore[misc]
        except NotStoredError as error:
            _logger.error("cannot delete old batches, will retry: %s", error.message)
        await asyncio.sleep(SWEEP_S)


DIALECT = Dialect(router, requests={_ALL: CreateBatch}, resume=resume)

"""What can be done with responses that are stored."""

from collections.abc import Mapping
from typing import Any

from server.api.responses import store
from server.api.responses.background import BackgroundResponse
from server.api.responses.following import Followed, Made
from server.api.services import Services

Fields = Mapping[str, Any]


async def retrieve(response_id: str, client: str, services: Services) -> Fields:
    """The object as it is now. Raises NotFoundError."""
    job = _job(response_id, client, services)
    if job is not None:
        return job.telling.response()
    return await services.storage.run(lambda rows: store.find_response(rows, response_id, client))


async def followed(response_id: str, client: str, services: Services) -> Followed:
    """Its stream, which may still go on. Raises NotFoundError, and InvalidRequestError if there is none."""
    job = _job(response_id, client, services)
    if job is not None:
        return job
    return Made(await services.storage.run(lambda rows: store.events_of(rows, response_id, client)))


async def delete(response_id: str, client: str, services: Services) -> Fields:
    """Forget it, and make no more of it. Raises NotFoundError."""
    job = _job(response_id, client, services)
    if job is not None:
        await job.cancel()
    await services.storage.run(lambda rows: store.delete_response(rows, response_id, client))
    return {"id": response_id, "object": "response", "deleted": True}


async def cancel(response_id: str, client: str, services: Services) -> Fields:
    """Make no more of a background response, and return it. Raises NotFoundError and InvalidRequestError."""
    job = _job(response_id, client, services)
    if job is not None:
        await job.cancel()
    return await services.storage.run(lambda rows: store.cancel(rows, response_id, client))


def _job(response_id: str, client: str, services: Services) -> BackgroundResponse | None:
    job = services.jobs.get(response_id, client)
    return job if isinstance(job, BackgroundResponse) else None

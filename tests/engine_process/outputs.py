"""A client's outputs one by one."""

import asyncio
from collections.abc import AsyncGenerator

from scheduler.interface import EngineRequest, RequestOutput
from server.engine.live_requests import Follower
from server.engine.supervisor import EngineSupervisor
from tests.engine_process.followers import Recorded


async def outputs_of(
    client: EngineSupervisor, request: EngineRequest, follower: Follower | None = None
) -> AsyncGenerator[RequestOutput]:
    """Submit and yield what comes until every choice has ended; closing the generator early closes the stream.

    Raises what the client says ended the request early.
    """
    news = asyncio.Event()
    stream = client.submit(request, news.set, follower or Recorded())
    try:
        while True:
            is_over = not stream.num_unfinished
            for output in stream.take():
                yield output
            if stream.error is not None:
                raise stream.error
            if is_over:
                return
            await news.wait()
            news.clear()
    finally:
        stream.close()

"""Streams that begin while their model is still being loaded."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass

from fastapi import Request, Response
from sse_starlette import EventSourceResponse
from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive, Scope, Send

from server.http.event_stream import EVENT_STREAM
from server.http.middleware import record_in, report
from server.http.responses import StreamErrorWriter


def _comment() -> bytes:
    return b": loading\n\n"


@dataclass(frozen=True, slots=True)
class Waiting:
    """How the client of a model that is being loaded waits."""

    streams: bool
    """Whether its answer is a stream."""
    piece: Callable[[], bytes] = _comment
    """Makes a piece of the stream that says nothing but that it goes on."""
    media_type: str = EVENT_STREAM


class LoadingStream(EventSourceResponse):
    """A stream of empty pieces until a model is loaded, and then the frames of the response.

    The status is sent before the response is known, so all later errors end the stream, and the response's own headers
    are lost. `begin` therefore waits a while first.
    """

    def __init__(
        self,
        use: AbstractAsyncContextManager[None],
        respond: Callable[[], Awaitable[Response]],
        keepalive_s: float,
        write_error: StreamErrorWriter,
        waiting: Waiting,
    ) -> None:
        """Entering `use` waits for the model. `respond` is called in it, and makes a response that is a stream."""
        super().__init__(iter(()), ping=0, sep="\n", headers={"content-type": waiting.media_type})
        del self.headers["connection"]  # as in EventStream
        self._waiting = waiting
        self._using = AsyncExitStack()
        self._respond = respond
        self._keepalive_s = keepalive_s
        self._write_error = write_error
        self._loading = asyncio.ensure_future(self._using.enter_async_context(use))

    async def begin(self, request: Request) -> Response:
        """The response if the model is loaded soon; otherwise this stream. Raises ApiError and ClientDisconnect."""
        return await self._response() if await self._wait(request.receive) else self

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream. Raises ClientDisconnect."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})

        async def send_rest(message: Message) -> None:
            if message["type"] != "http.response.start":
                await send(message)

        try:
            is_loaded = False
            while not is_loaded:
                await send({"type": "http.response.body", "body": self._waiting.piece(), "more_body": True})
                is_loaded = await self._wait(receive)
            response = await self._response()
            await response(scope, receive, send_rest)
        except ClientDisconnect:
            raise
        except Exception as error:  # noqa: BLE001  (the status is sent: the client learns of it in the stream)
            known = report(error, scope)
            record_in(scope).stream_error = known.status
            end = self._write_error(known, scope, 0)
            await send({"type": "http.response.body", "body": end, "more_body": False})

    async def _response(self) -> Response:
        """The response, once the load is over. Raises ApiError if it failed."""
        await self._loading
        try:
            return await self._respond()
        finally:
            await self._using.aclose()

    async def _wait(self, receive: Receive) -> bool:
        """Wait for the load, but not for long. Returns whether it is over; raises ClientDisconnect if the client left.

        A client that has left does not wait for the model any more.
        """
        gone = asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait({self._loading, gone}, timeout=self._keepalive_s, return_when=asyncio.FIRST_COMPLETED)
            if gone.done() and not self._loading.done():
                raise ClientDisconnect
        except BaseException:
            await self._leave()
            raise
        finally:
            gone.cancel()
        return self._loading.done()

    async def _leave(self) -> None:
        self._loading.cancel()
        await asyncio.wait([self._loading])
        await self._using.aclose()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass

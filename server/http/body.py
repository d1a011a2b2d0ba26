"""Reading a request's body: its media type, its size, and the JSON in it."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute

from server.errors import BodyTooLargeError, MediaTypeError
from server.http.services import services_of
from server.http.strict_json import parse_json

_LARGE = 1 << 18
"""Bytes from which a body is parsed in a thread, so that the others' streams do not wait."""


class JSONRequest(Request):
    """A request whose `json()` was read by our rules before the framework asks for it."""

    async def read(self, max_bytes: int) -> None:
        """Read and parse the body.

        Raises MediaTypeError, BodyTooLargeError, or InvalidRequestError for JSON that is malformed, too deep, not
        UTF-8, or that has a number or a string that no other part of the server could represent.
        """
        types = self.headers.getlist("content-type")
        if len(types) != 1 or types[0].partition(";")[0].strip().lower() != "application/json":
            raise MediaTypeError("The request needs the header 'Content-Type: application/json', once.")
        body = await self._limited(max_bytes)
        if not body.strip():
            self._body = b""
        else:
            self._json = await asyncio.to_thread(parse_json, body) if len(body) > _LARGE else parse_json(body)

    async def _limited(self, max_bytes: int) -> bytes:
        declared = self.headers.get("content-length", "")
        chunks, size = [], int(declared) if declared.isdecimal() and len(declared) < 20 else 0
        if size <= max_bytes:
            size = 0
            async for chunk in self.stream():
                chunks.append(chunk)
                size += len(chunk)
                if size > max_bytes:
                    break
        if size > max_bytes:
            raise BodyTooLargeError(f"The request body is too large. This server reads at most {max_bytes} bytes.")
        self._body = b"".join(chunks)
        return self._body


class JSONRoute(APIRoute):
    """A route with a JSON body. The limit comes from the application's settings."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def read_then_handle(request: Request) -> Response:
            strict = JSONRequest(request.scope, request.receive)
            await strict.read(int(services_of(request).settings.max_body_mib * (1 << 20)))
            return await handler(strict)

        return read_then_handle

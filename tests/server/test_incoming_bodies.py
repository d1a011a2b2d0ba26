"""Total memory of request bodies that have been received in part."""

import asyncio

import pytest
from fastapi import Request

from server.errors import ApiError, BodyTooLargeError, UnavailableError
from server.http.body import IncomingBodies
from server.telemetry.request_trace import RequestTrace

MIB = 1 << 20


class Client:
    """Sends a body piece by piece."""

    def __init__(self, bodies: IncomingBodies, key: str = "", address: str = "10.0.0.1") -> None:
        self._pieces: asyncio.Queue[tuple[bytes, bool]] = asyncio.Queue()
        state = {"record": RequestTrace("req", client=key)}
        headers = [(b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "headers": headers, "client": (address, 1), "state": state}
        self._task = asyncio.create_task(bodies.read_json(Request(scope, self._receive)))

    async def _receive(self) -> dict[str, object]:
        piece, more = await self._pieces.get()
        self._pieces.task_done()
        return {"type": "http.request", "body": piece, "more_body": more}

    async def send(self, num_bytes: int, *, more: bool) -> None:
        """Returns when the server has taken it, or takes nothing any more."""
        self._pieces.put_nowait((b"x" * num_bytes, more))
        taken = asyncio.create_task(self._pieces.join())
        await asyncio.wait((taken, self._task), return_when=asyncio.FIRST_COMPLETED)
        taken.cancel()

    async def end(self) -> bytes:
        """The body that was read. Raises the reader's errors."""
        return await self._task


async def test_the_oldest_bodies_make_room_for_others() -> None:
    bodies = IncomingBodies(max_mib=1, max_incomplete_mib=4)
    slow = [Client(bodies) for _ in range(6)]
    for client in slow:
        await client.send(MIB - 1, more=True)
    for client in slow[:2]:
        with pytest.raises(UnavailableError, match="too slowly"):
            await client.end()
    for client in slow[2:]:
        await client.send(1, more=False)
        assert len(await client.end()) == MIB


@pytest.mark.parametrize("mine", [{"key": "ann"}, {"address": "10.0.0.2"}])
async def test_a_crowd_s_slow_bodies_make_room_for_a_neighbour_s(mine: dict[str, str]) -> None:
    bodies = IncomingBodies(max_mib=1, max_incomplete_mib=4)
    honest = Client(bodies, **mine)
    await honest.send(MIB // 2, more=True)
    slow = [Client(bodies) for _ in range(150)]
    for client in slow:
        await client.send(MIB // 16, more=True)
    await honest.send(MIB // 2, more=False)
    assert len(await honest.end()) == MIB
    num_that_fit = 48  # next to the honest body
    for client in slow:
        await client.send(1, more=False)
    outcomes = await asyncio.gather(*(client.end() for client in slow), return_exceptions=True)
    were_dropped = [isinstance(one, UnavailableError) for one in outcomes]
    assert were_dropped == [True] * (150 - num_that_fit) + [False] * num_that_fit


async def test_bodies_that_have_come_make_room() -> None:
    bodies = IncomingBodies(max_mib=1, max_incomplete_mib=4)
    waiting = Client(bodies)
    await waiting.send(MIB - 1, more=True)
    for _ in range(20):
        client = Client(bodies)
        await client.send(MIB, more=False)
        assert len(await client.end()) == MIB
    await waiting.send(1, more=False)
    assert len(await waiting.end()) == MIB


async def test_bodies_that_were_refused_make_room() -> None:
    bodies = IncomingBodies(max_mib=1, max_incomplete_mib=4)
    waiting = Client(bodies)
    await waiting.send(MIB - 1, more=True)
    for _ in range(20):
        client = Client(bodies)
        await client.send(MIB + 1, more=True)
        with pytest.raises(BodyTooLargeError):
            await client.end()
    await waiting.send(1, more=False)
    assert len(await waiting.end()) == MIB


async def test_a_largest_body_is_always_read() -> None:
    bodies = IncomingBodies(max_mib=3, max_incomplete_mib=1)
    clients = [Client(bodies) for _ in range(4)]
    for client in clients:
        await client.send(3 * MIB - 1, more=True)
    for client in clients:
        await client.send(1, more=False)
    outcomes = await asyncio.gather(*(client.end() for client in clients), return_exceptions=True)
    assert not [one for one in outcomes if isinstance(one, ApiError)]

"""Responses over a websocket: events as over HTTP, turns that go on from each other, and what clients may do wrong."""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import httpx
import pytest
import uvicorn
import websockets.asyncio.client as websockets
from fastapi import FastAPI
from msgspec import Raw
from openai import AsyncOpenAI
from websockets.asyncio.client import ClientConnection
from websockets.exceptions import ConnectionClosed, InvalidStatus

from server.api.responses import websocket
from server.api.responses.websocket import Memories
from server.engine.client import EngineState
from server.http import body
from server.http import websocket as frames
from server.http.connection import LimitedConnection
from server.http.draining_server import DrainingServer, configure
from server.http.listening import bind
from server.http.websocket import LimitedWebSocket
from tests.server.fake_engine import FakeEngine
from tests.server.helpers import says
from tests.server.responses.calling import RESPONSES, Event, asking, events, plain, whole
from tests.server.responses.test_answers import THINKING, WEATHER
from tests.server.responses.test_inputs import result, user
from tests.server.test_tools import ROME
from tests.waiting import until

ENDS = ("error", "response.completed", "response.incomplete", "response.failed")
Make = Callable[..., FastAPI]


@asynccontextmanager
async def running(app: FastAPI, drains: FakeEngine | None = None) -> AsyncIterator[tuple[str, uvicorn.Server]]:
    config = configure(app, 20.0, app.state.websockets)
    config.lifespan = "off"
    server = uvicorn.Server(config) if drains is None else DrainingServer(config, drains, grace_s=20.0)
    with bind("127.0.0.1", 0) as listener:
        task = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            yield f"127.0.0.1:{listener.getsockname()[1]}", server
        finally:
            server.should_exit = True
            await task


@pytest.fixture
def app(make_app: Make) -> FastAPI:
    return make_app()


@pytest.fixture
async def address(app: FastAPI) -> AsyncIterator[str]:
    async with running(app) as (address, _):
        yield address


@pytest.fixture
async def client(address: str) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=f"http://{address}", timeout=60) as client:
        yield client


@pytest.fixture
async def socket(address: str) -> AsyncIterator[ClientConnection]:
    async with connect(address) as socket:
        yield socket


def connect(address: str, **options: Any) -> websockets.connect:
    return websockets.connect(f"ws://{address}{RESPONSES}", compression=None, proxy=None, **options)


async def create(socket: ClientConnection, **fields: Any) -> None:
    await socket.send(json.dumps({"type": "response.create", **asking(**fields)}))


async def told(socket: ClientConnection) -> list[Event]:
    """Events until a response or an error ends."""
    come: list[Event] = []
    while not come or come[-1]["type"] not in ENDS:
        come.append(json.loads(await socket.recv(decode=True)))
    return come


async def answered(socket: ClientConnection, **fields: Any) -> list[Event]:
    await create(socket, **fields)
    return await told(socket)


async def made(socket: ClientConnection, **fields: Any) -> dict[str, Any]:
    """The response, which must have an end."""
    last = (await answered(socket, **fields))[-1]
    assert last["type"] in ("response.completed", "response.incomplete"), last
    return last["response"]


async def refused(socket: ClientConnection, status: int = 400, **fields: Any) -> dict[str, Any]:
    (event,) = await answered(socket, **fields)
    assert (event["type"], event["status"]) == ("error", status), event
    return event["error"]


def alike(told: list[Event]) -> Any:
    """The events without fields that differ between runs; item ids contain the response's id."""
    suffix = told[0]["response"]["id"].partition("_")[2]
    return plain(json.loads(json.dumps(told).replace(suffix, "")))


# -- answers -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"top_logprobs": 2, "metadata": {"a": "b"}},
        {"tools": [WEATHER], "include": ["reasoning.encrypted_content"]},
        {"stream_options": {"include_obfuscation": True}},
    ],
    ids=["text", "logprobs", "tools", "a hint"],
)
async def test_the_events_are_those_of_http(
    client: httpx.AsyncClient, socket: ClientConnection, engine: FakeEngine, fields: Any
) -> None:
    engine.script = says(f"{THINKING}{ROME}" if "tools" in fields else "Hello 🙂.")
    over_http = await events(client, seed=1, **fields)
    assert alike(await answered(socket, seed=1, **fields)) == alike(over_http)


async def test_turns_go_on_as_if_all_was_sent(
    client: httpx.AsyncClient, socket: ClientConnection, engine: FakeEngine
) -> None:
    engine.script = says(f"{THINKING}{ROME}")
    fields = {"tools": [WEATHER], "store": False, "seed": 1}
    history = [user("Where is it warm?")]
    previous = None
    for turn in range(3):
        new = history[-1:] if turn else history
        response = await made(socket, **fields, input=new, previous_response_id=previous)
        whole_response = await whole(client, **fields, input=history)
        assert engine.requests[-2].prompt == engine.requests[-1].prompt
        assert response["usage"]["input_tokens"] == whole_response["usage"]["input_tokens"]
        previous = response["id"]
        history += [*response["output"], result("Sunny.", call_id=response["output"][-1]["call_id"])]
    error = await refused(socket, **fields, previous_response_id="resp_none")
    assert (error["code"], error["param"]) == ("previous_response_not_found", "previous_response_id")


async def test_a_prompt_is_prepared_without_an_answer(
    client: httpx.AsyncClient, socket: ClientConnection, engine: FakeEngine
) -> None:
    fields = {"tools": [WEATHER], "store": False, "max_output_tokens": 5}
    system = {"role": "developer", "content": "Be brief."}
    prepared = await answered(socket, **fields, input=[system], generate=False)
    assert [event["type"] for event in prepared] == [
        "response.created", "response.in_progress", "response.completed",
    ]  # fmt: skip
    assert prepared[-1]["response"]["output"] == []
    assert prepared[-1]["response"]["usage"]["output_tokens"] == 0
    assert engine.requests[-1].max_tokens == 0
    previous = prepared[-1]["response"]["id"]
    assert (await made(socket, **fields, previous_response_id=previous))["output"]
    await whole(client, **fields, input=[system, user("hi")])
    assert engine.requests[-2].prompt == engine.requests[-1].prompt


async def test_what_is_stored_is_found_from_everywhere(
    client: httpx.AsyncClient, socket: ClientConnection, address: str
) -> None:
    fields = {"max_output_tokens": 5}
    first = await made(socket, **fields)
    assert (await client.get(f"{RESPONSES}/{first['id']}")).json() == first
    async with connect(address) as other:
        assert await made(other, **fields, previous_response_id=first["id"])
    conversation = (await client.post("/v1/conversations", json={})).json()["id"]
    await made(socket, **fields, conversation=conversation)
    assert len((await client.get(f"/v1/conversations/{conversation}/items")).json()["data"]) == 2


async def test_what_is_not_stored_is_the_connection_s_own(app: FastAPI, address: str) -> None:
    memories = app.state.services.websockets.memories
    async with connect(address) as socket, connect(address) as other:
        first = await made(socket, store=False)
        assert memories.num_bytes > 0
        error = await refused(other, previous_response_id=first["id"])
        assert error["code"] == "previous_response_not_found"
        assert await made(socket, store=False, previous_response_id=first["id"])
    await until(lambda: memories.num_bytes == 0)
    async with connect(address) as socket:
        error = await refused(socket, previous_response_id=first["id"])
        assert error["code"] == "previous_response_not_found"


async def test_a_turn_that_fails_ends_the_conversation(socket: ClientConnection, engine: FakeEngine) -> None:
    first = await made(socket, store=False)
    error = await refused(socket, previous_response_id=first["id"], input=[result()])
    assert error["param"] == "input[0].call_id"
    assert (await refused(socket, previous_response_id=first["id"]))["code"] == "previous_response_not_found"
    first = await made(socket, store=False)
    engine.fail_after, engine.failure = 2, RuntimeError("broken")
    failed = await answered(socket, previous_response_id=first["id"])
    assert failed[-1]["type"] == "response.failed"
    engine.fail_after = None
    assert (await refused(socket, previous_response_id=first["id"]))["code"] == "previous_response_not_found"


# -- lanes -------------------------------------------------------------------------------------------------------------


async def test_a_lane_keeps_its_order_and_others_run_beside_it(socket: ClientConnection, engine: FakeEngine) -> None:
    engine.step_delay_s = 0.001
    for lane in ("a", "a", None, "b"):
        await create(socket, **({} if lane is None else {"stream_id": lane}), max_output_tokens=60)
    come: list[Event] = []
    while sum(event["type"] in ENDS for event in come) < 4:
        come.append(json.loads(await socket.recv(decode=True)))
    of_lane: dict[str | None, list[str]] = {}
    for event in come:
        of_lane.setdefault(event.get("stream_id"), []).append(event["type"])
    assert of_lane.keys() == {"a", "b", None}
    assert of_lane["a"] == of_lane["b"] * 2 == of_lane[None] * 2
    begun = {event.get("stream_id") for event in come[: [event["type"] in ENDS for event in come].index(True)]}
    assert begun == {"a", "b", None}


async def test_a_fork_goes_on_from_another_lane(socket: ClientConnection, engine: FakeEngine) -> None:
    first = await made(socket, store=False, stream_id="a", input="begin")
    await made(socket, store=False, stream_id="b", input="fork", previous_response_id=first["id"])
    of_fork = engine.requests[-1].prompt
    await made(socket, store=False, stream_id="a", input="fork", previous_response_id=first["id"])
    assert engine.requests[-1].prompt == of_fork
    error = await refused(socket, stream_id="a", previous_response_id=first["id"])
    assert error["code"] == "previous_response_not_found"


async def test_lanes_and_what_waits_are_limited(
    socket: ClientConnection, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(websocket, "MAX_WAITING", 3)
    monkeypatch.setattr(websocket, "MAX_LANES", 1)
    engine.first_delay_s = 30.0
    await create(socket, stream_id="a")
    await until(lambda: engine.num_live == 1)
    assert (await refused(socket, stream_id="b"))["code"] == "websocket_stream_limit_reached"
    for _ in range(3):
        await create(socket, stream_id="a")
    await create(socket, stream_id="a")
    (event,) = await told(socket)
    assert (event["status"], event["stream_id"]) == (429, "a")
    assert float(event["headers"]["Retry-After"]) > 0
    await socket.close()
    await until(lambda: engine.num_live == 0)
    assert len(engine.requests) == 1


# -- mistakes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"type": "response.cancel"}, "type", "invalid_value"),
        ({"inputs": "x"}, "inputs", "unknown_parameter"),
        ({"stream": False}, "stream", "unsupported_value"),
        ({"background": True}, "background", "unsupported_value"),
        ({"stream_id": ""}, "stream_id", "invalid_stream_id"),
        ({"stream_id": "a b"}, "stream_id", "invalid_stream_id"),
        ({"stream_id": "x" * 257}, "stream_id", "invalid_stream_id"),
        ({"stream_id": 3}, "stream_id", "invalid_type"),
        ({"generate": "no"}, "generate", "invalid_type"),
        ({"model": "other"}, "model", "model_not_found"),
    ],
)
async def test_mistakes_are_named(socket: ClientConnection, fields: Any, param: str, code: str) -> None:
    error = await refused(socket, 404 if param == "model" else 400, **fields)
    assert (error["param"], error["code"], error["type"]) == (param, code, "invalid_request_error")
    ids = {error["headers"]["x-request-id"], (await refused(socket, input=3))["headers"]["x-request-id"]}
    assert len(ids) == 2
    nulls = dict.fromkeys(("stream", "background", "stream_id", "generate", "previous_response_id"))
    assert await made(socket, **nulls, max_output_tokens=3)


@pytest.mark.parametrize("message", ["", "{", "{}", "[]", "null", '"x"', '{"a": 1, "a": 2}', "{" * 9999, b"{}"])
async def test_what_is_no_event_is_refused(socket: ClientConnection, message: str | bytes) -> None:
    await socket.send(message)
    (event,) = await told(socket)
    assert (event["status"], event["error"]["type"]) == (400, "invalid_request_error")
    assert await made(socket, max_output_tokens=3)


async def test_a_message_that_is_too_large_closes_the_connection(make_app: Make) -> None:
    async with running(make_app(max_body_mib=0.01)) as (address, _), connect(address) as socket:
        assert await made(socket, input="x" * 3000, max_output_tokens=3)
        await create(socket, input="x" * 11_000)
        with pytest.raises(ConnectionClosed) as closed:
            await told(socket)
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 1009


async def test_messages_that_do_not_end_make_room_for_others(make_app: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body, "MAX_INCOMPLETE_MIB", 0.0)
    never = asyncio.Event()

    async def pieces(size: int) -> AsyncIterator[bytes]:
        for _ in range(size):
            yield b"x"
        await never.wait()

    async with running(make_app(max_body_mib=0.01)) as (address, _), AsyncExitStack() as stack:
        sockets = [await stack.enter_async_context(connect(address)) for _ in range(3)]
        sending = [asyncio.create_task(one.send(pieces(250))) for one in sockets]  # their frames take more
        with pytest.raises(ConnectionClosed):
            await sockets[0].recv()
        never.set()
        await asyncio.gather(*sending, return_exceptions=True)
        for one in sockets[1:]:
            assert [event["status"] for event in await told(one)] == [400]


# -- clients that go, and those that may not come ----------------------------------------------------------------------


async def test_a_client_that_goes_frees_what_it_had(app: FastAPI, address: str, engine: FakeEngine) -> None:
    engine.step_delay_s = 0.01
    socket = await connect(address)
    await create(socket, stream_id="a")
    await create(socket, stream_id="a")
    await create(socket, stream_id="b")
    await until(lambda: engine.num_live == 2)
    socket.transport.abort()
    await until(lambda: engine.num_live == 0)
    await until(lambda: len(app.state.services.websockets) == 0)
    assert len(engine.closed_early) == len(engine.requests) == 2
    assert app.state.services.websockets.waiting_bytes.total() == 0


async def test_a_key_is_asked_for_before_the_handshake(make_with_keys: Make) -> None:
    app = make_with_keys({"ann": {}, "bob": {"requests_per_minute": 2}})
    async with running(app) as (address, _):
        for headers in ({}, {"authorization": "Bearer wrong"}):
            with pytest.raises(InvalidStatus) as answer:
                await connect(address, additional_headers=headers)
            response = answer.value.response
            assert (response.status_code, response.headers["content-type"]) == (401, "application/json")
            assert json.loads(response.body)["error"]["type"] == "invalid_request_error"
            assert response.headers["x-request-id"]
        async with connect(address, additional_headers={"x-api-key": "bob-key"}) as socket:
            for _ in range(2):
                await made(socket, max_output_tokens=3)
            error = await refused(socket, 429, max_output_tokens=3)
            assert error["type"] == "requests"
            assert error["headers"]["x-ratelimit-remaining-requests"] == "0"
        async with connect(address, additional_headers={"authorization": "Bearer ann-key"}) as socket:
            assert await made(socket, max_output_tokens=3)


@pytest.mark.parametrize(
    ("origin", "settings", "is_taken"),
    [
        ("https://evil.example", {}, False),
        ("null", {}, False),
        ("http://[", {}, False),
        ("http://[{address}", {"cors_origins": ["*"]}, True),
        ("http://{address}", {}, True),
        ("https://app.example", {"cors_origins": ["https://app.example"]}, True),
        ("https://evil.example", {"cors_origins": ["https://app.example"]}, False),
        ("https://evil.example", {"cors_origins": ["*"]}, True),
    ],
)
async def test_pages_of_strangers_are_kept_out(make_app: Make, origin: str, settings: Any, is_taken: bool) -> None:
    async with running(make_app(**settings)) as (address, _):
        connecting = connect(address, origin=origin.format(address=address))  # type: ignore[arg-type]
        if is_taken:
            async with connecting as socket:
                assert await made(socket, max_output_tokens=3)
        else:
            with pytest.raises(InvalidStatus) as answer:
                await connecting
            assert answer.value.response.status_code == 403
            assert json.loads(answer.value.response.body)["error"]["code"] == "origin_not_allowed"


async def test_a_crowd_is_limited(address: str, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(websocket, "MAX_OPEN", 2)
    async with connect(address) as first, connect(address) as second:
        assert await made(first, max_output_tokens=3)
        async with connect(address) as third:
            (event,) = await told(second)
            assert event["error"]["code"] == "websocket_connection_limit_reached"
            with pytest.raises(ConnectionClosed):
                await second.recv()
            engine.first_delay_s = 30.0
            await create(first)
            await create(third)
            await until(lambda: engine.num_live == 2)
            with pytest.raises(InvalidStatus) as answer:
                await connect(address)
            assert answer.value.response.status_code == 503


async def test_no_key_takes_the_places_of_others(
    make_with_keys: Callable[..., FastAPI], engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(websocket, "MAX_OPEN", 2)
    engine.first_delay_s = 30.0
    app = make_with_keys({"ann": {}, "bob": {}})
    ann, bob = ({"additional_headers": {"authorization": f"Bearer {name}-key"}} for name in ("ann", "bob"))
    async with running(app) as (address, _), connect(address, **ann) as first, connect(address, **ann) as second:
        await create(first)
        await create(second)
        await until(lambda: engine.num_live == 2)
        async with connect(address, **bob) as third:
            await create(third)
            await until(lambda: engine.num_live == 3)
            await create(first)
            (event,) = await told(first)
            assert event["error"]["code"] == "websocket_connection_limit_reached"
            for key in (ann, bob):
                with pytest.raises(InvalidStatus) as answer:
                    await connect(address, **key)
                assert answer.value.response.status_code == 503


def test_no_key_takes_the_memory_of_others() -> None:
    sockets = websocket.Websockets(64 << 20, 0)  # room for 256 MiB
    sockets.waiting_bytes["ann"] = 100 << 20
    assert sockets.has_room("ann", 20 << 20)
    assert not sockets.has_room("ann", 60 << 20)
    assert sockets.has_room("bob", 60 << 20)


async def test_no_key_s_half_messages_end_another_s_connection(
    make_with_keys: Callable[..., FastAPI], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(body, "MAX_INCOMPLETE_MIB", 0.0)  # so there is room for four of the largest messages
    app = make_with_keys({"ann": {}, "bob": {}}, max_body_mib=0.01)
    ann, bob = ({"additional_headers": {"authorization": f"Bearer {name}-key"}} for name in ("ann", "bob"))
    request = json.dumps({"type": "unknown", "padding": "x" * 8_000}).encode()
    message = b"\x81\xff" + len(request).to_bytes(8) + bytes(4) + request
    async with running(app) as (address, _), connect(address, **ann) as honest, AsyncExitStack() as stack:
        assert honest.transport is not None
        honest.transport.write(message[:4_000])
        strangers = [await stack.enter_async_context(connect(address, **bob)) for _ in range(8)]
        for stranger in strangers:
            assert stranger.transport is not None
            stranger.transport.write(message[:-1])
        await asyncio.wait_for(strangers[0].wait_closed(), 20)
        honest.transport.write(message[4_000:])
        (event,) = await told(honest)
        assert event["error"]["type"] == "invalid_request_error"


async def test_pings_are_not_read_while_their_pongs_are_not(app: FastAPI) -> None:
    pings = (b"\x89\xfd\0\0\0\0" + b"p" * 125) * 500
    async with running(app) as (address, server), connect(address) as socket:
        transport = socket.transport
        assert transport is not None
        transport.pause_reading()
        (served,) = [one for one in server.server_state.connections if isinstance(one, LimitedWebSocket)]
        while served.writable.is_set():
            if not transport.get_write_buffer_size():
                transport.write(pings)
            await asyncio.sleep(0)
        assert not served.transport.is_reading()
        transport.resume_reading()
        await until(served.transport.is_reading)
        assert await made(socket, max_output_tokens=3)


@pytest.mark.parametrize(
    ("where", "method", "frame", "count", "most"),
    [
        (LimitedWebSocket, "handle_pong", b"\x8a\x80\0\0\0\0", 2000, 171),
        (websocket.Session, "_take", b"\x81\x82\0\0\0\0{}", 200, 1),
    ],
)
async def test_floods_of_frames_leave_time_for_others(
    where: type, method: str, frame: bytes, count: int, most: int, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The event loop looks at other connections before all frames that came at once are handled."""
    handle, iteration, handled = getattr(where, method), 0, Counter[int]()

    def watched(*args: Any) -> Any:
        handled[iteration] += 1
        return handle(*args)

    monkeypatch.setattr(where, method, watched)
    monkeypatch.setattr(frames, "_TURN_S", 0.0)
    async with connect(address, max_queue=None) as socket, asyncio.timeout(20):
        assert socket.transport is not None
        socket.transport.write(frame * count)
        while handled.total() < count:
            await asyncio.sleep(0)
            iteration += 1
    assert max(handled.values()) <= most


async def test_a_connection_does_not_live_for_ever(
    address: str, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(websocket, "LIFETIME_S", 0.0)
    async with connect(address) as socket:
        (event,) = await told(socket)
        assert event["error"]["code"] == "websocket_connection_limit_reached"
        with pytest.raises(ConnectionClosed) as closed:
            await socket.recv()
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 1000


async def test_a_server_that_ends_finishes_what_runs_and_says_so(make_app: Make, engine: FakeEngine) -> None:
    engine.step_delay_s = 0.005
    async with running(make_app(), engine) as (address, server), connect(address) as socket, connect(address) as idle:
        assert isinstance(server, DrainingServer)
        await create(socket, max_output_tokens=40)
        await until(lambda: engine.num_live == 1)
        server.end()
        await until(lambda: engine.state is EngineState.DRAINING)
        await create(socket, stream_id="late")
        come = await told(socket)
        assert (come[-1]["status"], come[-1]["stream_id"]) == (503, "late")
        assert (await told(socket))[-1]["type"] == "response.incomplete"
        for one in (socket, idle):
            with pytest.raises(ConnectionClosed) as closed:
                await one.recv()
            assert closed.value.rcvd is not None
            assert closed.value.rcvd.code == 1012
            assert "server is shutting down" in closed.value.rcvd.reason


async def test_a_server_that_takes_no_work_opens_no_websocket(address: str, engine: FakeEngine) -> None:
    engine.state = EngineState.DRAINING
    with pytest.raises(InvalidStatus) as answer:
        await connect(address)
    assert answer.value.response.status_code == 503


async def test_openai_s_client_goes_on(address: str, engine: FakeEngine) -> None:
    engine.script = says("Hello.")
    openai = AsyncOpenAI(base_url=f"http://{address}/v1", api_key="none")
    async with openai, openai.responses.connect() as connection:
        previous: dict[str, Any] = {}
        for _ in range(2):
            await connection.response.create(model="tiny", input="hi", store=False, **previous)
            async for event in connection:
                if event.type == "response.completed":
                    break
            assert event.response.output_text == "Hello."
            previous = {"previous_response_id": event.response.id}
        await connection.response.create(model="tiny", input="hi", previous_response_id="resp_none")
        event = await connection.recv()
        assert event.type == "error"
        assert event.error.code == "previous_response_not_found"
        assert event.error.headers["x-request-id"]


def test_websockets_are_told_apart_by_their_paths() -> None:
    class Connection(LimitedConnection):
        websockets_at = {b"/page/": 1, b"/v1/responses": 2}  # noqa: RUF012

    connection = Connection.__new__(Connection)
    for url, size in [(b"/page/x", 1), (b"/v1/responses?a", 2), (b"/v1/responses/", None), (b"/page", None)]:
        connection.url = url
        assert connection._max_message_bytes == size


# -- what is remembered ------------------------------------------------------------------------------------------------


def items(size: int) -> list[Raw]:
    return [Raw(b"x" * (size - 128))]


def test_a_connection_remembers_its_lanes_within_bounds() -> None:
    memories = Memories(max_bytes=10_000, max_connection_bytes=1000)
    memory, other = memories.open("ann"), memories.open("ann")
    for number, lane in enumerate(["a", "b", "a"]):
        memory.keep(lane, f"resp_{number}", items(400))
    assert [memory.find(f"resp_{number}") is not None for number in range(3)] == [False, True, True]
    assert other.find("resp_1") is None
    memory.keep("c", "resp_3", items(400))
    assert (memory.find("resp_1"), memory.num_bytes) == (None, 800)
    memory.keep("c", "resp_4", items(1001))
    assert (memory.find("resp_3"), memory.find("resp_4"), memory.num_bytes) == (None, None, 400)
    memory.forget("resp_2")
    assert memories.num_bytes == 0


def test_who_remembers_most_makes_room() -> None:
    memories = Memories(max_bytes=1000, max_connection_bytes=1000)
    small, first, second = memories.open("bob"), memories.open("ann"), memories.open("ann")
    small.keep(None, "resp_s", items(300))
    first.keep(None, "resp_1", items(300))
    second.keep(None, "resp_2", items(300))
    assert first.find("resp_1")  # used last
    small.keep("b", "resp_t", items(200))
    assert [one.num_bytes for one in (small, first, second)] == [500, 300, 0]
    first.close()
    assert memories.num_bytes == 500

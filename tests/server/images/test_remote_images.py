"""Images in https URLs: which URLs and addresses are refused, what is sent, and what becomes of the answer."""

import asyncio
import gzip
import ssl
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from server.http import image_fetcher
from server.http.image_fetcher import ImageFetcher, is_public
from tests.cli.test_https import make_certificate
from tests.server.fake_engine import FakeEngine
from tests.server.helpers import CHAT, chat, client_of
from tests.server.images.conftest import file_of, picture, text_part

PNG = file_of(picture())
HOST = "llm.example.com"
URL = f"https://{HOST}/a.png"
PUBLIC = "93.184.216.34"
Answer = Callable[[httpx.Request], httpx.Response]


class Web(httpx.AsyncBaseTransport):
    """Other hosts: answers requests, and keeps them."""

    def __init__(self, answer: Answer) -> None:
        self.requests: list[httpx.Request] = []
        self._answer = answer

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        return self._answer(request)


def sends(data: bytes = PNG, status: int = 200, **headers: str) -> Answer:
    """An answer of every host. The body is a stream, as from the network."""

    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(data), 1000):
            yield data[start : start + 1000]

    return lambda _: httpx.Response(status, headers=headers, content=pieces())


@pytest.fixture
def fetching(make_app: Callable[..., FastAPI], image_folder: Callable[..., Path]) -> Callable[..., Any]:
    """An application that fetches from HOST, whose addresses and answers are given."""

    @asynccontextmanager
    async def make(
        answer: Answer | httpx.AsyncBaseTransport, addresses: Sequence[str] = (PUBLIC,), **settings: Any
    ) -> AsyncIterator[tuple[httpx.AsyncClient, Any]]:
        async def resolve(host: str) -> Sequence[str]:
            assert host == HOST
            return addresses

        app = make_app(image_folder(), **{"image_hosts": (HOST,), **settings})
        web = answer if isinstance(answer, httpx.AsyncBaseTransport) else Web(answer)
        services = app.state.services.models.default
        services.body_worker.fetcher = ImageFetcher(services.settings, resolve, web)
        async with client_of(app) as client:
            yield client, web

    return make


def of_chat(url: str = URL) -> dict[str, Any]:
    parts = [text_part("a"), {"type": "image_url", "image_url": {"url": url}}]
    return chat(messages=[{"role": "user", "content": parts}], max_tokens=4)


def of_responses(url: str = URL, **fields: Any) -> dict[str, Any]:
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_image", "image_url": url}]
    return {"model": "tiny", "input": [{"role": "user", "content": parts}], "max_output_tokens": 16, **fields}


def of_messages(url: str = URL) -> dict[str, Any]:
    parts = [text_part("a"), {"type": "image", "source": {"type": "url", "url": url}}]
    return {"model": "tiny", "messages": [{"role": "user", "content": parts}], "max_tokens": 4}


async def test_three_apis_fetch(fetching: Callable[..., Any], engine: FakeEngine):
    """The request is made to the address that was checked, with the host's name for TLS, and nothing of the client."""
    async with fetching(sends()) as (client, web):
        headers = {"authorization": "Bearer secret", "cookie": "a=b"}
        for path, body in ((CHAT, of_chat()), ("/v1/responses", of_responses()), ("/v1/messages", of_messages())):
            response = await client.post(path, json=body, headers=headers)
            assert response.status_code == 200, response.text
        counted = await client.post("/v1/messages/count_tokens", json=of_messages(f"{URL}?q=%2F&ä=ö \\x#fragment"))
    assert len({request.prompt for request in engine.requests}) == 1
    assert [request.images[0].data for request in engine.requests] == [PNG] * 3
    assert counted.json()["input_tokens"] == len(engine.requests[0].prompt)
    first, *_, last = web.requests
    assert (str(first.url), first.headers["host"]) == (f"https://{PUBLIC}/a.png", HOST)
    assert first.extensions["sni_hostname"] == HOST
    assert first.headers.keys() == {"host", "accept", "accept-encoding", "user-agent"}
    assert last.url.raw_path == b"/a.png?q=%2F&%C3%A4=%C3%B6%20\\x"


@pytest.mark.parametrize(
    "url",
    [
        "https://other.example.com/a.png",
        f"https://{HOST}.evil.com/a.png",
        f"https://evil.com\\@{HOST}/a.png",
        f"https://{HOST}\\@evil.com/a.png",
        f"https://user:secret@{HOST}/a.png",
        f"https://{HOST}:8443/a.png",
        f"https://{HOST}./a.png",
        f"http://{HOST}/a.png",
        "https:///a.png",
        "file:///etc/passwd",
        "https://127.0.0.1/a.png",
    ],
)
async def test_refused_urls(fetching: Callable[..., Any], url: str):
    async with fetching(sends()) as (client, web):
        for path, body in ((CHAT, of_chat(url)), ("/v1/messages", of_messages(url))):
            assert (await client.post(path, json=body)).status_code == 400
        assert not web.requests


async def test_off_by_default(fetching: Callable[..., Any]):
    async with fetching(sends(), image_hosts=()) as (client, web):
        error = (await client.post(CHAT, json=of_chat())).json()["error"]
        assert error["message"].startswith(
            "Invalid image URL: 'messages[0].content[1].image_url.url'. Expected a base64"
        )
        assert error["code"] == "invalid_value"
        assert "--image-hosts" in error["message"]
        assert "--image-hosts" in (await client.post("/v1/messages", json=of_messages())).text
        assert "--image-hosts" in (await client.post(CHAT, json=of_chat(f"HTTP://{HOST}/a.png"))).text
        assert not web.requests


@pytest.mark.parametrize(
    ("address", "public"),
    [
        *((one, True) for one in ("93.184.216.34", "2606:2800:220:1::1")),
        *((one, False) for one in ("10.0.0.1", "127.0.0.1", "169.254.169.254", "100.64.0.1", "192.168.1.1", "0.0.0.0")),
        *((one, False) for one in ("224.0.0.1", "240.0.0.1", "255.255.255.255", "::1", "fe80::1%eth0", "fd00::1")),
        *((one, False) for one in ("::ffff:93.184.216.34", "64:ff9b::7f00:1", "64:ff9b:1::1", "2002:7f00:1::")),
        *((one, False) for one in ("2001:0:7f00:1::", "ff02::1", "fec0::1", "::7f00:1")),
    ],
)  # fmt: skip
def test_addresses(address: str, public: bool):
    assert is_public(address) == public


async def test_failures_look_the_same(fetching: Callable[..., Any]):
    """Private addresses, redirects, errors, large and compressed files have one error, which tells nothing else."""

    def fails(_: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("/secret/address 0x7f")

    answers: list[tuple[Answer, Sequence[str]]] = [
        (sends(), ("10.0.0.1", "::1")),
        (sends(), ()),
        (sends(status=302, location="http://169.254.169.254/"), (PUBLIC,)),
        (sends(status=404), (PUBLIC,)),
        (sends(PNG + bytes(2 << 20)), (PUBLIC,)),
        (sends(gzip.compress(PNG), **{"content-encoding": "gzip"}), (PUBLIC,)),
        (fails, (PUBLIC,)),
    ]
    errors = set()
    for answer, addresses in answers:
        async with fetching(answer, addresses, max_image_mib=1) as (client, web):
            response = await client.post(CHAT, json=of_chat())
            assert response.status_code == 400
            errors.add(response.text)
            assert len(web.requests) == (addresses == (PUBLIC,))
            claude = (await client.post("/v1/messages", json=of_messages())).json()["error"]
    (error,) = errors
    assert f'"Error while downloading {URL}. The host' in error
    assert '"invalid_image_url"' in error
    where = "messages.0.content.1.image.source.url"
    assert claude["message"] == f"{where}: Unable to download the file. Please verify the URL and try again."


async def test_private_address_beside_a_public_one(fetching: Callable[..., Any]):
    async with fetching(sends(), ("127.0.0.1", PUBLIC)) as (client, web):
        assert (await client.post(CHAT, json=of_chat())).status_code == 200
        assert [request.url.host for request in web.requests] == [PUBLIC]


async def test_many_images(fetching: Callable[..., Any], engine: FakeEngine):
    """One URL is fetched once, and all images of a request together are bounded."""
    parts = [{"type": "image_url", "image_url": {"url": f"{URL}?{number % 3}"}} for number in range(6)]
    body = chat(messages=[{"role": "user", "content": parts}], max_tokens=4)
    async with fetching(lambda request: sends(file_of(picture(seed=int(request.url.query))))(request)) as (client, web):
        assert (await client.post(CHAT, json=body)).status_code == 200
        assert len(web.requests) == 3
    digests = [image.digest for image in engine.requests[0].images]
    assert digests[:3] == digests[3:]
    assert len(set(digests)) == 3
    async with fetching(sends(PNG + bytes(600_000)), max_body_mib=1) as (client, _):
        assert (await client.post(CHAT, json=body)).json()["error"]["code"] == "invalid_image_url"


async def test_slow_host(fetching: Callable[..., Any], monkeypatch: pytest.MonkeyPatch):
    closed = asyncio.Event()

    async def drips() -> AsyncIterator[bytes]:
        try:
            yield PNG[:100]
            await asyncio.Event().wait()
        finally:
            closed.set()

    monkeypatch.setattr(image_fetcher, "FETCH_S", 0.05)
    async with fetching(lambda _: httpx.Response(200, content=drips())) as (client, _):
        assert (await client.post(CHAT, json=of_chat())).json()["error"]["code"] == "invalid_image_url"
    await closed.wait()


async def test_stored_responses_keep_what_was_fetched(fetching: Callable[..., Any], engine: FakeEngine):
    """A URL may show something else later, so the picture itself is stored, and fetched once."""
    async with fetching(sends()) as (client, web):
        first = (await client.post("/v1/responses", json=of_responses())).json()
        body = {"model": "tiny", "input": "b", "previous_response_id": first["id"], "max_output_tokens": 16}
        assert (await client.post("/v1/responses", json=body)).status_code == 200
        items = (await client.get(f"/v1/responses/{first['id']}/input_items")).json()["data"]
        assert len(web.requests) == 1
    assert engine.requests[1].images[0].data == PNG
    assert items[0]["content"][1]["image_url"].startswith("data:image/png;base64,")


async def test_certificate_is_the_hosts(fetching: Callable[..., Any], tmp_path: Path):
    """Over TLS, the certificate must be valid for the host's name, though the connection is made to an address."""
    certificate, key = make_certificate(tmp_path, "own")
    server_side = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    server_side.load_cert_chain(certificate, key)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(PNG), PNG))
        await writer.drain()
        writer.close()

    class Near(httpx.AsyncHTTPTransport):
        """Sends everything to this machine."""

        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            request.url = request.url.copy_with(host="127.0.0.1", port=port)
            return await super().handle_async_request(request)

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=server_side)
    port = server.sockets[0].getsockname()[1]
    async with server:
        for trusted, status in ((certificate, 200), (None, 400)):
            async with Near(verify=ssl.create_default_context(cafile=trusted)) as near, fetching(near) as (client, _):
                assert (await client.post(CHAT, json=of_chat())).status_code == status

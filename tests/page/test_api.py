"""Answers of other servers, and how the client reads them."""

from collections.abc import AsyncIterator, Callable

import httpx
import pytest
import pytest_asyncio

from server.page.api import Api, ApiError

NESTED = b"[" * 100_000 + b"]" * 100_000


@pytest_asyncio.fixture
async def api(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Callable[[httpx.Response], Api]]:
    """Makes one whose server has a single answer."""
    made: list[Api] = []
    real = httpx.AsyncClient

    def of(response: httpx.Response) -> Api:
        transport = httpx.MockTransport(lambda request: response)
        monkeypatch.setattr(httpx, "AsyncClient", lambda **options: real(transport=transport))
        made.append(Api("http://server/v1"))
        return made[-1]

    yield of
    for one in made:
        await one.close()


@pytest.mark.parametrize(
    "response",
    [
        *(httpx.Response(status) for status in (400, 403, 404, 405)),
        *(httpx.Response(200, text=text) for text in ("<html></html>", "[]", "{}", '{"endpoints": {"/v1/x": []}}')),
        httpx.Response(200, content=NESTED),
    ],
)
async def test_a_server_with_other_capabilities_has_none(api: Callable[..., Api], response: httpx.Response) -> None:
    assert await api(response).capabilities("") is None


@pytest.mark.parametrize("status", [401, 500, 503])
async def test_whoever_cannot_tell_its_capabilities_now_is_asked_again(api: Callable[..., Api], status: int) -> None:
    with pytest.raises(ApiError) as raised:
        await api(httpx.Response(status)).capabilities("")
    assert raised.value.status == status


@pytest.mark.parametrize("content", [b'{"data": 5}', b'{"data": [{"id": 5}]}', b"[]", NESTED])
async def test_models_of_another_shape_are_a_problem(api: Callable[..., Api], content: bytes) -> None:
    with pytest.raises(ApiError, match="cannot be read"):
        await api(httpx.Response(200, content=content)).models("")


async def test_refusals_may_be_nested_as_they_like(api: Callable[..., Api]) -> None:
    with pytest.raises(ApiError):
        await api(httpx.Response(400, content=NESTED)).models("")


async def test_a_wrong_encoding_is_a_broken_connection(api: Callable[..., Api]) -> None:
    stream = httpx.ByteStream(b"no gzip")
    with pytest.raises(ApiError, match="connection"):
        await api(httpx.Response(200, headers={"content-encoding": "gzip"}, stream=stream)).models("")

"""What the server under test can do, asked before the load starts."""

from dataclasses import replace

import httpx
import msgspec

from server.cli.loadtest.timed_request import Target, send
from server.cli.loadtest.workload import LoadRequest
from server.client.openai_answers import AnswerError, error_message, first_model


class DiscoveryError(Exception):
    """The server cannot be tested; the message says why."""


async def find_model(client: httpx.AsyncClient, base_url: str) -> str:
    """The first model that the server lists. Raises DiscoveryError."""
    url = f"{base_url}/models"
    response = await _get(client, url)
    if response.status_code != 200:
        raise DiscoveryError(f"{url}: HTTP {response.status_code}: {error_message(response.content)}")
    try:
        return first_model(response.content)
    except AnswerError as error:
        raise DiscoveryError(f"{url}: {error}") from None


async def find_vocab_size(client: httpx.AsyncClient, base_url: str) -> int | None:
    """Vocabulary size from /tokenizer_info, which stands beside /v1; None where the server does not tell.

    Raises DiscoveryError if it does not answer.
    """
    response = await _get(client, f"{base_url.removesuffix('/v1')}/tokenizer_info")
    if response.status_code != 200:
        return None
    try:
        return msgspec.json.decode(response.content, type=_TokenizerInfo).vocab_size
    except msgspec.DecodeError:
        return None


async def probe(client: httpx.AsyncClient, target: Target, request: LoadRequest) -> None:
    """Send one request of this kind, with a single token of output. Raises DiscoveryError if it fails."""
    outcome = await send(client, target, replace(request, max_tokens=1))
    if outcome.failure is not None:
        raise DiscoveryError(f"{outcome.failure.kind}: {outcome.failure.message}")


async def _get(client: httpx.AsyncClient, url: str) -> httpx.Response:
    try:
        return await client.get(url, timeout=30.0)
    except httpx.InvalidURL as error:
        raise DiscoveryError(f"{url}: {error}") from None
    except httpx.TransportError as error:
        raise DiscoveryError(f"no server answers at {url} ({type(error).__name__})") from None


class _TokenizerInfo(msgspec.Struct):
    vocab_size: int | None = None

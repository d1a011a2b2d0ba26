"""Fetches images from the hosts that the operator allows, by https.

What a client names must not reach the operator's own network. So a host's address is looked up once, must be public,
and is the one that is connected to. Redirects are not followed. No proxy of the environment, no cookie and no header
of the client takes part. The certificate must be the host's.
"""

import asyncio
import ipaddress
import logging
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from server.client.certificates import trusted_certificates
from server.config import Settings
from server.generation.remote_images import FETCH_S, RemoteImage, UnfetchedError
from server.generation.sent_images import UploadedFile

if TYPE_CHECKING:
    import httpx

Resolve = Callable[[str], Awaitable[Sequence[str]]]
"""Looks up the addresses of a host. Raises OSError."""
_MAX_REQUESTS = 8
"""Requests whose images are fetched at a time."""
_MAX_IMAGES = 8
"""Images of one request that are fetched at a time."""
_UNICAST_6 = ipaddress.ip_network("2000::/3")
_RELAYED_6 = ipaddress.ip_network("2002::/16")
"""6to4: the address has an IPv4 address inside, which may be private."""
_logger = logging.getLogger("samewise.images")


class _FetchError(Exception):
    """An image was not fetched. The message is for the log."""


class ImageFetcher:
    """Fetches the images of requests."""

    def __init__(
        self, settings: Settings, resolve: Resolve | None = None, transport: "httpx.AsyncBaseTransport | None" = None
    ) -> None:
        """By default, addresses are looked up by the system, and connections use TLS."""
        self._max_bytes = int(settings.max_image_mib * (1 << 20))
        self._max_total = int(settings.body_mib(takes_images=True) * (1 << 20))
        self._resolve = resolve or _addresses_of
        self._transport = transport
        self._turns = asyncio.Semaphore(_MAX_REQUESTS)

    async def fetch(self, wanted: UnfetchedError) -> Mapping[str, UploadedFile]:
        """The images by their URLs. Raises the error for the first that cannot be fetched."""
        budget, places = _Budget(self._max_total), asyncio.Semaphore(_MAX_IMAGES)
        fetched: dict[str, UploadedFile] = {}

        async def one(url: str, image: RemoteImage) -> None:
            async with places:
                try:
                    data = await self._get(image, budget)
                except Exception as error:  # noqa: BLE001 - whatever fails there, the client gets the same error
                    _logger.info("cannot fetch an image from %s: %s", image.host, _described(error))
                    raise wanted.failures[url] from None
            fetched[url] = UploadedFile(data, len(data))

        async with self._turns:
            tasks = [asyncio.ensure_future(one(url, image)) for url, image in wanted.images.items()]
            try:
                async with asyncio.timeout(FETCH_S):
                    await asyncio.gather(*tasks)
            except TimeoutError:
                late = next(url for url in wanted.images if url not in fetched)
                _logger.info("cannot fetch an image from %s: %g seconds are over", wanted.images[late].host, FETCH_S)
                raise wanted.failures[late] from None
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
        return fetched

    async def _get(self, image: RemoteImage, budget: "_Budget") -> bytes:
        import httpx  # noqa: PLC0415  (takes time and memory, and few servers fetch images)

        if self._transport is None:
            # Connections are not kept: the pool knows them by the address, and one address may have many hosts.
            limits = httpx.Limits(max_keepalive_connections=0)
            self._transport = httpx.AsyncHTTPTransport(
                verify=trusted_certificates(), trust_env=False, limits=limits, retries=0
            )
        address = _public(await self._resolve(image.host))
        request = httpx.Request(
            "GET",
            httpx.URL(scheme="https", host=address, raw_path=image.target.encode()),
            headers={"Host": image.host, "Accept": "image/*", "Accept-Encoding": "identity", "User-Agent": "samewise"},
            extensions={"sni_hostname": image.host, "timeout": httpx.Timeout(FETCH_S).as_dict()},
        )
        response = await self._transport.handle_async_request(request)
        try:
            return await self._read(response, budget)
        finally:
            await response.aclose()

    async def _read(self, response: "httpx.Response", budget: "_Budget") -> bytes:
        if response.status_code != 200:
            raise _FetchError(f"status {response.status_code}")
        if response.headers.get("content-encoding", "identity").lower() != "identity":
            raise _FetchError("the answer is compressed")
        data = bytearray()
        async for piece in response.aiter_raw():
            data += piece
            budget.take(len(piece))
            if len(data) > self._max_bytes:
                raise _FetchError(f"more than {self._max_bytes} bytes")
        return bytes(data)


class _Budget:
    """The bytes that the images of one request may have together."""

    def __init__(self, num_bytes: int) -> None:
        self._left = num_bytes

    def take(self, num_bytes: int) -> None:
        """Raises _FetchError if nothing is left."""
        self._left -= num_bytes
        if self._left < 0:
            raise _FetchError("the images of the request have more bytes than a request may have")


async def _addresses_of(host: str) -> Sequence[str]:
    found = await asyncio.get_running_loop().getaddrinfo(host, 443, type=socket.SOCK_STREAM)
    return [str(address[0]) for *_, address in found]


def _public(addresses: Sequence[str]) -> str:
    """The first address that everyone can reach. Raises _FetchError if there is none."""
    for address in addresses:
        if is_public(address):
            return address
    raise _FetchError(f"no public address among {', '.join(addresses) or 'none'}")


def is_public(address: str) -> bool:
    """Whether an address is a global one of a single machine, and no other address is inside it."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return False  # with a scope, such as fe80::1%eth0
    if isinstance(parsed, ipaddress.IPv6Address) and (parsed not in _UNICAST_6 or parsed in _RELAYED_6):
        return False  # mapped, NAT64 and site-local addresses lie outside of the first network
    return parsed.is_global and not parsed.is_multicast and not parsed.is_reserved


def _described(error: Exception) -> str:
    return str(error) if isinstance(error, _FetchError | OSError) else f"{type(error).__name__}: {error}"

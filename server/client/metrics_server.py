"""A server whose metrics are read again and again."""

import asyncio
import contextlib
import time

import httpx

from server.client.load import Load, loads_of
from server.client.openai_answers import error_message, without_password
from server.client.snapshot import NoMetricsError, Snapshot, Source, parse
from server.client.window import Window

_TIMEOUT_S = 5.0


class NotMetricsError(Exception):
    """Whoever answers at this address has no metrics for us; the message is for the user."""


class UnreachableError(Exception):
    """Nobody answers, or not now; the message is for the user."""


class MetricsServer:
    """One address, what came from it lately, and why nothing comes if nothing does."""

    def __init__(self, client: httpx.AsyncClient, url: str, window_s: float) -> None:
        """`url` is the server's address, without a path of ours."""
        shown = without_password(url)
        self.name = shown.partition("//")[2]
        self.problem = ""
        """Why there are no numbers now; empty while there are."""
        self._client = client
        self._url = f"{url}/metrics"
        self._shown = f"{shown}/metrics"
        self._window = Window(window_s)

    @property
    def seconds(self) -> float:
        """What the rates of its loads are of."""
        return self._window.seconds

    @property
    def loads(self) -> dict[Source, Load]:
        """Of what was there at the last reading, in a lasting order; empty while there is a problem."""
        return loads_of(self._window)

    async def read(self) -> None:
        """Raises NotMetricsError or UnreachableError, and has no numbers then, only a `problem`."""
        try:
            self._window.add(await self._fetch())
            self.problem = ""
        except (NotMetricsError, UnreachableError) as error:
            self.problem = str(error)
            self._window.clear()
            raise

    async def follow(self, interval_s: float) -> None:
        """Read again and again until cancelled, whatever the server does."""
        while True:
            await asyncio.sleep(interval_s)
            with contextlib.suppress(NotMetricsError, UnreachableError):  # kept as the problem, which may go away
                await self.read()

    async def _fetch(self) -> Snapshot:
        try:
            response = await self._client.get(self._url, timeout=_TIMEOUT_S)
        except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
            raise NotMetricsError(f"{self._shown}: {error}") from None
        except httpx.RequestError as error:
            raise UnreachableError(f"no server answers at {self._shown} ({type(error).__name__})") from None
        at = time.monotonic()
        if response.status_code >= 500:
            raise UnreachableError(f"{self._shown}: HTTP {response.status_code}: {error_message(response.content)}")
        if response.status_code in (401, 403):
            said = error_message(response.content)
            raise NotMetricsError(f"{self._shown} wants another key (--api-key or SAMEWISE_API_KEY): {said}")
        if response.status_code != 200:
            raise NotMetricsError(f"{self._shown}: HTTP {response.status_code}: {error_message(response.content)}")
        try:
            return parse(response.text, at)
        except NoMetricsError as error:
            raise NotMetricsError(f"{self._shown}: {error}") from None

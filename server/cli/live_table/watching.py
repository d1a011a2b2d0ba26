"""Reads servers and shows what they say: once, or until the user has enough."""

import asyncio
from collections.abc import Sequence
from typing import NoReturn

import httpx
from rich.console import Console
from rich.live import Live

from server.cli.live_table.table import Screen, screen_of
from server.client.metrics_server import MetricsServer, UnreachableError
from server.client.openai_answers import headers

INTERVAL_S = 1.0


async def show_once(console: Console, urls: Sequence[str], api_key: str | None, window_s: float) -> list[str]:
    """Print one table, of what happens within the window; returns why some servers are not in it.

    Raises NotMetricsError if one of the addresses has no metrics.
    """
    async with _client(api_key) as client:
        servers = [MetricsServer(client, url, window_s) for url in urls]
        await _read_all(servers)
        await asyncio.sleep(window_s)
        await _read_all(servers)
        screen = _screen(servers, problems=False)
        if screen.rows:
            console.print(screen)
        return [server.problem for server in servers if server.problem]


async def watch(console: Console, urls: Sequence[str], api_key: str | None, window_s: float) -> NoReturn:
    """Show a table that changes every second, until cancelled; servers that are away are waited for.

    Raises NotMetricsError if, at the start, one of the addresses has no metrics.
    """
    async with _client(api_key) as client:
        servers = [MetricsServer(client, url, window_s) for url in urls]
        await _read_all(servers)
        async with asyncio.TaskGroup() as tasks:
            for server in servers:
                tasks.create_task(server.follow(INTERVAL_S))
            with Live(console=console, auto_refresh=False) as live:
                while True:
                    live.update(_screen(servers, problems=True), refresh=True)
                    await asyncio.sleep(INTERVAL_S)


def _client(api_key: str | None) -> httpx.AsyncClient:
    return httpx.AsyncClient(headers=headers(api_key), trust_env=False)


async def _read_all(servers: Sequence[MetricsServer]) -> None:
    """Raises NotMetricsError; a server that is away has a problem instead."""
    for error in await asyncio.gather(*(server.read() for server in servers), return_exceptions=True):
        if isinstance(error, BaseException) and not isinstance(error, UnreachableError):
            raise error


def _screen(servers: Sequence[MetricsServer], *, problems: bool) -> Screen:
    seconds = max(server.seconds for server in servers)
    said = [f"{server.problem}; trying again" for server in servers if server.problem] if problems else []
    return screen_of({server.name: server.loads for server in servers}, said, seconds)

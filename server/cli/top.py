"""`samewise top`: a live table of what servers do, from their metrics."""

from typing import Annotated

import typer

from server.cli.console import fail
from server.cli.server_options import ApiKey

Urls = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[URL]...",
        envvar="OPENAI_BASE_URL",
        help="Address of a server, or several; by default http://127.0.0.1:8000.",
        show_default=False,
    ),
]
Window = Annotated[float, typer.Option(min=0.1, max=3600, help="Seconds that rates and latencies are of.")]
Once = Annotated[
    bool, typer.Option("--once", help="Print one table and end, as happens where the output is no terminal.")
]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(top)


def top(urls: Urls = None, *, api_key: ApiKey = None, window: Window = 5.0, once: Once = False) -> None:
    """Watch servers in the terminal: load, throughput, latencies. Samewise's or vLLM's metrics. Ctrl-C ends."""
    import asyncio  # noqa: PLC0415

    from rich.console import Console  # noqa: PLC0415

    from server.cli.live_table.watching import show_once, watch  # noqa: PLC0415
    from server.client.metrics_server import NotMetricsError  # noqa: PLC0415

    addresses = _addresses(urls or ["http://127.0.0.1:8000"])
    console = Console(highlight=False)
    try:
        show = watch if console.is_terminal and not once else show_once
        problems = asyncio.run(show(console, addresses, api_key, window))
    except NotMetricsError as error:
        fail(str(error))
    except KeyboardInterrupt:
        raise typer.Exit from None
    if problems:
        fail("; ".join(problems))


def _addresses(urls: list[str]) -> list[str]:
    """Each once, without the path of an endpoint that users are used to."""
    from server.client.openai_answers import base_url  # noqa: PLC0415

    try:
        cleaned = [base_url(url).removesuffix("/metrics").removesuffix("/v1") for url in urls]
    except ValueError as error:
        fail(str(error), code=2)
    return list(dict.fromkeys(cleaned))

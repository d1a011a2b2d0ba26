"""`samewise page`: the web page, served alone, for any OpenAI-compatible server."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Annotated

import typer

from server.cli.console import DEFAULT_BASE_URL, BaseUrl, PlainCommand, address_of, fail

_CLIENT_TIMEOUT_S = 30.0
Host = Annotated[str, typer.Option(metavar="TEXT", help="Address to listen on; 0.0.0.0 admits other machines.")]
AllowedHosts = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME",
        help="Host name that requests may be sent to, such as page.example.com; * for all. Repeat it for several. By "
        "default only names that no one can register.",
        show_default=False,
    ),
]
Port = Annotated[int, typer.Option(metavar="INTEGER", min=0, max=65535, help="Port to listen on; 0 picks a free one.")]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(cls=PlainCommand)(page)


def page(
    *,
    base_url: BaseUrl = DEFAULT_BASE_URL,
    host: Host = "127.0.0.1",
    port: Port = 8001,
    allowed_hosts: AllowedHosts = None,
) -> None:
    """Show the page for any OpenAI-compatible server. It asks for a key in the browser. Ctrl-C ends it."""
    from server.http.listening import BindError  # noqa: PLC0415
    from server.page.gate import is_installed  # noqa: PLC0415

    if not is_installed():
        fail("the page is not installed; run `pip install 'samewise[page]'`")
    try:
        _serve(_api_address(base_url), host, port, [name.lower() for name in allowed_hosts or ()])
    except BindError as error:
        fail(str(error))


def _serve(base_url: str, host: str, port: int, allowed_hosts: list[str]) -> None:
    """Serve the page for the API at `base_url` until a signal ends it. Raises BindError."""
    import uvicorn  # noqa: PLC0415
    from rich.console import Console  # noqa: PLC0415
    from starlette.applications import Starlette  # noqa: PLC0415

    from server.client.openai_answers import without_password  # noqa: PLC0415
    from server.http.draining_server import configure  # noqa: PLC0415
    from server.http.listening import bind, url_of  # noqa: PLC0415
    from server.http.origins import guarded  # noqa: PLC0415
    from server.page.gate import WEBSOCKETS, PageGate  # noqa: PLC0415

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        yield
        await gate.close()

    gate = PageGate(Starlette(lifespan=lifespan), base_url)
    console = Console(soft_wrap=True, highlight=False)
    with bind(host, port) as listener:
        console.print(f"Page    {url_of(listener)}/", markup=False)
        console.print(f"Server  {without_password(base_url)}", markup=False)
        app = guarded(gate, allowed_hosts, has_keys=False)
        server = uvicorn.Server(configure(app, _CLIENT_TIMEOUT_S, websockets=WEBSOCKETS))
        with suppress(KeyboardInterrupt):  # uvicorn has ended by then
            server.run(sockets=[listener])


def _api_address(url: str) -> str:
    """The address with /v1, unless it has a path."""
    from urllib.parse import urlsplit  # noqa: PLC0415

    address = address_of(url)
    return address if urlsplit(address).path else f"{address}/v1"

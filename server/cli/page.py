"""`samewise page`: the web page, served alone, for any OpenAI-compatible server."""

from typing import Annotated

import typer

from server.cli.console import DEFAULT_BASE_URL, BaseUrl, fail

Host = Annotated[str, typer.Option(help="Address to listen on: 0.0.0.0 admits other machines.")]
AllowedHosts = Annotated[
    list[str] | None,
    typer.Option(
        help="Name by which it may be asked, such as page.example.com, * for all; by default only those that nobody "
        "can register.",
        show_default=False,
    ),
]
Port = Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 picks a free one.")]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(page)


def page(
    *,
    base_url: BaseUrl = DEFAULT_BASE_URL,
    host: Host = "127.0.0.1",
    port: Port = 8001,
    allowed_hosts: AllowedHosts = None,
) -> None:
    """Show the page for an OpenAI-compatible server. It asks for a key in the browser. Ctrl-C ends."""
    from server.cli.page_server import serve  # noqa: PLC0415
    from server.http.draining_server import BindError  # noqa: PLC0415
    from server.page.gate import is_installed  # noqa: PLC0415

    if not is_installed():
        fail("the page is not installed: pip install 'samewise[page]'")
    try:
        serve(_api_address(base_url), host, port, [name.lower() for name in allowed_hosts or ()])
    except BindError as error:
        fail(str(error))


def _api_address(url: str) -> str:
    """With /v1, unless it has a path of its own."""
    from urllib.parse import urlsplit  # noqa: PLC0415

    from server.client.openai_answers import base_url  # noqa: PLC0415

    try:
        address = base_url(url)
    except ValueError as error:
        fail(str(error), code=2)
    return address if urlsplit(address).path else f"{address}/v1"

"""What the commands share: errors and warnings in the terminal, and the options that name a server."""

import unicodedata
from typing import Annotated, NoReturn

import typer

KEPT = "\n\t\u200d"
"""Newline, tab, and the joiner inside emoji."""


def fail(message: str, code: int = 1) -> NoReturn:
    """Print an error in one line on stderr, and end the command with this exit code."""
    typer.secho(f"error: {message}", fg=typer.colors.RED, err=True)
    raise typer.Exit(code)


def warn(message: str) -> None:
    """Print a warning in one line on stderr."""
    typer.secho(f"warning: {message}", fg=typer.colors.YELLOW, err=True)


def address_of(url: str) -> str:
    """The server's address as users write it, in full; ends the command if it is not one."""
    from server.client.openai_answers import base_url  # noqa: PLC0415  (takes time)

    try:
        return base_url(url)
    except ValueError as error:
        fail(str(error), code=2)


def printable(text: str) -> str:
    """The text without control and format characters: what a server sends must not steer the terminal."""
    return "".join(char for char in text if char in KEPT or unicodedata.category(char) not in ("Cc", "Cf", "Cs"))


DEFAULT_BASE_URL = "http://127.0.0.1:8000/v1"

BaseUrl = Annotated[str, typer.Option(envvar="OPENAI_BASE_URL", help="Address of the server.")]
ModelName = Annotated[str | None, typer.Option(help="Model to ask for; by default the first that is listed.")]
ApiKey = Annotated[
    str | None,
    typer.Option(
        envvar=["SAMEWISE_API_KEY", "OPENAI_API_KEY"],
        show_default=False,
        help="Key to send.",
    ),
]

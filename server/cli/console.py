"""Errors and warnings in the terminal, and the options that name a server."""

import unicodedata
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand

KEPT = "\n\t\u200d"
"""Newline, tab, and the joiner inside emoji."""


def fail(message: str, code: int = 1) -> NoReturn:
    """Print an error in one line on stderr, and end the command with this exit code."""
    typer.secho(f"error: {printable(message)}", fg=typer.colors.RED, err=True)
    raise typer.Exit(code)


def warn(message: str) -> None:
    """Print a warning in one line on stderr."""
    typer.secho(f"warning: {printable(message)}", fg=typer.colors.YELLOW, err=True)


def address_of(url: str) -> str:
    """The full URL of the server that a user names. Ends the command if it is not a URL."""
    from server.client.openai_answers import base_url  # noqa: PLC0415  (takes time)

    try:
        return base_url(url)
    except ValueError as error:
        fail(str(error), code=2)


def printable(text: str) -> str:
    """The text without control and format characters, so that a server cannot steer the terminal."""
    return "".join(char for char in text if char in KEPT or unicodedata.category(char) not in ("Cc", "Cf", "Cs"))


GENERAL = "General"
"""The group of options that belong to no other."""
_NAME_WIDTH = 26
"""Characters of the column of options; a longer one has a line for itself."""


class PlainCommand(TyperCommand):
    """A command whose help lists options by group, without the boxes of rich, which would halve the room for words."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write each group with the same columns. An argument is named by its placeholder alone."""
        groups: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None:
                is_option = param.param_type_name == "option"
                name = record[0] if is_option else param.metavar or param.name
                title = getattr(param, "rich_help_panel", None) or (self._default_group if is_option else "Arguments")
                groups.setdefault(title, []).append((name.ljust(_NAME_WIDTH), record[1]))
        for title, records in groups.items():
            with formatter.section(title):
                formatter.write_dl(records, col_max=_NAME_WIDTH)

    @property
    def _default_group(self) -> str:
        """General, or Options if the command has no groups."""
        has_groups = any(getattr(param, "rich_help_panel", None) for param in self.params)
        return GENERAL if has_groups else "Options"


DEFAULT_BASE_URL = "http://127.0.0.1:8000/v1"

BaseUrl = Annotated[
    str,
    typer.Option(metavar="URL", envvar="OPENAI_BASE_URL", help="URL of the server, such as http://127.0.0.1:8000/v1."),
]
ModelName = Annotated[
    str | None, typer.Option(metavar="NAME", help="Name of the model. By default the first that the server lists.")
]
ApiKey = Annotated[
    str | None,
    typer.Option(
        metavar="SECRET",
        envvar=["SAMEWISE_API_KEY", "OPENAI_API_KEY"],
        show_default=False,
        help="API key to send, if the server needs one.",
    ),
]

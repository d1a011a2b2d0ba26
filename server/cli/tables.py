"""Tables and pairs in the terminal: with columns that fit, or plain in a pipe, or as JSON."""

# Short: what the commands about models and the cache share.

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import typer

from server.cli.console import printable


def print_json(content: Any) -> None:
    """Print JSON on stdout."""
    import msgspec  # noqa: PLC0415

    typer.echo(msgspec.json.format(msgspec.json.encode(content)).decode())


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[str] = ()) -> None:
    """Print a table; in a pipe, a line for each row with tabs between the columns. `right` names columns of numbers."""
    from rich.console import Console  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    console = Console()
    shown = [[printable(cell).replace("\t", " ").replace("\n", " ") for cell in row] for row in rows]
    if not console.is_terminal:
        for row in (columns, *shown):
            typer.echo("\t".join(row))
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", overflow="fold")
    for row in shown:
        table.add_row(*map(Text, row))
    console.print(table)


def print_pairs(pairs: Mapping[str, str]) -> None:
    """Print names and values, one pair on a line."""
    width = max(map(len, pairs)) + 2
    for name, value in pairs.items():
        typer.echo(f"{name:<{width}}{printable(value)}")


def day(seconds: float) -> str:
    """The date of a time in seconds since 1970."""
    return datetime.fromtimestamp(seconds).astimezone().strftime("%Y-%m-%d")

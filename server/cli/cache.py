"""`samewise cache ls` and `rm`: what this server itself keeps, so that starts are fast."""

from typing import Annotated

import typer

from server.cli.console import PlainCommand, fail, printable
from server.cli.models import Json
from server.cli.tables import day, print_json, print_table

Names = Annotated[list[str] | None, typer.Argument(metavar="NAME", help="Entries, as `samewise cache ls` lists.")]
Kind = Annotated[str | None, typer.Option(metavar="KIND", help="Remove all entries of a kind, such as models.")]
All = Annotated[bool, typer.Option("--all", help="Remove all entries.")]


def register(app: typer.Typer) -> None:
    """Add the commands, as a group."""
    group = typer.Typer(
        help="List or remove what this server keeps: converted models, kernels, downloads of URLs, learnt heads.",
        rich_markup_mode=None,
        no_args_is_help=True,
    )
    group.command(cls=PlainCommand)(ls)
    group.command(cls=PlainCommand)(rm)
    app.add_typer(group, name="cache")


def ls(*, json: Json = False) -> None:
    """List what this server keeps. Models of the hub are not among it: see `samewise list`."""
    from model_runner.hub.limits import size_text  # noqa: PLC0415
    from model_runner.hub.own_cache import list_cache  # noqa: PLC0415
    from model_runner.hub.repository import cache_folder  # noqa: PLC0415

    entries = list_cache(cache_folder())
    if json:
        print_json([entry.as_json() for entry in entries])
        return
    rows = [(entry.name, entry.kind, entry.source, size_text(entry.size), day(entry.used)) for entry in entries]
    print_table(("name", "kind", "source", "size", "last used"), rows, right=("size",))


def rm(names: Names = None, *, kind: Kind = None, everything: All = False) -> None:
    """Remove entries by name, by kind, or all. Only learnt heads are lost: everything else is made again."""
    from model_runner.hub.limits import size_text  # noqa: PLC0415
    from model_runner.hub.own_cache import KINDS, list_cache, remove_entries  # noqa: PLC0415
    from model_runner.hub.repository import cache_folder  # noqa: PLC0415

    if [bool(names), kind is not None, everything].count(True) != 1:
        fail("give names of entries, --kind or --all", code=2)
    if kind is not None and kind not in (known := [one.name for one in KINDS]):
        fail(f"--kind {printable(kind)} is unknown; there are {', '.join(known)}", code=2)
    folder = cache_folder()
    missing = set(names or ()) - {entry.name for entry in list_cache(folder)}
    if missing:
        fail(f"no entry {printable(min(missing))} in {folder}; `samewise cache ls` lists them")
    try:
        removed = remove_entries(folder, lambda entry: everything or entry.kind == kind or entry.name in (names or ()))
    except OSError as error:
        fail(f"{error.filename} cannot be removed: {error.strerror}")
    freed = size_text(sum(entry.size for entry in removed))
    typer.echo(f"Removed {len(removed)} {'entry' if len(removed) == 1 else 'entries'}, {freed}.")

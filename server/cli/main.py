"""The command line: `samewise serve`, `chat`, `bench` and others. A command imports what it needs when it runs."""

from typing import Annotated

import typer

from server import __version__
from server.cli import bench, chat, page, serve, train_heads, verify

app = typer.Typer(
    name="samewise",
    help="An OpenAI-compatible server for language models in which speed never changes the answer.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # boxes would leave too little of a line for the words
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"samewise {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Hold the options that stand before a command."""


serve.register(app)
chat.register(app)
bench.register(app)
verify.register(app)
page.register(app)
train_heads.register(app)


def main() -> None:
    """Entry point of the `samewise` script."""
    app(prog_name="samewise")


if __name__ == "__main__":
    main()

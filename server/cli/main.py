"""The command line: `samewise serve`, `chat`, `bench` and others. A command imports what it needs when it runs."""

from typing import Annotated

import typer

from server import __version__
from server.cli import bench, cache, chat, models, page, serve, train_heads, verify

_NEXT = """\
Samewise {version}: an OpenAI-compatible server for language models in which speed never changes the answer.

Start a server with the embedded model. Then talk to it from another terminal, or open http://127.0.0.1:8000/:
  samewise serve
  samewise chat

Next:
  samewise serve MODEL       serve a folder, a GGUF file or a model from the hub; several are loaded on demand
  samewise serve --help      list all settings
  samewise list              list the models on this machine, also those of Ollama and LM Studio
  samewise pull MODEL        download a model, or its newest commit
  samewise rm MODEL          remove a downloaded model
  samewise show MODEL        say what a model is, and what memory it needs
  samewise cache ls          list what this server keeps; `cache rm` removes it
  samewise verify URL        test whether a server gives the same answer every time
  samewise bench             measure latency and throughput of any OpenAI-compatible server
  samewise page              show the page for any OpenAI-compatible server
  samewise train-heads       train heads for speculation

samewise --install-completion installs completion for your shell."""

app = typer.Typer(
    name="samewise",
    help="An OpenAI-compatible server for language models in which speed never changes the answer.",
    epilog="`samewise` alone says what to do first; `samewise COMMAND --help` lists the options of a command.",
    rich_markup_mode=None,  # boxes would leave too little of a line for the words
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"samewise {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", help="Show the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Hold the options that stand before a command, and say what to do first if there is none."""
    if context.invoked_subcommand is None:
        typer.echo(_NEXT.format(version=__version__))


serve.register(app)
chat.register(app)
models.register(app)
cache.register(app)
verify.register(app)
bench.register(app)
page.register(app)
train_heads.register(app)


def main() -> None:
    """Entry point of the `samewise` script."""
    app(prog_name="samewise")


if __name__ == "__main__":
    main()

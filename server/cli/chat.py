"""`samewise chat`: a conversation in the terminal with any OpenAI-compatible server."""

from typing import Annotated

import typer

from server.cli.console import DEFAULT_BASE_URL, ApiKey, BaseUrl, ModelName, PlainCommand, address_of, fail

System = Annotated[str | None, typer.Option(metavar="TEXT", help="System message at the start of the conversation.")]
Temperature = Annotated[
    float | None,
    typer.Option(
        metavar="NUMBER",
        min=0,
        max=2,
        show_default="the model's",
        help="Temperature of sampling; 0 always picks the most probable token.",
    ),
]
TopP = Annotated[
    float | None,
    typer.Option(
        metavar="NUMBER",
        min=0,
        max=1,
        show_default="the model's",
        help="Sample from the most probable tokens that make up this probability.",
    ),
]
MaxTokens = Annotated[int | None, typer.Option(metavar="TOKENS", min=1, help="Maximum tokens of an answer.")]
Seed = Annotated[
    int | None,
    typer.Option(
        metavar="INTEGER", help="Seed of sampling: the same conversation with the same seed gives the same answers."
    ),
]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(cls=PlainCommand)(chat)


def chat(  # noqa: PLR0913  (one parameter for each flag)
    *,
    base_url: BaseUrl = DEFAULT_BASE_URL,
    model: ModelName = None,
    api_key: ApiKey = None,
    system: System = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    max_tokens: MaxTokens = None,
    seed: Seed = None,
) -> None:
    """Talk to a model in the terminal. Ctrl-C stops an answer, Ctrl-D ends the conversation, /help lists commands."""
    from server.cli.terminal_chat import (  # noqa: PLC0415
        ChatServer,
        Conversation,
        ServerError,
        Terminal,
    )

    given = {"temperature": temperature, "top_p": top_p, "max_tokens": max_tokens, "seed": seed}
    address = address_of(base_url)
    try:
        with ChatServer(address, api_key) as server:
            name = model or server.first_model()
            options = {key: value for key, value in given.items() if value is not None}
            Terminal(server, Conversation(name, system, options)).run()
    except ServerError as error:
        fail(str(error))

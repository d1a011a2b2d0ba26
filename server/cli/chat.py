"""`samewise chat`: a conversation in the terminal with any OpenAI-compatible server."""

from typing import Annotated

import typer

from server.cli.console import DEFAULT_BASE_URL, ApiKey, BaseUrl, ModelName, address_of, fail

System = Annotated[str | None, typer.Option(help="System message that starts the conversation.")]
Temperature = Annotated[
    float | None, typer.Option(min=0, max=2, show_default="the model's", help="0 always picks the most probable token.")
]
TopP = Annotated[float | None, typer.Option(min=0, max=1, show_default="the model's", help="Mass of nucleus sampling.")]
MaxTokens = Annotated[int | None, typer.Option(min=1, help="Most tokens of an answer.")]
Seed = Annotated[int | None, typer.Option(help="The same conversation with the same seed gives the same answers.")]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(chat)


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

"""Options that `chat`, `bench` and `page` share: which server to talk to."""

from typing import Annotated

import typer

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

"""`samewise verify`: test whether an OpenAI-compatible server gives the same answer every time."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from server.cli.console import ApiKey, ModelName, PlainCommand, address_of, fail, printable

if TYPE_CHECKING:
    from rich.console import Group

    from server.cli.verification import Difference, Verification, VerifyOptions

MAX_SHOWN = 10
"""Differences and failures that the report shows."""

Url = Annotated[str, typer.Argument(metavar="URL", help="URL of the server, such as http://127.0.0.1:8000/v1.")]
Endpoint = Annotated[
    Literal["completions", "chat"], typer.Option(metavar="completions|chat", help="Endpoint to send requests to.")
]
NumRequests = Annotated[int, typer.Option("-n", "--num-requests", metavar="INTEGER", min=1, help="Answers to compare.")]
Seconds = Annotated[
    float, typer.Option(metavar="SECONDS", min=1, help="Time limit in seconds; the test ends earlier if it can.")
]
MaxTokens = Annotated[int, typer.Option(metavar="TOKENS", min=1, help="Maximum tokens of each answer.")]
Crowd = Annotated[int, typer.Option(metavar="INTEGER", min=2, help="Requests in flight in a crowd.")]
Output = Annotated[Path | None, typer.Option("-o", "--output", metavar="FILE", help="Also write the result as JSON.")]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(cls=PlainCommand)(verify)


def verify(  # noqa: PLR0913  (one parameter for each flag)
    url: Url,
    *,
    model: ModelName = None,
    api_key: ApiKey = None,
    endpoint: Endpoint = "chat",
    num_requests: NumRequests = 200,
    seconds: Seconds = 60.0,
    max_tokens: MaxTokens = 32,
    crowd: Crowd = 16,
    output: Output = None,
) -> None:
    """Test whether a server gives the same answer every time. Exits with 1 if an answer differed or was missing.

    Sends the same greedy and seeded requests alone, again, streamed, behind shared beginnings, in a crowd, and later,
    and compares every answer with the first one to the same request.
    """
    from server.cli.verification import VerifyOptions  # noqa: PLC0415

    address = address_of(url)
    if output is not None and not output.parent.is_dir():
        fail(f"--output: the folder {output.parent} does not exist; create it first", code=2)
    options = VerifyOptions(address, model or "", endpoint, num_requests, seconds, max_tokens, crowd)
    result = _run(options, api_key)
    _print(result)
    if output is not None:
        import msgspec  # noqa: PLC0415

        output.write_bytes(msgspec.json.format(msgspec.json.encode(result)) + b"\n")
    if not result.is_same:
        raise typer.Exit(1)


def _run(options: "VerifyOptions", api_key: str | None) -> "Verification":
    import asyncio  # noqa: PLC0415
    from dataclasses import replace  # noqa: PLC0415

    from rich.console import Console  # noqa: PLC0415

    from server.cli.loadtest.benchmark import DiscoveryError, find_model  # noqa: PLC0415
    from server.cli.loadtest.load import open_client  # noqa: PLC0415
    from server.cli.verification import verify as compare  # noqa: PLC0415
    from server.client.openai_answers import AnswerError, headers  # noqa: PLC0415

    async def run() -> "Verification":
        async with open_client(headers(api_key)) as client:
            model = options.model or await find_model(client, options.base_url)
            return await compare(client, replace(options, model=model))

    try:
        with Console(stderr=True).status(f"comparing answers of {options.base_url}"):
            return asyncio.run(run())
    except DiscoveryError as error:
        fail(str(error))
    except AnswerError as error:
        fail(f"{options.base_url}: {error.kind}: {error}")
    except KeyboardInterrupt:
        fail("interrupted", code=130)


def _print(result: "Verification") -> None:
    from rich.console import Console  # noqa: PLC0415

    Console(soft_wrap=True).print(report(result))


def report(result: "Verification") -> "Group":
    """The table of conditions, the first differences, and the verdict."""
    from rich.console import Group  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    table = Table("condition")
    for name in ("compared", "differ", "failed"):
        table.add_column(name, justify="right")
    for one in result.conditions:
        table.add_row(one.name, str(one.num_compared), str(len(one.differences)), str(len(one.failures)))
    refused = f"Seeded requests were not tested, because the server refused `seed`: {result.refused_seed}"
    return Group(
        Text(_headline(result)),
        table,
        *([Text(refused)] if result.refused_seed else []),
        *(Text(_described(one), style="red") for one in result.differences[:MAX_SHOWN]),
        *(Text(printable(f"{one.kind}: {one.message}"), style="yellow") for one in result.failures[:MAX_SHOWN]),
        Text(_verdict(result), style="green" if result.is_same else "bold red"),
    )


def _described(difference: "Difference") -> str:
    where = f"{difference.condition}, {difference.probe.kind}, {difference.unit} {difference.position}"
    return printable(f"{where}: {difference.expected!r} became {difference.actual!r}")


def _headline(result: "Verification") -> str:
    options, unit = result.options, "token by token" if result.compares_tokens else "by their text"
    requests = f"{result.num_probes} requests of at most {options.max_tokens} tokens"
    return f"{options.base_url}, {options.model}: {requests}, answers compared {unit}, {result.seconds:.0f} s"


def _verdict(result: "Verification") -> str:
    if result.differences:
        return f"{len(result.differences)} of {result.num_compared} answers differ."
    if result.failures:
        return f"No difference in {result.num_compared} answers, but {len(result.failures)} requests failed."
    missing = [one.name for one in result.conditions if not one.num_compared]
    if missing:
        return f"No difference in {result.num_compared} answers; no time for: {', '.join(missing)}. Raise --seconds."
    return f"No difference in {result.num_compared} answers."

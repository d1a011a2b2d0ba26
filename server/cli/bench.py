"""`samewise bench`: measure latency and throughput of any OpenAI-compatible server."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from server.cli.console import DEFAULT_BASE_URL, ApiKey, BaseUrl, ModelName, PlainCommand, address_of, fail

if TYPE_CHECKING:
    from server.cli.loadtest.benchmark import BenchOptions

Endpoint = Annotated[
    Literal["completions", "chat"], typer.Option(metavar="completions|chat", help="Endpoint to send requests to.")
]
Timeout = Annotated[float, typer.Option(min=0.001, metavar="SECONDS", help="Time after which a request fails.")]
Concurrency = Annotated[
    int | None,
    typer.Option(metavar="INTEGER", min=1, help="Maximum requests in flight. By default 8, and unlimited with --rate."),
]
Rate = Annotated[
    float | None, typer.Option(metavar="NUMBER", min=1e-6, help="Mean requests per second, at random times (Poisson).")
]
NumRequests = Annotated[int, typer.Option("-n", "--num-requests", metavar="INTEGER", min=1, help="Number of requests.")]
InputLen = Annotated[str, typer.Option(metavar="N|LOW:HIGH", help="Tokens of each prompt, or a range.")]
OutputLen = Annotated[str, typer.Option(metavar="N|LOW:HIGH", help="Maximum tokens of each answer.")]
SharedPrefix = Annotated[
    float,
    typer.Option(
        metavar="NUMBER", min=0, max=1, help="Share of each prompt, from its start, that all prompts have in common."
    ),
]
Temperature = Annotated[float, typer.Option(metavar="NUMBER", min=0, max=2, help="Temperature of each request.")]
Speculation = Annotated[
    str | None,
    typer.Option(metavar="off|METHOD|JSON", help="Field `speculation` of each request. By default it is not sent."),
]
IgnoreEos = Annotated[
    bool | None,
    typer.Option(
        "--ignore-eos/--no-ignore-eos", help="Generate the full length. By default if the server supports it."
    ),
]
Seed = Annotated[int, typer.Option(metavar="INTEGER", help="Seed of prompts, lengths and arrival times.")]
Warmup = Annotated[int, typer.Option(metavar="INTEGER", min=0, help="Requests that are sent first and not counted.")]
VocabSize = Annotated[
    int | None,
    typer.Option(
        metavar="INTEGER",
        min=1,
        help="Send random token ids below this. By default as /tokenizer_info says, and random words without it.",
    ),
]
Output = Annotated[Path | None, typer.Option("-o", "--output", metavar="FILE", help="Also write the result as JSON.")]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(cls=PlainCommand)(bench)


def bench(  # noqa: PLR0913  (one parameter for each flag)
    *,
    base_url: BaseUrl = DEFAULT_BASE_URL,
    model: ModelName = None,
    api_key: ApiKey = None,
    endpoint: Endpoint = "completions",
    timeout: Timeout = 600.0,
    concurrency: Concurrency = None,
    rate: Rate = None,
    num_requests: NumRequests = 100,
    input_len: InputLen = "128",
    output_len: OutputLen = "128",
    shared_prefix: SharedPrefix = 0.0,
    temperature: Temperature = 0.0,
    speculation: Speculation = None,
    ignore_eos: IgnoreEos = None,
    seed: Seed = 0,
    warmup: Warmup = 2,
    vocab_size: VocabSize = None,
    output: Output = None,
) -> None:
    """Measure latency and throughput of any OpenAI-compatible server. Exits with 1 if a request failed."""
    from server.cli.loadtest.benchmark import BenchOptions, parse_speculation  # noqa: PLC0415
    from server.cli.loadtest.load import Lengths, Workload  # noqa: PLC0415

    address = address_of(base_url)
    try:
        lengths = Lengths.parse(input_len), Lengths.parse(output_len)
        speculation_field = parse_speculation(speculation)
    except ValueError as error:
        fail(str(error), code=2)
    options = BenchOptions(
        base_url=address,
        model=model,
        api_key=api_key,
        endpoint=endpoint,
        workload=Workload(num_requests, *lengths, shared_prefix, seed),
        concurrency=concurrency or (None if rate else 8),
        rate=rate,
        temperature=temperature,
        speculation=speculation_field,
        ignore_eos=ignore_eos,
        warmup=warmup,
        vocab_size=vocab_size,
        timeout_s=timeout,
    )
    _run(options, output)


def _run(options: "BenchOptions", output: Path | None) -> None:
    import asyncio  # noqa: PLC0415
    import json  # noqa: PLC0415

    from rich.console import Console  # noqa: PLC0415

    from server.cli.loadtest.benchmark import DiscoveryError, run_bench  # noqa: PLC0415
    from server.cli.loadtest.display import progress_bar, result_table  # noqa: PLC0415

    if output is not None and not output.parent.is_dir():
        fail(f"--output: the folder {output.parent} does not exist; create it first", code=2)
    try:
        with progress_bar(options.workload.num_requests) as advance:
            result = asyncio.run(run_bench(options, advance))
    except DiscoveryError as error:
        fail(str(error))
    except KeyboardInterrupt:
        fail("interrupted", code=130)
    Console(soft_wrap=True).print(result_table(result))
    if output is not None:
        output.write_text(json.dumps(result.as_dict(), indent=2) + "\n", encoding="utf-8")
    if result.report.failures:
        raise typer.Exit(1)

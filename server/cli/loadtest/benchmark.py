"""One run of `samewise bench`: probe the server, warm up, send the load, report."""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from typing import Any

import httpx
import msgspec

from server.cli.loadtest.load import (
    Arrivals,
    Endpoint,
    LoadRequest,
    Outcome,
    Report,
    Target,
    Workload,
    make_requests,
    open_client,
    run_load,
    send,
    summarize,
)
from server.client.certificates import UNTRUSTED, untrusted
from server.client.openai_answers import AnswerError, error_message, first_model, headers


class DiscoveryError(Exception):
    """The server cannot be tested. The message says why."""


async def find_model(client: httpx.AsyncClient, base_url: str) -> str:
    """The first model that the server lists. Raises DiscoveryError."""
    url = f"{base_url}/models"
    response = await _get(client, url)
    if response.status_code != 200:
        raise DiscoveryError(f"{url}: HTTP {response.status_code}: {error_message(response.content)}")
    try:
        return first_model(response.content)
    except AnswerError as error:
        raise DiscoveryError(f"{url}: {error}") from None


async def find_vocab_size(client: httpx.AsyncClient, base_url: str) -> int | None:
    """Vocabulary size from /tokenizer_info, next to /v1; None if the server does not report it.

    Raises DiscoveryError if it does not answer.
    """
    response = await _get(client, f"{base_url.removesuffix('/v1')}/tokenizer_info")
    if response.status_code != 200:
        return None
    try:
        return msgspec.json.decode(response.content, type=_TokenizerInfo).vocab_size
    except msgspec.DecodeError:
        return None


async def probe(client: httpx.AsyncClient, target: Target, request: LoadRequest) -> None:
    """Send one request of this kind, with a single token of output. Raises DiscoveryError if it fails."""
    outcome = await send(client, target, replace(request, max_tokens=1))
    if outcome.failure is not None:
        raise DiscoveryError(f"{outcome.failure.kind}: {outcome.failure.message}")


async def _get(client: httpx.AsyncClient, url: str) -> httpx.Response:
    try:
        return await client.get(url, timeout=30.0)
    except httpx.InvalidURL as error:
        raise DiscoveryError(f"{url}: {error}") from None
    except httpx.TransportError as error:
        if untrusted(error):
            raise DiscoveryError(f"{url}: {UNTRUSTED}") from None
        raise DiscoveryError(
            f"no server answers at {url} ({type(error).__name__}); start it, or correct the URL"
        ) from None


class _TokenizerInfo(msgspec.Struct):
    vocab_size: int | None = None


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """Options of a run; None is probed or left at its default."""

    base_url: str
    workload: Workload
    model: str | None = None
    api_key: str | None = None
    endpoint: Endpoint = "completions"
    concurrency: int | None = None
    rate: float | None = None
    temperature: float = 0.0
    speculation: str | dict[str, Any] | None = None
    """The request field `speculation`; None leaves it out."""
    ignore_eos: bool | None = None
    warmup: int = 0
    vocab_size: int | None = None
    timeout_s: float = 600.0


@dataclass(frozen=True, slots=True)
class BenchResult:
    """The options and the report of a run, without the API key."""

    started_at: str
    base_url: str
    model: str
    endpoint: Endpoint
    workload: Workload
    concurrency: int | None
    rate: float | None
    temperature: float
    speculation: str | dict[str, Any] | None
    ignore_eos: bool
    prompt_kind: str
    """"token ids" or "words"."""
    report: Report

    def as_dict(self) -> dict[str, Any]:
        """The result as JSON."""
        workload = asdict(self.workload)
        workload["input_len"], workload["output_len"] = str(self.workload.input_len), str(self.workload.output_len)
        return {**asdict(self), "workload": workload}


def parse_speculation(text: str | None) -> str | dict[str, Any] | None:
    """The field `speculation`, given as `off`, a method, or JSON. Raises ValueError."""
    if text is None or text == "off":
        return text
    if not text.startswith("{"):
        return {"method": text}
    try:
        value: dict[str, Any] = json.loads(text)
    except ValueError as error:
        raise ValueError(f"--speculation: {text!r} is not JSON: {error}") from None
    return value


async def run_bench(options: BenchOptions, on_done: Callable[[Outcome], None]) -> BenchResult:
    """Run the whole benchmark. Raises DiscoveryError if the server refuses the requests."""
    started_at = datetime.now(UTC).isoformat(timespec="seconds")
    async with open_client(headers(options.api_key)) as client:
        target, vocab_size = await _discover(client, options)
        arrivals = Arrivals(options.concurrency, options.rate, options.workload.seed)
        await run_load(client, target, _warmup_requests(options, vocab_size), Arrivals(options.concurrency))
        requests = make_requests(options.workload, vocab_size)
        report = summarize(await run_load(client, target, requests, arrivals, on_done))
    return BenchResult(
        started_at=started_at,
        base_url=options.base_url,
        model=target.model,
        endpoint=options.endpoint,
        workload=options.workload,
        concurrency=options.concurrency,
        rate=options.rate,
        temperature=options.temperature,
        speculation=options.speculation,
        ignore_eos="ignore_eos" in target.extra,
        prompt_kind="words" if vocab_size is None else "token ids",
        report=report,
    )


async def _discover(client: httpx.AsyncClient, options: BenchOptions) -> tuple[Target, int | None]:
    """The target, and the vocabulary size if prompts can be token ids. Raises DiscoveryError."""
    model = options.model or await find_model(client, options.base_url)
    extra: dict[str, Any] = {"temperature": options.temperature}
    if options.speculation is not None:
        extra["speculation"] = options.speculation
    plain = Target(options.base_url, model, options.endpoint, extra, options.timeout_s)
    await probe(client, plain, _probe_request(None))
    return await _choose_target(client, plain, options.ignore_eos), await _find_vocabulary(client, plain, options)


async def _choose_target(client: httpx.AsyncClient, plain: Target, ignore_eos: bool | None) -> Target:
    full_length = replace(plain, extra={**plain.extra, "ignore_eos": True})
    if ignore_eos is True:
        await probe(client, full_length, _probe_request(None))
        return full_length
    return full_length if ignore_eos is None and await _accepts(client, full_length, _probe_request(None)) else plain


async def _find_vocabulary(client: httpx.AsyncClient, target: Target, options: BenchOptions) -> int | None:
    if options.endpoint == "chat":
        if options.vocab_size is not None:
            raise DiscoveryError("--vocab-size: the chat endpoint takes no token ids; leave it out, and words are sent")
        return None
    if options.vocab_size is not None:
        await probe(client, target, _probe_request(options.vocab_size))
        return options.vocab_size
    found = await find_vocab_size(client, options.base_url)
    return found if found is not None and await _accepts(client, target, _probe_request(found)) else None


async def _accepts(client: httpx.AsyncClient, target: Target, request: LoadRequest) -> bool:
    try:
        await probe(client, target, request)
    except DiscoveryError:
        return False
    return True


def _probe_request(vocab_size: int | None) -> LoadRequest:
    return LoadRequest("time" if vocab_size is None else [vocab_size - 1], max_tokens=1)


def _warmup_requests(options: BenchOptions, vocab_size: int | None) -> list[LoadRequest]:
    """Requests like the measured ones, with other prompts, so that these are not in a prefix cache."""
    workload = replace(options.workload, num_requests=options.warmup, seed=options.workload.seed ^ 0x5EED)
    return make_requests(workload, vocab_size)

"""One run of `samewise bench`: ask the server what it can do, warm up, put the load on it, report."""

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
from server.client.openai_answers import AnswerError, error_message, first_model, headers


class DiscoveryError(Exception):
    """The server cannot be tested; the message says why."""


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
        raise DiscoveryError(f"no server answers at {url} ({type(error).__name__})") from None


class _TokenizerInfo(msgspec.Struct):
    vocab_size: int | None = None


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """What the user asked for; None is found out or left to its default."""

    base_url: str
    workload: Workload
    model: str | None = None
    api_key: str | None = None
    endpoint: Endpoint = "completions"
    concurrency: int | None = None
    rate: float | None = None
    temperature: float = 0.0
    speculation: str | dict[str, Any] | None = None
    """The field as it is sent; None leaves it out."""
    ignore_eos: bool | None = None
    warmup: int = 0
    vocab_size: int | None = None
    timeout_s: float = 600.0


@dataclass(frozen=True, slots=True)
class BenchResult:
    """What was run, and what came of it. The key is not in here."""

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
        """The result as JSON takes it."""
        workload = asdict(self.workload)
        workload["input_len"], workload["output_len"] = str(self.workload.input_len), str(self.workload.output_len)
        return {**asdict(self), "workload": workload}


def parse_speculation(text: str | None) -> str | dict[str, Any] | None:
    """The field `speculation` from `off`, the name of a method, or the object itself as JSON. Raises ValueError."""
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
    """Run the whole benchmark. Raises DiscoveryError if the server cannot be tested like this."""
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
    """Where and how to send, and the vocabulary size if prompts can be token ids. Says why if nothing gets through."""
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
            raise DiscoveryError("--vocab-size: the chat endpoint takes no token ids; leave it out for words")
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
    """Of the same shape, but other prompts: the measured ones must not find them in a prefix cache."""
    workload = replace(options.workload, num_requests=options.warmup, seed=options.workload.seed ^ 0x5EED)
    return make_requests(workload, vocab_size)

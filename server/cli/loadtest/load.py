"""The load of `samewise bench`: requests, arrival times, one timed request, and the report."""

import asyncio
import contextlib
import itertools
import math
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any, Literal

import httpx
import msgspec

from server.client.certificates import trusted_certificates
from server.client.openai_answers import AnswerError, Chunk, ChunkParser

Prompt = str | list[int]

WORDS = """
    time year people way day man thing woman life child world school state family student group country problem hand
    part place case week company system program question work government number night point home water room mother
    area money story fact month lot right study book eye job word business issue side kind head house service friend
    father power hour game line end member law car city community name president team minute idea body information
""".split()  # noqa: SIM905  (a hundred quoted lines would hide the rest of the file)
"""Common words: nearly every tokenizer has one token for each, with the space before it."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """A length, uniform from low to high inclusive; fixed if they are equal."""

    low: int
    high: int

    @classmethod
    def parse(cls, text: str) -> "Lengths":
        """Read `128` or `64:256`. Raises ValueError."""
        low, _, high = text.partition(":")
        try:
            lengths = cls(int(low), int(high or low))
        except ValueError:
            raise ValueError(f"expected a length such as 128 or a range such as 64:256, got {text!r}") from None
        if not 1 <= lengths.low <= lengths.high:
            raise ValueError(f"expected 1 <= low <= high, got {text!r}")
        return lengths

    def sample(self, rng: random.Random) -> int:
        return rng.randint(self.low, self.high)

    def __str__(self) -> str:
        return str(self.low) if self.low == self.high else f"{self.low}:{self.high}"


@dataclass(frozen=True, slots=True)
class Workload:
    """The shape of a load."""

    num_requests: int
    input_len: Lengths
    """Tokens of a prompt, or words if token ids cannot be sent."""
    output_len: Lengths
    """Maximum tokens of an answer."""
    shared_prefix: float = 0.0
    """Share of each prompt, from its start, that all prompts have in common, 0 to 1."""
    seed: int = 0


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """One request to send."""

    prompt: Prompt
    max_tokens: int


def make_requests(workload: Workload, vocab_size: int | None) -> list[LoadRequest]:
    """All requests of the load, of random token ids below `vocab_size`, or of random words if it is None."""
    rng = random.Random(workload.seed)
    common = _units(rng, workload.input_len.high, vocab_size)
    requests = []
    for _ in range(workload.num_requests):
        length = workload.input_len.sample(rng)
        shared = round(length * workload.shared_prefix)
        units = common[:shared] + _units(rng, length - shared, vocab_size)
        prompt: Prompt = units if vocab_size is not None else " ".join(WORDS[unit] for unit in units)
        requests.append(LoadRequest(prompt, workload.output_len.sample(rng)))
    return requests


def _units(rng: random.Random, count: int, vocab_size: int | None) -> list[int]:
    """Token ids, or indices of words."""
    return rng.choices(range(len(WORDS) if vocab_size is None else vocab_size), k=count)


Endpoint = Literal["completions", "chat"]
PATHS: dict[Endpoint, str] = {"completions": "/completions", "chat": "/chat/completions"}


@dataclass(frozen=True, slots=True)
class Target:
    """The endpoint, and the fields that all requests share."""

    base_url: str
    model: str
    endpoint: Endpoint
    extra: dict[str, Any] = field(default_factory=dict)
    """Further fields of each body, such as temperature and ignore_eos."""
    timeout_s: float = 600.0

    @property
    def url(self) -> str:
        return self.base_url + PATHS[self.endpoint]

    def body(self, request: LoadRequest) -> dict[str, Any]:
        """The JSON body of a request."""
        body: dict[str, Any] = {"model": self.model, "max_tokens": request.max_tokens, "stream": True}
        body["stream_options"] = {"include_usage": True}
        if self.endpoint == "chat":
            body["messages"] = [{"role": "user", "content": request.prompt}]
        else:
            body["prompt"] = request.prompt
        return {**body, **self.extra}


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a request got no complete answer: a kind to count by, and a message."""

    kind: str
    message: str


@dataclass(slots=True)
class Outcome:
    """The result of one request. Times are seconds of one monotonic clock."""

    started: float
    finished: float = 0.0
    chunk_times: list[float] = field(default_factory=list)
    """When text arrived; empty if the answer has no text."""
    prompt_tokens: int = 0
    output_tokens: int = 0
    """Tokens by the server's usage, or the number of chunks if it sends no usage."""
    failure: Failure | None = None

    @property
    def time_to_first_token(self) -> float | None:
        return self.chunk_times[0] - self.started if self.chunk_times else None

    @property
    def latency(self) -> float:
        return self.finished - self.started


async def send(client: httpx.AsyncClient, target: Target, request: LoadRequest) -> Outcome:
    """Send one request and read its stream to the end. Errors of server and network are in the outcome."""
    content = msgspec.json.encode(target.body(request))
    outcome = Outcome(started=time.perf_counter())
    try:
        async with asyncio.timeout(target.timeout_s):
            await _stream(client, target.url, content, outcome)
    except TimeoutError:
        outcome.failure = Failure("timeout", f"not finished after {target.timeout_s:g} s")
    except httpx.TransportError as error:
        outcome.failure = Failure("connection", f"{type(error).__name__}: {error}".rstrip(": "))
    except AnswerError as error:
        outcome.failure = Failure(error.kind, str(error))
    outcome.finished = time.perf_counter()
    return outcome


async def _stream(client: httpx.AsyncClient, url: str, content: bytes, outcome: Outcome) -> None:
    headers = {"content-type": "application/json"}
    async with client.stream("POST", url, content=content, headers=headers) as response:
        if response.status_code != 200:
            raise AnswerError.refusal(response.status_code, await response.aread())
        parser = ChunkParser()
        async for data in response.aiter_bytes():
            now = time.perf_counter()
            for chunk in parser.feed(data):
                _record(chunk, now, outcome)
            if parser.is_done:
                break
    parser.close()
    outcome.output_tokens = outcome.output_tokens or len(outcome.chunk_times)


def _record(chunk: Chunk, now: float, outcome: Outcome) -> None:
    if chunk.text:
        outcome.chunk_times.append(now)
    if chunk.usage is not None:
        outcome.prompt_tokens = chunk.usage.prompt_tokens
        outcome.output_tokens = chunk.usage.completion_tokens


@dataclass(frozen=True, slots=True)
class Arrivals:
    """A closed loop with `concurrency`, a Poisson process with `rate`, or with both a process that may have to wait."""

    concurrency: int | None = None
    """Maximum requests in flight; None sets no limit."""
    rate: float | None = None
    """Mean requests per second; None sends each as soon as `concurrency` allows."""
    seed: int = 0


@dataclass(frozen=True, slots=True)
class LoadResult:
    """Outcomes, in the order of the requests."""

    outcomes: tuple[Outcome, ...]
    duration_s: float
    """From the first request sent to the last answer."""


def open_client(headers: dict[str, str]) -> httpx.AsyncClient:
    """A client without limits on time and connections, because the load sets both."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    verify = trusted_certificates()
    return httpx.AsyncClient(headers=headers, timeout=None, limits=limits, trust_env=False, verify=verify)


async def run_load(
    client: httpx.AsyncClient,
    target: Target,
    requests: Sequence[LoadRequest],
    arrivals: Arrivals,
    on_done: Callable[[Outcome], None] = lambda outcome: None,
) -> LoadResult:
    """Send all requests as `arrivals` says, and wait for all answers. `on_done` gets each outcome."""
    gate = asyncio.Semaphore(arrivals.concurrency) if arrivals.concurrency is not None else contextlib.nullcontext()

    async def one(request: LoadRequest) -> Outcome:
        async with gate:
            outcome = await send(client, target, request)
        on_done(outcome)
        return outcome

    start = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(request)) async for request in _arriving(requests, arrivals)]
    return LoadResult(tuple(task.result() for task in tasks), time.perf_counter() - start)


def arrival_times(arrivals: Arrivals, count: int) -> list[float]:
    """Ascending seconds from the start: a Poisson process from 0 on, or all 0 without a rate."""
    if arrivals.rate is None:
        return [0.0] * count
    rng = random.Random(arrivals.seed)
    gaps = (rng.expovariate(arrivals.rate) for _ in range(count - 1))
    return list(itertools.accumulate(gaps, initial=0.0))


async def _arriving(requests: Sequence[LoadRequest], arrivals: Arrivals) -> AsyncIterator[LoadRequest]:
    start = time.perf_counter()
    for request, due in zip(requests, arrival_times(arrivals, len(requests)), strict=True):
        if due > 0:
            await asyncio.sleep(max(0.0, start + due - time.perf_counter()))
        yield request


@dataclass(frozen=True, slots=True)
class Distribution:
    """A summary of measured values, in their unit."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    max: float


@dataclass(frozen=True, slots=True)
class FailureCount:
    """The number of failures of one kind, and the message of the first."""

    kind: str
    count: int
    first_message: str


@dataclass(frozen=True, slots=True)
class Report:
    """The result of a load. Times and token counts are from complete answers only."""

    duration_s: float
    num_requests: int
    num_completed: int
    failures: tuple[FailureCount, ...]
    prompt_tokens: int
    output_tokens: int
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    time_to_first_token_ms: Distribution | None
    inter_token_ms: Distribution | None
    """Milliseconds between the chunks of a stream."""
    time_per_output_token_ms: Distribution | None
    """Time after a request's first token, divided by the tokens after it."""
    end_to_end_ms: Distribution | None

    def as_dict(self) -> dict[str, Any]:
        """The report as JSON."""
        return asdict(self)


def summarize(result: LoadResult) -> Report:
    """Reduce a load to its report."""
    done = [outcome for outcome in result.outcomes if outcome.failure is None]
    prompt_tokens = sum(outcome.prompt_tokens for outcome in done)
    output_tokens = sum(outcome.output_tokens for outcome in done)
    duration = max(result.duration_s, 1e-9)
    return Report(
        duration_s=result.duration_s,
        num_requests=len(result.outcomes),
        num_completed=len(done),
        failures=_count_failures(result.outcomes),
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        requests_per_s=len(done) / duration,
        output_tokens_per_s=output_tokens / duration,
        total_tokens_per_s=(prompt_tokens + output_tokens) / duration,
        time_to_first_token_ms=_milliseconds(
            [o.time_to_first_token for o in done if o.time_to_first_token is not None]
        ),
        inter_token_ms=_milliseconds([b - a for outcome in done for a, b in pairwise(outcome.chunk_times)]),
        time_per_output_token_ms=_milliseconds([t for outcome in done if (t := _time_per_token(outcome)) is not None]),
        end_to_end_ms=_milliseconds([outcome.latency for outcome in done]),
    )


def distribution(values: Sequence[float]) -> Distribution | None:
    """Mean, percentiles and maximum; None if there are no values."""
    if not values:
        return None
    ordered = sorted(values)
    p50, p90, p99 = (percentile(ordered, q) for q in (50, 90, 99))
    return Distribution(len(ordered), math.fsum(ordered) / len(ordered), p50, p90, p99, ordered[-1])


def percentile(ordered: Sequence[float], q: float) -> float:
    """The q-th percentile of ascending values, linear between neighbours (Hyndman and Fan's type 7, like numpy)."""
    position = (len(ordered) - 1) * q / 100
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def _milliseconds(seconds: list[float]) -> Distribution | None:
    return distribution([1000 * value for value in seconds])


def _time_per_token(outcome: Outcome) -> float | None:
    if outcome.output_tokens < 2 or len(outcome.chunk_times) < 2:
        return None
    return (outcome.chunk_times[-1] - outcome.chunk_times[0]) / (outcome.output_tokens - 1)


def _count_failures(outcomes: Sequence[Outcome]) -> tuple[FailureCount, ...]:
    failures = [outcome.failure for outcome in outcomes if outcome.failure is not None]
    first = {failure.kind: failure.message for failure in reversed(failures)}
    counts = Counter(failure.kind for failure in failures)
    return tuple(FailureCount(kind, count, first[kind]) for kind, count in counts.most_common())

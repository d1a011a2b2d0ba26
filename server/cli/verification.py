"""Tests whether an OpenAI-compatible server gives the same answer to the same request under every condition."""

import asyncio
import itertools
import random
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import httpx
import msgspec

from server.cli.loadtest.load import PATHS, WORDS, Endpoint, Failure
from server.client.openai_answers import UNREADABLE, AnswerError, EventParser

MAX_PROBES: Final = 12
MIN_PROBES: Final = 4
_ROUND_TRIPS = 6
"""Times that each probe is sent alone, or as long as alone, in the shortest run."""
_SHARE_OF_TIME = 0.8
"""Share of the time limit that the shortest run is planned to take."""
_TASKS = (
    "Tell a short story about a lighthouse.",
    "Explain how bread is made.",
    "List five cities and one fact about each.",
    "Describe a walk through a forest in autumn.",
    "Write a letter to a friend about a new job.",
    "Name the planets and describe two of them.",
)
_DONE = b"[DONE]"


@dataclass(frozen=True, slots=True)
class VerifyOptions:
    """Options of a run."""

    base_url: str
    model: str
    endpoint: Endpoint = "chat"
    num_requests: int = 200
    """Answers to compare, if they come within `seconds`."""
    seconds: float = 60.0
    max_tokens: int = 32
    crowd: int = 16
    """Requests in flight in a crowd."""


@dataclass(frozen=True, slots=True)
class Probe:
    """A request that is sent again and again."""

    context: str
    task: str
    seed: int | None
    """The seed of a sampled answer; None for a greedy one."""

    @property
    def prompt(self) -> str:
        return f"{self.context}\n{self.task}"

    @property
    def kind(self) -> str:
        return "greedy" if self.seed is None else "seeded"


@dataclass(frozen=True, slots=True)
class Answer:
    """The text of an answer, and its tokens if the server reports logprobs."""

    text: str
    tokens: tuple[str, ...] | None
    finish_reason: str | None


@dataclass(frozen=True, slots=True)
class Difference:
    """An answer that differs from the first one to the same request."""

    condition: str
    probe: Probe
    position: int
    """Index of the first token that differs; of the first character if the server does not report tokens."""
    unit: str
    """ "token" or "character"."""
    expected: str
    actual: str


@dataclass(slots=True)
class Condition:
    """The answers under one condition."""

    name: str
    num_same: int = 0
    differences: list[Difference] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)

    @property
    def num_compared(self) -> int:
        return self.num_same + len(self.differences)


@dataclass(slots=True)
class Verification:
    """The result of a run."""

    options: VerifyOptions
    num_probes: int
    compares_tokens: bool
    """Whether answers were compared token by token; otherwise by their text."""
    refused_seed: str
    """Why the server refused `seed`; empty if it did not."""
    conditions: list[Condition]
    seconds: float = 0.0

    @property
    def num_compared(self) -> int:
        return sum(one.num_compared for one in self.conditions)

    @property
    def differences(self) -> list[Difference]:
        return [difference for one in self.conditions for difference in one.differences]

    @property
    def failures(self) -> list[Failure]:
        return [failure for one in self.conditions for failure in one.failures]

    @property
    def is_same(self) -> bool:
        """Whether every answer came and was the same, under every condition."""
        return not self.differences and not self.failures and all(one.num_compared for one in self.conditions)


async def verify(
    client: httpx.AsyncClient, options: VerifyOptions, on_answer: Callable[[], None] = lambda: None
) -> Verification:
    """Compare the server's answers under all conditions. Raises AnswerError if the server refuses the requests."""
    run = _Run(client, options, on_answer)
    await run.prepare()
    await run.compare()
    return run.result


class _Run:
    def __init__(self, client: httpx.AsyncClient, options: VerifyOptions, on_answer: Callable[[], None]) -> None:
        self._client = client
        self._options = options
        self._on_answer = on_answer
        self._rng = random.Random()  # not seeded: no earlier run has put these prompts into the cache
        self._started = time.monotonic()
        self._deadline = self._started + options.seconds
        """When the current condition ends. Time for the last one is kept free."""
        self._expected: dict[Probe, Answer] = {}
        self._extra: dict[str, Any] = {}
        names = ("alone, again", "alone, streamed", "after a request with the same beginning", "in a crowd", "later")
        self._conditions = [Condition(name) for name in names]
        self.result = Verification(options, 0, compares_tokens=False, refused_seed="", conditions=self._conditions)

    async def prepare(self) -> None:
        """Find out what the server accepts, choose the probes, and get the first answer to each."""
        probes = [self._probe(index) for index in range(MAX_PROBES)]
        seconds = await self._try_fields(probes[0])
        try:
            await self._ask(probes[1])
        except AnswerError as error:
            if error.kind != "HTTP 400":
                raise
            self.result.refused_seed = str(error)
            probes = [replace(probe, seed=None) for probe in probes]
        affordable = int(_SHARE_OF_TIME * self._options.seconds / (_ROUND_TRIPS * max(seconds, 1e-3)))
        for probe in probes[: min(max(affordable, MIN_PROBES), MAX_PROBES)]:
            self._expected[probe] = await self._ask(probe)
        self.result.num_probes = len(self._expected)
        self.result.compares_tokens = all(answer.tokens is not None for answer in self._expected.values())

    async def compare(self) -> None:
        """Send the probes under one condition after the other, until enough answers are compared or time is up."""
        again, streamed, after_shared, crowd, later = self._conditions
        while True:
            begun = time.monotonic()
            for probe in self._expected:
                await self._send(again, probe)
            self._deadline = self._started + self._options.seconds - 1.5 * (time.monotonic() - begun)
            for probe in self._expected:
                await self._send(streamed, probe, stream=True)
            for probe in self._expected:
                await self._stranger(replace(probe, task=self._rng.choice(_TASKS) + " Use simple words."))
                await self._send(after_shared, probe)
            await self._crowd(crowd)
            if self._is_over or self.result.num_compared + len(self._expected) >= self._options.num_requests:
                break
        self._deadline = self._started + self._options.seconds
        for probe in self._expected:
            await self._send(later, probe)
        self.result.seconds = time.monotonic() - self._started

    async def _crowd(self, condition: Condition) -> None:
        """All probes twice among as many other requests, `crowd` at a time, half of them streamed."""
        places = asyncio.Semaphore(self._options.crowd)

        async def one(probe: Probe, *, is_probe: bool, stream: bool) -> None:
            async with places:
                await (self._send(condition, probe, stream=stream) if is_probe else self._stranger(probe))

        jobs = [one(probe, is_probe=True, stream=stream) for probe in self._expected for stream in (False, True)]
        jobs += [one(self._probe(index), is_probe=False, stream=False) for index in range(len(jobs))]
        self._rng.shuffle(jobs)
        await asyncio.gather(*jobs)

    @property
    def _is_over(self) -> bool:
        return time.monotonic() >= self._deadline

    def _probe(self, index: int) -> Probe:
        """A request with a context of up to 160 words; every second one is sampled with a seed."""
        words = self._rng.choices(WORDS, k=(8, 40, 160)[index % 3])
        context = f"{self._rng.getrandbits(32):08x} {' '.join(words)}"
        seed = self._rng.getrandbits(31) if index % 2 else None
        return Probe(context, _TASKS[index % len(_TASKS)], seed)

    async def _try_fields(self, probe: Probe) -> float:
        """Ask for logprobs if the server accepts that. Returns the seconds that an answer takes."""
        self._extra = {"logprobs": True if self._options.endpoint == "chat" else 1}
        try:
            await self._ask(probe)
        except AnswerError as error:
            if error.kind not in ("HTTP 400", "HTTP 422"):
                raise
            self._extra = {}
        started = time.monotonic()
        await self._ask(self._probe(0))
        return time.monotonic() - started

    async def _send(self, condition: Condition, probe: Probe, *, stream: bool = False) -> None:
        if self._is_over:
            return
        try:
            answer = await self._ask(probe, stream=stream)
        except AnswerError as error:
            condition.failures.append(Failure(error.kind, str(error)))
            return
        difference = _difference(condition.name, probe, self._expected[probe], answer)
        if difference is None:
            condition.num_same += 1
        else:
            condition.differences.append(difference)
        self._on_answer()

    async def _stranger(self, probe: Probe) -> None:
        """Send a request whose answer does not matter."""
        if not self._is_over:
            try:
                await self._ask(probe)
            except AnswerError:
                return

    async def _ask(self, probe: Probe, *, stream: bool = False) -> Answer:
        """Raises AnswerError, also for what the network does."""
        body: dict[str, Any] = {"model": self._options.model, "max_tokens": self._options.max_tokens, **self._extra}
        if self._options.endpoint == "chat":
            body["messages"] = [{"role": "user", "content": probe.prompt}]
        else:
            body["prompt"] = probe.prompt
        body |= {"temperature": 0} if probe.seed is None else {"temperature": 1, "seed": probe.seed}
        url = self._options.base_url + PATHS[self._options.endpoint]
        try:
            async with asyncio.timeout(self._options.seconds):
                if stream:
                    parts = [part async for part in self._stream(url, {**body, "stream": True})]
                else:
                    parts = [_decode((await _checked(await self._client.post(url, json=body))).content)]
        except TimeoutError:
            raise AnswerError("timeout", f"no answer within {self._options.seconds:g} s") from None
        except httpx.TransportError as error:
            raise AnswerError("connection", f"{type(error).__name__}: {error}".rstrip(": ")) from None
        return _joined([choice for part in parts for choice in part.choices])

    async def _stream(self, url: str, body: dict[str, Any]) -> AsyncIterator["_Part"]:
        async with self._client.stream("POST", url, json=body) as response:
            await _checked(response)
            parser = EventParser()
            async for data in response.aiter_bytes():
                for payload in parser.feed(data):
                    if payload == _DONE:
                        return
                    yield _decode(payload)
        raise AnswerError("incomplete stream", "the server closed the connection before the answer was complete")


class _Token(msgspec.Struct):
    token: str


class _Logprobs(msgspec.Struct):
    """`content` has the tokens of chat, `tokens` the tokens of completions."""

    content: list[_Token] | None = None
    tokens: list[str] | None = None


class _Message(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    message: _Message | None = None
    delta: _Message | None = None
    text: str | None = None
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None


class _Part(msgspec.Struct):
    """An answer, or a chunk of its stream."""

    choices: list[_Choice] = []
    error: object = None


def _decode(content: bytes) -> _Part:
    try:
        part = msgspec.json.decode(content, type=_Part)
    except UNREADABLE as error:
        raise AnswerError("malformed answer", f"the server sent no OpenAI answer: {error}") from None
    if part.error is not None:
        raise AnswerError.refusal(200, content)
    return part


async def _checked(response: httpx.Response) -> httpx.Response:
    if response.status_code != 200:
        raise AnswerError.refusal(response.status_code, await response.aread())
    return response


def _joined(choices: Sequence[_Choice]) -> Answer:
    """The answer that these choices, or pieces of one, make together."""
    texts, tokens, reason, has_tokens = [], [], None, False
    for choice in choices:
        message = choice.message or choice.delta
        texts.append((message.content if message else choice.text) or "")
        reason = choice.finish_reason or reason
        if choice.logprobs is not None:
            has_tokens = has_tokens or bool(choice.logprobs.content or choice.logprobs.tokens)
            tokens += choice.logprobs.tokens or [one.token for one in choice.logprobs.content or ()]
    return Answer("".join(texts), tuple(tokens) if has_tokens else None, reason)


def _difference(condition: str, probe: Probe, expected: Answer, actual: Answer) -> Difference | None:
    """None if text and finish reason are the same: some servers report the tokens of a stream differently."""
    if (expected.text, expected.finish_reason) == (actual.text, actual.finish_reason):
        return None
    unit, length, both = "character", 20, (tuple(expected.text), tuple(actual.text))
    if expected.tokens is not None and actual.tokens is not None:
        unit, length, both = "token", 4, (expected.tokens, actual.tokens)
    pairs = enumerate(itertools.zip_longest(*both))
    position = next((index for index, (one, other) in pairs if one != other), len(both[0]))
    shown = [
        "".join(part[position : position + length]) or f"(end: {answer.finish_reason})"
        for part, answer in zip(both, (expected, actual), strict=True)
    ]
    return Difference(condition, probe, position, unit, *shown)

"""The load generator: statistics against numpy, prompts, arrivals, and every way in which a request can fail."""

import json
import math
import random
from collections import Counter
from pathlib import Path

import httpx
import numpy as np
import pytest
from scipy import stats
from typer.testing import CliRunner, Result

from server.cli.loadtest.benchmark import DiscoveryError, find_model, find_vocab_size
from server.cli.loadtest.load import (
    WORDS,
    Arrivals,
    Failure,
    Lengths,
    LoadRequest,
    LoadResult,
    Outcome,
    Target,
    Workload,
    arrival_times,
    distribution,
    make_requests,
    open_client,
    percentile,
    run_load,
    summarize,
)
from server.cli.main import app
from server.client.openai_answers import EventParser, error_message
from server.client.openai_answers import base_url as clean_url
from tests.cli.fake_openai import FakeOpenAI


@pytest.mark.parametrize("count", [1, 2, 3, 10, 101, 1000])
def test_statistics_are_numpys(count: int) -> None:
    values = [random.Random(count).lognormvariate(0, 2) for _ in range(count)]
    found = distribution(values)
    assert found is not None
    assert (found.p50, found.p90, found.p99) == pytest.approx(tuple(np.percentile(values, [50, 90, 99])))
    assert (found.mean, found.max, found.count) == (pytest.approx(np.mean(values)), max(values), count)


def test_percentiles_between_and_at_the_ends() -> None:
    ordered = [1.0, 2.0, 4.0]
    assert [percentile(ordered, q) for q in (0, 25, 50, 75, 100)] == [1.0, 1.5, 2.0, 3.0, 4.0]
    assert distribution([]) is None


def test_the_report_counts_only_complete_answers() -> None:
    good = Outcome(10.0, 13.0, [10.5, 11.0, 12.0], prompt_tokens=7, output_tokens=4)
    silent = Outcome(10.0, 10.25, [], prompt_tokens=3, output_tokens=1)
    bad = [Outcome(0.0, 9.0, [1.0], 100, 100, Failure("HTTP 429", text)) for text in ("first", "second")]
    report = summarize(LoadResult((bad[0], good, bad[1], silent), duration_s=2.0))
    assert (report.num_requests, report.num_completed, report.prompt_tokens, report.output_tokens) == (4, 2, 10, 5)
    assert (report.requests_per_s, report.output_tokens_per_s, report.total_tokens_per_s) == (1.0, 2.5, 7.5)
    assert report.time_to_first_token_ms == distribution([500.0])
    assert report.inter_token_ms == distribution([500.0, 1000.0])
    assert report.time_per_output_token_ms == distribution([500.0])
    assert report.end_to_end_ms == distribution([3000.0, 250.0])
    assert [(f.kind, f.count, f.first_message) for f in report.failures] == [("HTTP 429", 2, "first")]


def test_prompts_have_the_lengths_and_the_share_in_common() -> None:
    workload = Workload(200, Lengths(10, 40), Lengths(3, 5), shared_prefix=0.5, seed=1)
    requests = make_requests(workload, vocab_size=1000)
    prompts = [request.prompt for request in requests if isinstance(request.prompt, list)]
    assert {len(prompt) for prompt in prompts} == set(range(10, 41))
    assert {request.max_tokens for request in requests} == {3, 4, 5}
    assert all(0 <= token < 1000 for prompt in prompts for token in prompt)
    longest = max(prompts, key=len)
    for prompt in prompts:
        shared = round(len(prompt) / 2)
        assert prompt[:shared] == longest[:shared]
    assert len({tuple(prompt[round(len(prompt) / 2) :]) for prompt in prompts}) == len(prompts)


def test_the_same_seed_gives_the_same_load_and_another_another() -> None:
    def make(seed: int) -> list[LoadRequest]:
        return make_requests(Workload(5, Lengths(8, 9), Lengths(1, 9), seed=seed), None)

    assert make(1) == make(1) != make(2)
    assert all(set(str(request.prompt).split()) <= set(WORDS) for request in make(1))


@pytest.mark.parametrize("text", ["0", "5:4", "x", "", "1:x", "-3:4", "1.5"])
def test_bad_lengths_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected"):
        Lengths.parse(text)


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_events_are_found_however_the_bytes_are_cut(size: int) -> None:
    stream = b': hello\n\ndata: {"a": 1}\n\ndata:{"b": 2}\r\n\r\nevent: x\ndata: [DONE]\n\n'
    parser = EventParser()
    parts = [stream[start : start + size] for start in range(0, len(stream), size)]
    assert [event for part in parts for event in parser.feed(part)] == [b'{"a": 1}', b'{"b": 2}', b"[DONE]"]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"error": {"message": "No."}}', "No."),
        (b'{"detail": "Not Found"}', "Not Found"),
        (b'{"error": "plain"}', "plain"),
        (b"<html>\nBad Gateway", "<html> Bad Gateway"),
        (b"[1]", "[1]"),
        (b"", "no message"),
    ],
)
def test_the_message_of_any_error_body(body: bytes, message: str) -> None:
    assert error_message(body) == message


def test_addresses() -> None:
    assert clean_url("localhost:8000/v1/") == "http://localhost:8000/v1"
    with pytest.raises(ValueError, match="http"):
        clean_url("ftp://x")


async def load(base_url: str, num_requests: int, arrivals: Arrivals, timeout_s: float = 60.0) -> LoadResult:
    requests = [LoadRequest("hello", max_tokens=8)] * num_requests
    target = Target(base_url, "fake-1", "completions", timeout_s=timeout_s)
    async with open_client({}) as client:
        return await run_load(client, target, requests, arrivals)


async def test_concurrency_is_kept_and_used(base_url: str, fake: FakeOpenAI) -> None:
    fake.delay_s = 0.01
    result = await load(base_url, 20, Arrivals(concurrency=4))
    assert fake.most_in_flight == 4
    assert all(outcome.failure is None for outcome in result.outcomes)
    assert all(len(outcome.chunk_times) == 4 and outcome.output_tokens == 4 for outcome in result.outcomes)
    assert all(outcome.started < outcome.chunk_times[0] <= outcome.finished for outcome in result.outcomes)


def test_arrivals_are_poisson() -> None:
    times = np.array(arrival_times(Arrivals(rate=40.0, seed=3), 2001))
    assert times[0] == 0
    assert stats.kstest(np.diff(times), "expon", args=(0, 1 / 40)).pvalue > 0.01
    assert stats.kstest(np.full(2000, 1 / 40), "expon", args=(0, 1 / 40)).pvalue < 1e-6  # evenly spaced ones are not
    assert stats.kstest(np.diff(times), "expon", args=(0, 1 / 50)).pvalue < 1e-6
    assert arrival_times(Arrivals(rate=40.0, seed=4), 5) != list(times[:5])
    assert arrival_times(Arrivals(concurrency=3), 3) == [0, 0, 0]


async def test_a_rate_is_followed(base_url: str) -> None:
    arrivals = Arrivals(rate=50.0, seed=3)
    started = [outcome.started for outcome in (await load(base_url, 20, arrivals)).outcomes]
    planned = arrival_times(arrivals, 20)
    assert all(moment - started[0] > due - 0.05 for moment, due in zip(started, planned, strict=True))


async def test_without_usage_chunks_are_counted(base_url: str, fake: FakeOpenAI) -> None:
    fake.sends_usage = False
    assert [outcome.output_tokens for outcome in (await load(base_url, 1, Arrivals())).outcomes] == [4]


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        ({"fails_with": (429, {"message": "Too many."})}, "HTTP 429", "Too many."),
        ({"error_after": 2}, "error in stream", "The engine is gone."),
        ({"breaks_after": 2}, "incomplete stream", "the server closed the connection before the answer was complete"),
        ({"delay_s": 5.0}, "timeout", "not finished after 0.5 s"),
    ],
)
async def test_every_failure_has_its_kind(
    change: dict[str, object], kind: str, message: str, base_url: str, fake: FakeOpenAI
) -> None:
    for name, value in change.items():
        setattr(fake, name, value)
    (outcome,) = (await load(base_url, 1, Arrivals(), timeout_s=0.5)).outcomes
    assert outcome.failure == Failure(kind, message)


async def test_a_server_that_goes_away_while_it_is_asked_what_it_can_do() -> None:
    def fail(request: httpx.Request) -> httpx.Response:
        raise httpx.ReadError("gone")

    async with httpx.AsyncClient(transport=httpx.MockTransport(fail)) as client:
        for find in (find_model, find_vocab_size):
            with pytest.raises(
                DiscoveryError, match=r"^no server answers at http://x/\S+ \(ReadError\); start it, or correct the URL$"
            ):
                await find(client, "http://x/v1")


@pytest.mark.parametrize(
    ("status", "body", "message"),
    [
        (200, b"<html>", "http://x/v1/models: the answer is not an OpenAI list of models"),
        (200, b'{"data": []}', "http://x/v1/models: the server lists no models; name one with --model"),
        (404, b'{"detail": "Not Found"}', "http://x/v1/models: HTTP 404: Not Found"),
    ],
)
async def test_no_model_is_found(status: int, body: bytes, message: str) -> None:
    transport = httpx.MockTransport(lambda _: httpx.Response(status, content=body))
    async with httpx.AsyncClient(transport=transport) as client:
        with pytest.raises(DiscoveryError) as raised:
            await find_model(client, "http://x/v1")
    assert str(raised.value) == message


async def test_no_server_is_a_failure_too() -> None:
    (outcome,) = (await load("http://127.0.0.1:9/v1", 1, Arrivals())).outcomes
    assert outcome.failure is not None
    assert outcome.failure.kind == "connection"


def bench(base_url: str, *arguments: str) -> Result:
    return CliRunner().invoke(app, ["bench", "--base-url", base_url, "-n", "6", "--input-len", "5:9", *arguments])


def test_bench_end_to_end(base_url: str, fake: FakeOpenAI, tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    result = bench(base_url, "--concurrency", "2", "--output", str(file), "--output-len", "3", "--api-key", "sk-hush")
    assert result.exit_code == 0, result.output
    content = json.loads(file.read_text())
    assert (content["report"]["num_completed"], content["report"]["output_tokens"]) == (6, 24)
    assert (content["model"], content["prompt_kind"], content["ignore_eos"]) == ("fake-1", "token ids", True)
    assert content["workload"]["input_len"] == "5:9"
    assert math.isfinite(content["report"]["time_to_first_token_ms"]["p99"])
    assert "hush" not in file.read_text() + result.output
    sent = fake.bodies[-6:]
    assert all(body["ignore_eos"] and body["max_tokens"] == 3 and body["temperature"] == 0 for body in sent)
    assert all(5 <= len(body["prompt"]) <= 9 and max(body["prompt"]) < 50 for body in sent)
    for row in ("time to first token", "between tokens", "time per output token", "end to end", "6 in "):
        assert row in result.output


def test_bench_does_without_what_a_server_does_not_know(base_url: str, fake: FakeOpenAI) -> None:
    fake.takes_ignore_eos, fake.vocab_size = False, None
    assert bench(base_url).exit_code == 0
    assert all("ignore_eos" not in body and isinstance(body["prompt"], str) for body in fake.bodies[-6:])


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("off", "off"),
        ("ngram", {"method": "ngram"}),
        ('{"method": "suffix", "num_tokens": 4}', {"method": "suffix", "num_tokens": 4}),
    ],
)
def test_bench_sends_speculation(text: str, field: object, base_url: str, fake: FakeOpenAI, tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    assert bench(base_url, "--speculation", text, "--output", str(file)).exit_code == 0
    assert all(body["speculation"] == field for body in fake.bodies)
    assert json.loads(file.read_text())["speculation"] == field


def test_bench_sends_no_speculation_unasked(base_url: str, fake: FakeOpenAI) -> None:
    assert bench(base_url).exit_code == 0
    assert not any("speculation" in body for body in fake.bodies)


def test_bench_insists_on_what_was_asked_for(base_url: str, fake: FakeOpenAI) -> None:
    fake.takes_ignore_eos = False
    result = bench(base_url, "--ignore-eos")
    assert result.exit_code == 1
    assert result.stderr == "error: HTTP 400: Unknown parameter: 'ignore_eos'.\n"


def test_bench_on_the_chat_endpoint(base_url: str, fake: FakeOpenAI) -> None:
    result = bench(base_url, "--endpoint", "chat", "--rate", "200")
    assert result.exit_code == 0, result.output
    assert all(body["messages"][0]["role"] == "user" for body in fake.bodies)
    assert bench(base_url, "--endpoint", "chat", "--vocab-size", "5").exit_code == 1


def test_bench_reports_failures_by_kind(base_url: str, fake: FakeOpenAI) -> None:
    fake.error_after = 1  # the probes ask for a single token, and pass
    result = bench(base_url, "--warmup", "0")
    assert result.exit_code == 1
    assert "6 x error in stream; the first: The engine is gone." in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--base-url", "http://127.0.0.1:9/v1"], "no server answers at http://127.0.0.1:9/v1"),
        (["--base-url", "ftp://x"], "not an http"),
        (["--input-len", "9:5"], "1 <= low <= high"),
        (["--output", "/no/such/folder/x.json"], "does not exist; create it first"),
        (["--speculation", "{method"], "--speculation: '{method' is not JSON"),
    ],
)
def test_bench_says_in_one_line_what_is_wrong(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["bench", *arguments])
    assert result.exit_code in (1, 2)
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


def test_warmup_is_other_prompts_and_not_counted(base_url: str, fake: FakeOpenAI) -> None:
    bench(base_url, "--warmup", "3")
    prompts = Counter(tuple(body["prompt"]) for body in fake.bodies[-9:])
    assert len(prompts) == 9

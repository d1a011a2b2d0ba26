"""A request's row and its details."""

import msgspec
import pytest

from server.page.load.requests import RequestRecord, details_of, row_of

DRAFTS = [{"method": "ngram", "accepted_tokens": 3, "rejected_tokens": 1}]


def record(**changes: object) -> RequestRecord:
    """A record of a successful request, with changes."""
    told = {
        "id": "req_1",
        "object": "request",
        "state": "ended",
        "endpoint": "/v1/chat/completions",
        "model": "m",
        "started_at": 1e9,
        "status": 200,
        "input_tokens": 1200,
        "cached_tokens": 1000,
        "output_tokens": 7,
        "time_to_first_token_ms": 30.0,
        "times_ms": {"before": 1.0, "queue": 4.0, "prefill": 15.0, "decode": 80.0, "after": 0.0, "total": 100.0},
        **changes,
    }
    return msgspec.convert(told, RequestRecord)


def test_a_row() -> None:
    row = row_of(record())
    assert (row.endpoint, row.outcome, row.is_problem) == ("/chat/completions", "OK", False)
    assert (row.tokens_in, row.tokens_out, row.first_token, row.total) == (
        "1,200 (1,000 cached)",
        "7",
        "30 ms",
        "100 ms",
    )
    assert row.time is not None
    assert [part.percent for part in row.time.parts] == [1.0, 4.0, 15.0, 80.0, 0.0]
    assert row.time.summary.startswith("Time by phase: before 1.0 ms, queue 4.0 ms")


def test_while_it_runs_nobody_knows_where_its_time_goes() -> None:
    row = row_of(record(state="running", status=None, time_to_first_token_ms=None, times_ms={"total": 5.0}))
    assert (row.outcome, row.first_token, row.total, row.time) == ("running", "–", "5.0 ms", None)


@pytest.mark.parametrize(
    ("status", "error", "outcome"),
    [(400, "invalid_request", "400 invalid_request"), (499, None, "499"), (200, "engine_died", "200 engine_died")],
)
def test_problems(status: int, error: str | None, outcome: str) -> None:
    row = row_of(record(status=status, error=error))
    assert (row.outcome, row.is_problem) == (outcome, True)


def test_no_phase_is_no_bar() -> None:
    assert row_of(record(times_ms={"total": 5.0})).time is None
    assert row_of(record(times_ms={"total": 0.0, "before": 0.0})).time is None


def test_details() -> None:
    choice = {"prompt": 0, "index": 1, "state": "ended", "finish_reason": "stop", "output_tokens": 7, "drafts": DRAFTS}
    waiting = {"prompt": 0, "index": 2, "state": "waiting"}
    times = {"queue": 1.0, "prefill": None, "decode": 2.0}
    details = details_of(
        record(
            steps=9, preemptions=0, drafts=DRAFTS, restarts=[1e9], choices=[{**choice, "times_ms": times}, waiting],
            num_choices=40,
        )
    )  # fmt: skip
    figures = details.figures
    assert figures["Request"] == "req_1"
    assert (figures["Steps"], figures["Preemptions"], figures["Engine restarts"]) == ("9", "0", "1")
    assert figures["Drafts by ngram"] == "3 of 4 accepted"
    assert figures["Choices"] == "40 (first 2 shown)"
    assert "Prefill chunks" not in figures
    assert details.choices is not None
    first, second = details.choices.rows
    assert first == ["0.1", "stop", "–", "7", "1.0 ms", "–", "2.0 ms", "–", "–", "ngram 3 of 4 accepted"]
    assert second[:2] == ["0.2", "waiting"]
    assert set(second[2:]) == {"–"}
    assert len(details.choices.columns) == len(first)


def test_details_of_one_that_no_engine_had() -> None:
    assert details_of(record(num_choices=0)).choices is None

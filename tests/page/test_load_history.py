"""The chart of the engine's steps."""

from server.page.load.history import SECONDS, Step, StepHistory, StepList

NOW = 1_000_000.5


def step(number: int, ago: float, **counts: int) -> Step:
    return Step(number=number, ended_at=NOW - ago, duration_ms=20.0, **counts)


def history_of(*steps: Step) -> StepHistory:
    history = StepHistory()
    history.add(StepList(data=list(steps), last_step=steps[-1].number if steps else 0))
    return history


def columns(history: StepHistory, now: float = NOW) -> list[tuple[float, ...]]:
    return list(zip(*(one.values for one in history.chart(now).series), strict=True))


def test_a_column_is_the_mean_of_the_steps_of_a_second() -> None:
    history = history_of(
        step(1, 1.0, prompt_tokens=64),
        step(2, 0.2, decode_tokens=8, draft_tokens=6, accepted_draft_tokens=4),
        step(3, 0.1, decode_tokens=4),
    )
    found = columns(history)
    assert len(found) == SECONDS
    assert found[-2:] == [(64, 0, 0, 0), (0, 6, 2, 1)]
    assert set(found[:-2]) == {(0, 0, 0, 0)}
    assert history.last_step == 3
    assert history.figures(NOW) == {"Step time": "20 ms"}


def test_steps_that_were_missed_change_nothing() -> None:
    """Only the last ones are remembered by a server that makes many."""
    many = [step(number, 0.3, decode_tokens=5) for number in range(1, 401)]
    assert columns(history_of(*many))[-1] == columns(history_of(*many[160:]))[-1] == (0, 5, 0, 0)


def test_what_is_old_is_forgotten() -> None:
    history = history_of(step(1, 100.0, decode_tokens=9), step(2, 59.0, decode_tokens=7))
    assert [column[1] for column in columns(history)] == [7] + [0] * (SECONDS - 1)
    assert not any(sum(column) for column in columns(history, NOW + 1))


def test_a_clock_that_is_ahead_is_followed() -> None:
    history = history_of(step(1, -30.0, decode_tokens=9))
    assert columns(history)[-1] == (0, 9, 0, 0)


def test_nothing_yet() -> None:
    history = history_of()
    assert set(columns(history)) == {(0, 0, 0, 0)}
    assert history.figures(NOW) == {"Step time": "–"}
    assert history.chart(NOW).top == 1


def test_a_server_that_counts_from_one_again() -> None:
    history = history_of(step(7, 0.1, decode_tokens=9))
    history.forget()
    assert history.last_step == 0
    assert set(columns(history)) == {(0, 0, 0, 0)}

"""Threads that the system may refuse."""

# Short: child processes are tested with those who start them.

import threading

import pytest

from model_runner.processes import can_start_threads


def test_threads_are_started_together_and_end() -> None:
    before = threading.active_count()
    assert can_start_threads(20)
    assert threading.active_count() == before


def test_a_system_that_gives_fewer(monkeypatch: pytest.MonkeyPatch) -> None:
    before = threading.active_count()
    start = threading.Thread.start

    def start_few(thread: threading.Thread) -> None:
        if threading.active_count() - before >= 5:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_few)
    assert can_start_threads(5)
    assert not can_start_threads(6)
    assert threading.active_count() == before

"""The line to a learner: what comes through, and that no end of the other side harms this one."""

import logging
import os
import queue
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from model_runner.heads.base import Example
from model_runner.learning.link import Begin, ProcessLink
from model_runner.processes import Backoff
from model_runner.runner_interface import LearningStats
from tests.model_runner.learning.fake_learner import BIG, HEADS

BEGIN = Begin("a model", "hydra", None, "a cache", 1, 1 << 20)
ROOT = Path(__file__).parents[3]
WAIT_S = 60.0
ONCE = Backoff(max_failures=1)

MakeLink = Callable[..., ProcessLink]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeLink]:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    made = []

    def make_link(mode: str, prepare: Callable[[bytes], Any] = bytes, backoff: Backoff = ONCE) -> ProcessLink:
        command = (sys.executable, "-m", "tests.model_runner.learning.fake_learner", mode)
        made.append(ProcessLink(BEGIN, prepare, command, backoff))
        made[-1].start()
        return made[-1]

    yield make_link
    for link in made:
        link.close()


def piece(num_tokens: int = 4, num_bytes: int = 8) -> Example:
    return Example(np.zeros(num_tokens, np.int64), 1, 0.0, {"last": np.zeros(num_bytes // 2, np.float16)})


def wait_reported(link: ProcessLink) -> LearningStats:
    while not link.stats.steps:
        assert link.is_open
        os.sched_yield()
    return link.stats


def wait_ended(link: ProcessLink) -> None:
    assert link._receiver is not None
    link._receiver.join(WAIT_S)
    assert not link._receiver.is_alive()


def endings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [one.getMessage() for one in caplog.records if "has ended" in one.getMessage()]


def test_pieces_go_and_the_newest_heads_come(make: MakeLink, caplog: pytest.LogCaptureFixture) -> None:
    prepared: queue.Queue[tuple[bytes, str]] = queue.Queue()
    go_on = threading.Event()

    def prepare(checkpoint: bytes) -> bytes:
        prepared.put((checkpoint, threading.current_thread().name))
        assert go_on.wait(WAIT_S)
        return checkpoint

    link = make("heads", prepare)
    assert link.is_open
    assert link.take_heads() is None
    link.offer(piece(7))
    names = {prepared.get(timeout=WAIT_S)[1]}
    go_on.set()
    for _ in range(1, HEADS):
        names.add(prepared.get(timeout=WAIT_S)[1])
    assert names == {"samewise-from-learner"}
    assert wait_reported(link) == LearningStats(7, 0, 5, 2, 1, 1.5, None)  # which comes after the heads
    assert link.take_heads() == b"%d" % HEADS
    assert link.take_heads() is None
    assert "begun with hydra" in caplog.text
    link.close()
    assert not endings(caplog)


@pytest.mark.parametrize(
    ("mode", "how"),
    [
        ("dies-sending", "was killed by SIGKILL"),
        ("dies-receiving", "was killed by SIGKILL"),
        ("says-nonsense", "it sent an unusable message: "),
        ("fails", "exited with code 3"),
    ],
)
def test_its_death_is_told_once_and_harms_nothing(
    make: MakeLink, caplog: pytest.LogCaptureFixture, mode: str, how: str
) -> None:
    link = make(mode)
    link.offer(piece(num_bytes=BIG))
    wait_ended(link)
    assert not link.is_open
    assert link.take_heads() is None
    for _ in range(10):
        link.offer(piece())
    (line,) = endings(caplog)
    assert how in line
    with pytest.raises(ChildProcessError):
        os.waitpid(link.pid, 0)  # it was reaped
    link.close()
    assert len(endings(caplog)) == 1


def test_killed_from_outside(make: MakeLink, caplog: pytest.LogCaptureFixture) -> None:
    link = make("deaf")
    wait_reported(link)
    os.kill(link.pid, signal.SIGKILL)
    wait_ended(link)
    assert "was killed by SIGKILL" in endings(caplog)[0]


def test_a_killed_one_is_followed_by_another_which_goes_on(make: MakeLink, caplog: pytest.LogCaptureFixture) -> None:
    link = make("heads", backoff=Backoff(first_s=0.0))
    for number, num_tokens in enumerate((7, 5, 4)):
        link.offer(piece(num_tokens))
        while link.stats.tokens != sum((7, 5, 4)[: number + 1]):
            os.sched_yield()
        assert (link.stats.steps, link.stats.publications) == (5 * (number + 1), 2 * (number + 1))
        assert link.take_heads() == b"%d" % HEADS
        if number < 2:
            killed = link.pid
            os.kill(killed, signal.SIGKILL)
            while not link.is_open or link.pid == killed:
                os.sched_yield()
    assert len(endings(caplog)) == 2
    assert "it restarts in 0 s" in endings(caplog)[0]
    last = link.pid
    link.close()
    with pytest.raises(ChildProcessError):
        os.waitpid(last, 0)
    assert len(endings(caplog)) == 2


@pytest.mark.parametrize(("mode", "times"), [("fails", 3), ("cannot", 1)])
def test_those_that_fail_at_once_are_given_up(
    make: MakeLink, caplog: pytest.LogCaptureFixture, mode: str, times: int
) -> None:
    wait_ended(make(mode, backoff=Backoff(max_failures=3, first_s=0.01)))
    told = endings(caplog)
    assert len(told) == times
    assert told[-1].endswith("training stops until the engine restarts.")
    assert not any(one.endswith("engine restarts.") for one in told[:-1])


def test_it_is_closed_while_another_is_waited_for(make: MakeLink) -> None:
    link = make("fails", backoff=Backoff(first_s=WAIT_S * 10, longest_s=WAIT_S * 10))
    while link.is_open:
        os.sched_yield()
    link.close()
    assert link._receiver is not None
    assert not link._receiver.is_alive()


def test_heads_that_cannot_be_used_end_it(make: MakeLink, caplog: pytest.LogCaptureFixture) -> None:
    def prepare(checkpoint: bytes) -> None:
        raise ValueError("they take layers.7, which the target is not asked for")

    link = make("heads", prepare)
    wait_ended(link)
    assert "they take layers.7" in endings(caplog)[0]
    assert link.take_heads() is None


def test_who_is_too_slow_gets_less(make: MakeLink) -> None:
    link = make("deaf")
    for _ in range(10):
        link.offer(piece(num_bytes=BIG))
    assert link.stats.pieces_dropped >= 10 - 4 - 1  # those that wait, and the one that is being sent


def test_one_that_does_not_listen_is_ended(make: MakeLink, caplog: pytest.LogCaptureFixture) -> None:
    link = make("deaf")
    wait_reported(link)
    link.offer(piece(num_bytes=BIG))
    link.close()
    with pytest.raises(ChildProcessError):
        os.waitpid(link.pid, 0)
    assert not endings(caplog)


def test_one_that_cannot_be_started(caplog: pytest.LogCaptureFixture) -> None:
    link = ProcessLink(BEGIN, bytes, ("/nowhere/to/be/found",))  # type: ignore[arg-type]
    link.start()
    assert not link.is_open
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "/nowhere/to/be/found" in record.getMessage()
    link.close()

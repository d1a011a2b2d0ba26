"""The engine's loop on a scripted channel."""

import logging
import time
from collections.abc import Sequence
from dataclasses import replace

import msgspec
import pytest

from model_runner.runner_interface import LearningStats
from scheduler.interface import EngineStats, RequestOutput
from scheduler.prefix_cache import CacheLog
from server.engine.loop import EXIT_CRASHED, EXIT_LOAD_FAILED, EXIT_STOPPED, LoadedEngine, run
from server.engine.messages import (
    Abort,
    Aborted,
    Explain,
    Explained,
    FromEngine,
    Load,
    LoadFailed,
    Ready,
    Rejected,
    Shutdown,
    StepDone,
    Submit,
)
from server.engine.messages import EngineConfig as Config
from tests.engine_process.conftest import request
from tests.engine_process.fake_engine import RAISE, REJECT, FakeEngine, expected
from tests.engine_process.test_messages import REQUEST

INFO = object()


class Script:
    """Gives one batch of messages at each receive, then nothing while there is work, then Shutdown."""

    def __init__(self, *batches: Sequence[object]) -> None:
        self.batches = list(batches)
        self.sent: list[FromEngine] = []

    def receive(self, *, wait: bool) -> Sequence[object]:
        if self.batches:
            return self.batches.pop(0)
        return [Shutdown()] if wait else []

    def send(self, message: FromEngine) -> None:
        self.sent.append(message)


def serve(engine: FakeEngine, *batches: Sequence[object]) -> tuple[int, list[FromEngine]]:
    channel = Script(*batches)
    code = run(lambda: LoadedEngine(engine, INFO), channel)
    return code, channel.sent


def test_one_message_for_each_step_with_all_outputs():
    wanted = [request("a", 1, max_tokens=3), request("b", 2, max_tokens=2, n=2)]
    code, (ready, *steps) = serve(FakeEngine(), [Submit(r) for r in wanted])
    assert code == EXIT_STOPPED
    assert ready == Ready(INFO)
    assert [[(o.request_id, o.choice) for o in step.outputs] for step in steps] == [
        [("a", 0), ("b", 0), ("b", 1)],
        [("a", 0), ("b", 0), ("b", 1)],
        [("a", 0)],
    ]
    assert tuple(step.outputs[0].tokens[0] for step in steps) == expected(wanted[0])
    assert [step.stats.num_running for step in steps] == [3, 1, 0]


class CachingEngine(FakeEngine):
    """Caches a block in every other step."""

    def __init__(self, cache_log: CacheLog) -> None:
        super().__init__()
        self._cache_log = cache_log

    def step(self) -> list[RequestOutput]:
        outputs = super().step()
        if self.steps % 2 == 0:
            self._cache_log.note_stored(self.steps.to_bytes(32, "big"), None, (self.steps,))
        return outputs


def test_changes_of_the_cache_come_with_the_outputs_of_their_step():
    channel, cache_log = Script([Submit(request("a", max_tokens=5))]), CacheLog()
    run(lambda: LoadedEngine(CachingEngine(cache_log), INFO, cache_log=cache_log), channel)
    sent = [message.kv_events for message in channel.sent if isinstance(message, StepDone)]
    assert [batch is not None for batch in sent] == [False, True, False, True, False]
    batches = [msgspec.msgpack.decode(batch) for batch in sent if batch is not None]
    assert [[event[0] for event in events] for _, events, _ in batches] == [
        ["AllBlocksCleared", "BlockStored"],
        ["BlockStored"],
    ]
    assert abs(batches[0][0] - time.time()) < 60


class LearningEngine(FakeEngine):
    """Learns something each time that it is asked, up to a point."""

    num_tokens = 0

    def stats(self) -> EngineStats:
        self.num_tokens = min(self.num_tokens + 1, 3)
        return replace(super().stats(), learning=LearningStats(tokens=self.num_tokens))


def test_what_is_learnt_without_work_is_reported_until_nothing_is_new():
    code, (_, *reports) = serve(LearningEngine(), [], [], [], [], [])
    assert code == EXIT_STOPPED
    assert [report.stats.learning.tokens for report in reports] == [2, 3]
    assert not any(report.outputs for report in reports)


def test_the_end_ends_what_was_started_beside():
    closed = []
    for engine, batches in ((FakeEngine(), []), (FakeEngine(), [[Submit(request("a"))]])):
        run(lambda engine=engine: LoadedEngine(engine, INFO, lambda: closed.append(engine)), Script(*batches))
    assert len(closed) == 2


def test_integrity_is_checked_only_when_the_work_is_done():
    engine = FakeEngine()
    serve(engine, [Submit(request("a", max_tokens=5))])
    assert engine.integrity_checks == 1


def test_an_abort_frees_at_once_and_reports_the_state():
    engine = FakeEngine()
    code, sent = serve(engine, [Submit(request("a", n=3))], [Abort("a", 1)], [Abort("a")])
    assert code == EXIT_STOPPED
    assert [sorted(o.choice for o in m.outputs) for m in sent if isinstance(m, StepDone)] == [[0, 1, 2], [0, 2], []]
    assert sent[-1].stats.num_running == 0
    assert engine.integrity_checks == 1


def test_aborting_what_is_unknown_or_finished_does_nothing():
    wanted = request("a", max_tokens=1)
    code, _ = serve(FakeEngine(), [Abort("x"), Abort("x", 1)], [Submit(wanted)], [Abort("a"), Abort("a", 0)])
    assert code == EXIT_STOPPED


def test_every_abort_is_answered_with_the_ends_of_those_that_ran():
    batches = [[Submit(request("a", n=3))], [Abort("a", 1), Abort("a", 1)], [Abort("a"), Abort("x", 2)]]
    _, sent = serve(FakeEngine(), *batches)
    answers = [message for message in sent if isinstance(message, Aborted)]
    assert [(answer.request_id, answer.choice) for answer in answers] == [("a", 1), ("a", 1), ("a", None), ("x", 2)]
    told = [[(one.choice, one.has_ended, one.output_tokens) for one in answer.histories] for answer in answers]
    assert told == [[(1, True, 1)], [], [(0, True, 2), (2, True, 2)], []]


def test_what_runs_is_explained_between_steps():
    batches = [[Submit(request("a", n=2))], [Explain("a")], [Explain("a"), Explain("x"), Abort("a")]]
    _, sent = serve(FakeEngine(), *batches)
    kinds = [type(message) for message in sent[1:]]
    assert kinds == [StepDone, Explained, StepDone, Explained, Explained, Aborted, StepDone]
    told = [[(one.choice, one.has_ended, one.steps) for one in m.histories] for m in sent if isinstance(m, Explained)]
    assert told == [[(0, False, 1), (1, False, 1)], [(0, False, 2), (1, False, 2)], []]


def test_a_request_that_cannot_run_is_rejected_alone():
    good = request("good", max_tokens=1)
    _, sent = serve(FakeEngine(), [Submit(request("bad", REJECT)), Submit(good)])
    assert Rejected("bad", "the prompt does not fit") in sent
    assert sum(isinstance(m, StepDone) for m in sent) == 1


def test_an_exception_in_a_step_is_logged_with_ids_but_no_prompt(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.ERROR, "samewise.engine"):
        code, _ = serve(FakeEngine(), [Submit(request("poison", RAISE, 4711)), Submit(request("victim", 4712))])
    assert code == EXIT_CRASHED
    assert "poison, victim" in caplog.text
    assert "told to raise" in caplog.text
    assert "4711" not in caplog.text
    assert "4712" not in caplog.text


def test_books_that_do_not_balance_are_a_crash(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    def unbalanced(self: FakeEngine) -> None:
        raise AssertionError("a block is missing")

    monkeypatch.setattr(FakeEngine, "check_integrity", unbalanced)
    code, _ = serve(FakeEngine(), [Submit(request("a", max_tokens=1))])
    assert code == EXIT_CRASHED
    assert "a block is missing" in caplog.text


@pytest.mark.parametrize("error", [ValueError("too large"), OSError("too large")])
def test_a_load_error_for_the_user_is_sent_and_the_loop_waits_to_be_told(error):
    def load() -> LoadedEngine:
        raise error

    channel = Script([], [Submit(REQUEST)], [Shutdown()])
    assert run(load, channel) == EXIT_LOAD_FAILED
    assert channel.sent == [LoadFailed("too large")]
    assert channel.batches == []


def test_an_unexpected_load_error_is_logged_as_a_crash(caplog: pytest.LogCaptureFixture):
    def load() -> LoadedEngine:
        raise KeyError("layers")

    channel = Script()
    assert run(load, channel) == EXIT_CRASHED
    assert channel.sent == []
    assert "KeyError: 'layers'" in caplog.text


def test_a_message_out_of_place_is_a_crash(tmp_path):
    assert serve(FakeEngine(), [Load(Config(tmp_path))])[0] == EXIT_CRASHED

"""Requests for which something must be prepared: others never wait for it."""

from concurrent.futures import Future
from dataclasses import replace
from threading import Timer

import pytest

from scheduler import engine as module
from scheduler.engine import Engine
from scheduler.interface import BACKGROUND, BeamSearch, FinishReason
from scheduler.scheduler import Scheduler
from tests.scheduler.driving import CONFIG, RecordingRunner, make_request, shares, tokens_of
from tests.scheduler.simulated_beams import expected_sequences
from tests.scheduler.simulated_world import expected_output


class PreparingRunner(RecordingRunner):
    """Prepares grammars, by their names, when the test says so."""

    def __init__(self):
        super().__init__(32, CONFIG.block_size)
        self.asked = []
        self.works = {}

    def prepare(self, sampling, num_choices):
        if sampling.grammar is None:
            return None
        self.asked.append((sampling.grammar, num_choices))
        return self.works.setdefault(sampling.grammar, Future())


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(module, "_PATIENCE_S", 0.0)


@pytest.fixture
def engine():
    return Engine(Scheduler(CONFIG, 32), PreparingRunner())


def finish(engine):
    outputs = {}
    while engine.has_work:
        for output in engine.step():
            outputs.setdefault((output.request_id, output.choice), []).append(output)
        engine.check_integrity()
    return outputs


def test_others_are_computed_meanwhile(engine):
    held, free = make_request("held", grammar="g", n=2), make_request("free")
    engine.add(held)
    outputs = run_until_idle(engine, free)
    assert tokens_of(outputs) == expected_output(free, 0)[0]
    assert all(set(shares(plan)) == {"free/0"} for plan in engine.runner.plans)
    assert engine.has_work
    engine.runner.works["g"].set_result(None)
    later = finish(engine)
    for choice in range(2):
        assert tokens_of(later[":held", choice]) == expected_output(held, choice)[0]


def run_until_idle(engine, request):
    """The outputs of a request, while another one is being prepared."""
    engine.add(request)
    outputs = []
    while not (outputs and outputs[-1].finish_reason):
        outputs += engine.step()
    return outputs


def test_the_one_that_is_ready_first_runs_first(engine):
    engine.add(make_request("slow", grammar="slow"))
    engine.add(make_request("quick", grammar="quick"))
    engine.runner.works["quick"].set_result(None)
    engine.step()
    engine.runner.works["slow"].set_result(None)
    engine.step()
    assert [set(shares(plan)) for plan in engine.runner.plans] == [{"quick/0"}, {"quick/0", "slow/0"}]


def test_they_count_as_waiting(engine):
    engine.add(make_request("held", grammar="g", n=3))
    engine.add(make_request("free"))
    assert (engine.stats().num_waiting, engine.stats().num_background_waiting) == (4, 0)
    engine.step()
    assert (engine.stats().num_waiting, engine.stats().num_running) == (3, 1)
    engine.runner.works["g"].set_result(None)
    engine.step()
    assert engine.stats().num_waiting + engine.stats().num_running == 4
    engine.step()
    assert engine.stats().num_waiting == 0


def test_those_in_the_background_count_as_such(engine):
    engine.add(replace(make_request("lines", grammar="g", n=3), tier=BACKGROUND))
    engine.add(make_request("other", grammar="g"))
    assert (engine.stats().num_waiting, engine.stats().num_background_waiting) == (4, 3)


def test_what_is_prepared_is_enough_for_all_that_runs_at_a_time(engine):
    engine.add(make_request("choices", grammar="choices", n=3))
    beams = replace(make_request("beams", grammar="beams", n=2), beam_search=BeamSearch(4))
    engine.add(beams)
    guided = replace(make_request("guided", grammar="guided", guidance=2.0, n=2), guide=(1, 2))
    engine.add(guided)
    assert engine.runner.asked == [("choices", 3), ("beams", 4), ("guided", 2)]


def test_what_can_never_run_fails_alone(engine):
    bad, good = make_request("bad", grammar="bad", n=2), make_request("good", grammar="good")
    engine.add(bad)
    engine.add(good)
    engine.runner.works["bad"].set_exception(ValueError("no such rule"))
    engine.runner.works["good"].set_result(None)
    outputs = finish(engine)
    assert tokens_of(outputs[":good", 0]) == expected_output(good, 0)[0]
    for choice in range(2):
        (output,) = outputs[":bad", choice]
        assert output.finish_reason is FinishReason.ERROR
        assert output.error.by_request
        assert output.error.message == "no such rule"


def test_other_errors_are_not_the_requests(engine):
    engine.add(make_request("held", grammar="g"))
    engine.runner.works["g"].set_exception(MemoryError())
    with pytest.raises(MemoryError):
        engine.step()


def test_an_abort_ends_it_before_it_begins(engine):
    engine.add(make_request("held", grammar="g", n=2))
    work = engine.runner.works["g"]
    engine.abort(":held", 0)
    assert engine.stats().num_waiting == 1
    engine.abort(":held", 1)
    assert work.cancelled()
    assert not engine.has_work
    assert engine.stats().num_waiting == 0
    assert engine.step() == []
    engine.add(make_request("held"))  # its id is free again
    assert finish(engine)


def test_an_abort_while_it_is_worked_on(engine):
    """Nothing can stop the work then; what becomes of it concerns nobody."""
    engine.add(make_request("held", grammar="g"))
    work = engine.runner.works["g"]
    work.set_running_or_notify_cancel()
    engine.abort(":held")
    work.set_exception(ValueError("no such rule"))
    assert not engine.has_work
    assert engine.step() == []
    assert engine.runner.plans == []


def test_of_some_choices_the_others_run(engine):
    held = make_request("held", grammar="g", n=3)
    engine.add(held)
    engine.abort(":held", 1)
    engine.abort(":nobody")
    engine.runner.works["g"].set_result(None)
    outputs = finish(engine)
    assert {choice: tokens_of(of_choice) for (_, choice), of_choice in outputs.items()} == {
        choice: expected_output(held, choice)[0] for choice in (0, 2)
    }


def test_of_a_search_the_other_sequences_are_the_same(engine):
    beams = replace(make_request("beams", max_tokens=5, grammar="g", n=3), beam_search=BeamSearch(4))
    engine.add(beams)
    engine.abort(":beams", 0)
    engine.runner.works["g"].set_result(None)
    outputs = finish(engine)
    expected = expected_sequences(replace(beams, sampling=replace(beams.sampling, grammar=None)))
    found = {choice: tokens_of(of_choice) for (_, choice), of_choice in outputs.items()}
    assert found == {choice: list(expected[choice].beam.tokens) for choice in (1, 2)}


def test_an_id_is_taken_while_its_request_is_prepared(engine):
    engine.add(make_request("held", grammar="g"))
    with pytest.raises(ValueError, match="already in use"):
        engine.add(make_request("held"))
    engine.runner.works["g"].set_result(None)
    engine.step()
    with pytest.raises(ValueError, match="already in use"):
        engine.add(make_request("held", grammar="g"))


def test_what_could_never_run_is_refused_before_anything_is_prepared(engine):
    with pytest.raises(ValueError, match="tokens"):
        engine.add(replace(make_request("held", grammar="g"), max_tokens=1000))
    assert engine.runner.asked == []
    assert not engine.has_work


def test_with_nothing_else_to_do_a_step_waits_for_it(engine, monkeypatch):
    monkeypatch.setattr(module, "_PATIENCE_S", 60.0)
    engine.add(make_request("held", grammar="g"))
    done = Timer(0.01, engine.runner.works["g"].set_result, (None,))
    done.start()
    assert len(engine.step()) == 1
    done.join()

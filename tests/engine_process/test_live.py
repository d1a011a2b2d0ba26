"""Requests under way: what the reader brings, what the consumer gets."""

from dataclasses import replace

import pytest

from model_runner.contract import Speculation
from scheduler.interface import BeamSearch, ChoiceState, EngineRequest, FinishReason, RequestOutput
from server.engine.live_requests import LiveRequest, LiveRequests
from tests.engine_process.conftest import request
from tests.engine_process.followers import Recorded


def out(choice: int, *tokens: int, finish: FinishReason | None = None, name: str = "a") -> RequestOutput:
    return RequestOutput(name, choice, tokens, finish_reason=finish)


def live_request(wanted: EngineRequest) -> LiveRequest:
    return LiveRequest(wanted, wake=lambda: None, follower=Recorded())


def test_a_resumed_request_has_its_unfinished_choices_with_their_outputs():
    live = live_request(request("a", n=3))
    for output in [out(0, 5), out(1, 6, finish=FinishReason.STOP), out(0, 7, 8), out(1, 9)]:
        live.apply(output)
    assert live.resumed().choices == (ChoiceState(0, (5, 7, 8)), ChoiceState(2, ()))
    assert live.resumed().prompt == request("a").prompt


def test_a_resumed_request_is_the_same_in_all_else():
    wanted = replace(request("a", n=2), speculation=Speculation("prediction", 4, "match", (1, 2)), cache_salt="salt")
    live = live_request(wanted)
    live.apply(replace(out(0, 5, 6, 7), num_accepted=2, num_rejected=2))
    assert replace(live.resumed(), choices=wanted.choices) == wanted
    assert live.resumed().choices == (ChoiceState(0, (5, 6, 7)), ChoiceState(1, ()))


def test_a_resumed_request_has_the_last_state_of_each_sampler():
    live = live_request(replace(request("a"), choices=(ChoiceState(0), ChoiceState(2, (4,), 2.5))))
    for state in (3.0, 3.5):
        live.apply(replace(out(0, 5), sampler_state=state))
    assert live.resumed().choices == (ChoiceState(0, (5, 5), 3.5), ChoiceState(2, (4,), 2.5))


def test_outputs_come_in_order_and_the_last_choice_ends_them():
    live = live_request(request("a", n=2))
    brought = [out(0, 1), out(1, 2, finish=FinishReason.STOP), out(0, 3, finish=FinishReason.LENGTH)]
    for output in brought:
        live.apply(output)
    live.apply(out(1, 99))
    assert live.num_unfinished == 0
    assert live.take() == brought
    assert live.take() == []


def test_the_consumer_is_told_of_all_that_is_new():
    told: list[str] = []
    live = LiveRequest(request("a", n=2), wake=lambda: told.append("wake"), follower=Recorded())
    live.apply(out(0, 1))
    live.apply(out(5, 1))
    assert told == ["wake"]
    live.abort(0)
    live.fail(RuntimeError("gone"))
    assert told == ["wake"] * 3


def test_an_aborted_choice_brings_nothing_more():
    live = live_request(request("a", n=2))
    live.apply(out(0, 1))
    live.apply(out(1, 2, finish=FinishReason.STOP))
    assert live.abort(0)
    assert not live.abort(0)
    assert live.take() == [out(1, 2, finish=FinishReason.STOP)]
    assert live.num_unfinished == 0


def test_a_failure_comes_after_the_outputs_that_are_there():
    live = live_request(request("a"))
    live.apply(out(0, 1))
    live.fail(RuntimeError("gone"))
    assert live.take() == [out(0, 1)]
    assert str(live.error) == "gone"


def test_choices_are_counted_while_they_run():
    requests = LiveRequests()
    requests.add(request("a", n=3), lambda: None, Recorded())
    requests.add(request("b"), lambda: None, Recorded())
    assert requests.places.num_taken == 4
    assert not requests.apply([out(0, 1, finish=FinishReason.STOP)])
    assert requests.places.num_taken == 3
    assert requests.apply([out(0, name="b", finish=FinishReason.STOP), out(0, 1, name="unknown")])
    assert (requests.places.num_taken, len(requests)) == (2, 1)


@pytest.mark.parametrize("ends", ["finish", "abort", "left"])
def test_a_search_holds_a_place_for_each_beam_until_its_last_choice_ends(ends: str):
    requests = LiveRequests()
    live = requests.add(replace(request("a", n=2), beam_search=BeamSearch(5)), lambda: None, Recorded())
    requests.add(request("b"), lambda: None, Recorded())
    requests.apply([out(0, 1, finish=FinishReason.STOP)])
    assert requests.places.num_taken == 6
    if ends == "finish":
        requests.apply([out(1, 1, finish=FinishReason.STOP)])
    elif ends == "abort":
        requests.abort_choice("a", 1)
    else:
        requests.abort(live)
    assert requests.places.num_taken == 1


def test_the_engine_is_told_of_an_abort_only_if_it_has_the_request():
    requests = LiveRequests()
    waiting = requests.add(request("waiting"), lambda: None, Recorded())
    assert not requests.abort(waiting)
    inside = requests.add(request("inside", n=2), lambda: None, Recorded())
    assert [r.request_id for r in requests.release()] == ["inside"]
    assert requests.abort_choice("inside", 0)
    assert not requests.abort_choice("inside", 0)
    assert requests.abort(inside)
    assert not requests.abort(inside)
    assert not requests.abort_choice("inside", 1)


def test_an_id_is_live_once():
    requests = LiveRequests()
    requests.add(request("a"), lambda: None, Recorded())
    with pytest.raises(ValueError, match="'a' is in use"):
        requests.add(request("a"), lambda: None, Recorded())


def test_what_is_aborted_in_an_engine_that_is_dead_is_told_to_have_ended():
    requests, follower = LiveRequests(), Recorded()
    live = requests.add(request("a", n=2), lambda: None, follower)
    requests.release()
    assert requests.abort(live)
    assert follower.histories == []
    requests.crashed(RuntimeError("gone"))
    assert follower.histories == [(0, None), (1, None)]
    assert follower.num_interruptions == 0


def test_an_end_that_crosses_an_abort_counts_once():
    requests, follower = LiveRequests(), Recorded()
    requests.add(request("a", n=2), lambda: None, follower)
    requests.release()
    assert requests.abort_choice("a", 0)
    requests.apply([out(0, 1, finish=FinishReason.STOP)])
    assert requests.places.num_taken == 1
    requests.aborted("a", 0, ())
    assert follower.histories == [(0, None)]

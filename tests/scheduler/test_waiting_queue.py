"""The three orders, and who makes room."""

import random

import pytest

from model_runner.contract import SamplingParams
from scheduler.interface import EngineRequest
from scheduler.queue import make_queue
from scheduler.request import make_choices


def make(arrival, priority=0, salt=""):
    request = EngineRequest(f"r{arrival}", (1,), SamplingParams(), 1, priority=priority, cache_salt=salt)
    return make_choices(request, arrival, block_size=4)[0]


def drain(queue):
    order = []
    while queue:
        assert queue.peek() is queue.peek()
        order.append(queue.peek())
        assert queue.pop() is order[-1]
    return order


def arrivals(requests):
    return [request.arrival for request in requests]


RANKS = {"fcfs": lambda request: request.arrival, "priority": lambda request: (request.priority, request.arrival)}


@pytest.mark.parametrize("policy", RANKS)
def test_order_is_that_of_sorting_under_any_mix_of_calls(policy):
    pick, queue, model = random.Random(1), make_queue(policy), []
    popped = []
    for arrival in range(2000):
        call = pick.random()
        if call < 0.5:
            model.append(make(arrival, priority=pick.randrange(-2, 3)))
            queue.push(model[-1])
        elif call < 0.6 and popped:
            model.append(popped.pop())
            queue.requeue(model[-1])
        elif call < 0.7 and model:
            queue.remove(model.pop(pick.randrange(len(model))))
        elif model:
            head = min(model, key=RANKS[policy])
            assert queue.pop() is head
            model.remove(head)
            popped.append(head)
        assert len(queue) == len(model)
    assert drain(queue) == sorted(model, key=RANKS[policy])


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_removing_what_does_not_wait_is_an_error(policy):
    queue = make_queue(policy)
    queue.push(make(1))
    with pytest.raises(ValueError, match="'r2/0' is not waiting"):
        queue.remove(make(2))


def test_salts_take_turns():
    queue = make_queue("fair")
    for arrival in range(6):
        queue.push(make(arrival, salt="busy"))
    queue.push(make(6, salt="rare"))
    queue.push(make(7, salt="rare"))
    queue.push(make(8, salt="late"))
    assert arrivals(drain(queue)) == [0, 6, 8, 1, 7, 2, 3, 4, 5]


def test_a_new_salt_waits_one_round_at_most_and_delays_the_others_by_one_turn():
    queue = make_queue("fair")
    for arrival in range(100):
        queue.push(make(arrival, salt="busy"))
    for arrival in range(100, 150):
        queue.push(make(arrival, salt=f"new {arrival}"))
        admitted = [queue.pop(), queue.pop()]
        assert {request.cache_salt for request in admitted} == {"busy", f"new {arrival}"}


def test_a_preempted_choice_gets_its_turn_back():
    queue = make_queue("fair")
    requests = [make(0, salt="a"), make(1, salt="a"), make(2, salt="b"), make(3, salt="b")]
    for request in requests:
        queue.push(request)
    assert queue.pop() is requests[0]
    queue.requeue(requests[0])
    assert arrivals(drain(queue)) == [0, 2, 1, 3]


def test_an_aborted_choice_costs_its_salt_no_turn():
    queue = make_queue("fair")
    requests = [make(0, salt="a"), make(1, salt="a"), make(2, salt="b"), make(3, salt="c")]
    for request in requests:
        queue.push(request)
    queue.remove(requests[0])
    queue.remove(requests[3])
    assert len(queue) == 2
    assert arrivals(drain(queue)) == [1, 2]


@pytest.mark.parametrize(("policy", "expected"), [("fcfs", 4), ("fair", 4), ("priority", 3)])
def test_who_makes_room(policy, expected):
    running = [make(1, priority=9), make(0, priority=2), make(2, priority=9), make(3, priority=9), make(4)]
    assert max(running, key=make_queue(policy).rank).arrival == expected

"""The three orders, and who makes room."""

import random

import pytest

from model_runner.contract import SamplingParams
from scheduler.groups import Guided
from scheduler.interface import EngineRequest
from scheduler.queue import make_queue
from scheduler.request import make_choices


def make(arrival, priority=0, salt="", client=""):
    request = EngineRequest(f"r{arrival}", (1,), SamplingParams(), 1, priority=priority, cache_salt=salt, client=client)
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


class Turns:
    """The truth about fair turns: of those that wait, whoever has waited longest for a turn is next, at both levels."""

    def __init__(self):
        self.waiting = []
        self._since = {}
        self._clock = 0

    @property
    def head(self):
        return min(self.waiting, key=lambda one: (*(self._since[party] for party in parties(one)), one.arrival))

    def push(self, request):
        self.waiting.append(request)
        for party in parties(request):
            self._since.setdefault(party, self._tick())

    def requeue(self, request):
        self.waiting.append(request)
        before_all = -self._tick()
        self._since.update(dict.fromkeys(parties(request), before_all))

    def pop(self):
        request = self.head
        self._since.update(dict.fromkeys(parties(request), self._tick()))
        self.remove(request)
        return request

    def remove(self, request):
        self.waiting.remove(request)
        there = {party for other in self.waiting for party in parties(other)}
        self._since = {party: since for party, since in self._since.items() if party in there}

    def _tick(self):
        self._clock += 1
        return self._clock


def parties(request):
    return request.client, (request.client, request.cache_salt)


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


@pytest.mark.parametrize(("num_clients", "num_salts"), [(1, 4), (4, 1), (3, 3)])
def test_turns_are_fair_under_any_mix_of_calls(num_clients, num_salts):
    pick, queue, truth, popped = random.Random(num_clients), make_queue("fair"), Turns(), []
    for arrival in range(2000):
        call = pick.random()
        if call < 0.5:
            salt, client = f"salt {pick.randrange(num_salts)}", f"client {pick.randrange(num_clients)}"
            request = make(arrival, salt=salt, client=client)
            truth.push(request)
            queue.push(request)
        elif call < 0.6 and popped:
            request = popped.pop()
            truth.requeue(request)
            queue.requeue(request)
        elif call < 0.7 and truth.waiting:
            request = pick.choice(truth.waiting)
            truth.remove(request)
            queue.remove(request)
        elif truth.waiting:
            popped.append(truth.pop())
            assert queue.pop() is popped[-1]
        assert len(queue) == len(truth.waiting)
    assert len(queue) > 20
    assert drain(queue) == [truth.pop() for _ in range(len(truth.waiting))]


def test_many_salts_bring_a_client_no_more_turns_than_one():
    queue = make_queue("fair")
    for arrival in range(50):
        queue.push(make(arrival, salt=f"salt {arrival}", client="greedy"))
    for arrival in range(50, 100):
        queue.push(make(arrival, salt="salt 0", client="modest"))
    order = drain(queue)
    assert [request.client for request in order] == ["greedy", "modest"] * 50
    assert arrivals(order[::2]) == list(range(50))
    assert arrivals(order[1::2]) == list(range(50, 100))


def test_a_preempted_choice_gives_the_turn_back_to_its_client_and_its_salt():
    queue = make_queue("fair")
    requests = [make(0, salt="x", client="a"), make(1, salt="x", client="a"), make(2, salt="y", client="a")]
    for request in [*requests, make(3, client="b")]:
        queue.push(request)
    assert queue.pop() is requests[0]
    queue.requeue(requests[0])
    assert arrivals(drain(queue)) == [0, 3, 2, 1]


@pytest.mark.parametrize(("removed", "left"), [(0, [3, 2, 1]), (1, [0, 2, 3]), (2, [0, 1, 3]), (3, [0, 2, 1])])
def test_a_choice_can_be_taken_out_wherever_it_stands(removed, left):
    """Those of a client with two salts, of which one has two choices, and of another client."""
    queue = make_queue("fair")
    requests = [
        make(arrival, client=client, salt=salt) for arrival, (client, salt) in enumerate(["ax", "ay", "by", "ax"])
    ]
    for request in requests:
        queue.push(request)
    queue.remove(requests[removed])
    assert arrivals(drain(queue)) == left


def test_all_members_of_a_group_and_all_forks_are_the_client_s():
    choice = make(0, client="a")
    assert choice.fork("fork", 1).client == "a"
    assert [member.client for member in Guided(choice, [2], block_size=4).members] == ["a", "a"]


@pytest.mark.parametrize(("policy", "expected"), [("fcfs", 4), ("fair", 4), ("priority", 3)])
def test_who_makes_room(policy, expected):
    running = [make(1, priority=9), make(0, priority=2), make(2, priority=9), make(3, priority=9), make(4)]
    assert max(running, key=make_queue(policy).rank).arrival == expected

"""The order in which choices wait, and who makes room."""

import random

import pytest

from model_runner.contract import SamplingParams
from scheduler.choices import Guided
from scheduler.interface import EngineRequest
from scheduler.request import make_choices
from scheduler.waiting_queue import make_queue


def make(arrival, priority=0, salt="", client="", **fields):
    fields |= {"priority": priority, "cache_salt": salt, "client": client}
    return make_choices(EngineRequest(f"r{arrival}", (1,), SamplingParams(), 1, **fields), arrival, 0.0, block_size=4)[
        0
    ]


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
    """The truth about turns: of the salts that wait, whichever has waited longest for a turn is next."""

    def __init__(self):
        self.waiting = []
        self._since = {}
        self._clock = 0

    @property
    def head(self):
        return min(self.waiting, key=lambda one: (self._since[one.cache_salt], one.arrival))

    def push(self, request):
        self.waiting.append(request)
        self._since.setdefault(request.cache_salt, self._tick())

    def requeue(self, request):
        self.waiting.append(request)
        self._since[request.cache_salt] = -self._tick()

    def pop(self):
        request = self.head
        self._since[request.cache_salt] = self._tick()
        self.remove(request)
        return request

    def remove(self, request):
        self.waiting.remove(request)
        there = {other.cache_salt for other in self.waiting}
        self._since = {salt: since for salt, since in self._since.items() if salt in there}

    def _tick(self):
        self._clock += 1
        return self._clock


class Shares:
    """The truth about shares, as the paper writes it down (algorithms 2 and 4), over a list of all that wait."""

    def __init__(self):
        self.waiting = []
        self.counters = {}
        self._joined = {}
        self._last_left = None

    @property
    def head(self):
        joined = list(self._joined)
        return min(self.waiting, key=lambda one: (self.counters[one.client], -joined.index(one.client), one.arrival))

    def push(self, request):
        there = {other.client for other in self.waiting}
        own = self.counters.setdefault(request.client, 0)
        if not there and self._last_left is not None:
            self.counters[request.client] = max(own, self.counters[self._last_left])
        elif there and request.client not in there:
            self.counters[request.client] = max(own, min(self.counters[client] for client in there))
        self.requeue(request)

    def requeue(self, request):
        self.waiting.append(request)
        self._joined.setdefault(request.client)

    def serve(self, request, num_input, num_output):
        self.counters[request.client] += (num_input + 2 * num_output) / request.weight

    def pop(self):
        request = self.head
        self.remove(request)
        return request

    def remove(self, request):
        self.waiting.remove(request)
        if all(other.client != request.client for other in self.waiting):
            self._last_left = request.client
            del self._joined[request.client]


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


def drive(pick, queue, truth, make_one, serve=None):
    """Any mix of calls, to the queue and to the truth; both must always agree."""
    popped = []
    for arrival in range(2000):
        call = pick.random()
        if call < 0.45:
            request = make_one(arrival)
            truth.push(request)
            queue.push(request)
        elif call < 0.55 and popped:
            request = popped.pop()
            truth.requeue(request)
            queue.requeue(request)
        elif call < 0.65 and truth.waiting:
            request = pick.choice(truth.waiting)
            truth.remove(request)
            queue.remove(request)
        elif call < 0.75 and popped and serve is not None:
            serve(pick.choice(popped))
        elif truth.waiting:
            popped.append(truth.pop())
            assert queue.pop() is popped[-1]
        assert len(queue) == len(truth.waiting)
    assert drain(queue) == [truth.pop() for _ in range(len(truth.waiting))]


def test_turns_between_salts_are_fair_under_any_mix_of_calls():
    pick = random.Random(1)
    drive(pick, make_queue("fair"), Turns(), lambda arrival: make(arrival, salt=f"salt {pick.randrange(4)}"))


WEIGHTS = {"a": 1.0, "b": 1.0, "c": 3.0, "d": 0.5}


@pytest.mark.parametrize("seed", range(3))
def test_shares_are_those_of_the_paper_under_any_mix_of_calls(seed):
    pick, queue, truth = random.Random(seed), make_queue("fair"), Shares()

    def make_one(arrival):
        client = pick.choice("abcd")
        return make(arrival, client=client, weight=WEIGHTS[client])

    def serve(request):
        num_input, num_output = pick.choice([(pick.randrange(50), 0), (0, pick.randrange(1, 8))])
        truth.serve(request, num_input, num_output)
        queue.note_service(request, num_input=num_input, num_output=num_output)

    drive(pick, queue, truth, make_one, serve)


def test_whoever_has_got_least_for_its_weight_is_next():
    queue = make_queue("fair")
    light, heavy = (
        [make(arrival, client=name, weight=weight) for arrival in numbers]
        for name, weight, numbers in (("light", 1.0, range(0, 40, 2)), ("heavy", 3.0, range(1, 40, 2)))
    )
    for request in (*light, *heavy):
        queue.push(request)
    order = []
    for _ in range(20):
        order.append(queue.pop())
        queue.note_service(order[-1], num_input=10)
    assert [request.client for request in order].count("heavy") == 15


def test_who_comes_back_has_saved_up_nothing():
    queue = make_queue("fair")
    rare = make(0, client="rare")
    queue.push(rare)
    queue.note_service(queue.pop(), num_input=1)
    for arrival in range(1, 11):
        queue.push(make(arrival, client="busy"))
    for _ in range(4):
        queue.note_service(queue.pop(), num_input=100)
    for arrival in range(11, 15):
        queue.push(make(arrival, client="rare"))
    order = []
    while queue:
        order.append(queue.pop())
        queue.note_service(order[-1], num_input=100)
    assert [request.client for request in order] == ["rare", "busy"] * 4 + ["busy"] * 2


def test_lower_tiers_go_first_whatever_the_policy():
    for policy in ("fcfs", "priority", "fair"):
        queue = make_queue(policy)
        requests = [make(0, tier=1, priority=-5), make(1, tier=0), make(2, tier=-1, priority=9), make(3, tier=0)]
        for request in requests:
            queue.push(request)
        assert queue.pop() is requests[2]
        queue.requeue(requests[2])
        assert arrivals(drain(queue)) == [2, 1, 3, 0]
        assert max(requests, key=queue.rank) is requests[0]


@pytest.mark.parametrize(("removed", "left"), [(0, [2, 3, 1]), (1, [2, 0, 3]), (2, [0, 1, 3]), (3, [2, 0, 1])])
def test_a_choice_can_be_taken_out_wherever_it_stands(removed, left):
    """The queue has a client with two salts, one of them with two choices, and another client."""
    queue = make_queue("fair")
    requests = [
        make(arrival, client=client, salt=salt) for arrival, (client, salt) in enumerate(["ax", "ay", "by", "ax"])
    ]
    for request in requests:
        queue.push(request)
    queue.remove(requests[removed])
    order = []
    while queue:
        order.append(queue.pop())
        queue.note_service(order[-1], num_input=1)
    assert arrivals(order) == left


def test_all_members_of_a_group_and_all_forks_are_the_client_s():
    choice = make(0, client="a")
    assert choice.fork("fork", 1).client == "a"
    assert [member.client for member in Guided(choice, [2], block_size=4).members] == ["a", "a"]


@pytest.mark.parametrize(("policy", "expected"), [("fcfs", 4), ("fair", 4), ("priority", 3)])
def test_who_makes_room(policy, expected):
    running = [make(1, priority=9), make(0, priority=2), make(2, priority=9), make(3, priority=9), make(4)]
    assert max(running, key=make_queue(policy).rank).arrival == expected

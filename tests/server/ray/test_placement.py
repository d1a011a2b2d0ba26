"""Sessions stay where they are unless there is a reason, and no replica is overrun."""

import math
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from server.ray.placement import LEAST_BOUND, OngoingRequests, ReplicaState, ranked_replicas

SESSIONS = [f"session-{number}" for number in range(400)]


def idle(*names: str) -> list[ReplicaState]:
    return [ReplicaState(name, 0, is_ready=True) for name in names]


def first(session: str, states: list[ReplicaState]) -> str:
    return ranked_replicas(session, states)[0].name


def test_a_session_has_a_replica_whatever_their_order() -> None:
    states = idle("a", "b", "c")
    assert [first(session, states) for session in SESSIONS] == [first(session, states[::-1]) for session in SESSIONS]


def test_sessions_are_spread() -> None:
    counts = Counter(first(session, idle("a", "b", "c", "d")) for session in SESSIONS)
    assert min(counts.values()) > len(SESSIONS) / 4 * 0.7


def test_a_replica_that_goes_moves_only_its_own_sessions() -> None:
    before, after = idle("a", "b", "c"), idle("a", "c")
    assert all(first(one, before) == first(one, after) for one in SESSIONS if first(one, before) != "b")


def test_a_replica_that_comes_takes_sessions_and_moves_no_others() -> None:
    before, after = idle("a", "b"), idle("a", "b", "c")
    moved = [one for one in SESSIONS if first(one, before) != first(one, after)]
    assert moved
    assert {first(one, after) for one in moved} == {"c"}


def test_a_full_replica_is_passed_over_and_the_next_one_is_always_the_same() -> None:
    home, second, third = (state.name for state in ranked_replicas("s", idle("a", "b", "c")))
    loads = {home: LEAST_BOUND, second: 0, third: 0}
    assert first("s", [ReplicaState(name, load, is_ready=True) for name, load in loads.items()]) == second
    loads[home] -= 1
    assert first("s", [ReplicaState(name, load, is_ready=True) for name, load in loads.items()]) == home


def test_a_replica_that_is_not_ready_is_the_last() -> None:
    home = first("s", idle("a", "b"))
    states = [ReplicaState(name, 0, is_ready=name != home) for name in ("a", "b")]
    assert [state.name for state in ranked_replicas("s", states)][-1] == home
    assert first("", states) != home


def test_without_a_session_the_least_loaded_one_is_taken() -> None:
    assert first("", [ReplicaState("a", 3, is_ready=True), ReplicaState("b", 1, is_ready=True)]) == "b"


def test_there_may_be_none() -> None:
    assert ranked_replicas("s", []) == ranked_replicas("", []) == []


@given(st.lists(st.integers(0, 100), min_size=1, max_size=8), st.text(min_size=1))
def test_nobody_gets_more_than_the_bound(loads: list[int], session: str) -> None:
    states = [ReplicaState(str(index), load, is_ready=True) for index, load in enumerate(loads)]
    ranked = ranked_replicas(session, states)
    assert sorted(ranked, key=lambda state: state.name) == sorted(states, key=lambda state: state.name)
    assert ranked[0].num_ongoing < max(LEAST_BOUND, math.ceil(1.25 * (sum(loads) + 1) / len(loads)))


def test_of_requests_that_come_at_once_each_knows_of_the_others() -> None:
    now = [0.0]
    ongoing, spread = OngoingRequests(lambda: now[0]), Counter()
    for number in range(24):
        counts = ongoing.counts()
        states = [ReplicaState(name, counts[name], is_ready=True) for name in "ab"]
        replica = first("session", states)
        spread[replica] += 1
        ongoing.choose(f"r{number}", replica)
    assert 12 <= max(spread.values()) <= 16
    for number in range(0, 24, 2):
        ongoing.send(f"r{number}", "a")
    assert sum(ongoing.counts().values()) == 24
    now[0] = 6.0
    assert ongoing.counts() == Counter(a=12), "those that were never sent were given up"
    for number in range(24):
        ongoing.end(f"r{number}")
    assert not ongoing.counts()

"""Places and shares of them, against every order in which clients can come."""

import random

import pytest

from server.engine.places import Places

LIMIT = 24


def test_alone_a_client_has_all_of_them():
    places = Places()
    assert not places.refusal("", 1.0, LIMIT, LIMIT)
    assert places.refusal("", 1.0, LIMIT + 1, LIMIT)
    places.take("", 1.0, LIMIT)
    assert places.refusal("", 1.0, 1, LIMIT).startswith(f"{LIMIT} choices are running or waiting; 1 more")
    places.give_back("", 1)
    assert not places.refusal("", 1.0, 1, LIMIT)


def test_shares_follow_the_weights():
    places = Places()
    places.take("ann", 1.0, LIMIT)
    assert not places.refusal("bob", 3.0, LIMIT * 3 // 4, LIMIT)
    assert places.refusal("bob", 3.0, LIMIT * 3 // 4 + 1, LIMIT)
    places.take("bob", 3.0, LIMIT * 3 // 4)
    assert places.refusal("ann", 1.0, 1, LIMIT), "it has more than its share"
    places.give_back("ann", LIMIT)
    assert not places.refusal("ann", 1.0, LIMIT // 4, LIMIT)


def test_who_has_gone_has_no_share():
    places = Places()
    places.take("ann", 1.0, 1)
    places.give_back("ann")
    assert not places.refusal("bob", 1.0, LIMIT, LIMIT)


@pytest.mark.parametrize("seed", range(20))
def test_nobody_who_holds_nothing_is_kept_out_and_all_together_stay_bounded(seed: int):
    source, places, held = random.Random(seed), Places(), dict.fromkeys("abcdef", 0)
    bound = LIMIT * sum(1 / number for number in range(1, len(held) + 1)) + len(held)  # shares are rounded up
    for _ in range(2000):
        name, number = source.choice("abcdef"), source.randint(1, LIMIT)
        if source.random() < 0.3:
            places.give_back(name, held[name])
            held[name] = 0
        if not places.refusal(name, 1.0, number, LIMIT):
            places.take(name, 1.0, number)
            held[name] += number
        assert held[name] or not places.refusal(name, 1.0, 1, LIMIT)
        assert places.num_taken == sum(held.values()) <= bound

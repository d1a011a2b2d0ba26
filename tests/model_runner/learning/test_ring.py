"""The ring against a list that is cut from its front."""

import random

import numpy as np

from model_runner.heads.base import Example
from model_runner.learning.learner import NEWEST, Ring

ROW = 8 + 4 * 2  # a token, and a feature of 4 numbers


def piece(rows: int, prompt: int = 1) -> Example:
    return Example(np.zeros(rows, dtype=np.int64), prompt, 0.0, {"last": np.zeros((rows, 4), dtype=np.float16)})


def test_the_latest_pieces_that_fit_are_kept() -> None:
    source = random.Random(3)
    ring, kept = Ring(1000 * ROW), list[Example]()
    for _ in range(3000):
        one = piece(source.randrange(2, 90))
        ring.add(one)
        kept.append(one)
        while sum(len(other.tokens) for other in kept) > 1000:
            kept.pop(0)
        assert len(ring) == len(kept)
        assert ring.num_answer == sum(other.num_answer for other in kept)
        assert [id(other) for other in ring.newest(10**9)] == [id(other) for other in kept]


def test_what_cannot_be_kept_changes_nothing() -> None:
    ring = Ring(100 * ROW)
    first = piece(50)
    for one in (first, piece(101), piece(7, prompt=7)):
        ring.add(one)
    assert [id(one) for one in ring.newest(1000)] == [id(first)]
    assert ring.num_answer == 49


def test_newest_is_as_short_as_possible_and_in_order() -> None:
    ring = Ring(10**6)
    made = [piece(11) for _ in range(9)]
    for one in made:
        ring.add(one)
    assert [id(one) for one in ring.newest(25)] == [id(one) for one in made[-3:]]


def test_half_of_a_batch_is_new_and_nothing_is_left_out() -> None:
    ring = Ring(10**6)
    made = [piece(11) for _ in range(10 * NEWEST)]
    for one in made:
        ring.add(one)
    source = random.Random(0)
    drawn = [id(one) for _ in range(300) for one in ring.batch(100, source)]
    assert len(drawn) == 300 * 10
    new = {id(one) for one in made[-10:]}
    share = sum(one in new for one in drawn) / len(drawn)
    assert abs(share - (0.5 + 0.5 / NEWEST)) < 0.05
    assert set(drawn) == {id(one) for one in made}

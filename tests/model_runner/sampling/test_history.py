"""Repetitions, grown token by token, against a comparison of every place with the end."""

import itertools
import random
from collections.abc import Sequence

import pytest

from model_runner.contract import Breaker, Dry
from model_runner.sampling.history import Repetitions, SequenceBreakers

from . import oracle

BREAKERS = [
    (),
    (Breaker((0,)),),
    (Breaker((0, 5)), Breaker((1, 3), (2,))),
    (Breaker((1,), (2, 1)), Breaker((2, 3), (2,)), Breaker((0, 4, 5), (2, 1)), Breaker((6,), (3, 2))),
]


def found(repetitions: Repetitions, least: int) -> dict[int, int]:
    tokens, lengths = repetitions.prolonged(least)
    return dict(zip(tokens.tolist(), lengths.tolist(), strict=True))


def expected(history: Sequence[int], dry: Dry) -> dict[int, int]:
    """With base 2 and multiplier 1 a penalty tells the length."""
    penalties = oracle.dry_penalties(dry, history)
    return {token: dry.allowed_length + int(amount).bit_length() - 1 for token, amount in penalties.items()}


@pytest.mark.parametrize("breakers", BREAKERS)
@pytest.mark.parametrize("last_n", [-1, 0, 1, 5, 20])
@pytest.mark.parametrize("least", [1, 2, 5])
def test_grown_or_made_at_once_it_finds_what_a_comparison_of_all_places_finds(
    breakers: tuple[Breaker, ...], last_n: int, least: int
) -> None:
    generator = random.Random(f"{breakers} {last_n} {least}")
    dry = Dry(1.0, 2.0, least, last_n, breakers)
    total = 0
    for num_tokens, period in itertools.product((1, 4, 20), (3, 7, 11)):
        history = [generator.randrange(num_tokens) for _ in range(generator.randrange(12))]
        grown = Repetitions(history, last_n, breakers)
        for _ in range(30):
            truth = expected(history, dry)
            assert found(grown, least) == found(Repetitions(history, last_n, breakers), least) == truth
            total += len(truth)
            repeats = len(history) >= period and generator.random() < 0.9
            history.append(history[-period] if repeats else generator.randrange(num_tokens))
            grown.add(history[-1])
    assert total > 0 or 0 <= last_n <= least + 1


def test_a_long_repetition_is_found_whole() -> None:
    story = random.Random(1).choices(range(1000), k=3000)
    assert found(Repetitions([*story, 1000, *story[:-1]], -1, ()), 2)[story[-1]] == len(story) - 1
    assert found(Repetitions([7] * 5000, -1, ()), 2) == {7: 4999}


class Counted(list[int]):
    """A history that counts how often it is read."""

    num_read = 0

    def __getitem__(self, place):  # type: ignore[no-untyped-def, override]
        self.num_read += 1
        return super().__getitem__(place)


def test_where_breakers_end() -> None:
    breakers = SequenceBreakers([Breaker((1, 2)), Breaker((3, 4), (5,)), Breaker((6,), (4, 5))])
    assert breakers.single == {1, 2}
    history = [5, 5, 3, 5, 4, 5, 6, 4, 5, 0, 2]
    assert [place for place in range(len(history)) if breakers.end_at(history, place)] == [3, 5, 8, 10]
    assert not breakers.end_at([4, 5][1:], 0)  # nothing stands before the history


def test_many_breakers_with_thousands_of_beginnings_cost_no_more_than_one() -> None:
    """Each place is asked about once, in as many steps as its tokens agree with a rest."""
    first = tuple(range(100, 3100))
    rests = [(*range(30 - length, 30), 0) for length in range(29)]
    of_many = [Breaker(tuple(token + 3000 * other for token in first), rest) for other in range(16) for rest in rests]
    breakers = SequenceBreakers(of_many)
    history = Counted([0] * 2000)
    assert not any(breakers.end_at(history, place) for place in range(2000))
    assert history.num_read < 2 * 2000
    history = Counted([99, *range(2, 30), 0])  # all of the longest rest, after a token that begins none
    assert not breakers.end_at(history, 29)
    assert history.num_read == 30

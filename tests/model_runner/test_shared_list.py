"""Lists that share their beginnings, against plain ones."""

import random

import pytest

from model_runner.shared_list import SharedList


def test_forks_of_forks_are_what_lists_would_be():
    rng = random.Random(1)
    pairs = [(SharedList(range(start)), list(range(start))) for start in (0, 1, 63, 64, 65, 200)]
    for _ in range(3000):
        shared, plain = rng.choice(pairs)
        kind = rng.randrange(4)
        if kind == 0:
            length = rng.choice([None, rng.randrange(len(plain) + 1)])
            pairs.append((shared.fork(length), plain[:length]))
        elif kind == 1:
            pairs.append((shared.appended(7), [*plain, 7]))
        else:
            more = [rng.randrange(100) for _ in range(rng.choice([1, 1, 70]))]
            shared.extend(more)
            plain += more
        pairs = rng.sample(pairs, min(len(pairs), 30))
        for one, other in pairs:
            assert list(one) == other
            assert (one, len(one)) == (other, len(other))
            start, stop = sorted(rng.randrange(-3, len(other) + 5) for _ in range(2))
            assert one[start:stop] == other[start:stop]
            assert one[start:] == other[start:]
            assert one[::-2] == other[::-2]
            assert not other or one[-1] == other[-1]


@pytest.mark.parametrize("index", [3, -4])
def test_no_item_is_beyond_the_ends(index):
    with pytest.raises(IndexError):
        SharedList([1, 2, 3])[index]


def test_what_differs_is_not_equal():
    assert SharedList([1, 2]) != SharedList([1, 3])
    assert SharedList([1, 2]) != [1]
    assert SharedList([1]) != 1


@pytest.mark.parametrize("length", [100, 10_000])
def test_a_fork_copies_a_chunk_at_most(length):
    class Counted(list):
        """Chunks that say how many items were copied from them."""

        copied = 0

        def __getitem__(self, index):
            found = super().__getitem__(index)
            if isinstance(index, slice):
                Counted.copied += len(found)
            return found

    shared = SharedList(range(length))
    shared._full = [Counted(chunk) for chunk in shared._full]
    shared._last = Counted(shared._last)
    for fork_at in (0, 63, 64, length // 2 + 5, length):
        Counted.copied = 0
        assert shared.fork(fork_at) == range(fork_at)
        assert Counted.copied < 64

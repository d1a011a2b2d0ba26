"""Tests for every backend: the same bits, however a stream was cut, drafted, moved or begun."""

from functools import cache

import numpy as np
import pytest
import torch

from model_runner.recurrence.states import BLOCK, RecurrentShape, ScanShape
from tests.model_runner.recurrence.streams import (
    SHAPES,
    Inputs,
    MakeBackend,
    Outputs,
    Part,
    Stream,
    World,
    assert_same,
    concatenated,
    conv_definition,
    cut_evenly,
    definition,
    joined,
    run,
)

LENGTH = 107


@cache
def whole(shape: RecurrentShape | ScanShape, make: MakeBackend, inputs: Inputs) -> Outputs:
    """The outputs of a stream that is computed alone and at once."""
    return run([inputs], [[len(inputs)]], World(shape, make))[0]


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
class ExactnessTests:
    """Inherited by the tests of a backend, whose module has a fixture `make`."""

    def test_equals_the_definition(self, shape: RecurrentShape | ScanShape, make: MakeBackend) -> None:
        inputs, world = Inputs.random(shape, LENGTH, 0), World(shape, make)
        [output] = run([inputs], [[LENGTH]], world)
        np.testing.assert_allclose(output.recurrent.numpy(), definition(shape, inputs), atol=4e-6)
        np.testing.assert_allclose(output.conv.numpy(), conv_definition(world, inputs.x), atol=4e-6)

    @pytest.mark.parametrize("size", [1, 2, 7, 31, 32, 33, 64, 100])
    def test_cuts_change_nothing(self, shape: RecurrentShape | ScanShape, make: MakeBackend, size: int) -> None:
        inputs = Inputs.random(shape, LENGTH, 0)
        [output] = run([inputs], [cut_evenly(LENGTH, size)], World(shape, make, seed=size))
        assert_same(output, whole(shape, make, inputs))

    @pytest.mark.parametrize("pages", [(), (0,), (0, 1, 2), (1,)])
    def test_pages_change_nothing(
        self, shape: RecurrentShape | ScanShape, make: MakeBackend, pages: tuple[int, ...]
    ) -> None:
        inputs = Inputs.random(shape, LENGTH, 0)
        for size in (LENGTH, 16, 40):
            [output] = run([inputs], [cut_evenly(LENGTH, size)], World(shape, make), [pages])
            assert_same(output, whole(shape, make, inputs))

    def test_neighbours_change_nothing(self, shape: RecurrentShape | ScanShape, make: MakeBackend) -> None:
        lengths, cuts = (LENGTH, 40, 1, 64), ([50, 57], [1] * 40, [1], [32, 32])
        inputs = [Inputs.random(shape, length, seed) for seed, length in enumerate(lengths)]
        for output, alone in zip(run(inputs, cuts, World(shape, make)), inputs, strict=True):
            assert_same(output, whole(shape, make, alone))

    @pytest.mark.parametrize("known", [1, 20, 29, 30, 31, 32, 33, 63, 64])
    def test_a_branch_of_drafts_is_a_chain(
        self, shape: RecurrentShape | ScanShape, make: MakeBackend, known: int
    ) -> None:
        parents = [-1, -1, 0, 2, 1, 4, 3, 5, 6, 3, 7]
        inputs, drafts = Inputs.random(shape, known, 0), Inputs.random(shape, len(parents), 1)
        world, stream, before = World(shape, make), Stream(), known // 2
        if before:
            world.step([Part(stream, inputs[:before])])
        rest = inputs[before:]
        [output] = world.step([Part(stream, rest, drafts, parents)])
        for leaf in set(range(len(parents))) - set(parents):
            path = [leaf]
            while parents[path[0]] >= 0:
                path.insert(0, parents[path[0]])
            chain = whole(shape, make, joined([inputs, drafts[path]]))
            assert_same(output[[len(rest) + node for node in path]], chain[known:])

    @pytest.mark.parametrize("known", [5, 27, 30, 31, 32])
    def test_accepted_drafts_stay(self, shape: RecurrentShape | ScanShape, make: MakeBackend, known: int) -> None:
        parents, accepted = [-1, -1, 1, 0, 2, 4, 5], [1, 2, 4, 5]
        inputs, drafts, later = (Inputs.random(shape, n, i) for i, n in enumerate((known, len(parents), 40)))
        world, stream = World(shape, make), Stream()
        world.step([Part(stream, inputs, drafts, parents)])
        world.accept(stream, accepted)
        outputs = [world.step([Part(stream, later[:1])])[0], world.step([Part(stream, later[1:])])[0]]
        expected = whole(shape, make, joined([inputs, drafts[accepted], later]))
        assert_same(concatenated(outputs), expected[-len(later) :])

    def test_long_drafts_cross_two_blocks(self, shape: RecurrentShape | ScanShape, make: MakeBackend) -> None:
        inputs, drafts = Inputs.random(shape, 30, 0), Inputs.random(shape, 70, 1)
        world, stream = World(shape, make), Stream()
        [output] = world.step([Part(stream, inputs, drafts, range(-1, 69))])
        assert_same(output, whole(shape, make, joined([inputs, drafts])))

    def test_drafts_grow_over_passes(self, shape: RecurrentShape | ScanShape, make: MakeBackend) -> None:
        """A drafter computes the nodes of a tree in several passes; here each pass repeats the earlier ones."""
        inputs, drafts = Inputs.random(shape, 30, 0), Inputs.random(shape, 5, 1)
        world, stream = World(shape, make), Stream()
        world.step([Part(stream, inputs)])
        outputs = [world.step([Part(stream, None, drafts[:n], range(-1, n - 1))])[0] for n in (2, 5)]
        expected = whole(shape, make, joined([inputs, drafts]))
        assert_same(outputs[0], expected[30:32])
        assert_same(outputs[1], expected[30:35])

    @pytest.mark.parametrize("block", [0, 1, 2])
    def test_begins_from_a_page(self, shape: RecurrentShape | ScanShape, make: MakeBackend, block: int) -> None:
        inputs = Inputs.random(shape, LENGTH, 0)
        world, stream = World(shape, make), Stream()
        world.step([Part(stream, inputs, pages=(0, 1, 2))])
        other, start = world.begin_at(stream, block), (block + 1) * BLOCK
        outputs = [
            world.step([Part(other, inputs[start : start + 3])])[0],
            world.step([Part(other, inputs[start + 3 :])])[0],
        ]
        assert_same(concatenated(outputs), whole(shape, make, inputs)[start:])

    def test_forks_go_on_alike(self, shape: RecurrentShape | ScanShape, make: MakeBackend) -> None:
        inputs = Inputs.random(shape, LENGTH, 0)
        world, stream = World(shape, make), Stream()
        world.step([Part(stream, inputs[:50])])
        fork = world.fork(stream)
        one, other = world.step([Part(stream, inputs[50:90]), Part(fork, inputs[50:])])
        assert_same(one, other[:40])
        assert_same(other, whole(shape, make, inputs)[50:])

    def test_a_broken_neighbour_stays_alone(self, shape: RecurrentShape | ScanShape, make: MakeBackend) -> None:
        inputs, broken = Inputs.random(shape, 40, 0), joined([Inputs.random(shape, 40, 1)])
        for numbers in (broken.query, broken.key, broken.value, broken.log_decay, broken.beta, broken.x):
            numbers[5:] = torch.nan
        outputs = run([inputs, broken], [[40], [40]], World(shape, make))
        assert_same(outputs[0], whole(shape, make, inputs))
        assert_same(outputs[1][:5], whole(shape, make, broken[:5]))

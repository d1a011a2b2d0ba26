"""Recurrences on CUDA: the reference's numbers, and exactness. In the interpreter only a few small cases."""

import pytest
import torch

from model_runner.recurrence.states import BLOCK, RecurrentShape, ScanShape
from model_runner.recurrence.triton import TritonRecurrence
from tests.model_runner.oracles.recurrence import ReferenceRecurrence
from tests.model_runner.recurrence.exactness import whole
from tests.model_runner.recurrence.streams import Inputs, Part, Stream, World, assert_same, concatenated, joined, run

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # numpy's, in the interpreter

SHAPES = {
    "gdn": RecurrentShape(2, 1, 16, 16, delta=True, per_channel=False),
    "kda": RecurrentShape(1, 1, 20, 12, delta=True, per_channel=True),
    "ssd": RecurrentShape(1, 1, 16, 40, delta=False, per_channel=False),
    "scan": ScanShape(40, 5),
}
LENGTH = 70


def shapes(*names: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("shape", [SHAPES[name] for name in names], ids=names)


@shapes(*SHAPES)
def test_equals_the_reference(shape: RecurrentShape | ScanShape) -> None:
    inputs = Inputs.random(shape, LENGTH, 0)
    output, reference = (whole(shape, make, inputs) for make in (TritonRecurrence, ReferenceRecurrence))
    torch.testing.assert_close(output.recurrent, reference.recurrent, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(output.conv, reference.conv, atol=1e-5, rtol=1e-5)


@shapes("gdn", "kda", "scan")
def test_cuts_and_neighbours_change_nothing(shape: RecurrentShape | ScanShape) -> None:
    inputs = [Inputs.random(shape, LENGTH, 0), Inputs.random(shape, 34, 1)]
    for output, alone in zip(
        run(inputs, [[3, 30, 1, 36], [31, 1, 1, 1]], World(shape, TritonRecurrence)), inputs, strict=True
    ):
        assert_same(output, whole(shape, TritonRecurrence, alone))


@shapes("kda", "scan")
def test_a_branch_of_drafts_is_a_chain_and_stays(shape: RecurrentShape | ScanShape) -> None:
    parents, accepted = [-1, -1, 1, 0, 2], [1, 2, 4]
    inputs, drafts, later = (Inputs.random(shape, n, i) for i, n in enumerate((30, len(parents), 8)))
    world, stream = World(shape, TritonRecurrence), Stream()
    world.step([Part(stream, inputs[:29])])
    [output] = world.step([Part(stream, inputs[29:], drafts, parents)])
    world.accept(stream, accepted)
    outputs = [output[[0, *(1 + node for node in accepted)]], *world.step([Part(stream, later)])]
    expected = whole(shape, TritonRecurrence, joined([inputs, drafts[accepted], later]))
    assert_same(concatenated(outputs), expected[29:])


@shapes("gdn")
def test_begins_from_a_page(shape: RecurrentShape | ScanShape) -> None:
    inputs = Inputs.random(shape, LENGTH, 0)
    world, stream = World(shape, TritonRecurrence), Stream()
    world.step([Part(stream, inputs, pages=(0, 1))])
    other = world.begin_at(stream, 0)
    [output] = world.step([Part(other, inputs[BLOCK:])])
    assert_same(output, whole(shape, TritonRecurrence, inputs)[BLOCK:])
